from __future__ import annotations

import importlib.util
from pathlib import Path

from kvsieve.engine.support import FEATURES

ROOT = Path(__file__).parents[2]


def test_the_readme_prints_the_table_that_the_start_checks() -> None:
    spec = importlib.util.spec_from_file_location(
        "support_table", ROOT / "scripts" / "support_table.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    readme = (ROOT / "README.md").read_text()

    assert script.with_table(readme) == readme, "run `python scripts/support_table.py`"


def test_every_refusal_says_what_to_change() -> None:
    assert all(feature.note for feature in FEATURES if feature.status == "refused")
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
