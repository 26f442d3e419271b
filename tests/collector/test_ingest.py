import math
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, select
from sqlalchemy.event import listen

from tests.collector.rows import RUN, SECOND, START, STEPS, Writer
from tests.support.examples import examples
from tests.support.storing import die_after_the_rows, stored_rows
from trainvitals.catalog import ROW_COLUMNS, SCALARS_SCHEMA
from trainvitals.errors import FormatError, NewerVersionError
from trainvitals.records import (
    EVENT_SCHEMA,
    AttemptStarted,
    CheckpointChanged,
    CommandAck,
    CommandAcknowledged,
    Decision,
    DecisionMade,
    Event,
    EventRow,
    Finding,
    FindingRaised,
    NamesDefined,
    Note,
    RunEnded,
    RunInfo,
    RunStarted,
)
from trainvitals.rows import Column, Schema, column_of
from trainvitals.wire import Batch, BatchHeader, decode_batch, encode_batch
from vitals_collector.ingest import projections
from vitals_collector.ingest.ingest import ingest, ingest_all
from vitals_collector.numbers.interface import RowSpan
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage import schema as tables
from vitals_collector.storage.store import Store, open_data_store, open_store


def part_of(raw: bytes, first: int, last: int) -> bytes:
    """Return rows ``first`` to ``last`` (exclusive) of a batch as a batch."""
    batch = decode_batch(raw)
    size = batch.header.stream_schema.row_size
    header = msgspec.structs.replace(
        batch.header, first_seq=batch.header.first_seq + first, num_rows=last - first
    )
    return encode_batch(header, batch.rows[first * size : last * size])


def test_a_commit_of_many_writers_records_each_of_them(either: Store):
    writers = [Writer(f"rank:{i}", world_size=300) for i in range(300)]
    late, in_time = writers[:1], writers[1:]
    for step in range(2):
        ingest_all(either, [w.steps([step], loss=float(w.identity.rank)) for w in in_time], START)
    ingest_all(either, [w.steps([step], loss=0.0) for step in range(2) for w in late], START)
    seen, read = tables.sources.c, tables.streams.c
    with either.read_transaction() as connection:
        sources = connection.execute(
            select(seen.rank, seen.last_step, seen.last_step_unix_ns, seen.loss).order_by(seen.rank)
        ).all()
        streams = connection.execute(
            select(read.last_seq, read.num_rows, read.num_lost, read.last_unix_ns)
        ).all()
    assert [(rank, 1, START + SECOND, float(rank)) for rank in range(300)] == sources
    assert [(1, 2, 0, START)] * 300 == streams


def test_what_another_process_stored_counts_and_not_what_is_remembered(store: Store):
    url = store.engine.url.render_as_string(hide_password=False)
    other = Store(open_store(url).engine, store.numbers)
    writer, agent = Writer(), Writer("node:node-a")
    first, second, third = (agent.events(Note(code="x", text=text)) for text in "abc")
    rows = [writer.steps(range(start, start + 3)) for start in (0, 3, 6)]
    assert [1, 3] == [reply.num_new for reply in ingest_all(store, [first, rows[0]], 5)]
    assert [1, 3] == [reply.num_new for reply in ingest_all(other, [second, rows[1]], 5)]
    replies = ingest_all(store, [second, third, rows[1], rows[2]], 5)
    assert [0, 1, 0, 3] == [reply.num_new for reply in replies]
    assert [1, 0, 3, 0] == [reply.num_duplicate for reply in replies]
    assert [("events", seq) for seq in range(3)] + [("steps", seq) for seq in range(9)] == (
        stored_rows(store)
    )
    assert 0 == store.counters.num_lost
    other.engine.dispose()


def test_a_batch_sent_twice_is_stored_once(store: Store):
    raw = Writer().steps(range(10))
    first, second = ingest(store, raw), ingest(store, raw)
    assert (10, 0, 9) == (first.num_new, first.num_duplicate, first.durable_seq)
    assert (0, 10, 9) == (second.num_new, second.num_duplicate, second.durable_seq)
    assert [("steps", i) for i in range(10)] == stored_rows(store)


