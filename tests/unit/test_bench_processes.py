"""CPU time of a tree of processes, those that have ended too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvsieve.bench.processes import cpu_seconds

# Burns CPU time in itself or in a child that has ended when "done" is printed.
BURN = """
import time
end = time.process_time() + {seconds}
while time.process_time() < end:
    pass
"""
PARENT = """
import subprocess, sys
{work}
print("done", flush=True)
sys.stdin.read()
"""
IN_CHILD = f"subprocess.run([sys.executable, '-c', {BURN.format(seconds=0.3)!r}], check=True)"
# The child's own parent ends first.
ORPHAN = f"""
script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
burn = {BURN.format(seconds=0.3)!r} + "print('burnt', flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", script, burn], check=True)
"""


@pytest.mark.parametrize(
    ("work", "word"),
    [(BURN.format(seconds=0.3), "done"), (IN_CHILD, "done"), (ORPHAN, "burnt")],
    ids=["itself", "ended-child", "orphan"],
)
def test_all_of_a_session_counts(work: str, word: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(work=work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline().strip() != word:
            pass
        first = cpu_seconds(process.pid)
        assert 0.25 <= first < 30
        assert cpu_seconds(process.pid) >= first
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_session_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    assert cpu_seconds(process.pid) == 0
