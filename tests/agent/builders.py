"""Small makers of what the agent's tests need: ranks that write, agents, and what came out."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.agent.fake_nvml import no_driver
from trainvitals.catalog import steps_schema
from trainvitals.identity import Identity, new_incarnation
from trainvitals.io.journal import JournalWriter, announce_run, journal_directory
from trainvitals.io.mailbox import Mailbox
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import read_batches
from trainvitals.records import Event, EventRow, decode_events
from trainvitals.wire import decode_batch
from vitals_agent.agent import Agent, AgentConfig

RUN = "01JD0000000000000000000000"
OTHER_RUN = "01JD0000000000000000000001"
NODE = "node-a"
STEPS = steps_schema()


def at_once(name: str, function) -> None:
    """Begins nothing on a thread: it is done when this returns."""
    function()


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000_000_000_000

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns


def identity(*, run_id: str = RUN, rank: int = 0, pid: int = 0, node: str = NODE) -> Identity:
    return Identity(
        run_id=run_id,
        incarnation=new_incarnation(),
        source=f"rank:{rank}",
        node=node,
        pid=pid,
        rank=rank,
        local_rank=rank,
        world_size=2,
        started_unix_ns=time.time_ns(),
        started_monotonic_ns=time.monotonic_ns(),
    )


class Rank:
    """A rank that writes its journal from this process."""

    def __init__(self, base: Path, run_dir: RunDir, who: Identity) -> None:
        folder = announce_run(base, who.run_id, run_dir.path)
        if who.rank == 0:
            Mailbox.create(folder / "mailbox").close()
        self.identity = who
        self.directory = journal_directory(folder, who)
        self.journal = JournalWriter(self.directory, who)
        self.steps = self.journal.open_stream(STEPS)

    def step(self, *numbers: int, **columns: float | int) -> None:
        for number in numbers:
            row = {"step": number, "attempt": 1, "loss": number / 2, **columns}
            self.steps.append([row.get(column.name) for column in STEPS.columns])

    def say(self, event: Event, *, step: int = 0) -> None:
        from trainvitals.records import EVENT_SCHEMA

        stream = self.journal.open_stream(EVENT_SCHEMA)
        stream.append_event(event, step=step, attempt=1, time_unix_ns=1, monotonic_ns=1)

    def close(self) -> None:
        self.journal.close()


@dataclass
class World:
    """One node's private base and one shared folder."""

    base: Path
    vitals_dir: Path
    clock: ManualClock = field(default_factory=ManualClock)
    closers: list = field(default_factory=list)

    @property
    def keys(self) -> Path:
        """A folder with a control key."""
        # Imported here: ranks of an earlier version, which has none, are made by this module too.
        from trainvitals.io.control_key import make_control_key

        folder = self.base.parent / "keys"
        folder.mkdir(exist_ok=True)
        make_control_key(folder)
        return folder

    def rank(self, rank: int = 0, **who) -> Rank:
        who = {"pid": os.getpid(), **who}
        found = identity(rank=rank, **who)
        run_dir = RunDir.create(self.vitals_dir, found.run_id)
        run_dir.command_key(create=True)
        made = Rank(self.base, run_dir, found)
        self.closers.append(made.close)
        return made

    def agent(
        self,
        *,
        client=None,
        reachable=None,
        ahead=None,
        nvml=None,
        spawn=at_once,
        start=True,
        **config,
    ) -> Agent:
        settings = {
            "vitals_dir": self.vitals_dir, "base": self.base, "keys": self.keys, "node": NODE,
        } | config  # fmt: skip
        agent = Agent(
            AgentConfig(**settings),
            client=client,
            reachable=reachable,
            ahead=ahead,
            clock=self.clock,
            nvml=nvml or no_driver(),
            spawn=spawn,
        )
        if start:
            agent.start()
            self.closers.append(agent.stop)
        return agent

    def run_dir(self, run_id: str = RUN) -> RunDir:
        return RunDir.open(self.vitals_dir / run_id)

    def spool(self, run_id: str = RUN, node: str = NODE) -> Path:
        return self.vitals_dir / run_id / "agents" / node / "spool"

    def spooled(self, *, run_id: str = RUN, node: str = NODE) -> Counter:
        """Every row in the spool, by (source, stream, seq, bytes), and how often it lies there."""
        return rows_in([raw for _, raw in read_batches(self.spool(run_id, node))])

    def steps(self, rank: int = 0, **where) -> list[int]:
        """The steps of one rank in the spool, each as often as it lies there."""
        found = []
        for (source, stream, _, row), count in self.spooled(**where).items():
            if (source, stream) == (f"rank:{rank}", "steps"):
                found += [STEPS.unpack(row)["step"]] * count
        return sorted(found)

    def events(self, source: str = f"node:{NODE}", **where) -> list[EventRow]:
        found: list[EventRow] = []
        for _, raw in read_batches(self.spool(**where)):
            batch = decode_batch(raw)
            if batch.header.stream == "events" and batch.header.identity.source == source:
                found += decode_events(batch.header.stream_schema, batch.rows)
        return found

    def notes(self, **where) -> list[str]:
        return [row.event.code for row in self.events(**where)]


def rows_in(batches: list[bytes]) -> Counter:
    found: Counter = Counter()
    for raw in batches:
        batch = decode_batch(raw)
        schema = batch.header.stream_schema
        for start in range(0, len(batch.rows), schema.row_size):
            row = batch.rows[start : start + schema.row_size]
            seq = schema.seq_of(row)
            found[(batch.header.identity.source, schema.stream, seq, row)] += 1
    return found
