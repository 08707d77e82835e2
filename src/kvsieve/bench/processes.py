"""CPU time of a server: of all its processes, those that have ended too."""

from __future__ import annotations

import os

import psutil

TRIES = 5


def cpu_seconds(leader: int) -> float:
    """CPU time, user and system, of all processes of a session since they started.

    Children that ended count with the parent that waited for them. A process whose parent
    ended still belongs to the session, and counts.

    Args:
        leader: Id of the process that leads the session.

    Returns:
        Seconds; 0 if no process of the session is left.
    """
    total = 0.0
    for _ in range(TRIES):
        before = _session(leader)
        total = sum(map(_seconds, before))
        # One that ends between two reads would be missed, or count twice.
        if _session(leader) == before:
            break
    return total


def _session(leader: int) -> list[int]:
    return [pid for pid in psutil.pids() if _session_of(pid) == leader]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    ended = times.children_user + times.children_system
    return float(times.user + times.system + ended)
