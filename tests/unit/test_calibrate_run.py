"""The whole calibration on a small model with random weights, and its file in a server's hands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import typer
from rich.console import Console

from kvsieve.calibrate.prompts import KINDS, calibration_prompts
from kvsieve.calibrate.run import CalibrateSettings, calibrate_model, candidate_layers
from kvsieve.cli import main as cli
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.pruning import PRUNE_NAMES, Prune
from kvsieve.evals.prompts import PromptMaker
from kvsieve.pruning import PruneOptions, pruning_from_config
from tests.engine.models import tiny_model
from tests.unit.word_tokenizer import add_tokenizer

NUM_LAYERS = 6
ARGS = ("--prompts", "3", "--tokens", "240")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def make_model(folder: Path) -> Callable[..., str]:
    def make(architecture: str = "llama", num_layers: int = NUM_LAYERS) -> str:
        path = tiny_model(folder, architecture, num_layers=num_layers, head_size=16)
        add_tokenizer(path)
        return path

    return make


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The command as a user types it; its exit code."""
    monkeypatch.setattr(sys, "argv", ["kvsieve", "calibrate", *args])
    with pytest.raises((SystemExit, typer.Exit)) as ended:
        cli.main()
    return int(ended.value.code or 0)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def written(make_model: Callable[..., str], folder: Path) -> tuple[Path, str]:
    out, monkeypatch = folder / "found.json", pytest.MonkeyPatch()
    monkeypatch.setenv("COLUMNS", "200")
    try:
        assert run(monkeypatch, make_model(), "--out", str(out), "--every", "1", *ARGS) == 0
    finally:
        monkeypatch.undo()
    return out, make_model()


def served_by(path: Path, prune: str = "asl", **options: Any) -> Any:
    config = SieveConfig(prune=prune, prune_calibration=str(path), prune_options=options)
    pruning = pruning_from_config(config)
    assert pruning is not None
    return pruning


def test_server_takes_what_the_file_says(written: tuple[Path, str]) -> None:
    content = json.loads(written[0].read_text())
    pruning = served_by(written[0])

    assert set(content["methods"]) == set(PRUNE_NAMES)
    for name in PRUNE_NAMES:
        served = pruning.settings(Prune(name), NUM_LAYERS)
        for key, value in content["methods"][name].items():
            assert getattr(served, key) == value
    assert {"layer", "observed_layers", "threshold", "max_layer"} == set(content["methods"]["asl"])
    assert set(content["methods"]["fastkv"]) == {"layer"}


def test_operator_and_request_come_first(written: tuple[Path, str]) -> None:
    found = json.loads(written[0].read_text())["methods"]["asl"]
    given = 2 if found["layer"] != 2 else 1

    assert (
        served_by(written[0], max_layer=4, layer=given).settings(Prune("asl"), NUM_LAYERS).layer
        == given
    )
    assert served_by(written[0]).settings(Prune("fastkv", 0), NUM_LAYERS).layer == 0


def test_another_depth_is_refused(written: tuple[Path, str]) -> None:
    with pytest.raises(ConfigError, match="with 6 layers, and this model has 30"):
        served_by(written[0]).settings(Prune("asl"), 30)


def test_file_has_curves_and_provenance(written: tuple[Path, str]) -> None:
    content = json.loads(written[0].read_text())

    assert content["model"] == written[1] and content["kept_share"] == 0.25
    assert content["provenance"]["versions"]["torch"] and content["provenance"]["argv"]
    measured = content["measured"]
    layers = [str(layer) for layer in range(5)]
    assert list(measured["distance"]["fastkv"]) == layers
    assert list(measured["rank_variance"]) == [str(layer) for layer in range(1, 6)]
    assert [one["name"] for one in measured["prompts"]] == [
        "1: niah",
        "2: niah_multikey",
        "3: text",
    ]
    for one in measured["prompts"]:
        assert one["kept_tokens"] == one["tokens"] // 4
        assert set(one["pruned_at"]) == set(PRUNE_NAMES)


