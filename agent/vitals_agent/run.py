"""One run as this node's agent serves it: its journals, its spool, the agent's own sources."""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainvitals.catalog import PROCESS_SCHEMA
from trainvitals.clock import Clock
from trainvitals.errors import UNREADABLE, NewerVersionError, StorageError, VitalsError
from trainvitals.identity import Identity, Source, new_incarnation
from trainvitals.io.discovery import write_notice
from trainvitals.io.journal import mark_journal_closed
from trainvitals.io.private import read_own, replace_file
from trainvitals.io.rundir import RunDir, is_full
from trainvitals.io.spool import Key, Spool
from trainvitals.records import Finding, FindingRaised, Note
from trainvitals.rows import Value
from trainvitals.units import humanize_count
from vitals_agent.faults import Faults
from vitals_agent.sources import AgentSource
from vitals_agent.state_dir import AgentStateDir
from vitals_agent.tailer import JournalTail, journal_identity

log = logging.getLogger("vitals_agent")

UNSERVED_SECONDS = 20.0
"""Time after which an agent of the journals' own node would have started."""

# ------------------------------------------------------------------- journals that are being copied


class OpenJournal(msgspec.Struct, frozen=True):
    """A journal that is not completely in the spool yet."""

    folder: str
    source: str
    incarnation: str


class OpenJournals:
    """The list in a file next to the spool, from which a later agent sees the lost journals.

    An unreadable list counts as empty: then nothing is reported, and nothing else is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed = _read_journals(path)

    def add(self, journal: OpenJournal) -> None:
        """List a journal that the agent copies to the spool. May raise OSError."""
        if self._listed.get(journal.folder) != journal:
            self._listed[journal.folder] = journal
            self._write_journals()

    def discard(self, folder: str) -> None:
        """Remove a journal from the list: the agent has spooled all of it. May raise OSError."""
        if self._listed.pop(folder, None) is not None:
            self._write_journals()

    def take_missing(self, memory: Path) -> list[OpenJournal]:
        """Remove journals from the list that the node's memory has lost; return them."""
        missing = [each for each in self._listed.values() if not (memory / each.folder).is_dir()]
        for each in missing:
            del self._listed[each.folder]
        if missing:
            self._write_journals()
        return missing

    def _write_journals(self) -> None:
        """Write the list of journals that the agent is copying to the spool's disk."""
        replace_file(self._path, msgspec.json.encode(list(self._listed.values())))


def _read_journals(path: Path) -> dict[str, OpenJournal]:
    """Return the open journals that an earlier agent listed, by directory."""
    try:
        journals = msgspec.json.decode(read_own(path), type=list[OpenJournal])
    except (OSError, VitalsError, *UNREADABLE):
        return {}
    return {each.folder: each for each in journals}


# ------------------------------------------------------------------------------------------ the run


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Identity of the agent: the same for all its runs."""

    node: str
    pid: int
    boot_id: str
    metrics_url: str = ""
    clock: Clock
    faults: Faults
    send_ahead: Callable[[bytes, str], object] | None = None
    """Called with every batch that was added to the spool, and the run's writer key."""


