"""The agent: one cycle that turns its parts, each of which fails by itself."""

import logging
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainvitals.clock import Clock, SystemClock
from trainvitals.errors import UsageError
from trainvitals.io.journal import JournalRef, discover
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import Note
from vitals_agent.backoff import Backoff
from vitals_agent.exposition import Health, MetricsServer, Reading
from vitals_agent.faults import Faults
from vitals_agent.gpu import GpuSampler
from vitals_agent.home import TOKEN_FILE, AgentHome, AgentInfo
from vitals_agent.host import HostSampler
from vitals_agent.readings import run_readings, sample_readings
from vitals_agent.relay import Commands, Relay
from vitals_agent.run import NodeFacts, ServedRun, boot_id
from vitals_agent.sampling import Sampling
from vitals_agent.shipper import Ingests, Shipper

log = logging.getLogger("vitals_agent")

STALLED_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What one agent is told."""

    vitals_dir: Path
    """Where run directories lie."""
    base: Path
    """The private folder in shared memory where journals lie."""
    node: str
    """This node's id; journals of other nodes are passed over."""
    run_id: str = ""
    """Serve only this run."""
    host: str = "127.0.0.1"
    """Address that ``/metrics`` listens on."""
    port: int = 0
    """Port that ``/metrics`` listens on; 0 takes a free one."""
    read_token: str = ""
    """Token for ``/metrics``, the collector's where there is one: so that one scrape job can read
    every agent. Empty makes one of this folder's own."""
    notice: str = ""
    """What went wrong before the start; it is said in every run."""
    sample_seconds: float = 2.0
    """Time between two samples of GPUs, node and processes."""
    spool_max_bytes: int = 5 << 30
    """Bound of one run's spool on this node."""
    retire_seconds: float = 60.0
    """A run without a rank here is let go after this time."""


class Collects(Ingests, Commands, Protocol):
    """What the agent needs of a collector: ``trainvitals.io.client.CollectorClient``."""