def test_command_shows_the_tables(
    make_model: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    assert run(monkeypatch, make_model(), "--max-layer", "3", *ARGS) == 0

    shown = capsys.readouterr().out
    for words in ("Where the methods select", "distance, gemfilter", "asl from here on"):
        assert words in shown
    assert "Written to kvsieve-calibration.json" in shown
    line = f"serve {make_model()} --budget 25% --prune asl --prune-calibration kvsieve-calib"
    assert line in shown
    methods = served_by(tmp_path / "kvsieve-calibration.json").calibration.methods
    assert methods["fastkv"].layer <= 3 and methods["gemfilter"].layer <= 3


def test_json_is_the_file(
    make_model: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a.json"

    assert run(monkeypatch, make_model(), "--json", "--out", str(out), *ARGS) == 0

    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kept", "0%"), "--kept: a share must be above 0%"),
        (("--kept", "100%"), "kept is a share of the prompt"),
        (("--kept", "much"), "--kept: 'much' is neither"),
        (("--max-layer", "5"), "max_layer must be in [0, 4]"),
        (("--kept", "5%"), "tokens are 9, and ASL keeps the last 32 anyway: give a larger --kept"),
        (("--tokens", "9000"), "more than the model's 4096: give a smaller --tokens"),
        (("--tokens", "5"), "cannot be asked in"),
        (("--out", "nowhere/a.json"), "does not exist; make it first"),
    ],
)
def test_what_cannot_be_done_is_said(
    make_model: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(monkeypatch, make_model(), *ARGS, *args) == 2

    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "kvsieve-calibration.json").exists()


def test_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tmp_path / "none")) == 2

    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "num_layers", "said"),
    [
        ("gemma3", 6, "layers without full attention (4 of 6)"),
        ("llama", 3, "has 3 layers, too few"),
    ],
)
def test_models_that_cannot_be_pruned_are_refused(
    make_model: Callable[..., str], architecture: str, num_layers: int, said: str
) -> None:
    settings = CalibrateSettings(num_prompts=1, mean_tokens=200)

    with pytest.raises(ConfigError) as error:
        calibrate_model(make_model(architecture, num_layers), settings, console=Console(quiet=True))

    assert said in str(error.value)


def test_every_setting_that_cannot_work_is_named() -> None:
    settings = CalibrateSettings(1.0, 0, 0, -1, 0)

    with pytest.raises(ConfigError) as error:
        calibrate_model("nowhere", settings, console=Console(quiet=True))

    assert len(error.value.reasons) == 5


@pytest.mark.parametrize(
    ("num_layers", "settings", "layers"),
    [
        (30, CalibrateSettings(), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        (32, CalibrateSettings(), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21]),
        (6, CalibrateSettings(), [0, 1, 2, 3, 4]),
        (30, CalibrateSettings(max_layer=7, every=3), [1, 4, 7]),
    ],
)
def test_layers_that_are_tried(
    num_layers: int, settings: CalibrateSettings, layers: list[int]
) -> None:
    assert candidate_layers(num_layers, settings) == layers


class Hashing(PromptMaker):
    """Tells words apart that the tiny tokenizer does not know."""

    def encode(self, text: str) -> list[int]:
        return [3 + crc32(word.encode()) % 500 for word in text.split(" ")]


def test_prompts_are_of_several_kinds_and_lengths(make_model: Callable[..., str]) -> None:
    maker = Hashing(make_model(), chat=False)
    maker.beginning = (1,)

    prompts = calibration_prompts(maker, 7, 400)

    assert [prompt.name for prompt in prompts] == [
        f"{index}: {KINDS[(index - 1) % 3]}" for index in range(1, 8)
    ]
    for index, prompt in enumerate(prompts):
        bound = 500 if index % 2 == 0 else 300
        # BOS comes on top of a task's length.
        assert 0.9 * bound <= len(prompt.token_ids) <= bound + 1
        assert prompt.token_ids[0] == 1
    assert len({prompt.token_ids for prompt in prompts}) == 7
    assert calibration_prompts(maker, 7, 400) == prompts


def test_options_are_those_of_a_server(written: tuple[Path, str]) -> None:
    """A calibration sets nothing that an operator could not."""
    keys = {key for one in json.loads(written[0].read_text())["methods"].values() for key in one}

    assert keys <= set(PruneOptions.model_fields)
