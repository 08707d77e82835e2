"""What one pass of one prompt tells: each layer is reduced to a few numbers as it passes by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.inspect.activations import LayerActivations, MassiveRule, layer_activations
from kvsieve.inspect.concentration import HeadSpread, concentration
from kvsieve.inspect.evidence import layer_evidence, rotary_for
from kvsieve.inspect.forward import run_pass
from kvsieve.inspect.model import LoadedModel
from kvsieve.inspect.prompt import Prompt
from kvsieve.inspect.ranks import window_ranks
from kvsieve.inspect.recommend import PromptLosses, layer_losses
from kvsieve.inspect.sliced import LayerAttention, LayerHeads
from kvsieve.policies import Policy, Rotary


@dataclass(frozen=True)
class Probe:
    """What is asked of every layer.

    Attributes:
        policy: How tokens are ranked and chosen.
        budgets: Budgets whose loss is predicted, in tokens.
        block_size: Block size of the cache manager, in tokens.
        pool_size: Width of ASL's pooling, in tokens.
        massive: When an activation counts as massive.
        num_sampled: Queries that stand for all queries of the prompt.
    """

    policy: Policy
    budgets: tuple[int, ...]
    block_size: int
    pool_size: int
    massive: MassiveRule
    num_sampled: int


@dataclass
class Reading:
    """What a pass of one prompt told. Lists have one item per full-attention layer.

    Attributes:
        prompt: The prompt.
        probe: What was asked.
        rotary: The model's rotary embedding, if the policy looks at it.
        window: Tokens that hold a share of the attention of the window's queries.
        sampled: Tokens that hold a share of the attention of queries all over the prompt.
        attention: [num_tokens] float32 each: share of the window's attention that a position
            gets, mean over the heads.
        ranks: [num_tokens - window] float32 each: ranks by the window's attention.
        lost: Attention mass lost under each budget of the probe.
        activations: The hidden state after each *decoder* layer, whatever its attention.
    """

    prompt: Prompt
    probe: Probe
    rotary: Rotary | None = None
    window: list[dict[float, HeadSpread]] = field(default_factory=list)
    sampled: list[dict[float, HeadSpread]] = field(default_factory=list)
    attention: list[torch.Tensor] = field(default_factory=list)
    ranks: list[torch.Tensor] = field(default_factory=list)
    lost: list[list[float]] = field(default_factory=list)
    activations: list[LayerActivations] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def losses(self) -> PromptLosses:
        """What each budget would lose of the prompt."""
        return PromptLosses(self.num_tokens, torch.tensor(self.lost, dtype=torch.float64))

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        """Reduce one layer's attention.

        Raises:
            ConfigError: The policy does not fit the model.
        """
        probe = self.probe
        window = attention.observation_window
        before = attention.window_mass[:, : self.num_tokens - window]
        self.window.append(concentration(attention.window_mass))
        self.sampled.append(concentration(attention.sampled_mass))
        self.attention.append((attention.window_mass.mean(dim=0) / window).cpu())
        self.ranks.append(window_ranks(before, probe.pool_size).cpu())
        evidence = layer_evidence(probe.policy, attention, heads, self.rotary)
        try:
            lost = layer_losses(evidence, probe.budgets, probe.policy, probe.block_size)
        except ValueError as error:
            raise ConfigError([f"the policy {probe.policy.name}: {error}"]) from error
        self.lost.append(lost)

    def on_sliding(self, layer: int) -> None:
        """A sliding window is not sieved, and has no ranks over the whole prompt."""

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Note what stands out in a hidden state.

        Raises:
            KvsieveError: It holds something that is not a number.
        """
        if not bool(hidden.isfinite().all()):
            raise KvsieveError(
                f"the hidden state after layer {layer} is not finite with {self.prompt.name}:"
                " the model's weights or their type are broken, and no figure would mean anything"
            )
        self.activations.append(layer_activations(layer, hidden, self.probe.massive))


def read_prompt(loaded: LoadedModel, prompt: Prompt, probe: Probe) -> Reading:
    """Run a prompt through the model once, and reduce what passes by.

    Raises:
        ConfigError: The policy does not fit the model.
        KvsieveError: The model's numbers are not finite.
    """
    reading = Reading(prompt, probe, rotary_for(loaded, probe.policy, len(prompt.token_ids)))
    run_pass(
        loaded,
        list(prompt.token_ids),
        reading,
        observation_window=probe.policy.observation_window,
        num_sampled=probe.num_sampled,
    )
    return reading