def test_of_a_batch_that_overlaps_only_the_new_rows_are_stored(store: Store):
    raw = Writer().steps(range(10))
    ingest(store, part_of(raw, 0, 6))
    reply = ingest(store, part_of(raw, 3, 10))
    assert (4, 3, 9) == (reply.num_new, reply.num_duplicate, reply.durable_seq)
    assert [("steps", i) for i in range(10)] == stored_rows(store)


def test_rows_that_never_came_are_counted(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(5)))
    ingest(store, writer.steps(range(8, 10), lose=3))
    with store.read_transaction() as connection:
        lost = connection.execute(select(tables.streams.c.num_lost)).scalar_one()
    assert (3, 3) == (lost, store.counters.num_lost)


def test_streams_and_incarnations_count_on_their_own(store: Store):
    first, relaunched = Writer(), Writer()
    replies = [
        ingest(store, first.steps(range(3))),
        ingest(store, first.events(Note(code="N1", text="hello"))),
        ingest(store, relaunched.steps(range(3))),
    ]
    assert [3, 1, 3] == [reply.num_new for reply in replies]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 15)), max_size=25), st.randoms())
def test_however_batches_are_cut_and_repeated_each_row_is_stored_once(
    cuts: list[tuple[int, int]], rng: random.Random
):
    raw = Writer().steps(range(40), loss=[float(i) for i in range(40)])
    store = open_store("sqlite://")
    pieces = [(first, min(40, first + num)) for first, num in cuts]
    done = 0
    for first, last in [*pieces, *((i, i + 1) for i in range(40))]:
        # A spool never sends a later row before an earlier one: only pieces that join on.
        if first <= done:
            ingest(store, part_of(raw, first, last))
            done = max(done, last)
            if rng.random() < 0.3:
                ingest(store, part_of(raw, first, last))
    rows = store.numbers.scan(RowSpan(RUN, "steps"), ["seq", "loss"])
    assert list(range(40)) == rows["seq"].values.tolist() == rows["loss"].values.tolist()
    assert 0 == store.counters.num_lost
    store.close()


