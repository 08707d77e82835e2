"""What calibration measures, against the definition on Transformers' own eager attention."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from kvsieve.calibrate import resume
from kvsieve.calibrate.measure import FIXED, PromptCurves, measure_prompt, work
from kvsieve.calibrate.prompts import CalibrationPrompt
from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.inspect.model import LoadedModel, decoder_layers
from tests.engine.models import VOCABULARY, tiny_model

NUM_TOKENS, NUM_KEEP, NUM_LAYERS = 90, 40, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(folder: Path, architecture: str = "llama") -> LoadedModel:
    path = tiny_model(folder, architecture, num_layers=NUM_LAYERS, head_size=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return LoadedModel(path, model, None, decoder_layers(model), None)


def prompt(seed: int = 0, num_tokens: int = NUM_TOKENS) -> CalibrationPrompt:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (num_tokens,), generator=generator).tolist()
    return CalibrationPrompt("random", tuple(ids))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_keeping_everything_changes_nothing(folder: Path, architecture: str) -> None:
    loaded = load(folder, architecture)

    found = measure_prompt(loaded, prompt(), NUM_TOKENS, range(NUM_LAYERS - 1))

    assert found.squared_norm > 0
    for method in FIXED:
        assert found.distances[method] == dict.fromkeys(range(NUM_LAYERS - 1), 0.0)


@pytest.fixture(scope="module")
def measured(folder: Path) -> PromptCurves:
    return measure_prompt(load(folder), prompt(), NUM_KEEP, range(NUM_LAYERS - 1))


class Eager:
    """Transformers' eager attention on the prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.model.set_attn_implementation("eager")
        self.layers = loaded.layers
        self.ids = torch.tensor([prompt().token_ids])
        with torch.no_grad():
            self.out = self.model.base_model(
                self.ids, output_attentions=True, output_hidden_states=True, use_cache=False
            )

    def final(self) -> torch.Tensor:
        return self.out[0][0, -1].double()

    def fastkv_keeps(self, layer: int) -> torch.Tensor:
        attention = self.out.attentions[layer][0][:, -8:].sum(dim=1)[:, :-8]
        scores = F.max_pool1d(attention, 7, stride=1, padding=3).sum(dim=0)
        # Max pooling makes ties: the later position is better.
        best = NUM_TOKENS - 9 - scores.flip(0).argsort(descending=True, stable=True)
        best = best[: NUM_KEEP - 8]
        return torch.cat([best.sort().values, torch.arange(NUM_TOKENS - 8, NUM_TOKENS)])

    def gemfilter_keeps(self, layer: int) -> torch.Tensor:
        block: Any = self.layers[layer]
        with torch.no_grad():
            hidden = block.input_layernorm(self.out.hidden_states[layer])
            shape = (1, NUM_TOKENS, -1, 16)
            query = block.self_attn.q_proj(hidden).view(shape).transpose(1, 2)
            key = block.self_attn.k_proj(hidden).view(shape).transpose(1, 2)
            rope = self.model.base_model.rotary_emb(hidden, torch.arange(NUM_TOKENS)[None])
            rotate = sys.modules[type(block).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
            query, key = rotate(query, key, *rope)
            key = key.repeat_interleave(2, dim=1)
            logits = torch.einsum("hd,hnd->n", query[0, :, -1], key[0])
        pooled = F.avg_pool1d(logits[None], 5, stride=1, padding=2)[0]
        return pooled.topk(NUM_KEEP).indices.sort().values

    def final_without(self, dropped: torch.Tensor, layer: int) -> torch.Tensor:
        """The last token's state if the layers beyond one cannot see dropped positions."""

        def hide(_module: Any, args: Any, kwargs: Any) -> Any:
            mask = torch.full((NUM_TOKENS, NUM_TOKENS), float("-inf")).triu(1)
            mask[:, dropped] = float("-inf")
            # A row that sees nothing would be no number; nobody looks at those rows.
            mask.fill_diagonal_(0)
            return args, {**kwargs, "attention_mask": mask[None, None]}

        with ExitStack() as hooks, torch.no_grad():
            for block in self.layers[layer + 1 :]:
                hooks.callback(block.register_forward_pre_hook(hide, with_kwargs=True).remove)
            out: torch.Tensor = self.model.base_model(self.ids, use_cache=False)[0]
        return out[0, -1].double()

    def final_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The last state of a prompt of these tokens alone."""
        with torch.no_grad():
            out: torch.Tensor = self.model.base_model(self.ids[:, positions], use_cache=False)[0]
        return out[0, -1].double()


@pytest.fixture(scope="module")
def eager(folder: Path) -> Eager:
    return Eager(load(folder))


@pytest.mark.parametrize("layer", range(NUM_LAYERS - 1))
def test_distance_of_fastkv_is_that_of_hidden_columns(
    measured: PromptCurves, eager: Eager, layer: int
) -> None:
    kept = eager.fastkv_keeps(layer)
    dropped = torch.tensor(sorted(set(range(NUM_TOKENS)) - set(kept.tolist())))

    expected = (eager.final_without(dropped, layer) - eager.final()).square().sum()

    assert expected > 0
    assert measured.distances["fastkv"][layer] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("layer", range(NUM_LAYERS - 1))
def test_distance_of_gemfilter_is_that_of_the_kept_text(
    measured: PromptCurves, eager: Eager, layer: int
) -> None:
    expected = (eager.final_of(eager.gemfilter_keeps(layer)) - eager.final()).square().sum()

    assert measured.distances["gemfilter"][layer] == pytest.approx(float(expected), rel=1e-3)
    assert measured.squared_norm == pytest.approx(float(eager.final().square().sum()), rel=1e-4)


def test_rank_variance_is_that_of_asl(measured: PromptCurves, eager: Eager) -> None:
    ranks = []
    for matrix in eager.out.attentions:
        pooled = F.avg_pool1d(matrix[0][:, -32:].sum(dim=1)[:, :-32], 7, stride=1, padding=3)
        order = pooled.sum(dim=0).argsort(descending=True)
        ranks.append((order.argsort() + 1).double())
    best = NUM_KEEP - 32
    expected: list[float | None] = [None]
    # Six layers: two of them are compared.
    for one, other in pairwise(ranks):
        pair = torch.stack([one, other])
        union = (pair <= best).any(dim=0)
        expected.append(float(pair[:, union].var(dim=0, unbiased=False).mean()))

    assert measured.stability.l_obs == 2 and measured.stability.num_ranked == best
    assert list(measured.stability.variance[1:]) == pytest.approx(expected[1:])


def test_work_is_what_is_reported(folder: Path) -> None:
    done: list[int] = []

    measure_prompt(load(folder), prompt(), NUM_KEEP, [1, 3], done.append)

    assert sum(done) == work(NUM_TOKENS, NUM_KEEP, [1, 3], NUM_LAYERS)


def test_model_is_as_before(folder: Path) -> None:
    loaded = load(folder)
    before = resume.read(loaded, list(prompt().token_ids))

    measure_prompt(loaded, prompt(), NUM_KEEP, [0, 4])
    with pytest.raises(RuntimeError):
        resume.go_on(loaded, [3, 4], torch.arange(2), 2, torch.zeros(2, 7))

    assert not any("forward" in vars(layer) for layer in loaded.layers)
    assert torch.equal(resume.read(loaded, list(prompt().token_ids)), before)


def test_layers_that_cannot_be_run_on_rows_alone_are_refused(folder: Path) -> None:
    loaded = load(folder)
    ids = list(prompt().token_ids)
    resume.check_going_on(loaded, ids)
    first_attention: Any = loaded.layers[0].self_attn
    left_by_first: list[torch.Tensor] = []

    def begin(*_: Any) -> None:
        left_by_first.clear()

    def note(_module: Any, _args: Any, output: Any) -> None:
        left_by_first.append(output[0])

    def add(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + sum(left_by_first)

    # A last layer that also takes what the first one's attention left in this pass.
    loaded.model.base_model.register_forward_pre_hook(begin)
    first_attention.register_forward_hook(note)
    loaded.layers[-1].register_forward_hook(add)

    with pytest.raises(ConfigError, match="cannot be calibrated: run from layer 3 on"):
        resume.check_going_on(loaded, ids)


def test_numbers_that_are_not_finite_are_refused(folder: Path) -> None:
    loaded = load(folder)
    with torch.no_grad():
        loaded.layers[3].mlp.down_proj.weight[0, 0] = float("inf")  # type: ignore[union-attr, index]

    with pytest.raises(KvsieveError, match="not finite with the prompt random"):
        measure_prompt(loaded, prompt(), NUM_KEEP, [1])
