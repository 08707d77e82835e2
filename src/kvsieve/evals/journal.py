"""The journal of a run: finished items are written at once, and a run that broke off goes on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from kvsieve.core.errors import ConfigError
from kvsieve.evals.item import Item
from kvsieve.evals.record import Record

FILE_NAME = "journal.jsonl"


class Journal:
    """The journal in a folder: a line that says what the run is, then a line per record.

    Nothing in it is ever rewritten. It is locked while it is open, so that two runs cannot
    write into one folder; use it in a `with` block.

    Args:
        folder: The run's folder; made if there is none.
        identity: What must be equal for records to belong together: model, template,
            seed, versions. Tasks, budgets and policies may be added to later.

    Raises:
        ConfigError: The folder has the journal of another run, another run is writing
            there, or it cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / FILE_NAME
        self._records: dict[tuple[str, str, int | str], Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError([f"cannot write in {folder}: {error.strerror}"]) from None
        try:
            self._lock()
            self._read(json.loads(json.dumps(identity)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._records)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"another run is writing {self.path}: wait for it, or name another --out"
            raise ConfigError([reason]) from None
        except OSError:
            pass  # Some network file systems have no locks.

    def _read(self, identity: Mapping[str, Any]) -> None:
        # A run that was killed may have ended in the middle of a character.
        content = self.path.read_bytes().decode("utf-8", "replace")
        # Not `splitlines`: an answer may hold U+2028 and others that end a line for it.
        first, *lines = content.split("\n")
        if not content:
            self._write(json.dumps(identity) + "\n")
        elif self._is_unused(first, lines, identity):
            # A run that ended before its first answer: the folder is free for this one.
            self._file.truncate(0)
            self._write(json.dumps(identity) + "\n")
        else:
            self._check_same(first, identity)
        for line in lines:
            try:
                record = Record.model_validate_json(line)
            except ValidationError:
                # The line that was being written when the run was killed.
                continue
            self._keep(record)
        if content and not content.endswith("\n"):
            self._write("\n")

    @staticmethod
    def _is_unused(first: str, lines: Sequence[str], identity: Mapping[str, Any]) -> bool:
        try:
            written = json.loads(first)
        except ValueError:
            return False
        is_journal = isinstance(written, dict) and written.keys() == identity.keys()
        return is_journal and not any(line.strip() for line in lines)

    def _check_same(self, first: str, identity: Mapping[str, Any]) -> None:
        try:
            written = json.loads(first)
            if not isinstance(written, dict):
                raise ValueError("not an object")
        except ValueError:
            raise ConfigError(
                [f"{self.path} is no journal: name another folder (--out), or remove it"]
            ) from None
        differing = [
            f"{key} was {written.get(key)!r} and is {identity.get(key)!r}"
            for key in sorted(written.keys() | identity.keys())
            if written.get(key) != identity.get(key)
        ]
        if differing:
            advice = f"{self.path} is of another run: name another folder (--out), or remove it"
            raise ConfigError([advice, *differing])

    def _keep(self, record: Record) -> None:
        self._records[record.item_id, record.policy, record.kv_budget] = record

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def get(self, item: Item, policy: str, kv_budget: int | str) -> Record | None:
        """The record of an item under a setting, or None; a namesake's does not count."""
        record = self._records.get((item.item_id, policy, kv_budget))
        return record if record and record.item_sha256 == item.sha256 else None

    def add(self, records: Sequence[Record]) -> None:
        """Write the records of an item.

        Raises:
            ConfigError: The disk is full, or gone.
        """
        try:
            self._write("".join(record.model_dump_json() + "\n" for record in records))
        except OSError as error:
            raise ConfigError([f"cannot write {self.path}: {error.strerror}"]) from None
        for record in records:
            self._keep(record)
