"""Find a Chromium for the tests of the reports, or install one: `python3 scripts/browser.py`.

The tests open every report in a real browser. The Makefile runs this once before them, when
`.venv/.browser` is missing or older than this file. Kept free of syntax newer than Python 3.6.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

STAMP = Path(__file__).resolve().parent.parent / ".venv" / ".browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "the tests of the reports need a Chromium and there is none on PATH (looked for "
    + ", ".join(NAMES)
    + "); install one, on Debian with `apt-get install chromium`, or run"
    " `python3 scripts/browser.py` as root, which does that"
)


def find_browser() -> str:
    """Path of the first browser on PATH that says its version, empty if there is none.

    Ubuntu's `chromium-browser` is a stub that only tells to install a snap: being there is not
    enough.
    """
    for name in NAMES:
        path = shutil.which(name)
        if path and version(path):
            return path
    return ""


def version(browser: str) -> str:
    """What the browser calls itself, empty if it does not run."""
    try:
        done = subprocess.run(
            [browser, "--version"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def can_install() -> bool:
    """Whether this is root on a system with Debian's package manager."""
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and bool(_apt())


def install() -> bool:
    """Install Chromium from Debian's packages; whether that worked.

    The first attempt takes the package lists that are there; a machine without any, or with
    lists that name versions long gone, gets new ones and a second attempt.
    """
    command = [_apt(), "install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    print("==> installing chromium, which the tests of the reports need (once)", flush=True)
    if _quietly(command, environment):
        return True
    print("==> the package lists are missing or old; fetching new ones", flush=True)
    # A source of somebody else's that does not answer is no reason to give up.
    _quietly([_apt(), "update"], environment)
    return _quietly(command, environment, show=True)


def _apt() -> str:
    return shutil.which("apt-get") or ""


def _quietly(command: "list[str]", environment: "dict[str, str]", show: bool = False) -> bool:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if done.returncode != 0 and show:
        print("\n".join(done.stdout.splitlines()[-10:]), file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    """Find or install a browser and write the stamp; returns the exit status."""
    browser = find_browser()
    if not browser and can_install() and install():
        browser = find_browser()
    if not browser:
        print("error: " + HOW, file=sys.stderr)
        return 1
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(browser + "\n")
    print("==> browser for the tests: " + version(browser), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