class Agent:
    """Serves the runs of one folder on one node.

    Call ``start``, then ``cycle`` again and again, then ``stop``. Everything but the HTTP threads,
    which only read, happens in the caller's thread.

    Args:
        config: what to serve.
        client: the collector, or None where there is none: then the spools are the history.
        clock: stamps the agent's own rows.
        nvml: a module like ``pynvml``.
        rng: spreads the tries after a failure.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        client: Collects | None = None,
        clock: Clock | None = None,
        nvml: Any = None,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.faults = Faults()
        self.runs: dict[str, ServedRun] = {}
        self.has_served = False
        self._clock = clock or SystemClock()
        self._facts = NodeFacts(
            node=config.node,
            pid=os.getpid(),
            boot_id=boot_id(),
            clock=self._clock,
            faults=self.faults,
        )
        chance = rng or random.Random()
        self.sampling = Sampling(HostSampler(config.base), GpuSampler(nvml), self.faults)
        self.shipper = (
            Shipper(client, backoff=Backoff(rng=chance), faults=self.faults) if client else None
        )
        self.relay = Relay(
            client, backoff=Backoff(rng=chance), clock=self._clock, faults=self.faults
        )
        self._home = AgentHome(self._home_path())
        self._server: MetricsServer | None = None
        self._info: AgentInfo | None = None
        self._elsewhere: set[str] = set()
        self._idle_since: dict[str, float] = {}
        self._sampled_at: float | None = None
        self._cycled_at_ns = 0
        self._turned_at_ns = 0
        self._counted = {"rows": 0, "dropped": 0, "corrupt": 0}

    def _home_path(self) -> Path:
        if self.config.run_id:
            run_dir = RunDir.create(self.config.vitals_dir, self.config.run_id)
            return run_dir.agent_dir(self.config.node)
        return self.config.vitals_dir / "agents" / self.config.node

    # ------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Take the folder and begin to listen.

        Raises:
            UsageError: another agent serves the folder, or the address cannot be used.
        """
        self._home.acquire()
        try:
            token = self._home.read_token(self.config.read_token)
            self._server = MetricsServer(
                self, host=self.config.host, port=self.config.port, token=token
            )
            self._info = AgentInfo(
                pid=os.getpid(),
                node=self.config.node,
                url=self._server.url,
                token_file=str(self._home.path / TOKEN_FILE),
            )
            self._home.publish(self._info)
        except BaseException:
            self.stop()
            raise
        log.info("agent serves dir=%s node=%s", self.config.vitals_dir, self.config.node)
        if self.shipper is not None:
            self._take_up_leftovers()

    @property
    def info(self) -> AgentInfo | None:
        """How to reach the agent, once it is started."""
        return self._info

    def stop(self) -> None:
        """Give everything back. Call ``cycle`` before, so that nothing new is left behind."""
        for run_id in list(self.runs):
            self._let_go(run_id)
        if self._server is not None:
            self._server.close()
            self._server = None
        with self.faults.contained("sampler.gpu"):
            self.sampling.close()
        self._home.release()

    # ----------------------------------------------------------------------------- cycle

    def cycle(self, now: float) -> None:
        """Turn every part once; ``now`` is in monotonic seconds."""
        with self.faults.contained("discover"):
            self._discover()
        if self._sampled_at is None or now - self._sampled_at >= self.config.sample_seconds:
            self._sampled_at = now
            self.sampling.sample(self.runs.values())
        for run in self.runs.values():
            with self.faults.contained("tailer"):
                run.copy()
            if self.shipper is not None:
                with self.faults.contained("shipper"):
                    self.shipper.ship(run.run_id, run.spool, now)
            with self.faults.contained("relay"):
                self.relay.relay(run, now)
            with self.faults.contained("tailer"):
                run.sweep()
        self._retire(now)
        self.has_served = self.has_served or any(run.tails for run in self.runs.values())
        self._cycled_at_ns = self._clock.time_ns()
        self._turned_at_ns = self._clock.monotonic_ns()

    @property
    def num_ranks(self) -> int:
        """Ranks whose journal is not finished and in the spool."""
        return sum(not t.finished for run in self.runs.values() for t in run.tails.values())

    @property
    def drained(self) -> bool:
        """Whether all is in the spools and, where there is a collector, stored there."""
        if any(run.active for run in self.runs.values()):
            return False
        return self.shipper is None or all(self.shipper.drained(run_id) for run_id in self.runs)

    # ------------------------------------------------------------------------- which runs

    def _discover(self) -> None:
        for ref in discover(self.config.base):
            if not self._is_ours(ref):
                continue
            with self.faults.contained("discover"):
                assert ref.run_dir is not None
                run = self.runs.get(ref.run_id)
                run = run or self._take_up(ref.run_dir, keep=self.shipper is None)
                if run is not None:
                    run.found(ref.directory)

    def _is_ours(self, ref: JournalRef) -> bool:
        if ref.run_dir is None or ref.run_dir.name != ref.run_id:
            return False
        if self.config.run_id and ref.run_id != self.config.run_id:
            return False
        return ref.run_dir.resolve().parent == self.config.vitals_dir.resolve()

    def _take_up(self, path: Path, *, keep: bool) -> ServedRun | None:
        """Begin to serve a run, unless another agent of this node does."""
        run_dir = RunDir.create(path.parent, path.name)
        home = AgentHome(run_dir.agent_dir(self.config.node))
        if home.path != self._home.path:
            try:
                home.acquire()
            except UsageError as error:
                if run_dir.run_id not in self._elsewhere:
                    self._elsewhere.add(run_dir.run_id)
                    log.info("run left to another agent run=%s: %s", run_dir.run_id, error.text)
                return None
        try:
            spool = Spool(home.path / "spool", max_bytes=self.config.spool_max_bytes, keep=keep)
            if self._info is not None:
                home.publish(self._info)
        except BaseException:
            home.release()
            raise
        folder = self.config.base / run_dir.run_id
        run = ServedRun(run_dir, home, spool, folder=folder, facts=self._facts)
        self.runs = {**self.runs, run.run_id: run}
        self._elsewhere.discard(run.run_id)
        log.info("run taken up run=%s", run.run_id)
        if self.config.notice:
            log.error("%s run=%s", self.config.notice, run.run_id)
            note = Note(code="not_shipped", text=self.config.notice, severity="error")
            run.node_source.say(note)
        return run

    def _take_up_leftovers(self) -> None:
        """Serve runs that ended while the collector was away: their spools wait to be shipped.

        Such a spool may be a run's only history, so it is kept after it was shipped.
        """
        for run_dir in RunDir.find_all(self.config.vitals_dir):
            if self.config.run_id not in ("", run_dir.run_id):
                continue
            if self.config.node in run_dir.spool_dirs():
                with self.faults.contained("discover"):
                    run = self._take_up(run_dir.path, keep=True)
                    if run is not None and not run.spool.pending(1):
                        self._let_go(run.run_id)

    def _retire(self, now: float) -> None:
        for run_id, run in list(self.runs.items()):
            busy = run.active or (self.shipper is not None and not self.shipper.drained(run_id))
            if busy:
                self._idle_since.pop(run_id, None)
            elif now - self._idle_since.setdefault(run_id, now) >= self.config.retire_seconds:
                self._let_go(run_id)

    def _let_go(self, run_id: str) -> None:
        run = self.runs[run_id]
        self._counted["rows"] += run.num_rows
        self._counted["dropped"] += run.num_dropped
        self._counted["corrupt"] += run.spool.corrupt
        self.runs = {key: other for key, other in self.runs.items() if key != run_id}
        run.close()
        self._idle_since.pop(run_id, None)
        self.relay.forget(run_id)
        self.sampling.forget(run_id)
        if self.shipper is not None:
            self.shipper.forget(run_id)

    # --------------------------------------------------------------- read by HTTP threads

    def health(self) -> Health:
        """Return whether the cycle turned lately."""
        age = (self._clock.monotonic_ns() - self._turned_at_ns) / 1e9
        if not self._cycled_at_ns:
            return Health(ok=True, details={"seconds_since_cycle": None})
        return Health(ok=age < STALLED_SECONDS, details={"seconds_since_cycle": round(age, 3)})

    def readings(self) -> Iterable[Reading]:
        """Yield everything ``/metrics`` shows."""
        runs = list(self.runs.values())
        yield from self._own_readings(runs)
        yield from sample_readings(self.sampling, self.config.node)
        for run in runs:
            yield from run_readings(run)

    def _own_readings(self, runs: list[ServedRun]) -> Iterable[Reading]:
        base = self._counted
        numbers: dict[str, float] = {
            "agent_spool_bytes": sum(run.spool.num_bytes for run in runs),
            "agent_spooled_rows_total": base["rows"] + sum(run.num_rows for run in runs),
            "agent_dropped_rows_total": base["dropped"] + sum(run.num_dropped for run in runs),
            "agent_corrupt_rows_total": base["corrupt"] + sum(r.spool.corrupt for r in runs),
            "agent_commands_total": self.relay.num_delivered,
        }
        if self._cycled_at_ns:
            numbers["agent_up_timestamp_seconds"] = self._cycled_at_ns / 1e9
        if self.shipper is not None:
            numbers["agent_shipped_rows_total"] = self.shipper.num_rows
            numbers["agent_ship_errors_total"] = self.shipper.num_errors
            numbers["agent_corrupt_rows_total"] += self.shipper.num_refused_rows
        for name, value in numbers.items():
            yield Reading(name=name, value=value)
        for part, count in self.faults.counts.items():
            yield Reading(name="agent_part_failures_total", value=count, labels=(part,))
