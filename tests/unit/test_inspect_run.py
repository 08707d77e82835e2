"""The whole inspection on a small model with random weights and a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvsieve.cli.inspect import inspect
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.inspect.facts import as_facts, kind_shares, predicted_loss
from kvsieve.inspect.model import load_model
from kvsieve.inspect.page import inspection_page, print_inspection, sink_words
from kvsieve.inspect.recommend import Bounds
from kvsieve.inspect.run import Inspection, InspectSettings, inspect_loaded, inspect_model
from kvsieve.policies import parse_settings
from tests.engine.models import tiny_model
from tests.unit.word_tokenizer import WORDS, add_tokenizer


def text(num_words: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    words = [WORDS[i] for i in torch.randint(len(WORDS), (num_words,), generator=generator)]
    words[10::20] = ["."] * len(words[10::20])
    words[11::40] = ["\n"] * len(words[11::40])
    words[12::50] = ["7"] * len(words[12::50])
    return " ".join(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inspect")


@pytest.fixture(scope="module")
def make_model(folder: Path) -> Callable[..., str]:
    def make(architecture: str = "llama", num_layers: int = 6) -> str:
        path = tiny_model(folder, architecture, num_layers=num_layers, head_size=16)
        add_tokenizer(path)
        return path

    return make


@pytest.fixture(scope="module")
def files(folder: Path) -> list[Path]:
    paths = [folder / "long.txt", folder / "short.txt"]
    for path, words, seed in zip(paths, (420, 180), (1, 2), strict=True):
        path.write_text(text(words, seed))
    return paths


def look(model: str, files: list[Path], **settings: Any) -> Inspection:
    return inspect_model(model, files, InspectSettings(**settings), console=Console(quiet=True))


@pytest.fixture(scope="module")
def found(make_model: Callable[..., str], files: list[Path]) -> Inspection:
    return look(
        make_model(), files, bounds=Bounds(0.2), config=parse_settings({"policy": "snapkv"})
    )


def test_prediction_is_what_snapkv_loses_on_eager_attention(
    make_model: Callable[..., str], found: Inspection
) -> None:
    best = found.recommendation.best
    assert best is not None and found.recommendation.is_within
    loaded = load_model(make_model())
    loaded.model.set_attn_implementation("eager")
    window = found.settings.config.observation_window
    for facts, one in zip(as_facts(found)["prompts"], found.prompts, strict=True):
        ids = list(one.reading.prompt.token_ids)
        with torch.no_grad():
            matrices = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
        start = max(0, (len(ids) - best.budget) // 32 * 32)
        assert (facts["attention_mass_lost"] is None) is (start == 0)
        if not start:
            continue
        lost = facts["attention_mass_lost"]["layers"]
        assert list(lost) == [str(layer) for layer in best.plan.sieved]
        for layer in best.plan.sieved:
            attention = matrices[layer][0][:, -window:].double().sum(dim=1) / window
            # SnapKV by hand: best of the pooled mean of two heads, the sinks, the window.
            scores = attention.view(2, 2, -1).mean(dim=1)[:, :-window]
            scores = torch.nn.functional.max_pool1d(scores, 7, stride=1, padding=3)
            scores[:, :4] = 2
            kept = scores.topk(len(ids) - start - window).indices
            shares = [
                float(attention[head, kept[head // 2]].sum() + attention[head, -window:].sum())
                for head in range(4)
            ]
            assert lost[str(layer)] == pytest.approx(1 - sum(shares) / 4, abs=2e-3)


def test_plan_holds_for_every_prompt(found: Inspection) -> None:
    best = found.recommendation.best
    assert best is not None
    means = [
        prompt["attention_mass_lost"]["mean"]
        for prompt in as_facts(found)["prompts"]
        if prompt["attention_mass_lost"]
    ]
    assert max(means) == pytest.approx(best.mean_loss, abs=1e-5) and max(means) <= 0.2


def test_facts_are_json_and_complete(found: Inspection) -> None:
    facts = json.loads(json.dumps(as_facts(found), allow_nan=False))

    assert facts["layers"] == {"full_attention": list(range(6)), "sliding_window": []}
    for prompt, one in zip(facts["prompts"], found.prompts, strict=True):
        assert prompt["tokens"] == one.reading.num_tokens
        assert len(prompt["concentration"]) == len(prompt["massive_activations"]["layers"]) == 6
        shares = prompt["massive_activations"]["kinds"]
        assert sum(share["tokens"] for share in shares) == prompt["tokens"]
        # Each query's attention is 1 altogether.
        assert sum(share["attention"] for share in shares) == pytest.approx(1, abs=1e-4)
        assert {"first", "newline", "delimiter", "digit", "word"} == {s["kind"] for s in shares}
    command = facts["plan"]["recommended"]["command"]
    assert command.startswith(f"kvsieve serve {found.model} --budget ")


def test_terminal_and_page_show_the_same_plan(found: Inspection) -> None:
    console = Console(file=StringIO(), record=True, width=160)
    print_inspection(console, found)
    shown = console.export_text()
    page = inspection_page(found, {"date": "today"})

    best = found.recommendation.best
    assert best is not None
    for written in (shown, page):
        assert f"--budget {best.budget} --full-layers" in written
        assert "Attention mass lost is a proxy" in written
        assert "kvsieve eval" in written
        assert "long.txt" in written and "short.txt" in written
    assert "ruins the text, which is why the first 4 tokens are always kept" in page
    # Loss, loss per layer, and for each prompt concentration, activations, ranks.
    assert page.count("<svg") == 2 + 2 * 3


def test_kinds_without_tokens_are_left_out(found: Inspection) -> None:
    assert "special" not in {share.kind for share in kind_shares(found.prompts[0])}


def test_chat_template_is_applied(make_model: Callable[..., str], files: list[Path]) -> None:
    raw, chat = (look(make_model(), files[1:], chat=chat) for chat in (False, True))

    tokens = [one.prompts[0].reading.prompt.token_ids for one in (raw, chat)]
    assert tokens[1][0] != tokens[0][0] or len(tokens[1]) == len(tokens[0]) + 1
    assert tokens[1] != tokens[0]


def test_sliding_window_layers_are_reported_and_left_out(
    make_model: Callable[..., str], files: list[Path]
) -> None:
    found = look(make_model("gemma3"), files[:1], bounds=Bounds(0.5))

    facts = as_facts(found)
    assert facts["layers"] == {"full_attention": [2, 5], "sliding_window": [0, 1, 3, 4]}
    assert [one["layer"] for one in facts["prompts"][0]["concentration"]] == [2, 5]
    assert len(facts["prompts"][0]["massive_activations"]["layers"]) == 6
    assert "have a sliding window" in inspection_page(found, {})


def test_no_plan_within_the_loss_is_said(make_model: Callable[..., str], files: list[Path]) -> None:
    found = look(make_model(), files[:1], bounds=Bounds(0.0))

    page = inspection_page(found, {})
    best = found.recommendation.best
    assert best is not None
    if not found.recommendation.is_within:
        assert "No plan stays within" in page
        assert f"{100 * best.mean_loss:.2f}%" in page


def test_prompts_that_are_too_short_are_all_named(
    make_model: Callable[..., str], tmp_path: Path, files: list[Path]
) -> None:
    (tmp_path / "a.txt").write_text("w1 w2")
    (tmp_path / "b.txt").write_text("w1")
    (tmp_path / "c.txt").write_bytes(b"\xff")

    with pytest.raises(ConfigError) as error:
        look(make_model(), [tmp_path / f"{name}.txt" for name in "abcd"] + files[1:])

    reasons = error.value.reasons
    assert len(reasons) == 4
    assert "a.txt has 3 tokens" in reasons[0] and "observation_window" in reasons[0]
    assert "b.txt has 2 tokens" in reasons[1]
    assert "is not UTF-8" in reasons[2] and "No such file" in reasons[3]


def test_a_prompt_hardly_longer_than_the_window_has_no_plan(
    make_model: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:33]))

    found = look(make_model(), [tmp_path / "a.txt"])

    assert found.recommendation.best is None
    assert "nothing to recommend" in inspection_page(found, {})
    json.dumps(as_facts(found), allow_nan=False)


def test_a_model_of_one_layer_and_one_that_is_not_finite(
    make_model: Callable[..., str], files: list[Path]
) -> None:
    loaded = load_model(make_model(num_layers=1))
    settings = InspectSettings(bounds=Bounds(0.5))
    quiet = Console(quiet=True)

    found = inspect_loaded(loaded, files[:1], settings, console=quiet)
    assert "<svg" in inspection_page(found, {})

    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(0)
        loaded.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(KvsieveError):
        inspect_loaded(loaded, files[:1], settings, console=quiet)


def test_settings_that_cannot_work_are_all_named(tmp_path: Path) -> None:
    from kvsieve.inspect.ranks import RankSettings

    with pytest.raises(ConfigError) as error:
        look(
            "nowhere",
            [tmp_path],
            bounds=Bounds(2.0, -1.0),
            ranks=RankSettings(tau=0, pool_size=4, select_k=10),
            num_sampled=0,
        )

    assert len(error.value.reasons) == 6


def run(*args: str) -> Any:
    app = typer.Typer()
    app.command()(inspect)
    return CliRunner().invoke(app, args)


def test_command_writes_its_files(
    make_model: Callable[..., str], files: list[Path], tmp_path: Path
) -> None:
    html, data = tmp_path / "a.html", tmp_path / "a.json"

    ran = run(
        make_model(),
        *("--prompt-file", str(files[0]), "--prompt-file", str(files[1])),
        *("--loss", "0.3", "--observation-window", "16", "--l-obs", "2", "--l-min", "1"),
        *("--html", str(html), "--json", str(data)),
    )

    assert ran.exit_code == 0, ran.output
    assert "kvsieve serve" in ran.output and "--observation-window 16" in ran.output
    facts = json.loads(data.read_text())
    assert facts["prompts"][0]["rank_stability"]["l_min"] == 1
    assert facts["provenance"]["versions"]["torch"]
    assert html.read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        (
            ("--policy", "tova"),
            "--policy tova",
            "What it keeps is decided by the prompt's last query,",
        ),
        (
            ("--policy", "pyramidkv"),
            "--policy pyramidkv --layer-budgets uniform",
            "layer_budgets, as pyramidkv is configured",
        ),
        (
            ("--policy", "h2o", "--num-recent-tokens", "24"),
            "--policy h2o --num-recent-tokens 24",
            "is not decided by the prompt's last 32 queries",
        ),
        (
            ("--policy", "chunkkv", "--policy-options", '{"chunk_length": 5}'),
            """--policy chunkkv --policy-options '{"chunk_length": 5}'""",
            "What it keeps is decided by the prompt's last 32 queries,",
        ),
    ],
)
def test_command_takes_every_policy_and_says_what_decides(
    make_model: Callable[..., str],
    files: list[Path],
    tmp_path: Path,
    given: tuple[str, ...],
    named: str,
    said: str,
) -> None:
    html, data = tmp_path / "a.html", tmp_path / "a.json"

    ran = run(
        make_model(),
        *("--prompt-file", str(files[0]), "--loss", "0.5", *given),
        *("--html", str(html), "--json", str(data)),
    )

    assert ran.exit_code == 0, ran.output
    shown = " ".join(ran.output.split())
    assert named in shown and said in shown
    facts = json.loads(data.read_text())
    assert facts["settings"]["policy"] == given[1]
    assert named in facts["plan"]["recommended"]["command"]
    page = unescape(html.read_text())
    assert named in page and said in page


def test_page_says_whether_first_tokens_are_kept(found: Inspection) -> None:
    said = [
        sink_words(replace(found, settings=InspectSettings(SieveConfig(num_sink_tokens=sinks))))
        for sinks in (0, 1, 4)
    ]

    assert "no first token is forced to stay here" in said[0]
    assert "why the first token is always kept" in said[1]
    assert "why the first 4 tokens are always kept" in said[2]


def test_a_sieved_prompt_that_loses_nothing_has_a_loss_of_nothing(found: Inspection) -> None:
    best = found.recommendation.best
    assert best is not None
    lossless = replace(
        found.prompts[0].reading, lost=[[0.0] * len(found.budgets) for _ in range(6)]
    )

    lost = predicted_loss(found, lossless)

    assert lost is not None and (lost.mean, lost.max) == (0, 0)
    assert list(lost.layers) == [str(layer) for layer in best.plan.sieved]


def test_command_without_a_prompt_says_so(tmp_path: Path) -> None:
    ran = run(str(tmp_path))

    assert ran.exit_code == 2 and "--prompt-file" in ran.output