def test_many_senders_of_the_same_batch_store_it_once(store: Store):
    raws = [Writer().steps(range(5)) for _ in range(3)]
    gate = threading.Barrier(6)
    new: list[int] = []

    def send(raw: bytes) -> None:
        gate.wait()
        new.append(ingest(store, raw).num_new)

    threads = [threading.Thread(target=send, args=(raw,)) for raw in raws * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [0, 0, 0, 5, 5, 5] == sorted(new)


# ------------------------------------------------------- killed between the rows and what is said


@pytest.fixture(params=["memory", "lake"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store whose rows lie in memory, and one whose rows lie in a lake."""
    is_lake = request.param == "lake"
    opened = open_data_store(tmp_path / "data") if is_lake else open_store("sqlite://")
    yield opened
    opened.close()


def noted(store: Store) -> list[tuple[int, int, int]]:
    """Return of each stream of rows its last number, and how many rows it has and lacks."""
    own = tables.streams.c
    with store.read_transaction() as connection:
        rows = connection.execute(
            select(own.last_seq, own.num_rows, own.num_lost).where(own.stream != "events")
        )
        return [tuple(row) for row in rows]


def test_rows_of_a_collector_that_died_before_it_said_so_are_stored_once_and_said(
    either: Store, monkeypatch: pytest.MonkeyPatch
):
    writer, heard = Writer(), list[tuple[int, int]]()
    either.after_ingest.append(
        lambda new: heard.extend((b.header.first_seq, b.header.num_rows) for b, _ in new)
    )
    ingest(either, writer.steps(range(5), loss=0.5))
    unsure = [writer.steps(range(8, 12), lose=3, loss=0.5), writer.steps([13], lose=1, loss=0.5)]
    with monkeypatch.context() as patch:
        die_after_the_rows(either, patch)
        with pytest.raises(MemoryError):
            ingest_all(either, unsure, 5)
    assert ([(4, 5, 0)], [(0, 5)]) == (noted(either), heard)
    seqs = [*range(5), *range(8, 12), 13]
    assert [("steps", seq) for seq in seqs] == stored_rows(either), "they are durable"

    replies = ingest_all(either, unsure, 5)
    assert [(11, 4), (13, 1)] == [(reply.durable_seq, reply.num_new) for reply in replies]
    assert [0, 0] == [reply.num_new for reply in ingest_all(either, unsure, 5)]
    ingest(either, writer.steps([14], loss=0.5))
    assert [("steps", seq) for seq in [*seqs, 14]] == stored_rows(either), "each once"
    assert [(14, 11, 4)] == noted(either)
    assert 4 == either.counters.num_lost
    assert [(0, 5), (8, 4), (13, 1), (14, 1)] == heard, "the watchers hear of each once"


def test_a_stream_that_never_was_said_is_said_when_it_comes_again(
    either: Store, monkeypatch: pytest.MonkeyPatch
):
    raws = [Writer(f"rank:{rank}").steps(range(3), loss=0.5) for rank in range(2)]
    with monkeypatch.context() as patch:
        die_after_the_rows(either, patch)
        with pytest.raises(MemoryError):
            ingest_all(either, raws, 5)
    assert [] == noted(either)
    ingest_all(either, raws[:1], 5)
    ingest_all(either, [raws[1], raws[0]], 5)
    assert [(2, 3, 0)] * 2 == noted(either)
    assert [("steps", seq) for seq in (0, 0, 1, 1, 2, 2)] == stored_rows(either)
    with either.read_transaction() as connection:
        measured = connection.execute(select(tables.measured_columns.c.name)).scalars().all()
        steps = connection.execute(select(tables.sources.c.last_step)).scalars().all()
    assert "loss" in measured
    assert [2, 2] == steps


def test_rows_that_damage_took_are_taken_once_from_who_sends_them_again(lake_store: Store):
    raws = [Writer(f"rank:{rank}").steps(range(6), loss=0.5) for rank in range(2)]
    for raw in raws:
        ingest(lake_store, raw)
    assert isinstance(lake_store.numbers, Lake)
    (file, *_) = sorted(lake_store.numbers.engine.folder.glob("data/main/steps/*.parquet"))
    file.write_bytes(bytes(len(file.read_bytes())))
    lake_store.numbers.drop_damaged_files()
    assert 6 == len(stored_rows(lake_store))
    for _ in range(2):
        assert [6, 6] == [ingest(lake_store, raw).num_duplicate for raw in raws]
        assert sorted([("steps", seq) for seq in range(6)] * 2) == stored_rows(lake_store)
    assert [(5, 6, 0)] * 2 == noted(lake_store)


def torn(raw: bytes) -> bytes:
    return raw[:-10]


def flipped(raw: bytes) -> bytes:
    return raw[:-10] + bytes([raw[-10] ^ 1]) + raw[-9:]


def newer(raw: bytes) -> bytes:
    batch = decode_batch(raw)
    return encode_batch(msgspec.structs.replace(batch.header, version=99), batch.rows)


def renumbered(raw: bytes) -> bytes:
    batch = decode_batch(raw)
    return encode_batch(msgspec.structs.replace(batch.header, first_seq=7), batch.rows)


def numbered_beyond_reach(raw: bytes) -> bytes:
    header = decode_batch(raw).header
    first = msgspec.structs.replace(header, first_seq=2**53, num_rows=2)
    pack = header.stream_schema.pack
    blank = [None] * len(header.stream_schema.columns)
    return encode_batch(first, b"".join(pack(2**53 + i, blank) for i in range(2)))


def too_large(raw: bytes) -> bytes:
    batch = decode_batch(raw)
    identity = msgspec.structs.replace(batch.header.identity, pid=2**63)
    return encode_batch(msgspec.structs.replace(batch.header, identity=identity), batch.rows)


def without_step(raw: bytes) -> bytes:
    header = decode_batch(raw).header
    columns = Schema("steps", (Column("loss", "f8"),))
    header = msgspec.structs.replace(header, stream_schema=columns, num_rows=1)
    return encode_batch(header, columns.pack(0, [1.0]))


def with_column(raw: bytes, stream: str, name: str, kind: str) -> bytes:
    """Return one row of another stream that has a column which the batch had not."""
    columns = Schema(stream, (*ROW_COLUMNS, Column(name, kind)))
    header = msgspec.structs.replace(decode_batch(raw).header, stream_schema=columns, num_rows=1)
    return encode_batch(header, columns.pack(0, [0, 0, 0, 0, None]))


def with_text_as_loss(raw: bytes) -> bytes:
    return with_column(raw, "steps", "loss", "S8")


def with_text_as_a_group(raw: bytes) -> bytes:
    return with_column(raw, "steps", "learning_rate.1", "S8")


def with_rank_as_fraction(raw: bytes) -> bytes:
    return with_column(raw, "process", "rank", "f8")


def with_a_long_name(raw: bytes) -> bytes:
    return with_column(raw, "steps", "x" * 4_000, "f8")


@pytest.mark.parametrize(
    ("spoil", "said", "kind"),
    [
        (torn, "batch claims", FormatError),
        (flipped, "checksum", FormatError),
        (newer, "format version 99", NewerVersionError),
        (renumbered, "sequence numbers", FormatError),
        (numbered_beyond_reach, "numbered up to 9007199254740993; no run", FormatError),
        (too_large, "64 bits", FormatError),
        (without_step, "lack the columns step", FormatError),
        (with_text_as_loss, "column 'loss' of steps is S8; by the catalog it is f8", FormatError),
        (with_text_as_a_group, "'learning_rate.1' of steps is S8", FormatError),
        (with_rank_as_fraction, "column 'rank' of process is f8; .* it is i8", FormatError),
        (with_a_long_name, "has a name of 4000 characters", FormatError),
        (lambda raw: b"", "begins with", FormatError),
    ],
)
def test_a_bad_batch_is_refused_counted_and_changes_nothing(
    store: Store, spoil, said: str, kind: type[FormatError]
):
    raw = Writer().steps(range(3))
    with pytest.raises(kind, match=said) as caught:
        ingest(store, spoil(raw))
    assert {caught.value.code: 1} == store.counters.rejected
    assert [] == stored_rows(store)


def test_an_incarnation_cannot_be_two_sources(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]))
    writer.identity = msgspec.structs.replace(writer.identity, source="rank:1")
    with pytest.raises(FormatError, match="is known as rank:0, not rank:1"):
        ingest(store, writer.events(Note(code="N1", text="")))


def test_a_number_that_no_database_takes_undoes_the_whole_batch(store: Store):
    writer = Writer()
    bad = AttemptStarted(id=2**63, parent=None, fork_step=0, reason="hostile")
    with pytest.raises(FormatError, match="no database stores"):
        ingest(store, writer.events(Note(code="N1", text=""), bad))
    assert [] == stored_rows(store)


def spoil_processes(patch: pytest.MonkeyPatch) -> None:
    """Let no process of number 666 be placed, by a fault of ours."""
    note_processes = projections.note_processes

    def note_or_fail(connection: Connection, told: Iterable[Any]) -> None:
        some = list(told)
        for _, schema, rows in some:
            if 666 in column_of(schema, rows, "pid")[0]:
                raise ValueError("cannot convert float NaN to integer")
        note_processes(connection, some)

    patch.setattr(projections, "note_processes", note_or_fail)


def test_a_batch_at_which_we_fail_is_refused_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spoil_processes(monkeypatch)
    agent, rank = Writer("node:a"), Writer()
    raws = [agent.process_rows(1, {0: (7, 1)}), agent.process_rows(2, {0: (666, 1)})]
    replies = ingest_all(store, [*raws, rank.steps(range(3))], 5)
    assert [1, 0, 3] == [reply.num_new for reply in replies]
    assert "the batch cannot be stored: ValueError: cannot convert" in replies[1].text
    assert {"V200": 1} == store.counters.rejected
    assert [("process", 0), *(("steps", i) for i in range(3))] == stored_rows(store)
    assert "batch_not_stored" in caplog.text


def test_where_memory_runs_out_no_batch_is_at_fault(store: Store, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError

    raw = Writer("node:a").process_rows(1, {0: (7, 1)})
    with monkeypatch.context() as patch:
        patch.setattr(projections, "note_processes", fail)
        with pytest.raises(MemoryError):
            ingest(store, raw)
    assert {} == store.counters.rejected
    assert 1 == ingest(store, raw).num_new


def test_an_event_nobody_knows_is_kept_as_unknown(store: Store):
    raw = Writer().batch(EVENT_SCHEMA, [[None] * 8])
    assert 1 == ingest(store, raw).num_new
    with store.read_transaction() as connection:
        assert "Unknown" == connection.execute(select(tables.events.c.kind)).scalar_one()


def test_text_with_nul_is_stored_without_it(store: Store):
    ingest(store, Writer().events(RunStarted(info=RunInfo(name="a\0b"))))
    with store.read_transaction() as connection:
        assert "ab" == connection.execute(select(tables.runs.c.name)).scalar_one()


def test_events_become_rows_once_even_when_sent_again(store: Store):
    decision = Decision(
        ledger_seq=1,
        action="skip_step",
        step=4,
        decided_at_step=5,
        attempt=1,
        reason="loss is nan",
        rule="nonfinite",
        cause="nonfinite_loss",
        value=math.nan,
    )
    finding = Finding(
        kind="nonfinite", level="actionable", step=4, detector="nonfinite", reason="nan"
    )
    events: tuple[Event, ...] = (
        RunStarted(info=RunInfo(name="tiny", project="p", user="u", tags=("a",))),
        AttemptStarted(id=1, parent=None, fork_step=0, reason="start"),
        FindingRaised(finding=finding),
        DecisionMade(decision=decision),
        CheckpointChanged(checkpoint_id="c", checkpoint_step=2, state="healthy", where="disk"),
        RunEnded(state="finished"),
    )
    raw = Writer().events(*events)
    ingest(store, raw)
    ingest(store, raw)
    with store.read_transaction() as connection:
        counts = {
            table.name: len(connection.execute(select(table)).all())
            for table in (
                tables.runs,
                tables.attempts,
                tables.findings,
                tables.decisions,
                tables.checkpoints,
                tables.events,
            )
        }
        body = connection.execute(select(tables.decisions.c.body)).scalar_one()
    assert {
        "runs": 1,
        "attempts": 1,
        "findings": 1,
        "decisions": 1,
        "checkpoints": 1,
        "events": 6,
    } == counts
    kept = msgspec.msgpack.decode(body, type=Decision)
    assert math.isnan(kept.value or 0), "the NaN that was decided on is kept"


def test_an_older_word_about_a_checkpoint_does_not_undo_a_newer_one(store: Store):
    writer = Writer()

    def said(state: str, at: int) -> bytes:
        event = CheckpointChanged(checkpoint_id="c", checkpoint_step=1, state=state, where="disk")
        return writer.events(event, at=START + at * SECOND)

    for raw in (said("verified", 10), said("healthy", 20), said("candidate", 5)):
        ingest(store, raw)
    with store.read_transaction() as connection:
        assert "healthy" == connection.execute(select(tables.checkpoints.c.state)).scalar_one()


def test_in_one_batch_the_latest_state_of_each_checkpoint_is_stored(store: Store):
    def changed(name: str, state: str, step: int) -> CheckpointChanged:
        return CheckpointChanged(
            checkpoint_id=name, checkpoint_step=step, state=state, where="disk", num_bytes=step
        )

    states = ("candidate", "verified", "healthy")
    events = [changed(name, state, 10 * at) for at, state in enumerate(states) for name in "ab"]
    ingest(store, Writer().events(*events))
    columns = tables.checkpoints.c
    with store.read_transaction() as connection:
        query = select(columns.checkpoint_id, columns.state, columns.step, columns.num_bytes)
        rows = connection.execute(query.order_by(columns.checkpoint_id)).all()
    assert [("a", "healthy", 20, 20), ("b", "healthy", 20, 20)] == rows


@pytest.mark.parametrize(
    "event",
    [
        NamesDefined(stream="layers", names={1: "fc1", 2: "fc2"}),
        FindingRaised(
            finding=Finding(kind="spike", level="advisory", step=1, detector="spike", reason="high")
        ),
        DecisionMade(
            decision=Decision(
                ledger_seq=1,
                action="skip_step",
                step=4,
                decided_at_step=5,
                attempt=0,
                reason="loss is nan",
                rule="nonfinite",
                cause="nonfinite_loss",
            )
        ),
        CheckpointChanged(checkpoint_id="c", checkpoint_step=1, state="healthy", where="disk"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_many_events_of_one_type_take_as_many_statements_as_one(store: Store, event: Event):
    statements: list[str] = []
    listen(store.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    ingest(store, Writer().events(event))  # registers the run
    num_statements: list[int] = []
    for pid, num in ((1, 1), (2, 40)):
        before = len(statements)
        assert num == ingest(store, Writer(pid=pid).events(*[event] * num)).num_new
        num_statements.append(len(statements) - before)
    assert num_statements[0] == num_statements[1]


def test_a_command_learns_what_became_of_it(store: Store):
    writer = Writer()
    ingest(store, writer.steps([0]))
    with store.write() as connection:
        connection.execute(
            tables.commands.insert().values(
                run_id=RUN, number=7, action="halt", status="delivered", body=b""
            )
        )
    ack = CommandAck(number=7, status="done", step=12, detail="halted")
    ingest(store, writer.events(CommandAcknowledged(ack=ack)))
    with store.read_transaction() as connection:
        row = connection.execute(select(tables.commands)).one()
    assert ("done", 12, "halted") == (row.status, row.step, row.detail)


def test_hooks_hear_of_new_rows_only_and_after_they_are_stored(store: Store):
    heard: list[tuple[int, int, int]] = []

    def hook(new: Sequence[tuple[Batch, Sequence[EventRow]]]) -> None:
        [(batch, _)] = new
        heard.append((batch.header.first_seq, batch.header.num_rows, len(stored_rows(store))))
        assert len(batch.rows) == batch.header.num_rows * STEPS.row_size

    store.after_ingest.append(hook)
    raw = Writer().steps(range(10))
    for first, last in ((0, 4), (0, 4), (2, 10)):
        ingest(store, part_of(raw, first, last))
    assert [(0, 4, 4), (4, 6, 10)] == heard


def test_a_failing_hook_is_counted_and_the_batch_still_acknowledged(
    store: Store, caplog: pytest.LogCaptureFixture
):
    def hook(new: Sequence[tuple[Batch, Sequence[EventRow]]]) -> None:
        raise RuntimeError("detector broke")

    store.after_ingest.append(hook)
    assert 3 == ingest(store, Writer().steps(range(3))).num_new
    assert {"after_ingest": 1} == store.counters.failures
    assert "detector broke" in caplog.text


def test_a_new_column_in_the_middle_of_a_stream_is_kept(store: Store):
    writer = Writer()
    ingest(store, writer.scalars(1, {0: 0.5}))
    wider = Schema("scalars", (*SCALARS_SCHEMA.columns, Column("later", "f8")))
    reply = ingest(store, writer.batch(wider, [[1, 1, START, 0, 1, 0.25, 9.0]]))
    assert 1 == reply.num_new
    later = store.numbers.scan(RowSpan(RUN, "scalars"), ["later"])["later"]
    assert [True, False] == later.is_missing.tolist()


def test_a_header_with_fields_of_the_future_is_read(store: Store):
    class Wider(BatchHeader, frozen=True, kw_only=True):
        invented: str = "later"

    batch = decode_batch(Writer().steps([0]))
    header = Wider(**{f: getattr(batch.header, f) for f in BatchHeader.__struct_fields__})
    assert 1 == ingest(store, encode_batch(header, batch.rows)).num_new
