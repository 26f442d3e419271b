"""A long training with faults ends as one without them, and its processes do not grow."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.soak import NUM_LOOKS, Look, Plan, not_flat
from tests.trainer_hooks.torchrun import GLOO_ABORT, wait_for_agents

LONG = Plan(num_steps=20_000, poisoned_every=487, broken_at=(3_500, 9_500, 15_500))
SHORT = Plan(num_steps=1_000, poisoned_every=97, broken_at=(520,))

# ------------------------------------------------------------------------------- the check itself


def looks(of: Callable[[int], dict[str, float]], *, num_steps: int = 20_000) -> list[Look]:
    """Return looks at a process that holds so much more at each step than it usually does."""
    noise = random.Random(3)
    made = []
    for step in range(0, num_steps, num_steps // NUM_LOOKS):
        usual = {
            "rss_bytes": 400e6 + noise.uniform(-1e6, 1e6),
            "own_bytes": 300e6 + noise.uniform(-1e6, 1e6),
            "num_descriptors": 40 + noise.randrange(3),
            "num_threads": 9,
            "num_memfds": 2,
            "memfd_bytes": 1e6,
            "journal_bytes": noise.uniform(0, 2e6),
        }
        more = of(step)
        held = {name: value + more.get(name, 0.0) for name, value in usual.items()}
        made.append(Look(step=step, **held))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("num_steps", [20_000, 1_000])
@pytest.mark.parametrize(
    "of",
    [
        lambda step: {},
        lambda step: {"rss_bytes": min(step, 200) * 1e6, "num_threads": min(step, 3)},
        lambda step: {"own_bytes": 40e6 if step % 600 == 0 else 0.0},
        lambda step: {"own_bytes": 1.5e6 if step >= 700 else 0.0},
    ],
    ids=["noise", "a warm-up", "peaks", "one more block"],
)
def test_what_a_healthy_process_does_is_flat(of, num_steps):
    assert [] == not_flat(looks(of, num_steps=num_steps))


@pytest.mark.parametrize("num_steps", [20_000, 1_000])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.625, 0.63, 0.9])
def test_a_slot_that_is_lent_once_is_flat_whenever_that_happens(share, num_steps):
    def of(step: int) -> dict[str, float]:
        lent = float(step >= share * num_steps)
        return {"num_memfds": lent, "num_descriptors": lent, "memfd_bytes": 1e6 * lent}

    assert [] == not_flat(looks(of, num_steps=num_steps))


@pytest.mark.parametrize("num_steps", [20_000, 1_000])
@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("own_bytes", lambda step: {"own_bytes": 10_000 * step}),
        ("num_descriptors", lambda step: {"num_descriptors": step // 100}),
        ("num_memfds", lambda step: {"num_memfds": step // 400}),
        ("journal_bytes", lambda step: {"journal_bytes": 8_000 * step}),
    ],
    ids=["a list of 10 kB a step", "a file of a snapshot", "a memfd", "segments nobody frees"],
)
def test_a_leak_is_seen(name, of, num_steps):
    (grown,) = not_flat(looks(of, num_steps=num_steps))
    assert grown.startswith(f"{name} grows by ")


def test_a_record_kept_of_each_step_is_seen_in_a_long_run():
    assert [] != not_flat(looks(lambda step: {"own_bytes": 300 * step}))


# ----------------------------------------------------------------------------------- the training


def soak(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Train as a user would, with all defaults; return what each rank wrote, by mode."""
    for _ in range(3):
        (folder / "shm").mkdir(parents=True)
        ranks = [_start(folder, rank, plan) for rank in range(2)]
        try:
            codes = [rank.wait(timeout=3_000) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        wait_for_agents(folder / "runs")
        if codes == [0, 0]:
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        said = "".join((folder / f"{rank}.txt").read_text() for rank in range(2))
        assert GLOO_ABORT in said, said[-6_000:]
        shutil.rmtree(folder)
    raise AssertionError("gloo aborted three times")


def _start(folder: Path, rank: int, plan: Plan) -> subprocess.Popen[bytes]:
    places = {"VITALS_DIR": str(folder / "runs"), "VITALS_SHM": str(folder / "shm")}
    with (folder / f"{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.soak", str(folder), str(rank), json.dumps(plan)],
            env={**os.environ, **places, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def looks_of(ranks: list[dict[str, Any]]) -> dict[str, list[Look]]:
    """Return the looks at each process; the agent is looked at by rank 0."""
    return {
        name: [Look(*look) for look in looks]
        for rank in ranks
        for name, looks in rank["heal"]["looks"].items()
    }


def check(ranks: list[dict[str, Any]], plan: Plan) -> None:
    """Both ranks healed to the state without what they skipped; no process has grown."""
    for rank in ranks:
        healed, clean = rank["heal"], rank["off"]
        assert {} == healed["errors"]
        assert len(plan.broken_at) == len(healed["back"]), healed["back"]
        outliers = {*healed["skipped"]} - plan.poisoned
        assert plan.poisoned <= {*healed["skipped"]}
        assert len(outliers) <= plan.num_steps // 500, "healthy batches were skipped"
        assert clean["digests"] == healed["digests"], "skips or rollbacks have left a trace"
    by_process = looks_of(ranks)
    assert {"rank 0", "rank 1", "agent"} == by_process.keys()
    assert {} == {
        name: grown for name, process in by_process.items() if (grown := not_flat(process))
    }


@pytest.mark.slow  # 25 s on two cores with a load of 3, minutes with a load of 11
@pytest.mark.dist
def test_a_thousand_steps_with_faults_leave_no_trace_and_no_growth(tmp_path):
    check(soak(tmp_path / "soak", SHORT), SHORT)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(6_000)
def test_twenty_thousand_steps_with_faults_leave_no_trace_and_no_growth(tmp_path):
    check(soak(tmp_path / "soak", LONG), LONG)