class ServedRun:
    """Everything of one run on this node. The spool has one owner: the holder of ``state_dir``.

    The agent's main thread copies journals and closes those of dead ranks. Other threads read
    properties, and call ``say`` of ``node_source``.
    """

    def __init__(
        self,
        run_dir: RunDir,
        state_dir: AgentStateDir,
        spool: Spool,
        *,
        folder: Path,
        facts: NodeFacts,
        writer_key: str = "",
        keeps_history: bool = False,
        resume: Mapping[Key, int] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.run_id = run_dir.run_id
        self.state_dir = state_dir
        self.spool = spool
        self.folder = folder
        self.writer_key = writer_key
        """Secret that is sent with the batches, so that no other writer can use their streams."""
        self.tails: dict[Path, JournalTail] = {}
        self.num_written = 0
        """Batches appended so far: if it is unchanged, nothing was written in between."""
        self.keeps_history = keeps_history
        self.is_disk_full = False
        """Whether the spool's disk was full at the last write."""
        self.stacks_wanted: deque[int] = deque(maxlen=8)
        """Numbers of an operator's requests for the ranks' stacks; any thread may add."""
        self._lock = threading.Lock()
        self._num_copied = 0
        self._dirty = False
        self._facts = facts
        self._resume: Mapping[Key, int] = resume or {}
        self._resume = self.last_seqs()
        self._sources: dict[str, AgentSource] = {}
        self._strangers: set[Path] = set()
        self._of_other_nodes: dict[Path, tuple[Identity, float | None]] = {}
        """Journals of nodes that this agent does not serve, and the start of their observation."""
        self._overflowed: dict[Path, int] = {}
        self.node_source = self._get_or_create_source(Source("node", facts.node))
        """The source ``node:ID``: samples of the node and its ranks, and the agent's events."""
        self._open = OpenJournals(spool.directory.parent / "journals.json")
        with facts.faults.contained("journals"):
            # The list at the other place would miss the journals that end from now on.
            other = state_dir.path if self.in_memory else state_dir.memory_path
            (other / "journals.json").unlink(missing_ok=True)
            self._report_lost_journals()

    # ------------------------------------------------------------------------ own rows

    def gpu_source(self, uuid: str) -> AgentSource:
        """Return the agent's source of rows about one GPU of its node."""
        return self._get_or_create_source(Source("gpu", uuid))

    def _get_or_create_source(self, source: Source) -> AgentSource:
        key = str(source)
        if key not in self._sources:
            clock = self._facts.clock
            identity = Identity(
                run_id=self.run_id,
                incarnation=new_incarnation(),
                source=key,
                node=self._facts.node,
                pid=self._facts.pid,
                started_unix_ns=clock.time_ns(),
                started_monotonic_ns=clock.monotonic_ns(),
                boot_id=self._facts.boot_id,
                gpu_uuid=source.key if source.kind == "gpu" else "",
                metrics_url=self._facts.metrics_url if source.kind == "node" else "",
            )
            self._sources[key] = AgentSource(identity, self.append, clock)
        return self._sources[key]

    def append(self, raw: bytes) -> bool:
        """Add a batch to the run's spool on this node; ``copy`` makes it durable."""
        with self._lock:  # the counter is not atomic
            self.num_written += 1
            self._dirty = True
            try:
                was_added = self.spool.append(raw)
            except StorageError as error:
                self.is_disk_full = is_full(error)
                raise
            self.is_disk_full = False
        if was_added and self._facts.send_ahead is not None:
            self._facts.send_ahead(raw, self.writer_key)
        return was_added

    @property
    def clock(self) -> Clock:
        """Return the agent's clock, which also times its rows of this run."""
        return self._facts.clock

    @property
    def faults(self) -> Faults:
        """Return the counter of errors that the agent survived."""
        return self._facts.faults

    @property
    def in_memory(self) -> bool:
        """Return whether the run's spool is in the node's memory, because the disk was full."""
        return self.spool.directory.parent != self.state_dir.path

    def last_seqs(self) -> dict[Key, int]:
        """Return the last sequence number per stream in any spool of the run on this node."""
        last = dict(self._resume)
        for key, seq in self.spool.last_seqs().items():
            last[key] = max(seq, last.get(key, -1))
        return last

    @property
    def num_rows(self) -> int:
        """Return how many rows the agent has written to the run's spool since its start."""
        return self._num_copied + sum(
            tailer_state.num_rows for tailer_state in list(self._sources.values())
        )

    @property
    def num_dropped(self) -> int:
        """Return how many rows of the run were lost before the spool, or refused by it."""
        return self.spool.dropped_rows + sum(t.num_dropped for t in list(self.tails.values()))

    # ------------------------------------------------------------------------- journals

    def follow(self, directory: Path) -> None:
        """Start copying a journal, once its first segment identifies its writer."""
        if directory in self.tails or directory in self._strangers:
            return
        try:
            identity = journal_identity(directory)
        except NewerVersionError as error:
            self._strangers.add(directory)
            self._facts.faults.record("journal", error)
            self.node_source.write_event(
                Note(code="newer_journal", text=error.text, severity="error")
            )
            return
        if identity is None:
            return
        if identity.run_id != self.run_id or identity.node != self._facts.node:
            self._strangers.add(directory)
            if identity.run_id == self.run_id:
                self._of_other_nodes[directory] = (identity, None)
            log.warning(
                "journal skipped path=%s run=%s node=%s; this agent is node %s",
                directory,
                identity.run_id,
                identity.node,
                self._facts.node,
            )
            return
        run_key = (identity.run_id, identity.incarnation)
        resume = {key[2]: seq for key, seq in self._resume.items() if key[:2] == run_key}
        # Replaced, not changed: HTTP threads read it.
        self.tails = {**self.tails, directory: JournalTail(directory, identity, resume)}
        with self._facts.faults.contained("journals"):
            self._open.add(OpenJournal(directory.name, identity.source, identity.incarnation))
        log.info("journal found run=%s source=%s", self.run_id, identity.source)

    def copy(self) -> int:
        """Copy new journal rows into the spool, make them durable, free them; return how many."""
        faults = self._facts.faults
        num_rows = 0
        for tail in self.tails.values():
            with faults.contained("tailer"):
                if tail.is_quiet:
                    # Checked before the copy: all rows of a dead process can then be read.
                    tail.alive = tail.process.alive()
                num_rows += tail.copy(self.append)
                self._report_overflow(tail)
                if not tail.alive and not tail.removed:
                    self._finish_dead_rank(tail)
        self._num_copied += num_rows
        try:
            self._sync_spool()
        except (OSError, StorageError) as error:
            faults.record("spool", error)
            for tail in self.tails.values():
                tail.reread_unsynced()
            return num_rows
        # The spool's own numbers: the I/O thread may have failed to write some of the appended
        # rows.
        durable = self.spool.last_seqs()
        for tail in self.tails.values():
            with faults.contained("release"):
                writer = (self.run_id, tail.identity.incarnation)
                tail.release_synced({s: durable.get((*writer, s), -1) for s in tail.appended})
        return num_rows

    def _sync_spool(self) -> None:
        """Make the rows durable that the agent added to the run's spool."""
        if self._dirty:
            self._dirty = False  # before the sync: another thread may append meanwhile
            try:
                self.spool.sync()
            except BaseException as error:
                self._dirty = True
                self.is_disk_full = is_full(error)
                raise

    def _finish_dead_rank(self, tail: JournalTail) -> None:
        """Report a rank of this node that ended without a report, and close its journal."""
        if tail.closed:
            return
        who = tail.identity
        tail.process_values = {"alive": 0}
        row: dict[str, Value] = {"rank": who.rank, "pid": who.pid, "alive": 0}
        self.node_source.sample(PROCESS_SCHEMA, [row])
        if not tail.last.ended:
            how = f" ({tail.exit})" if tail.exit else ""
            last = f"; its last step is {tail.last.step}" if tail.last.step >= 0 else ""
            note = Note(
                code="rank_gone",
                text=f"rank {who.rank} (pid {who.pid} on {who.node}) ended without a clean exit"
                f"{how}{last}",
                severity="error",
            )
            self.node_source.write_event(note, step=tail.last.step, attempt=tail.last.attempt)
            # On disk before the journal is closed: a closed journal means that it was reported.
            self._sync_spool()
        mark_journal_closed(tail.directory)  # a restarted agent sees that it was reported

    def _report_overflow(self, tail: JournalTail) -> None:
        """Report a rank that writes its journal faster than the agent reads it."""
        num_dropped, num_told = tail.num_dropped, self._overflowed.get(tail.directory, 0)
        if num_dropped <= 2 * num_told:
            return
        self._overflowed[tail.directory] = num_dropped
        text = (
            f"the journal of {tail.identity.source} on {self._facts.node} overflowed: "
            f"{humanize_count(num_dropped, 'row')} lost so far, up to its step {tail.last.step}; "
            "it writes faster than its agent reads, or the agent was down"
        )
        note = Note(code="journal_overflowed", text=text, severity="warning")
        self.node_source.write_event(note, step=tail.last.step, attempt=tail.last.attempt)

    def report(self, note: Note, *, stores: bool = True) -> None:
        """Log a note of the agent, store it with the run, and show it on the rank's terminal."""
        log.warning("%s run=%s", note.text, self.run_id)
        if stores:
            self.node_source.write_event(note)
        with self._facts.faults.contained("spool"):
            write_notice(self.folder, note.text)

    def check_foreign_nodes(self, now: float) -> None:
        """Report the first journal here of a node that no agent serves; ``now`` is monotonic."""
        for directory, (identity, since) in list(self._of_other_nodes.items()):
            if since is None:
                self._of_other_nodes[directory] = (identity, now)
            if since is None or now - since < UNSERVED_SECONDS:
                continue
            del self._of_other_nodes[directory]
            local = self.folder.parent
            other = AgentStateDir(self.run_dir.agent_path(identity.node), local)
            if not directory.is_dir() or other.is_held_by_another():
                continue
            self._of_other_nodes.clear()
            text = (
                f"{identity.source} and others here report node {identity.node}, and this agent is "
                f"node {self._facts.node}: their rows are not forwarded. Start the agent with "
                f"--node {identity.node}, or set the same VITALS_NODE for ranks and agent"
            )
            self.report(Note(code="foreign_node", text=text, severity="error"))
            finding = Finding(
                kind="stream_stopped",
                level="advisory",
                step=-1,
                detector="shipper",
                reason=text,
                cause="node",
            )
            self.node_source.write_event(FindingRaised(finding=finding))

    def report_stopped_stream(self, key: Key, text: str) -> None:
        """Report a stream of the run that the agent sends and the collector does not store."""
        _, incarnation, stream = key
        if incarnation == self.node_source.identity.incarnation:
            # The report would wait behind the rows that it is about.
            node = Source("node", self._facts.node)
            del self._sources[str(node)]
            self.node_source = self._get_or_create_source(node)
        writers = {tail.identity.incarnation: tail for tail in self.tails.values()}
        tail = writers.get(incarnation)
        finding = Finding(
            kind="stream_stopped",
            level="advisory",
            step=-1 if tail is None else tail.last.step,
            detector="shipper",
            rank=-1 if tail is None else tail.identity.rank,
            reason=f"{'' if tail is None else f'{tail.identity.source} on '}{self._facts.node}: "
            f"{text}",
            cause=stream,
        )
        attempt = 0 if tail is None else tail.last.attempt
        event = FindingRaised(finding=finding)
        self.node_source.write_event(event, step=finding.step, attempt=attempt)

    def delete_finished_journals(self) -> None:
        """Delete journals that have ended and are spooled; the node's shared memory is short."""
        for tail in self.tails.values():
            if not tail.removed and tail.take_end():
                with self._facts.faults.contained("release"):
                    tail.remove()
                    self._open.discard(tail.directory.name)

    def _report_lost_journals(self) -> None:
        """Report the journals that an earlier agent was copying when their memory was lost."""
        for journal in self._open.take_missing(self.folder):
            last = self._resume.get((self.run_id, journal.incarnation, "steps"), -1)
            text = (
                f"the journal of {journal.source} was lost with the memory of node "
                f"{self._facts.node}: what it held after row {last} of its steps, if anything, "
                "is lost"
            )
            self.node_source.write_event(Note(code="journal_lost", text=text, severity="warning"))

    @property
    def has_open_journals(self) -> bool:
        """Return whether a rank on this node still writes, or has rows that are not spooled."""
        return any(not tail.take_end() for tail in self.tails.values())

    @property
    def num_living_ranks(self) -> int:
        """Return how many ranks on this node live and have not ended their journal."""
        living = [t for t in self.tails.values() if t.alive and not t.removed]
        return sum(not tail.closed for tail in living)

    def synced(self, directory: Path) -> dict[str, int]:
        """Return the last sequence number per stream of a journal that is durable in the spool."""
        tail = self.tails.get(directory)
        return tail.synced_seqs if tail is not None else {}

    @property
    def holds_mailbox(self) -> bool:
        """Return whether rank 0 is on this node, so that the agent relays its commands."""
        return bool(self.rank0_incarnation)

    @property
    def rank0_incarnation(self) -> str:
        """Return the incarnation of rank 0 on this node; "" without one."""
        here = [t.identity for t in self.tails.values() if t.identity.rank == 0 and t.alive]
        return max(here, key=lambda who: who.started_unix_ns).incarnation if here else ""

    def acked_number(self) -> int:
        """Return the latest command that a rank on this node acknowledged in its journal."""
        return max((tail.last.acked_number for tail in self.tails.values()), default=0)

    def close(self) -> None:
        """Close the run's spool, and release the agent's directory."""
        with self._facts.faults.contained("spool"):
            is_done = self.in_memory and not self.spool.pending(1)
            self.spool.close()
            if is_done:
                shutil.rmtree(self.spool.directory)
        self.state_dir.release()


def boot_id() -> str:
    """Return the id of the node's boot, to recognize processes of an earlier one."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
