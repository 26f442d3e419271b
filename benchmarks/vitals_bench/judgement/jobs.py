"""Trainings of the benchmark, and how many run at once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec
import torch

from trainvitals.errors import FormatError
from trainvitals.jsonable import from_json, to_json
from vitals_bench.judgement.rank import Work
from vitals_bench.judgement.run import Clip, Outcome, Policy, run_one
from vitals_bench.judgement.worlds import KINDS, NEW_KINDS, WORLDS, World
from vitals_bench.training import own_place

CLIPS: tuple[Clip, ...] = (1.0, None)
KIND_CLIPS: tuple[Clip, ...] = (1.0, None, "auto")
KIND_MODES: tuple[Policy, ...] = ("guard", "heal+probe", "guard+declared", "heal+declared")
"""What each of ``KINDS`` is watched with."""
MODES: tuple[Policy, ...] = ("guard", "heal+probe")
"""What every world is watched with."""
MORE_MODES: tuple[Policy, ...] = ("guard", "guard+probe", "heal", "heal+probe")
SEEDS, MORE_SEEDS, QUICK_STEPS = 2, 10, 120
"""Seeds of a run and of a full one: the even ones set thresholds, the odd ones are held out."""
RANKS_SECONDS = 1_800
"""After which a training on several ranks is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the trainings are called with from the command line."""

    jobs: int = 1
    """Trainings at once, each on one thread; 0 runs none, and shows what ``results`` holds."""
    full: bool = False
    """Whether all policies and all seeds are run: hours."""
    results: Path | None = None
    """File of outcomes: what is in it is not run again, what is new is added."""
    worlds: tuple[str, ...] = ()
    """Parts of worlds' names; none takes all."""
    policies: tuple[str, ...] = ()
    """Policies to watch with instead of the usual ones."""
    seeds: tuple[int, ...] = ()
    """Seeds instead of the usual ones."""
    ranks: int = 1
    """Processes that each training runs on; more than one take the worlds that are dealt out."""
    kinds: tuple[str, ...] = ()
    """Names of ``KINDS``, or ``all``: these trainings, and no other worlds."""
    part: Literal["all", "healthy", "faults"] = "all"
    """Which trainings of the chosen ones."""


class Job(NamedTuple):
    """One training."""

    world: str
    clip: Clip
    policy: Policy
    seed: int
    ranks: int = 1


def jobs_of(asked: Asked, *, quick: bool) -> list[Job]:
    """Return the trainings, those that others are compared with first, each once."""
    worlds = [w for w in WORLDS.values() if _is_chosen(w, asked)]
    if quick and not asked.worlds:
        worlds = list({world.family: world for world in worlds}.values())
    seeds = asked.seeds or range(1 if quick else MORE_SEEDS if asked.full else SEEDS)
    jobs = []
    for seed in seeds:
        for world in worlds:
            clips = KIND_CLIPS if asked.kinds else CLIPS
            for clip in clips[:1] if quick else clips:
                jobs += _of_world(world, clip, seed, asked)
    return list(dict.fromkeys(jobs))


def _is_chosen(world: World, asked: Asked) -> bool:
    is_shared = world.name.startswith("ranks-")
    if (asked.ranks > 1 and not is_shared) or (asked.ranks == 1 and is_shared and asked.kinds):
        return False
    if asked.part != "all" and (world.label == "healthy") != (asked.part == "healthy"):
        return False
    if asked.kinds:
        base = world.name.partition("!")[0]
        is_kind = world.name in KINDS if world.label == "healthy" else "!" in world.name
        is_named = not asked.worlds or any(part in world.name for part in asked.worlds)
        return is_kind and is_named and ("all" in asked.kinds or base in asked.kinds)
    if "!" in world.name or world.name in NEW_KINDS:
        return any(part in world.name for part in asked.worlds)
    return not asked.worlds or any(part in world.name for part in asked.worlds)


def _of_world(world: World, clip: Clip, seed: int, asked: Asked) -> list[Job]:
    policies: list[Policy] = list(MORE_MODES if asked.full else MODES)
    if asked.kinds:
        policies = list(KIND_MODES if world.label == "healthy" else MODES)
    elif world.make(seed=seed).loss_kind != "minimize":
        policies.append("heal+kind")
    pairs = [(world.base, "none")]
    if world.label != "healthy":
        pairs.append((world.name, "none"))
    if world.label == "poisoned":
        pairs.append((world.name, "oracle"))
    pairs += [(world.name, policy) for policy in asked.policies or policies]
    return [Job(name, clip, cast("Policy", policy), seed, asked.ranks) for name, policy in pairs]


def run_jobs(jobs: Sequence[Job], asked: Asked, *, steps: int | None) -> Iterator[Outcome]:
    """Yield what became of each training; what was run before is read from the file."""
    earlier = {key_of(outcome): outcome for outcome in read_outcomes(asked.results)}
    yield from (earlier[job] for job in jobs if job in earlier)
    left = [job for job in jobs if job not in earlier] if asked.jobs else []
    for outcome in _run(left, asked.jobs, steps) if left else ():
        if asked.results is not None:
            with asked.results.open("ab") as file:
                file.write(to_json(outcome) + b"\n")
        yield outcome


def key_of(outcome: Outcome) -> Job:
    """Return the job that an outcome is of."""
    return Job(outcome.world, outcome.clip, outcome.policy, outcome.seed, outcome.ranks)


def read_outcomes(path: Path | None) -> list[Outcome]:
    """Return the outcomes in a file; none where there is no file yet.

    Raises:
        FormatError: a line is no outcome.
    """
    if path is None or not path.exists():
        return []
    try:
        lines = path.read_bytes().splitlines()
        return [from_json(line, Outcome) for line in lines]
    except msgspec.DecodeError as error:
        raise FormatError(f"{path} holds something else than outcomes: {error}") from error


def _run(jobs: Iterable[Job], at_once: int, steps: int | None) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")
    with (
        _one_thread(),
        ProcessPoolExecutor(at_once, mp_context=context, initializer=_begin) as pool,
    ):
        futures = [pool.submit(_run_job, job, steps) for job in jobs]
        for future in as_completed(futures):
            yield future.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let the processes that are started meanwhile have one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _begin() -> None:
    torch.set_num_threads(1)


def _run_job(job: Job, steps: int | None) -> Outcome:
    try:
        if job.ranks > 1:
            return _run_on_ranks(job, steps)
        return run_one(job.world, clip=job.clip, policy=job.policy, seed=job.seed, steps=steps)
    except Exception as error:  # noqa: BLE001 - one training must not take the others with it
        text = f"{type(error).__name__}: {error}"
        return Outcome(
            world=job.world, clip=job.clip, policy=job.policy, seed=job.seed, ranks=job.ranks,
            first=0.0, final=0.0, digest="", attempted=0, seconds=0.0, error=text,
        )  # fmt: skip


def _run_on_ranks(job: Job, steps: int | None) -> Outcome:
    work = Work(world=job.world, clip=job.clip, policy=job.policy, seed=job.seed, steps=steps)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks))
    with own_place() as folder:
        result = folder / "outcome.json"
        module = ("-m", "vitals_bench.judgement.rank", msgspec.json.encode(work).decode())
        command = [sys.executable, *launch, *module, str(result)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RANKS_SECONDS)
        if not result.exists():
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-500:]}")
        return from_json(result.read_bytes(), Outcome)
