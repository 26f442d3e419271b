"""Where a run's files are: made or found on rank 0, told to all ranks, opened by each."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from trainer_hooks.agree import on_every_rank
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.inbox import Inbox
from trainer_hooks.ranks import Ranks
from trainvitals.clock import Clock
from trainvitals.errors import FormatError, StorageError, TrainingHalted
from trainvitals.identity import (
    Identity,
    new_attempt_id,
    new_incarnation,
    new_run_id,
    safe_node_id,
)
from trainvitals.io.journal import JournalWriter, announce_run, journal_directory
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.policy import Facts, JudgeConfig, load_judge_config


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run's files are; the same on all ranks but for the node's own base."""

    run_dir: RunDir
    folder: Path
    attempt: int
    node: str
    facts: Facts
    """What earlier starts of the run have spent, as rank 0 read it."""
    judge: JudgeConfig
    """Settings of the detectors and the ladder, as rank 0 read them."""


def open_run(
    ranks: Ranks, environ: Mapping[str, str], directory: str | Path | None, clock: Clock
) -> Place:
    """Make or find the run on rank 0 and tell all ranks; an error is raised on every rank."""
    at_root = on_every_rank(
        ranks, lambda: _open_on_root(environ, directory, clock) if ranks.rank == 0 else None
    )[0]
    assert at_root is not None
    run_id, path, attempt, facts, judge = at_root
    folders: list[Path] = []
    on_every_rank(
        ranks, lambda: folders.append(announce_run(private_base(environ), run_id, Path(path)))
    )
    node = safe_node_id(environ.get("VITALS_NODE") or socket.gethostname())
    return Place(RunDir(Path(path)), folders[0], attempt, node, facts, judge)


def _open_on_root(
    environ: Mapping[str, str], directory: str | Path | None, clock: Clock
) -> tuple[str, str, int, Facts, JudgeConfig]:
    judge = load_judge_config(environ)
    base = Path(directory or environ.get("VITALS_DIR") or "vitals_runs")
    run_id = environ.get("VITALS_RUN_ID") or new_run_id(clock.time_ns())
    run_dir = RunDir.create(base, run_id)
    marker = run_dir.halted()
    if marker is not None:
        raise TrainingHalted(
            f"run {run_id} was stopped at step {marker.step}: {marker.reason}",
            hint=f"after looking into it, `vitals resume {run_dir.path}` allows a new start",
        )
    try:
        run_dir.command_key(create=True)
    except OSError as error:
        raise StorageError(
            f"{run_dir.path}: the command key cannot be made: {error.strerror}",
            hint="set VITALS_DIR to a folder that can be written",
        ) from error
    facts = _facts(run_dir)
    # A clock may have gone back since; a relaunch is newer than what it follows all the same.
    attempt = max(new_attempt_id(clock.time_ns()), facts.attempt + 1)
    return run_id, str(run_dir.path), attempt, facts, judge


def _facts(run_dir: RunDir) -> Facts:
    """Return what earlier starts of the run have spent; what cannot be read is never guessed."""
    spent = [entry["facts"] for entry in run_dir.read_plan() if "facts" in entry]
    try:
        return msgspec.convert(spent[-1], Facts) if spent else Facts()
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{run_dir.path / 'plan.jsonl'}: what the run has spent is damaged: {error}",
            hint="restore the file from a backup, or start a new run",
        ) from error


def open_journal(
    place: Place, ranks: Ranks, faults: FaultCounter, clock: Clock, device: torch.device
) -> JournalWriter | None:
    """Open this rank's journal; without one training goes on, and the fault is counted."""
    uuid = ""
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    journal = None
    with faults.fail_open("journal.open"):
        identity = Identity(
            run_id=place.run_dir.run_id,
            incarnation=new_incarnation(),
            source=f"rank:{ranks.rank}",
            node=place.node,
            pid=os.getpid(),
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            world_size=ranks.world_size,
            started_unix_ns=clock.time_ns(),
            started_monotonic_ns=clock.monotonic_ns(),
            boot_id=_boot_id(),
            gpu_uuid=uuid,
        )
        journal = JournalWriter(journal_directory(place.folder, identity), identity)
    return journal  # noqa: RET504 - the assignment may not have happened


def open_inbox(place: Place, ranks: Ranks, clock: Clock) -> Inbox | None:
    """Open the run's mailbox on rank 0, which alone reads it; an error is raised on every rank."""
    opened: list[Inbox] = []

    def at_root() -> None:
        if ranks.rank == 0:
            inbox = Inbox(
                mailbox=Mailbox.create(place.folder / "mailbox"),
                key=place.run_dir.command_key(),
                run_id=place.run_dir.run_id,
                clock=clock,
                last_number=place.facts.last_command,
            )
            opened.append(inbox)

    on_every_rank(ranks, at_root)
    return opened[0] if opened else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
