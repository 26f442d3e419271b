"""Paths of a run's files: created or found on rank 0, broadcast, and opened by each rank."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from trainer_hooks.failopen import FaultCounter
from trainer_hooks.node import Spot, locate_process, name_nodes
from trainer_hooks.ranks import Ranks, on_every_rank
from trainvitals.clock import Clock
from trainvitals.errors import (
    FormatError,
    InsecurePathError,
    StorageError,
    TrainingHalted,
    VitalsError,
)
from trainvitals.identity import (
    Identity,
    new_attempt_id,
    new_incarnation,
    new_run_id,
    safe_node_id,
)
from trainvitals.io.control_key import control_folder
from trainvitals.io.journal import JournalWriter, announce_run, check_room, journal_directory
from trainvitals.io.mailbox import CommandInbox, Mailbox
from trainvitals.io.private import is_memory_backed, private_bases
from trainvitals.io.relaunch import earlier_run, remember_run
from trainvitals.io.rundir import RunDir, is_full
from trainvitals.policy import JudgeConfig, load_judge_config
from trainvitals.policy.plan import Plan, read_plan

_LOG = logging.getLogger("trainvitals")
_runs = itertools.count()
"""Index of the runs in this process; a restart opens them in the same order."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of a run; equal on all ranks, except for ``folder`` and ``node``."""

    run_dir: RunDir
    folder: Path | None
    """Directory for journals and mailbox on this node; None if no such directory is usable."""
    attempt: int
    node: str
    is_first: bool
    """Whether this rank starts the node's agent."""
    plan: Plan
    """Budgets, attempts and skipped windows of earlier processes, as rank 0 read them."""
    judge: JudgeConfig
    """Settings of detectors and policy, as rank 0 read them."""


def open_run(
    ranks: Ranks,
    environ: Mapping[str, str],
    directory: str | Path | None,
    clock: Clock,
    faults: FaultCounter,
) -> RunPaths:
    """Create or find the watched run on rank 0 and broadcast it; raise errors on every rank."""
    at_root = on_every_rank(
        ranks, lambda: _open_on_root(environ, directory, clock) if ranks.rank == 0 else None
    )[0]
    assert at_root is not None
    run_id, path, attempt, plan, judge = at_root
    folders: list[Path | None] = []

    def here() -> Spot:
        folders.append(_create_journal_folder(environ, run_id, Path(path), faults))
        host = safe_node_id(environ.get("VITALS_NODE") or socket.gethostname())
        return locate_process(host, folders[0])

    nodes = name_nodes(on_every_rank(ranks, here))
    node = nodes[ranks.rank]
    is_first = ranks.rank == nodes.index(node)
    return RunPaths(RunDir(Path(path)), folders[0], attempt, node, is_first, plan, judge)


def _create_journal_folder(
    environ: Mapping[str, str], run_id: str, run_dir: Path, faults: FaultCounter
) -> Path | None:
    """Create a watched run's journal directory on this node; None, counted, if impossible.

    A full file system is used only if all are full: space may be freed later.

    Raises:
        VitalsError: the directory in ``VITALS_SHM`` cannot be used.
    """
    refused: list[VitalsError] = []
    full: list[Path] = []
    for base in private_bases(environ, refused):
        try:
            folder = announce_run(base, run_id, run_dir)
            try:
                check_room(folder)
            except StorageError:
                full.append(folder)
                raise
        except VitalsError as error:
            refused.append(error)
            continue
        for why in refused:
            faults.count(f"journal.folder, {base} is used instead", why)
        return folder
    if environ.get("VITALS_SHM") and not is_full(refused[0]):
        raise refused[0]
    for why in refused:
        faults.count("journal.folder", why)
    return full[0] if full else None


def _open_on_root(
    environ: Mapping[str, str], directory: str | Path | None, clock: Clock
) -> tuple[str, str, int, Plan, JudgeConfig]:
    """Create or find the watched run's directory and plan, on rank 0."""
    judge = load_judge_config(environ)
    base = Path(directory or environ.get("VITALS_DIR") or "vitals_runs")
    nth = next(_runs)
    try:
        run_dir = _run_dir(base, environ, clock, nth)
    except StorageError as error:
        other = _other_disk(environ) if is_full(error) else None
        if other is None:
            raise
        _LOG.warning("vitals: %s; the run is stored in %s instead", error.text, other)
        run_dir = _run_dir(other, environ, clock, nth)
    plan = read_earlier_plan(run_dir)
    # A clock may have been set back; a relaunch must still get a larger id than earlier attempts.
    attempt = max(new_attempt_id(clock.time_ns()), plan.newest_attempt + 1)
    return run_dir.run_id, str(run_dir.path), attempt, plan, judge


