"""A collector that is restored from a backup gets again what came after it, each row once."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.agent.builders import RUN
from tests.support.examples import one_in
from trainvitals.errors import FormatError, TransportError
from trainvitals.io.spool import FILE_BYTES, Spool
from trainvitals.records import Note
from trainvitals.wire import IngestReply, split_batches
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.storage.schema import events, streams
from vitals_collector.storage.store import open_data_store

STEPS_BEFORE, STEPS_AFTER, CYCLE_STEPS = 200, 500, 100
CYCLE_SECONDS = 10.0


class RealStore:
    """A collector's store in a folder, which can be away, backed up and restored."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.num_rows_sent = 0
        self.store = open_data_store(data)

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> Sequence[IngestReply]:
        if self.store is None:
            raise TransportError("the collector is away")
        (outcome,) = ingest_bodies(self.store, [raws], 1, [asks])
        if isinstance(outcome, FormatError):
            raise outcome
        self.num_rows_sent += sum(reply.num_new + reply.num_duplicate for reply in outcome)
        return outcome

    def ask(self, question):
        return ()

    def mark_delivered(self, run_id: str, number: int, incarnation: str) -> None:
        pass

    def copy_to(self, folder: Path) -> None:
        self.close()
        shutil.copytree(self.data, folder)
        self.store = open_data_store(self.data)

    def restore(self, folder: Path) -> None:
        self.close()
        shutil.rmtree(self.data)
        shutil.copytree(folder, self.data)
        self.store = open_data_store(self.data)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def steps(self) -> Counter[tuple[str, int]]:
        """Every stored step, with its source, and how often it is there."""
        rows = self.store.numbers.scan(RowSpan(RUN, "steps"), ["source", "step"])
        return Counter(zip(*(column.values.tolist() for column in rows.values()), strict=True))

    def notes(self) -> Counter[str]:
        with self.store.read_transaction() as connection:
            rows = connection.execute(events.select()).all()
        texts = [row.summary.removesuffix(" [test]") for row in rows]
        return Counter(text for text in texts if text.startswith("note of"))

    def damage_rows(self) -> None:
        """Flip a bit of a file of rows, and have the collector take it out."""
        folder = self.data / "lake" / "data" / "main" / "steps"
        file = sorted(folder.iterdir())[1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert self.store.numbers.drop_damaged_files()

    def num_lost(self) -> int:
        with self.store.read_transaction() as connection:
            return sum(connection.execute(select(streams.c.num_lost)).scalars())


@pytest.fixture
def collector(tmp_path):
    made = RealStore(tmp_path / "collector")
    yield made
    made.close()


def train(world, agent, ranks, first: int, last: int, now: float) -> float:
    """Write these steps on all ranks, and notes, while the agent turns; return the time."""
    for begin in range(first, last, CYCLE_STEPS):
        for rank in ranks:
            rank.step(*range(begin, begin + CYCLE_STEPS))
            text = f"note of step {begin} of {rank.identity.source}"
            rank.say(Note(code="test", text=text, severity="info"), step=begin)
        now += CYCLE_SECONDS
        world.clock.now_ns += int(1e9 * CYCLE_SECONDS)
        agent.cycle(now)
    return now


def expected(num_steps: int) -> tuple[Counter, Counter]:
    sources = ("rank:0", "rank:1")
    texts = [f"note of step {n} of {s}" for n in range(0, num_steps, CYCLE_STEPS) for s in sources]
    return Counter((s, n) for s in sources for n in range(num_steps)), Counter(texts)


@pytest.fixture(
    params=one_in(
        2, [pytest.param(FILE_BYTES, id="one-file"), pytest.param(1 << 14, id="many-files")]
    )
)
def files(request, monkeypatch):
    monkeypatch.setattr("vitals_agent.agent.Spool", partial(Spool, file_bytes=request.param))


def test_rows_and_events_after_the_backup_are_there_again_once(world, collector, tmp_path, files):
    ranks = [world.rank(0), world.rank(1)]
    agent = world.agent(client=collector, keeps_history=False)
    now = train(world, agent, ranks, 0, STEPS_BEFORE, 0.0)
    collector.copy_to(tmp_path / "backup")
    now = train(world, agent, ranks, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER, now)
    assert expected(STEPS_BEFORE + STEPS_AFTER) == (collector.steps(), collector.notes())
    collector.restore(tmp_path / "backup")
    assert expected(STEPS_BEFORE) == (collector.steps(), collector.notes())
    now = train(world, agent, ranks, 700, 800, now)
    for second in range(30):
        agent.cycle(now + second)
    assert expected(800) == (collector.steps(), collector.notes())
    assert 0 == collector.num_lost()
    assert agent.shipper.drained(RUN)


def test_ranks_that_ended_and_an_agent_that_began_anew_hold_nothing_back(
    world, collector, tmp_path, files
):
    ranks = [world.rank(0), world.rank(1)]
    agent = world.agent(client=collector, keeps_history=False)
    now = train(world, agent, ranks, 0, STEPS_BEFORE, 0.0)
    collector.copy_to(tmp_path / "backup")
    now = train(world, agent, ranks, STEPS_BEFORE, 500, now)
    for rank in ranks:
        rank.close()
    agent.cycle(now + 1.0)
    agent.stop()
    collector.restore(tmp_path / "backup")
    later = world.agent(client=collector, keeps_history=False)
    for second in range(30):
        later.cycle(now + 10.0 + second)
    assert expected(500) == (collector.steps(), collector.notes())
    assert 0 == collector.num_lost()


def test_what_is_not_retained_any_more_is_counted_as_lost_and_the_rest_goes_on(
    world, collector, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitals_agent.agent.Spool", partial(Spool, file_bytes=1 << 14))
    rank = world.rank(0)
    agent = world.agent(client=collector, keeps_history=False, retain_seconds=0.0)
    now = train(world, agent, [rank], 0, 200, 0.0)
    collector.copy_to(tmp_path / "backup")
    now = train(world, agent, [rank], 200, 600, now)
    collector.restore(tmp_path / "backup")
    now = train(world, agent, [rank], 600, 700, now)
    for second in range(30):
        agent.cycle(now + second)
    steps = collector.steps()
    assert 0 < collector.num_lost()
    assert set(range(600, 700)) <= {step for _, step in steps}
    assert {1} == set(steps.values())
    assert agent.shipper.drained(RUN)


class BadCable:
    """Flips a bit of every third request on its way to the store, the bytes as they come."""

    def __init__(self, store: RealStore) -> None:
        self.store = store
        self.rng = random.Random(21)
        self.is_bad = True
        self.num_flips = 0

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> Sequence[IngestReply]:
        body = bytearray(b"".join(raws))
        if self.is_bad and self.rng.random() < 1 / 3:
            place = self.rng.randrange(len(body) * 8)
            body[place // 8] ^= 1 << place % 8
            self.num_flips += 1
        return self.store.ingest_all(split_batches(bytes(body)), asks=asks)

    ask = RealStore.ask
    mark_delivered = RealStore.mark_delivered


@pytest.mark.slow
def test_over_a_cable_that_flips_bits_every_row_arrives_once(world, collector, files):
    ranks = [world.rank(0), world.rank(1)]
    cable = BadCable(collector)
    agent = world.agent(client=cable, keeps_history=False)
    now = 0.0
    for begin in range(0, 3_000, CYCLE_STEPS):
        now = train(world, agent, ranks, begin, begin + CYCLE_STEPS, now)
    for second in range(100):
        agent.cycle(now + second)
    cable.is_bad = False
    for second in range(100, 200):
        agent.cycle(now + second)
    assert 10 < cable.num_flips
    assert expected(3_000) == (collector.steps(), collector.notes())
    assert (0, 0) == (collector.num_lost(), agent.shipper.num_refused_rows)
    assert agent.shipper.drained(RUN)


class LooseCable:
    """Fails after every second request, as if the store were away for a moment."""

    def __init__(self, store: RealStore) -> None:
        self.store = store
        self.num_requests = 0
        self.is_loose = False

    def ingest_all(
        self, raws: Sequence[bytes], *, asks: bool = False, writer_key: str = ""
    ) -> Sequence[IngestReply]:
        self.num_requests += 1
        if self.is_loose and self.num_requests % 3 == 0:
            raise TransportError("the cable is loose")
        return self.store.ingest_all(raws, asks=asks)

    ask = RealStore.ask
    mark_delivered = RealStore.mark_delivered


def test_looking_back_over_a_loose_cable_goes_on_where_it_was(
    world, collector, tmp_path, files, monkeypatch
):
    monkeypatch.setattr("vitals_agent.shipper.MAX_REQUEST_BATCHES", 8)
    ranks = [world.rank(0), world.rank(1)]
    cable = LooseCable(collector)
    agent = world.agent(client=cable, keeps_history=False)
    now = train(world, agent, ranks, 0, STEPS_BEFORE, 0.0)
    collector.copy_to(tmp_path / "backup")
    now = train(world, agent, ranks, STEPS_BEFORE, 500, now)
    collector.restore(tmp_path / "backup")
    cable.is_loose = True
    num_sent = collector.num_rows_sent
    for second in range(0, 2_600, 61):
        agent.cycle(now + second)
    assert expected(500) == (collector.steps(), collector.notes())
    assert (0, True) == (collector.num_lost(), collector.num_rows_sent - num_sent < 2_000)
    cable.is_loose = False
    for second in range(2_600, 2_900, 61):
        agent.cycle(now + second)
    assert agent.shipper.drained(RUN)


@pytest.mark.slow
def test_a_collector_that_is_restored_again_while_it_is_looked_back_lacks_nothing(
    world, collector, tmp_path, files, monkeypatch
):
    monkeypatch.setattr("vitals_agent.shipper.MAX_REQUEST_BATCHES", 8)
    ranks = [world.rank(0), world.rank(1)]
    cable = LooseCable(collector)
    agent = world.agent(client=cable, keeps_history=False)
    now = train(world, agent, ranks, 0, STEPS_BEFORE, 0.0)
    collector.copy_to(tmp_path / "backup")
    now = train(world, agent, ranks, STEPS_BEFORE, 500, now)
    cable.is_loose = True
    for _ in range(3):
        collector.restore(tmp_path / "backup")
        for second in range(0, 305, 61):  # a few groups, and then again
            agent.cycle(now + second)
        now += 600
    cable.is_loose = False
    for second in range(0, 100, 10):
        agent.cycle(now + second)
    assert expected(500) == (collector.steps(), collector.notes())
    assert 0 == collector.num_lost()
    assert agent.shipper.drained(RUN)


def test_what_the_collector_s_disk_has_damaged_is_asked_for_and_there_again_once(world, collector):
    ranks = [world.rank(0), world.rank(1)]
    agent = world.agent(client=collector, keeps_history=False)
    now = train(world, agent, ranks, 0, 300, 0.0)
    collector.damage_rows()
    assert sum(collector.steps().values()) < 600
    now = train(world, agent, ranks, 300, 400, now)
    for second in range(30):
        agent.cycle(now + second)
    assert expected(400) == (collector.steps(), collector.notes())
    assert 0 == collector.num_lost()
    assert agent.shipper.drained(RUN)


def test_damaged_rows_that_no_agent_has_any_more_hold_nothing_back(world, collector, monkeypatch):
    monkeypatch.setattr("vitals_agent.agent.Spool", partial(Spool, file_bytes=1 << 14))
    rank = world.rank(0)
    agent = world.agent(client=collector, keeps_history=False, retain_seconds=0.0)
    now = train(world, agent, [rank], 0, 300, 0.0)
    collector.damage_rows()
    num_left = sum(collector.steps().values())
    num_sent = collector.num_rows_sent
    now = train(world, agent, [rank], 300, 500, now)
    for second in range(30):
        agent.cycle(now + second)
    assert num_left + 200 == sum(collector.steps().values())
    assert collector.num_rows_sent - num_sent < 400, "it is asked for once"
    assert agent.shipper.drained(RUN)
