"""The agent: its parts and their threads; each part fails by itself.

- The main thread discovers, tails, spools, closes the journals of dead ranks, and samples the node
  and its ranks: everything that is local and quick.
- The I/O loop's thread ships and carries commands: everything that may wait for a network
  (``io_loop``).
- A separate thread queries the GPU driver, because it may never respond (``sampling``).
- HTTP threads only read.
"""

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from trainvitals.clock import Clock, SystemClock
from trainvitals.detect.hang import HangConfig
from trainvitals.errors import UsageError
from trainvitals.io.discovery import AWAY_FILE
from trainvitals.io.journal import JournalRef, find_journals
from trainvitals.io.private import open_private
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Key, Spool
from trainvitals.records import Note
from trainvitals.units import humanize_count
from vitals_agent.backoff import Backoff
from vitals_agent.command_delivery import CommandClient, CommandDelivery
from vitals_agent.exposition import (
    Health,
    MetricSample,
    MetricsServer,
    agent_readings,
    run_readings,
    sample_readings,
)
from vitals_agent.faults import Faults
from vitals_agent.gpu import GpuSampler
from vitals_agent.hang import ExitWatch, HangWatch
from vitals_agent.host import HostSampler
from vitals_agent.io_loop import EventsAhead, IoLoop, SendAhead
from vitals_agent.memory_spool import ROOM_BYTES, bytes_in, has_room, move_to_disk, open_in_memory
from vitals_agent.mirrors import MirrorStarter
from vitals_agent.process import RankProcess
from vitals_agent.run import NodeFacts, ServedRun, boot_id
from vitals_agent.sampling import Sampling, Spawn, on_a_thread
from vitals_agent.shipper import IngestClient, Shipper
from vitals_agent.state_dir import AgentInfo, AgentStateDir
from vitals_agent.tailer import journal_identity, num_unsynced_rows

log = logging.getLogger("vitals_agent")

STALLED_SECONDS = 30.0
LEFTOVERS_SECONDS = 3600.0
"""Time between two checks of the spools of ended runs: whether the collector still has their rows,
and which of them were retained for long enough."""

AFTER_OUTAGE_SECONDS = 60.0
"""Time after an outage of the collector at which those spools are checked."""

DISK_SECONDS = 10.0
"""Time between two checks whether a full disk has space again."""

MAX_TAKEN_OVER = 256
"""Maximum runs, the latest, that the agent of one run checks for leftovers."""

MAX_RUNS = 4096
"""Maximum run directories whose ownership is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent."""

    vitals_dir: Path
    """Directory of the run directories."""
    base: Path
    """The private directory in shared memory that contains the journals."""
    keys: Path
    """Directory of ``control.pub``, which verifies the commands of operators."""
    node: str
    """This node's id; journals of other nodes are skipped."""
    run_id: str = ""
    """Serve only this run."""
    host: str = "127.0.0.1"
    """Address that ``/metrics`` listens on."""
    port: int = 0
    """Port that ``/metrics`` listens on; 0 takes a free one."""
    scrape_token: str = ""
    """Token for ``/metrics``, derived from the collector's token if there is one, so that one
    scrape job can read every agent. Empty: create one for this directory."""
    collector: str = ""
    """The collector's name: its URLs or its data directory. Empty without a collector."""
    is_collector_named: bool = True
    """Whether a user chose it; otherwise it is this user's own, and only receives runs that ran
    during its lifetime."""
    takes_over: bool = False
    """With ``run_id``: also send rows of ended runs on this node to the same collector."""
    notice: str = ""
    """An error before the start, which is reported in every run."""
    sample_seconds: float = 2.0
    """Time between two samples of GPUs, node and processes."""
    keeps_history: bool | None = None
    """Whether the run directory keeps rows that a collector has too; None: only without one."""
    spool_max_bytes: int = 5 << 30
    """Bound of one run's spool on this node."""
    retain_seconds: float = 24 * 3600.0
    """How long acknowledged rows are retained: a collector restored from a backup requests the rows
    after it. Must be at least the time between two backups."""
    retain_bytes: int = 1 << 30
    """Limit of the retained rows of one run on this node; the oldest are deleted first."""
    hang: HangConfig | None = None
    """How long ranks may wait for one of them; None: the defaults."""
    mirrors: tuple[str, ...] = ()
    """Trackers to which runs with rank 0 on this node are mirrored, as in `vitals mirror --to`."""
    mirror_source: tuple[str, ...] = ()
    """Arguments with which a mirror reads the run; empty: from its directory."""
    retire_seconds: float = 60.0
    """Time after which a run without a rank on this node is released."""