def _run_dir(base: Path, environ: Mapping[str, str], clock: Clock, nth: int) -> RunDir:
    """Create or find the directory of the ``nth`` run that this process watches.

    Raises:
        StorageError: it cannot be created or written.
        TrainingHalted: the run was halted and not resumed by an operator.
    """
    run_id = environ.get("VITALS_RUN_ID") or earlier_run(base, environ, nth=nth)
    run_id = run_id or new_run_id(clock.time_ns())
    run_dir = RunDir.create(base, run_id, share=environ.get("VITALS_SHARE", ""))
    marker = run_dir.halted()
    if marker is not None:
        raise TrainingHalted(
            f"run {run_id} was halted by Vitals at step {marker.step}: {marker.reason}",
            hint=f"run `vitals postmortem {run_dir.path}`, then `vitals resume {run_dir.path}` "
            "allows a restart",
        )
    try:
        run_dir.command_key(create=True)
    except OSError as error:
        raise StorageError(
            f"{run_dir.path}: the run's own files cannot be written: {error.strerror}",
            hint="set VITALS_DIR to a writable folder",
        ) from error
    try:
        remember_run(base, environ, run_id, nth=nth)
    except (OSError, InsecurePathError) as error:  # not a reason to stop training
        _LOG.warning("vitals: a restart of this job will begin a new run: %s", error)
    return run_dir


def _other_disk(environ: Mapping[str, str]) -> Path | None:
    """Return a directory on another disk, not in memory, if a run's disk is full; or None."""
    elsewhere = {name: value for name, value in environ.items() if name != "VITALS_SHM"}
    disks = (base for base in private_bases(elsewhere, []) if not is_memory_backed(base))
    return next((base / "vitals_runs" for base in disks), None)


def read_earlier_plan(run_dir: RunDir) -> Plan:
    """Return the watched run's plan of earlier processes; raise if unreadable, and never guess."""
    try:
        return read_plan(run_dir.read_plan())
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{run_dir.path / 'plan.jsonl'}: the record of used rollbacks is damaged: {error}",
            hint="restore the file from a backup, or start a new run",
        ) from error


def open_journal(
    run_paths: RunPaths, ranks: Ranks, faults: FaultCounter, clock: Clock, device: torch.device
) -> JournalWriter | None:
    """Open a watched rank's journal; if it fails, training continues and the fault is counted."""
    if run_paths.folder is None:
        return None
    uuid = ""
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    journal = None
    with faults.fail_open("journal.open"):
        identity = Identity(
            run_id=run_paths.run_dir.run_id,
            incarnation=new_incarnation(),
            source=f"rank:{ranks.rank}",
            node=run_paths.node,
            pid=os.getpid(),
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            world_size=ranks.world_size,
            started_unix_ns=clock.time_ns(),
            started_monotonic_ns=clock.monotonic_ns(),
            boot_id=_boot_id(),
            gpu_uuid=uuid,
        )
        journal = JournalWriter(journal_directory(run_paths.folder, identity), identity)
    return journal  # noqa: RET504 - the assignment may not have happened


def open_inbox(
    run_paths: RunPaths,
    ranks: Ranks,
    environ: Mapping[str, str],
    clock: Clock,
    faults: FaultCounter,
) -> CommandInbox | None:
    """Open the mailbox of the watched run on rank 0, its only reader.

    If that fails, training continues and the fault is counted. An error in the run's key is raised
    on every rank.
    """
    opened: list[CommandInbox] = []

    def at_root() -> None:
        if ranks.rank == 0:
            key = run_paths.run_dir.command_key()
            if run_paths.folder is None:
                return
            path = run_paths.folder / "mailbox"
            try:
                mailbox = Mailbox.create(path)
            except (OSError, VitalsError) as error:
                text = f"{path} cannot be made, so commands do not reach this run: {error}"
                faults.count("mailbox", StorageError(text))
                return
            inbox = CommandInbox(
                mailbox=mailbox,
                key=key,
                keys=control_folder(environ),
                run_id=run_paths.run_dir.run_id,
                clock=clock,
                last_number=max(run_paths.plan.facts.last_command, run_paths.plan.expired),
            )
            opened.append(inbox)

    on_every_rank(ranks, at_root)
    return opened[0] if opened else None


def _boot_id() -> str:
    """Return the kernel's boot id, for the journal of a watched rank; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
