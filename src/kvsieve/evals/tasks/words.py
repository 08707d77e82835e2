"""Words, numbers and identifiers that tasks draw from."""

from __future__ import annotations

import random
import uuid

_ADJECTIVES = """
amber ancient bitter blunt brave brisk bronze calm careful clever coastal copper cosy crimson crisp
curious daring distant dusty eager early faded famous fancy fierce foggy fragile frosty gentle giant
glossy golden graceful hasty hidden hollow honest humble icy idle ivory jolly keen lively lonely
loud loyal lucky marble mellow merry mighty misty modest narrow nimble noble patient plain polished
proud purple rapid restless royal rusty salty scarlet secret shallow sharp shiny silent silver
simple sleepy slender smoky solemn spare spotted steady stormy striped sturdy subtle sunny swift
tall tidy timid tiny tropical vast velvet violet wandering wild windy wise wooden woolly
"""

_NOUNS = """
acorn airport almanac anchor antelope apron arcade archer armchair arrow badger bagpipe bakery
balcony bamboo banjo barley barrel basin basket beacon beaver bellows bicycle bishop blanket blossom
bonfire bonnet bottle boulder bracelet bramble brewery bridge broom bucket buckle buffalo bugle
bullet butcher button cabbage cabin cactus camel candle cannon canoe canyon caravan carnival carpet
carriage castle cathedral cavern cellar cello chapel chariot cherry chess chimney cinema circus
clarinet clover cobbler coffee comet compass coral corridor cottage cotton cradle crater cricket
crocus crystal cupboard curtain cushion dagger daisy dancer desert dolphin domino donkey doorbell
dragon drawer drummer dungeon eagle easel elbow elephant elevator ember engine falcon feather fiddle
fireplace flannel flute forest fortress fountain foxglove freckle furnace galaxy gallery gallop
garage garden garlic garnet gazelle geyser ginger glacier goblet gondola gorilla granite grapefruit
gravel guitar hammer hammock hamster harbor harness harp harvest hatchet hazel hedgehog helmet heron
hinge honey horizon hornet hotel hurdle hyena igloo inkwell iris island jackal jacket jaguar jasmine
jersey jewel jigsaw jockey journal jungle juniper kayak kennel kettle keyboard kingdom kitchen kite
kiwi knapsack ladder lagoon lantern lark lasso laundry lavender lemon leopard lettuce library
lighthouse lilac lily limestone linen lizard llama lobster locket locomotive lotus lullaby lumber
magnet magpie mammoth mango mantle maple marathon market marsh mask meadow melon mermaid meteor
mirror mitten monastery monkey mosaic moss motel mountain mulberry museum mushroom mustard necklace
needle nephew nettle nickel notebook nutmeg oasis oatmeal ocean octopus olive onion opal orbit
orchard orchestra orchid organ ostrich otter oven owl oyster paddle pagoda palace palette pancake
panther papaya parade parasol parcel parrot parsley pasture peacock peanut pearl pebble pelican
penguin pepper petal pheasant piano picnic pigeon pillow pirate planet plaza plum pocket poet pony
poplar poppy porcelain porcupine portrait potato prairie prism puddle pumpkin puppet pyramid quail
quarry quilt rabbit raccoon radish raft rainbow raspberry raven reindeer ribbon river robin rocket
rooster rosemary rudder saddle saffron sailor salmon sandal sapphire satchel saucer sawmill scarf
scooter sculptor seahorse shadow shepherd shovel skylark sleigh snowflake sofa sparrow spinach
spindle spoon squirrel stable stadium statue steeple stirrup stork suitcase sundial sunflower
swallow tailor tambourine tapestry teapot telescope temple terrace theater thimble thistle thunder
tiger toboggan tomato torch tortoise tower tractor trombone trumpet tulip tunnel turban turnip
turtle tuxedo umbrella unicorn valley vanilla vault veranda village vineyard violin volcano waffle
wagon wallet walnut walrus warehouse waterfall weasel whale wheel whistle widow willow windmill
winter wizard wolf woodpecker wreath yacht yarn zebra zipper
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())


def draw_keys(rng: random.Random, count: int) -> list[str]:
    """Names of two words, such as "amber falcon"; no noun occurs twice."""
    return [f"{rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(NOUNS, count)]


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]


def draw_uuid(rng: random.Random) -> str:
    """A random identifier of version 4 (RFC 9562): 32 hexadecimal digits and four hyphens."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
