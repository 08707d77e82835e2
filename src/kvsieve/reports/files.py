"""The files of a report: complete or not there, whatever happens while they are written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsieve.core.errors import KvsieveError


def check_report_files(html: Path | None, json_file: Path | None) -> None:
    """Find out before the work whether the report can be written after it.

    Args:
        html: File for the page, or None.
        json_file: File for the data, or None.

    Raises:
        KvsieveError: A folder does not exist or cannot be written to, or a file is a folder.
    """
    problems = [
        problem for path in (html, json_file) if path is not None and (problem := _problem(path))
    ]
    if html is not None and json_file is not None and html.absolute() == json_file.absolute():
        problems.append(f"{html} is given for the page and for the data; name two files")
    if problems:
        raise KvsieveError("the report cannot be written: " + "; ".join(problems))


def _problem(path: Path) -> str:
    folder = path.absolute().parent
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    if _is_special(path):
        return ""
    if not folder.is_dir():
        return f"the folder {folder} of {path.name} does not exist; make it first"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} of {path.name} may not be written to; name another one"
    return ""


def _is_special(path: Path) -> bool:
    """Whether this is a pipe or device such as /dev/stdout, which is written to, not replaced."""
    return path.exists() and not path.is_file()


def write_report(
    html: Path | None, json_file: Path | None, *, page: str, data: Mapping[str, Any]
) -> None:
    """Write the page and the data behind it; a file that is there is replaced.

    Args:
        html: File for the page; None writes none.
        json_file: File for the data; None writes none.
        page: Text that `render_page` returned.
        data: Everything measured, as JSON values. Infinite numbers and NaN, which JSON lacks,
            become null.

    Raises:
        KvsieveError: As `check_report_files`, or writing failed. Nothing is left half written.
    """
    check_report_files(html, json_file)
    if json_file is not None:
        text = json.dumps(_json_values(data), indent=1, ensure_ascii=False, allow_nan=False)
        _replace(json_file, text + "\n")
    if html is not None:
        _replace(html, page)


def _json_values(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _replace(path: Path, text: str) -> None:
    # A lone surrogate, which a model's broken text may hold, has no UTF-8.
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        # A link stays one. Beside the file: a rename is atomic only within one file system.
        target = path.resolve()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise KvsieveError(f"could not write {path}: {error.strerror or error}") from error