class CollectorInterface(IngestClient, CommandClient, Protocol):
    """The interface of a collector: ``collector_endpoint.CollectorEndpoint``."""


class Agent:
    """Serves the runs of one directory on one node.

    Call ``start``, then ``run_once`` repeatedly, then ``stop``, all on one thread, and
    ``io_loop.serve_runs`` on another one. ``cycle`` does both.

    Args:
        config: what to serve.
        client: the collector; None without one: then the spools are the history.
        reachable: whether a collector currently responds; None: always.
        clock: timestamps of the agent's own rows.
        nvml: a module like ``pynvml``.
        ahead: sends events before the backlog of the spool; None: they wait.
        spawn: starts calls that may hang.
        rng: jitter of retries.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        client: CollectorInterface | None = None,
        reachable: Callable[[float], bool] | None = None,
        ahead: SendAhead | None = None,
        clock: Clock | None = None,
        nvml: Any = None,
        spawn: Spawn = on_a_thread,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.faults = Faults()
        self.runs: dict[str, ServedRun] = {}
        self.has_served = False
        self._clock = clock or SystemClock()
        # Retention is measured by this clock, which setting the wall clock cannot shorten.
        self._began_ns = self._clock.time_ns() - self._clock.monotonic_ns()
        self.ahead = None if ahead is None else EventsAhead(ahead, faults=self.faults)
        self._facts = NodeFacts(
            node=config.node,
            pid=os.getpid(),
            boot_id=boot_id(),
            clock=self._clock,
            faults=self.faults,
            send_ahead=None if self.ahead is None else self.ahead.enqueue,
        )
        chance = rng or random.Random()
        gpus = GpuSampler(nvml, clock=self._clock)
        self.sampling = Sampling(HostSampler(config.base), gpus, self.faults, spawn=spawn)
        # Separate backoffs: shipping may fail while queries succeed.
        ships, asks = Backoff(rng=chance), Backoff(rng=chance)
        self.shipper = (
            Shipper(
                client, backoff=ships, faults=self.faults, on_stopped=self._report_stopped_stream
            )
            if client
            else None
        )
        self.relay = CommandDelivery(
            client, keys=config.keys, backoff=asks, clock=self._clock, faults=self.faults
        )
        self.io_loop = IoLoop(
            self.shipper,
            self.relay,
            runs=lambda: self.runs,
            faults=self.faults,
            reachable=reachable or (lambda now: True),
        )
        keeps = config.keeps_history
        self._keeps_history = client is None if keeps is None else keeps
        self._state_dir = AgentStateDir(self._state_path(), config.base)
        self._spawn = spawn
        self._exits = ExitWatch()
        self._hangs: dict[str, HangWatch] = {}
        self._mirrors = MirrorStarter(config.mirrors, config.mirror_source)
        self._server: MetricsServer | None = None
        self._info: AgentInfo | None = None
        self._token = config.scrape_token
        self._ships = ships
        self._destined: set[str] = set()
        self._outage_reported: dict[str, bool] = {}
        self._elsewhere: set[str] = set()
        self._ours: dict[Path, bool] = {}
        self._leftovers_checked_at: float | None = None
        self._was_away = False
        self._idle_since: dict[str, float] = {}
        self._disks_checked_at = 0.0
        self._memory_reported: set[str] = set()
        self._dropped_reported: dict[str, int] = {}
        self._sampled_at: float | None = None
        self._cycled_at_ns = 0
        self._turned_at_ns = 0
        self._counted = {"rows": 0, "dropped": 0, "corrupt": 0}

    def _state_path(self) -> Path:
        """Return the agent's state directory, within its only run or for all runs."""
        if self.config.run_id:
            return RunDir(self.config.vitals_dir / self.config.run_id).agent_path(self.config.node)
        return self.config.vitals_dir / "agents" / self.config.node

    # ------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Lock the agent's directory on this node, and start serving ``/metrics``.

        Raises:
            UsageError: another agent serves the directory, or the address cannot be used.
        """
        self._state_dir.acquire()
        try:
            self._token = self._state_dir.load_or_create_token(self.config.scrape_token)
            self._server = MetricsServer(
                self, host=self.config.host, port=self.config.port, token=self._token
            )
            self._publish_agent_info(self._server.url)
        except BaseException:
            self.stop()
            raise
        log.info("serving dir=%s node=%s", self.config.vitals_dir, self.config.node)

    def _publish_agent_info(self, url: str) -> None:
        """Write the agent's pid, URL and token path to its state directory."""
        self._facts = replace(self._facts, metrics_url=url)
        self._info = AgentInfo(
            pid=os.getpid(),
            node=self.config.node,
            url=url,
            token_file=str(self._state_dir.token_file),
        )
        self._state_dir.publish(self._info)

    @property
    def info(self) -> AgentInfo | None:
        """Return URL and token file of this node's agent; None before ``start``."""
        return self._info

    def stop(self) -> None:
        """Release the agent's spools, samplers and lock. Call ``run_once`` before this."""
        for run_id, run in list(self.runs.items()):
            if run.in_memory and run.spool.pending(1):
                log.warning(
                    "rows wait in memory run=%s: they are in %s; the next agent sends them, "
                    "unless the node's memory goes first",
                    run_id,
                    run.spool.directory,
                )
            if not self._release_run(run_id):
                # The I/O loop still uses its spool: the lock on it ends with this process.
                log.warning("stopped while the collector was still busy run=%s", run_id)
        if self._server is not None:
            self._server.close()
            self._server = None
        with self.faults.contained("sampler.gpu"):
            self.sampling.close()
        self._exits.close()
        self._state_dir.release()

    # ----------------------------------------------------------------------------- cycle

    def cycle(self, now: float) -> None:
        """Run every part of the agent once, in turn; ``now`` is monotonic seconds."""
        self.io_loop.find_collector(now)
        self.run_once(now)
        self.io_loop.serve_runs(now)
        self._retire_idle_runs(now)

    def run_once(self, now: float) -> None:
        """Sample the node, check for hangs and spool the journals once; wait for no network."""
        with self.faults.contained("spool"):
            self._check_disks(now)
        with self.faults.contained("discover"):
            looked_at = self._leftovers_checked_at
            pause = AFTER_OUTAGE_SECONDS if self._is_collector_back() else LEFTOVERS_SECONDS
            is_due = looked_at is None or now - looked_at >= pause
            if self.io_loop.can_ship and is_due:
                self._leftovers_checked_at = now
                self._was_away = False
                self._serve_ended_runs()
            self._follow_discovered_journals()
        runs = list(self.runs.values())
        for run in runs:
            with self.faults.contained("spool"):
                self._note_destination(run)
        if self._sampled_at is None or now - self._sampled_at >= self.config.sample_seconds:
            self._sampled_at = now
            self.sampling.sample(runs, now)
        self.sampling.write_gpu_samples(runs, now)
        for run in runs:
            with self.faults.contained("hang"):  # before the journal of a dead rank is closed
                self._hang_watch(run).check(now)
            with self.faults.contained("tailer"):
                run.copy()
            with self.faults.contained("mirror"):
                self._mirrors.start_if_due(run)
            with self.faults.contained("tailer"):
                run.delete_finished_journals()
                run.check_foreign_nodes(now)
        self._retire_idle_runs(now)
        served_refs = [run for run in runs if self.config.run_id in ("", run.run_id)]
        self.has_served = self.has_served or any(run.tails for run in served_refs)
        self._cycled_at_ns = self._clock.time_ns()
        self._turned_at_ns = self._clock.monotonic_ns()

    def _hang_watch(self, run: ServedRun) -> HangWatch:
        """Return the watch for hangs of a served run's ranks, created if needed."""
        watch = self._hangs.get(run.run_id)
        if watch is None:
            watch = self._hangs[run.run_id] = HangWatch(
                run, self._exits, config=self.config.hang, spawn=self._spawn
            )
        return watch

    @property
    def num_living_ranks(self) -> int:
        """Ranks on this node that live and have not ended their journal."""
        return sum(run.num_living_ranks for run in self.runs.values())

    @property
    def drained(self) -> bool:
        """Whether all rows are in the spools and, with a collector, stored there."""
        runs = self.runs.values()
        return not any(run.has_open_journals for run in runs) and all(
            map(self.io_loop.drained, runs)
        )

    def report_unspooled_rows(self) -> int:
        """Report rows that never reached a spool; return their number. They stay in memory."""
        total = 0
        for ref in self._find_journals():
            with self.faults.contained("tailer"):
                run = self.runs.get(ref.run_id)
                num_unsent = num_unsynced_rows(
                    ref.directory, run.synced(ref.directory) if run else {}
                )
                total += num_unsent
                if num_unsent:
                    log.error(
                        "rows not spooled rows=%d run=%s: they are in %s and in no spool; the next "
                        "agent sends them, unless the node's memory goes first",
                        num_unsent,
                        ref.run_id,
                        ref.directory,
                    )
        return total

    # ------------------------------------------------------------------------- which runs

    def _follow_discovered_journals(self) -> None:
        """Start spooling each rank's journal that the agent found in shared memory."""
        for ref in self._find_journals():
            with self.faults.contained("discover"):
                assert ref.run_dir is not None
                run = self.runs.get(ref.run_id)
                run = run or self._serve_run(ref.run_dir, keep=self._keeps_history)
                if run is not None:
                    run.follow(ref.directory)

    def _find_journals(self) -> Iterable[JournalRef]:
        """Return the ranks' journals in shared memory that this agent serves."""
        # An ended run may be started again: its new agent exits because this one serves it.
        run_ids = {self.config.run_id, *self.runs} if self.config.run_id else {""}
        of_runs = (find_journals(self.config.base, run_id) for run_id in sorted(run_ids))
        return filter(self._is_in_vitals_dir, chain.from_iterable(of_runs))

    def _is_in_vitals_dir(self, ref: JournalRef) -> bool:
        """Return whether a journal's run directory is in the directory that the agent serves."""
        if ref.run_dir is None or ref.run_dir.name != ref.run_id:
            return False
        if ref.run_dir not in self._ours:
            here = ref.run_dir.resolve().parent == self.config.vitals_dir.resolve()
            self._ours = {**self._ours, ref.run_dir: here} if len(self._ours) < MAX_RUNS else {}
            return here
        return self._ours[ref.run_dir]

    def _serve_run(
        self, path: Path, *, keep: bool, resume: Mapping[Key, int] | None = None
    ) -> ServedRun | None:
        """Start serving a run, unless another agent of this node does."""
        run_dir = RunDir(path.absolute())
        state_dir = self._state_dir_of(run_dir)
        if state_dir.path != self._state_dir.path:
            try:
                state_dir.acquire()
            except UsageError as error:
                if run_dir.run_id not in self._elsewhere:
                    self._elsewhere.add(run_dir.run_id)
                    log.info("run served by another agent run=%s: %s", run_dir.run_id, error.text)
                return None
        try:
            spool = self._open_spool(state_dir, keep=keep)
            writer_key = state_dir.load_or_create_writer_key()
            if self._info is not None:
                state_dir.publish(self._info)
        except BaseException:
            state_dir.release()
            raise
        folder = self.config.base / run_dir.run_id
        run = ServedRun(
            run_dir,
            state_dir,
            spool,
            folder=folder,
            facts=self._facts,
            writer_key=writer_key,
            keeps_history=keep,
            resume=resume,
        )
        self.runs = {**self.runs, run.run_id: run}
        self._elsewhere.discard(run.run_id)
        log.info("serving run=%s", run.run_id)
        if self.config.notice:
            log.error("%s run=%s", self.config.notice, run.run_id)
            note = Note(code="not_shipped", text=self.config.notice, severity="error")
            run.node_source.write_event(note)
        self._report_memory_spool(run)
        return run

    def _open_spool(self, state_dir: AgentStateDir, *, keep: bool) -> Spool:
        """Open the run's spool on its disk, or in the node's memory if the disk is full."""

        def now() -> float:
            return (self._began_ns + self._clock.monotonic_ns()) / 1e9

        memory = state_dir.memory_path / "spool"
        if not has_room(state_dir.path, ROOM_BYTES + bytes_in(memory)):
            return open_in_memory(memory, now)
        spool = Spool(
            state_dir.path / "spool",
            max_bytes=self.config.spool_max_bytes,
            keep=keep,
            retain_seconds=self.config.retain_seconds,
            retain_bytes=self.config.retain_bytes,
            now=now,
        )
        move_to_disk(memory, spool)
        return spool

    def _report_memory_spool(self, run: ServedRun) -> None:
        """Report once per run that its rows are not on a disk of this node."""
        if not run.in_memory or run.run_id in self._memory_reported:
            return
        self._memory_reported.add(run.run_id)
        text = (
            f"the disk of {run.state_dir.path} is full: node {self.config.node} holds what its "
            f"ranks write in memory, at most {run.spool.max_bytes >> 20} MiB, and forwards it from "
            "there, until the disk has room again. Meanwhile acknowledged rows are not kept: a "
            "collector that is restored from a backup will lack them"
        )
        run.report(Note(code="spool_in_memory", text=text, severity="warning"))

    def _report_stopped_stream(self, key: Key, text: str) -> None:
        """Report a stream of a run that the agent stopped sending to the collector."""
        run = self.runs.get(key[0])
        if run is not None:
            run.report_stopped_stream(key, text)

    def _check_disks(self, now: float) -> None:
        """Spool to memory if the node's disk is full, and to disk once it has space again.

        The rows on a full disk are shipped first: a run has one spool at a time.
        """
        runs = list(self.runs.values())
        if now - self._disks_checked_at < DISK_SECONDS:
            # A disk that has become full: a fast loop fills its journal in seconds.
            runs = [run for run in runs if run.is_disk_full and not has_room(run.state_dir.path)]
        else:
            self._disks_checked_at = now
            with self.faults.contained("spool"):
                self._return_state_to_disk()
        for run in runs:
            with self.faults.contained(
                "spool"
            ):  # an error in one run must not keep the others in memory
                self._check_spool_disk(run)

    def _return_state_to_disk(self) -> None:
        """Move the agent's state from memory back to a disk that has space again."""
        if self._state_dir.in_memory and has_room(self._state_dir.path):
            self._state_dir.return_to_disk()
            assert self._server is not None and self._info is not None
            self._state_dir.load_or_create_token(self._token)
            self._publish_agent_info(self._server.url)

    def _check_spool_disk(self, run: ServedRun) -> None:
        """Move a run's spool from a full disk to memory, or back to disk with space."""
        num_dropped = run.spool.dropped_rows
        if num_dropped > 2 * self._dropped_reported.get(run.run_id, 0):
            self._dropped_reported[run.run_id] = num_dropped
            text = (
                f"{humanize_count(num_dropped, 'row')} of run {run.run_id} lost on node "
                f"{self.config.node}: its spool in {run.spool.directory} is full; free some space "
                "there"
            )
            note = Note(code="spool_full", text=text, severity="error")
            run.report(note, stores=not run.spool.keep)  # a full spool accepts no note either
        if run.in_memory:
            moves = has_room(run.state_dir.path, ROOM_BYTES + run.spool.num_bytes)
        else:
            moves = run.is_disk_full and not run.spool.pending(1)
        if moves and self._release_run(run.run_id):
            last = run.last_seqs()
            again = self._serve_run(run.run_dir.path, keep=run.keeps_history, resume=last)
            if again is not None and not again.in_memory:
                log.info("the disk has room again run=%s", run.run_id)

    def _serve_ended_runs(self) -> None:
        """Serve runs that ended while the collector was down, to ship their spools.

        A spool that was for no collector, or for another one, may be a run's only history, so it is
        kept after it was shipped. Spools with acknowledged rows are served for a while too, because
        the collector may have been restored.
        """
        run_dirs = RunDir.find_all(self.config.vitals_dir)
        for run_dir in run_dirs:
            if self.config.run_id not in ("", run_dir.run_id):
                continue
            with self.faults.contained("discover"):
                is_new = run_dir.is_ours and run_dir.run_id not in self.runs
                if is_new and self._has_spool(run_dir):
                    # A spool that is not for our collector may be the only history of its run.
                    keep = self._keeps_history or not self._is_for_our_collector(
                        self._state_dir_of(run_dir)
                    )
                    run = self._serve_run(run_dir.path, keep=keep)
                    if run is not None and not (
                        run.spool.pending(1) or run.spool.may_be_asked_for()
                    ):
                        self._release_run(run.run_id)
        if self.config.run_id and self.config.takes_over:
            for run_dir in run_dirs[-MAX_TAKEN_OVER:]:
                with self.faults.contained("discover"):
                    is_new = run_dir.is_ours and run_dir.run_id not in self.runs
                    if is_new and self._is_orphaned(run_dir):
                        self._serve_run(run_dir.path, keep=self._keeps_history)

    def _is_for_our_collector(self, state_dir: AgentStateDir) -> bool:
        return bool(self.config.collector) and state_dir.destination() == self.config.collector

    def _state_dir_of(self, run_dir: RunDir) -> AgentStateDir:
        """Return the agent's state directory for this node in a run directory."""
        return AgentStateDir(run_dir.agent_path(self.config.node), self.config.base)

    def _is_orphaned(self, run_dir: RunDir) -> bool:
        """Return whether a run of this agent ended here, and the collector may lack its rows.

        A run with a living rank has an agent, or its rank will soon start one: that agent serves
        it, even while its lock is free.
        """
        state_dir = self._state_dir_of(run_dir)
        if not self._is_for_our_collector(state_dir):
            return False
        writers = [
            journal_identity(ref.directory)
            for ref in find_journals(self.config.base, run_dir.run_id)
            if self._is_in_vitals_dir(ref)
        ]
        if any(who is None or RankProcess(who).alive() for who in writers):
            return False
        return bool(writers) or state_dir.num_waiting(1) > 0

    @property
    def _is_collector_down(self) -> bool:
        """Return whether the agent knows no collector, or failed in its latest requests to it."""
        return self.io_loop.can_ship is False or self._ships.num_failures > 0

    def _is_collector_back(self) -> bool:
        """Whether the collector responds again, after being down since the last check."""
        self._was_away = self._was_away or self._is_collector_down
        return self._was_away and not self._is_collector_down

    def _note_destination(self, run: ServedRun) -> None:
        """Record the collector that the run's rows are for, and whether it is down."""
        name = self.config.collector
        if not name:
            return
        if run.run_id not in self._destined:
            if not (self.config.is_collector_named or self.io_loop.can_ship):
                return
            run.state_dir.set_destination(name)
            self._destined.add(run.run_id)
        is_away = self._is_collector_down
        if is_away != self._outage_reported.get(run.run_id):
            note = run.folder / AWAY_FILE
            if is_away and run.folder.is_dir():
                with os.fdopen(open_private(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as f:
                    f.write(name)
            elif not is_away:
                note.unlink(missing_ok=True)
            self._outage_reported[run.run_id] = is_away

    def _has_spool(self, run_dir: RunDir) -> bool:
        """Return whether this node has spooled rows of a run, on disk or in memory."""
        state_dir = self._state_dir_of(run_dir)
        is_in_memory = bytes_in(state_dir.memory_path / "spool") > 0
        return is_in_memory or self.config.node in run_dir.spool_dirs()

    def _retire_idle_runs(self, now: float) -> None:
        """Release runs whose ranks have ended and whose rows are shipped."""
        for run_id, run in list(self.runs.items()):
            if run.has_open_journals or not self.io_loop.drained(run):
                self._idle_since.pop(run_id, None)
            elif now - self._idle_since.setdefault(run_id, now) >= self.config.retire_seconds:
                self._release_run(run_id)

    def _release_run(self, run_id: str) -> bool:
        """Close a run and release its directory; return False while the I/O loop serves it."""
        run = self.runs[run_id]

        def remove() -> None:
            self.runs = {key: other for key, other in self.runs.items() if key != run_id}

        if not self.io_loop.leave(run_id, remove):
            return False
        self._counted["rows"] += run.num_rows
        self._counted["dropped"] += run.num_dropped
        self._counted["corrupt"] += run.spool.corrupt
        run.close()
        self._destined.discard(run_id)
        self._outage_reported.pop(run_id, None)
        self._idle_since.pop(run_id, None)
        self.sampling.forget(run_id)
        self._hangs.pop(run_id, None)
        return True

    # --------------------------------------------------------------- read by HTTP threads

    def health(self) -> Health:
        """Return the agent's health for ``/healthz``: whether its cycle ran recently."""
        if not self._cycled_at_ns:
            return Health(ok=True, details={"seconds_since_cycle": None})
        age = self._cycle_age_seconds
        details = {
            "seconds_since_cycle": round(age, 3),
            "gpu_driver_hung": bool(self.sampling.hung),
        }
        return Health(ok=age < STALLED_SECONDS, details=details)

    @property
    def _cycle_age_seconds(self) -> float:
        """Return the seconds since the agent's latest cycle."""
        return (self._clock.monotonic_ns() - self._turned_at_ns) / 1e9

    def readings(self) -> Iterable[MetricSample]:
        """Yield the samples for the agent's ``/metrics``: its runs, the node and the GPUs."""
        runs = list(self.runs.values())
        yield from agent_readings(
            runs, counted=self._counted, relay=self.relay, shipper=self.shipper, faults=self.faults
        )
        if self._cycled_at_ns:
            yield MetricSample(name="agent_cycle_age_seconds", value=self._cycle_age_seconds)
        yield from sample_readings(self.sampling, self.config.node)
        for run in runs:
            yield from run_readings(run)
