"""Which trainings run; each leaves a run directory, which is read and deleted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch

from trainvitals.errors import FormatError, UsageError
from trainvitals.jsonable import from_json, to_json
from vitals_agent.agent import Agent, AgentConfig
from vitals_bench.attribution.trainings import make
from vitals_bench.explanation.kinds import (
    FIRST_QUERY,
    KINDS,
    PLACEMENTS,
    QUIET_WINDOWS,
    STEPS,
    Job,
    Placement,
    Truth,
    plan,
    truth_of,
)
from vitals_bench.explanation.rank import MODEL, train
from vitals_bench.explanation.scoring import Score, num_invented, score
from vitals_bench.explanation.statements import Statement, read_quiet, read_statements
from vitals_bench.processes import free_port
from vitals_bench.training import own_place

SEEDS = (0, 1, 2, 3)
"""Rules are tuned on the even ones; the odd ones are only reported."""
HEALTHY = "healthy"
"""Instead of the kinds of fault: only healthy trainings."""
NODE = "bench"
_SECONDS = 600.0
_TURN_SECONDS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command."""

    kinds: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (1,)
    placements: tuple[str, ...] = ()
    results: Path | None = None
    is_run: bool = True
    """Whether trainings run; otherwise only the results are shown."""
    has_quiet: bool = True
    """Whether healthy trainings run as well."""
    has_signals: bool = False
    """Whether all trainings also run with the optional signals, measured at each step."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one training."""

    job: Job
    truths: list[Truth] = []
    """The scored fault first."""
    statements: list[Statement] = []
    named_by_why: int = 0
    named_by_changes: int = 0
    windows: int = 0
    seconds: float = 0.0
    error: str = ""
    """The reason if it could not run."""

    @property
    def scores(self) -> list[Score]:
        """Scores of its faults: computed from the stored statements."""
        return [score(truth, self.statements, ranks=self.job.ranks) for truth in self.truths]

    @property
    def num_invented(self) -> int:
        """Incidents about nothing."""
        return num_invented(self.truths, self.statements)


def jobs_of(options: Options, *, quick: bool) -> list[Job]:
    """Return the trainings, healthy ones last.

    Raises:
        UsageError: a kind or placement does not exist.
    """
    kinds = options.kinds or (tuple(KINDS)[:2] if quick else tuple(KINDS))
    placements = options.placements or (PLACEMENTS[:1] if quick else PLACEMENTS)
    if kinds == (HEALTHY,):
        kinds = ()
    for names, known in ((kinds, KINDS), (placements, PLACEMENTS)):
        for name in names:
            if name not in known:
                raise UsageError(f"{name!r} does not exist", hint=f"one of: {', '.join(known)}")
    seeds = options.seeds or (SEEDS[:1] if quick else SEEDS)
    has_signals = (False, True) if options.has_signals else (False,)
    jobs = [
        Job(kind, cast("Placement", placement), seed, ranks, measured)
        for measured in has_signals
        for ranks in options.ranks
        for seed in seeds
        for placement in placements
        for kind in kinds
    ]
    if options.has_quiet:
        jobs += [
            Job("", "alone", seed, ranks, measured)
            for measured in has_signals
            for ranks in options.ranks
            for seed in seeds
        ]
    return jobs


def run_jobs(jobs: Sequence[Job], options: Options) -> Iterator[Outcome]:
    """Yield the result of each training; those in the results file do not run again."""
    earlier = {outcome.job: outcome for outcome in read_outcomes(options.results)}
    for job in jobs:
        outcome = earlier.get(job)
        if outcome is None:
            if not options.is_run:
                continue
            outcome = run_job(job)
            if options.results is not None and not outcome.error:
                with options.results.open("ab") as file:
                    file.write(to_json(outcome) + b"\n")
        yield outcome


def read_outcomes(path: Path | None) -> list[Outcome]:
    """Return the results in a file; none if it does not exist.

    Raises:
        FormatError: a line is not a result.
    """
    if path is None or not path.exists():
        return []
    try:
        return [from_json(line, Outcome) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise FormatError(f"{path} contains a line that is not a result: {error}") from error


def run_job(job: Job, *, steps: int = STEPS) -> Outcome:
    """Train, read the run directory and return the statements."""
    begin = time.monotonic()
    faults = plan(job, make(MODEL, job.seed).layers)
    truths = [truth_of(fault) for fault in faults]
    try:
        with own_place() as runs, _agent(runs) as agent:
            run_id = train_on_ranks(job, steps, lambda: agent.cycle(time.monotonic()))
            agent.cycle(time.monotonic())
            agent.stop()
            folder = runs / run_id
            statements = read_statements(folder)
            draws = np.random.default_rng([job.seed, job.ranks])
            asked = draws.integers(FIRST_QUERY, steps, 0 if job.kind else QUIET_WINDOWS)
            by_why, by_changes = read_quiet(folder, asked.tolist())
    except Exception as error:  # noqa: BLE001 - the other trainings still run
        return Outcome(job=job, truths=truths, error=f"{type(error).__name__}: {error}")
    return Outcome(
        job=job, truths=truths, statements=statements, named_by_why=by_why,
        named_by_changes=by_changes, windows=len(asked),
        seconds=round(time.monotonic() - begin, 1),
    )  # fmt: skip


class _agent:  # noqa: N801 - a context manager
    """An agent in this process that copies the journals into the run directory."""

    def __init__(self, runs: Path) -> None:
        base = Path(os.environ["VITALS_SHM"]) / f"trainvitals-{os.getuid()}"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = runs / "keys"
        keys.mkdir()
        os.environ["VITALS_NODE"] = NODE
        self._agent = Agent(AgentConfig(vitals_dir=runs, base=base, keys=keys, node=NODE))

    def __enter__(self) -> Agent:
        self._agent.start()
        return self._agent

    def __exit__(self, *_: object) -> None:
        os.environ.pop("VITALS_NODE", None)


def train_on_ranks(job: Job, steps: int, on_look: Callable[[], object]) -> str:
    """Train in this process, or on gloo ranks; return the run's id."""
    if job.ranks == 1:
        torch.set_num_threads(1)
        return train(job, steps=steps, on_look=on_look)
    with tempfile.TemporaryDirectory(prefix="vitals-explanation-") as name:
        base = {
            **os.environ, "OMP_NUM_THREADS": "1", "VITALS_QUIET": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.ranks),
        }  # fmt: skip
        body = msgspec.json.encode((job, steps)).decode()
        command = [sys.executable, "-m", "vitals_bench.explanation.rank", body]
        processes, logs = [], []
        for rank in range(job.ranks):
            of_rank = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "EXPLANATION_OUT": f"{name}/{rank}",
            }  # fmt: skip
            logs.append((Path(name) / f"log{rank}").open("wb"))
            processes.append(
                subprocess.Popen(command, env={**base, **of_rank}, stdout=logs[-1], stderr=logs[-1])
            )
        try:
            _wait(processes, on_look)
        finally:
            for process, log in zip(processes, logs, strict=True):
                process.kill()
                process.wait()
                log.close()
        ids = {path.read_text() for path in Path(name).glob("[0-9]") if path.read_text()}
        if len(ids) != 1:
            text = (Path(name) / "log0").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{job} left {len(ids)} runs: {text}")
        return ids.pop()


def _wait(processes: Sequence[subprocess.Popen[bytes]], on_look: Callable[[], object]) -> None:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        on_look()
        if all(process.poll() is not None for process in processes):
            return
        time.sleep(_TURN_SECONDS)
    raise RuntimeError(f"the ranks did not end within {_SECONDS:g} seconds")
