from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.inspect import activations
from kvsieve.inspect.activations import MassiveRule, layer_activations, outstanding_tokens
from kvsieve.inspect.prompt import TokenKind, token_kind

RULE = MassiveRule()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 20), st.integers(1, 700))
def test_as_the_definition_says_whatever_the_chunks(
    seed: int, tokens: int, size: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator)
    hidden *= 10 ** (4 * torch.rand(tokens, size, generator=generator) ** 6)
    rule = MassiveRule(min_magnitude=20.0, min_ratio=30.0)

    with pytest.MonkeyPatch.context() as patch:
        found_whole = layer_activations(3, hidden, rule, 5)
        patch.setattr(activations, "median_magnitude", lambda _: found_whole.median)
        patch.setattr(activations, "CHUNK_ENTRIES", chunk)
        found = layer_activations(3, hidden, rule, 5)

    magnitude = hidden.abs()
    median = float(magnitude.flatten().sort().values[(magnitude.numel() - 1) // 2])
    massive = [
        (i, j)
        for i in range(tokens)
        for j in range(size)
        if magnitude[i, j] > 20 and magnitude[i, j] >= 30 * median
    ]
    assert found_whole.median == pytest.approx(median)
    for one in (found_whole, found):
        assert one.num_massive == len(massive)
        assert one.massive_positions == tuple(sorted({i for i, _ in massive}))
        assert [abs(e.value) for e in one.top] == (
            magnitude.flatten().sort(descending=True).values[: len(one.top)].tolist()
        )
        assert all(float(hidden[e.position, e.dimension]) == e.value for e in one.top)
        assert torch.equal(one.peaks, magnitude.amax(1))


def test_a_planted_activation_appears_and_vanishes() -> None:
    torch.manual_seed(0)
    states = [torch.randn(40, 64) for _ in range(5)]
    for layer in (1, 2, 3):
        states[layer][0, 7] = -5000.0
        states[layer][12, 7] = 500.0
    each = [layer_activations(number, state, RULE) for number, state in enumerate(states)]

    first, second, *others = outstanding_tokens(each, 4)

    assert (first.position, first.massive_layers, first.peak) == (0, (1, 2, 3), 5000.0)
    # 500 is large, and not a thousand times the median of about 0.67.
    assert (second.position, second.is_massive) == (12, False)
    assert not any(token.is_massive for token in others)
    assert [one.num_massive > 0 for one in each] == [False, True, True, True, False]
    assert each[1].top[0].dimension == 7


def test_small_numbers_are_not_massive_however_unequal() -> None:
    hidden = torch.full((10, 10), 1e-4)
    hidden[3, 3] = 99.0

    found = layer_activations(0, hidden, RULE)

    assert found.num_massive == 0
    assert (found.top[0].position, found.top[0].dimension) == (3, 3)


def test_a_dead_state_gives_finite_numbers() -> None:
    found = layer_activations(0, torch.zeros(4, 4), RULE)

    assert found.num_massive == 0
    assert all(entry.ratio == 0 for entry in found.top)


@pytest.mark.parametrize(
    ("position", "text", "is_special", "kind"),
    [
        (0, "The", False, "first"),
        (0, "<s>", True, "first"),
        (5, "<|im_end|>", True, "special"),
        (5, "\n", False, "newline"),
        (5, ".\n\n", False, "newline"),
        (5, " ,", False, "delimiter"),
        (5, "...", False, "delimiter"),
        (5, "\u3002", False, "delimiter"),
        (5, "=", False, "delimiter"),
        (5, " 1991", False, "digit"),
        (5, "\u0663", False, "digit"),
        (5, "  ", False, "space"),
        (5, "", False, "space"),
        (5, " the", False, "word"),
        (5, "3rd", False, "word"),
        (5, "\u0643\u062a\u0627\u0628", False, "word"),
    ],
)
def test_kinds_of_tokens(position: int, text: str, is_special: bool, kind: TokenKind) -> None:
    assert token_kind(position, text, is_special) == kind
