"""Waits for agents that are about to end: what they leave is then taken up, or is nothing."""

import time
from collections.abc import Callable
from pathlib import Path

from trainvitals.errors import VitalsError
from trainvitals.identity import Identity
from trainvitals.io.journal import discover
from trainvitals.io.rundir import RunDir
from vitals_agent.process import RankProcess
from vitals_agent.state_dir import AgentStateDir
from vitals_agent.tailer import journal_identity

LEAVING_SECONDS = 20.0
"""As long as a rank's child tries to reach its collector once the ranks are gone, and some more."""


def wait_for_leaving(
    base: Path,
    vitals_dir: Path,
    *,
    seconds: float = LEAVING_SECONDS,
    stopwatch: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no agent holds a run of the folder whose ranks on this node are all gone.

    After ``seconds`` it returns all the same. A run with a rank that lives here is left alone.
    """
    deadline = stopwatch() + seconds
    homes = _homes_of_the_dead(base, vitals_dir)
    while any(_is_held(home) for home in homes) and stopwatch() < deadline:
        sleep(0.1)


def _homes_of_the_dead(base: Path, vitals_dir: Path) -> list[AgentStateDir]:
    ranks: dict[Path, list[Identity]] = {}
    for ref in discover(base):
        if ref.run_dir is None or ref.run_dir.resolve().parent != vitals_dir.resolve():
            continue
        who = _writer(ref.directory)
        if who is not None:
            ranks.setdefault(ref.run_dir, []).append(who)
    ended = {path: who for path, who in ranks.items() if not any(map(_lives, who))}
    folders = {
        RunDir.open(path).agent_dir(each.node) for path, who in ended.items() for each in who
    }
    return [AgentStateDir(folder, base) for folder in sorted(folders)]


def _writer(directory: Path) -> Identity | None:
    try:
        return journal_identity(directory)
    except VitalsError:
        return None  # of a newer version: the agent says so


def _lives(who: Identity) -> bool:
    return RankProcess(who).alive()


def _is_held(home: AgentStateDir) -> bool:
    try:
        home.acquire()
    except VitalsError:
        return True
    home.release()
    return False
