"""Runs trainings on four ranks, and passes what they recorded through the rule."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.fleet.origin.onsets import Onset, find_origin_onset
from trainvitals.detect.fleet.origin.tracker import OnsetTracker
from vitals_bench.attribution.rank import LEAD, Part, Work
from vitals_bench.attribution.trainings import Fault
from vitals_bench.merged_rows import merge_batches

RANKS = 4
_SECONDS = 900


class Recorded(NamedTuple):
    """What a run, and the faults in copies of it, left in the ranks' journals."""

    run: list[MergedStep]
    faults: list[tuple[Fault, list[MergedStep]]]


def record(work: Work) -> Recorded:
    """Train on four ranks and return the steps as a collector merges them.

    Raises:
        RuntimeError: a rank failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="vitals-attribution-") as name:
        folder = Path(name)
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "VITALS_AGENT": "off", "VITALS_QUIET": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        command = (sys.executable, "-c", "from vitals_bench.attribution.rank import run; run()")
        body = msgspec.json.encode(work).decode()
        logs = [(folder / f"log{rank}").open("wb") for rank in range(RANKS)]
        ranks = [
            subprocess.Popen([*command, body, str(i), name], env=env, stdout=log, stderr=log)
            for i, log in enumerate(logs)
        ]
        try:
            codes = _wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
            for log in logs:
                log.close()
        if any(codes):
            text = (folder / f"log{codes.index(max(codes, key=abs))}").read_text()[-3000:]
            raise RuntimeError(f"a rank of {work} failed:\n{text}")
        parts = [pickle.loads((folder / f"rows{i}.pkl").read_bytes()) for i in range(RANKS)]
    merged = [(parts[0][i].fault, _merged([p[i] for p in parts])) for i in range(len(parts[0]))]
    return Recorded(merged[0][1], merged[1:])


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes; where one fails, the others are not waited for."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.1)
    return [code or 0 if code is not None else 1 if not any(codes) else 0 for code in codes]


def _merged(parts: Sequence[Part]) -> list[MergedStep]:
    """Return the steps of a stretch, by the numbers they have in the run."""
    first = parts[0].first_step
    steps = merge_batches([part.batches for part in parts])
    return [replace(step, step=step.step + first, attempt=1) for step in steps]


# ---------------------------------------------------------------------------------- the rule


def told(recorded: Recorded, *, by_default: bool = False) -> Iterator[tuple[Fault, Onset | None]]:
    """Yield each fault, and what was seen to have moved first when somebody asked."""
    tracker, run = OnsetTracker(), iter(recorded.run)
    last = -1
    for fault, steps in recorded.faults:
        while last < fault.step - LEAD - 1:
            step = next(run)
            last = step.step
            tracker.update(as_seen(step, by_default=by_default))
        own = copy.deepcopy(tracker)
        for step in steps:
            # The first steps of a copy have nothing behind them; the run's own do.
            own.update(as_seen(step, by_default=by_default, is_near=step.step >= fault.step))
        yield fault, find_origin_onset(own.onsets, attempt=1, step=fault.asked_at)


_NOT_DEFAULT = ("rank_grad_norm",)


def as_seen(step: MergedStep, *, by_default: bool, is_near: bool = False) -> MergedStep:
    """Return a step as it is recorded without any signal opted in."""
    if not by_default:
        return step
    layers: Mapping[str, Mapping[str, float]] = {}
    # The library writes layers at every tenth step, and at each one after a finding.
    if step.step % 10 == 0 or (is_near and step.run.get("verdict")):
        layers = {
            name: {"grad_norm": row["grad_norm"]}
            for name, row in step.layers.items()
            if "grad_norm" in row
        }
    ranks = {name: v for name, v in step.ranks.items() if name not in _NOT_DEFAULT}
    return replace(step, layers=layers, ranks=ranks)
