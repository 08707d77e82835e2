"""The journal of a run: finished items are written at once, and a run that broke off goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsieve.core.errors import ConfigError
from kvsieve.evals.record import Record

FILE_NAME = "journal.jsonl"


class Journal:
    """The journal in a folder: a line that says what the run is, then a line per record.

    Args:
        folder: The run's folder; made if there is none.
        identity: What must be equal for records to belong together: model, template,
            seed, versions. Tasks, budgets and policies may be added to later.

    Raises:
        ConfigError: The folder has the journal of another run, or cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._path = folder / FILE_NAME
        identity = json.loads(json.dumps(identity))
        self._records: dict[tuple[str, str, int | str], Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                self._read(identity)
            else:
                self._path.write_text(json.dumps(identity) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"cannot write in {folder}: {error.strerror}"]) from None

    def _read(self, identity: Mapping[str, Any]) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        try:
            written = json.loads(lines[0])
            if not isinstance(written, dict):
                raise ValueError("not an object")
        except ValueError:
            raise ConfigError([f"{self._path} is no journal of an evaluation"]) from None
        differing = [
            f"{key} was {written.get(key)!r} and is {identity.get(key)!r}"
            for key in sorted(written.keys() | identity.keys())
            if written.get(key) != identity.get(key)
        ]
        if differing:
            advice = f"{self._path} is of another run: name another folder (--out), or remove it"
            raise ConfigError([advice, *differing])
        sound = [lines[0]]
        for line in lines[1:]:
            try:
                record = Record.model_validate_json(line)
            except ValidationError:
                # The line that was being written when the run was killed.
                continue
            self._keep(record)
            sound.append(line)
        if len(sound) < len(lines):
            self._path.write_text("\n".join(sound) + "\n", encoding="utf-8")

    def _keep(self, record: Record) -> None:
        self._records[record.item_id, record.policy, record.kv_budget] = record

    def get(self, item_id: str, policy: str, kv_budget: int | str) -> Record | None:
        """The record of an item under a setting, or None."""
        return self._records.get((item_id, policy, kv_budget))

    def add(self, records: Sequence[Record]) -> None:
        """Write the records of an item, all or none."""
        for record in records:
            self._keep(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(record.model_dump_json() + "\n" for record in records))
            file.flush()
