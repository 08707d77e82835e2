"""Compare what an engine did with the independent oracle, and count the near ties.

"Equal" means: the same kept positions except where two scores lie closer than
`SCORE_EPSILON` (relative), and the same greedy tokens except where the two best logits
lie closer than `LOGIT_EPSILON`. Batch shape and kernel change rounding, nothing else. The
oracle decodes with the positions that the engine kept, so that a near tie among them does
not excuse the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.engine.engines import Generated
from tests.oracle.snapkv_formula import kept_difference
from tests.oracle.snapkv_oracle import Oracle

SCORE_EPSILON = 1e-4
DEEP_SCORE_EPSILON = 5e-4
"""For the last layers of the tiny random-weight model. Its attention is so peaked that the
oracle's own scores move by up to 2.2e-4 of themselves between float32 and float64 (layer 5,
positions near the threshold, 40 prompts; 4e-5 in layer 2): two sound float32 computations
may differ by twice that."""
LOGIT_EPSILON = 1e-3


@dataclass
class Agreement:
    """Counts over the requests compared so far.

    Attributes:
        score_epsilon: Relative distance of two scores that counts as a near tie.
        requests: Requests compared.
        positions: Kept positions compared, over heads and layers.
        position_ties: Positions that differ and are explained by a near tie.
        tokens: Tokens compared.
        token_ties: Tokens that differ and are explained by a near tie.
        max_logprob_difference: Largest difference of a token's log-probability.
        disagreements: Everything that no near tie explains, in words.
    """

    score_epsilon: float = SCORE_EPSILON
    requests: int = 0
    positions: int = 0
    position_ties: int = 0
    tokens: int = 0
    token_ties: int = 0
    max_logprob_difference: float = 0.0
    disagreements: list[str] | None = None

    def __post_init__(self) -> None:
        self.disagreements = []

    def check(self, *, max_logprob_difference: float, max_tie_share: float = 1e-3) -> None:
        """Fail unless everything agrees, near ties are rare and log-probabilities close."""
        assert not self.disagreements, "\n".join(self.disagreements[:10])
        assert self.position_ties <= max(2, max_tie_share * self.positions), self
        assert self.token_ties <= max(1, max_tie_share * self.tokens), self
        assert self.max_logprob_difference <= max_logprob_difference, self

    def compare(
        self,
        oracle: Oracle,
        prompt: list[int],
        generated: Generated,
        *,
        budget: int,
        block_size: int,
        full_layers: set[int],
        label: str = "",
        **parameters: object,
    ) -> None:
        """Run the oracle on the engine's own text and record how well they agree."""
        complain = self.disagreements.append
        label = label or f"prompt of {len(prompt)}, budget {budget}"
        tokens = generated.token_ids
        chosen = generated.kept
        expected = oracle.run(
            prompt,
            budget_tokens=budget,
            block_size=block_size,
            full_layers=full_layers,
            max_new_tokens=len(tokens),
            forced_tokens=tokens,
            forced_kept=chosen,
            **parameters,
        )
        self.requests += 1
        # The oracle calls everything kept where a prompt fits its budget.
        references = expected.kept if expected.start else {}
        if set(generated.kept) != set(references):
            complain(f"{label}: layers {sorted(generated.kept)} sieved, not {sorted(references)}")
            return
        for layer, reference in references.items():
            kept = chosen[layer]
            self.positions += kept.numel()
            if kept.shape != reference.shape:
                complain(f"{label}, layer {layer}: kept {kept.shape[1]}, not {reference.shape[1]}")
                continue
            different, explained = kept_difference(
                reference, kept, expected.scores[layer], self.score_epsilon
            )
            self.position_ties += explained
            if different != explained:
                complain(f"{label}, layer {layer}: {different - explained} other positions kept")
        for step, token in enumerate(tokens):
            self.tokens += 1
            if token != expected.token_ids[step]:
                if expected.top2_gap[step] <= LOGIT_EPSILON:
                    self.token_ties += 1
                else:
                    complain(
                        f"{label}, token {step}: {token}, not {expected.token_ids[step]}"
                        f" (gap {expected.top2_gap[step]:.2e})"
                    )
        if generated.logprobs:
            theirs = expected.logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]
            difference = float((theirs - torch.tensor(generated.logprobs)).abs().max())
            self.max_logprob_difference = max(self.max_logprob_difference, difference)
