"""A journal against a model of it: writers and readers that die, memory that is full."""

import errno
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support.examples import examples
from tests.trainvitals.io.builders import STEPS, an_identity, note, seqs_of, values_of
from trainvitals.io.journal import JournalReader, JournalWriter, StreamWriter, mark_journal_closed
from trainvitals.io.segments import read_header
from trainvitals.records import EVENT_SCHEMA
from trainvitals.rows import Column, Schema

WIDER = Schema("steps", (*STEPS.columns, Column("extra", "f8")))
STREAMS = ("steps", "events")


class JournalMachine(RuleBasedStateMachine):
    """A rank that writes, and an agent that reads, makes durable and frees.

    What the agent has made durable is all that a next agent knows of.
    """

    @initialize(in_memory=st.booleans(), max_pages=st.integers(8, 40))
    def begin(self, in_memory: bool, max_pages: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vitals-test-journal-", dir="/dev/shm"))
        self.folder = self.root / "j"
        self.patches = ExitStack()
        if not in_memory:  # without the thread: each row is written where it is appended
            patch = self.patches.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("trainvitals.io.journal.is_memory_backed", lambda path: False)
            patch.setattr("trainvitals.io.journal._Flusher", Immediate)
        self.writer = JournalWriter(
            self.folder, an_identity(), max_bytes=4096 * max_pages, segment_bytes=4096, max_share=1
        )
        self.schema = STEPS
        self.steps: StreamWriter | None = self.writer.open_stream(STEPS)
        self.events: StreamWriter | None = self.writer.open_stream(EVENT_SCHEMA)
        self.said_goodbye = False
        self.num_written = dict.fromkeys(STREAMS, 0)
        self.read_seqs: dict[str, set[int]] = {stream: set() for stream in STREAMS}
        self.durable = dict.fromkeys(STREAMS, -1)
        self.reader = JournalReader(self.folder)
        self.resumed_at = dict(self.durable)

    @rule(num=st.integers(1, 60))
    def write_steps(self, num: int) -> None:
        if self.steps is None:
            return
        for _ in range(num):
            values = [self.num_written["steps"], float(self.num_written["steps"])]
            wider = [*values, 0.0]
            assert self.num_written["steps"] == self.steps.append(
                wider if self.schema is WIDER else values
            )
            self.num_written["steps"] += 1

    @rule(length=st.sampled_from([1, 900, 3000]))
    def say(self, length: int) -> None:
        if self.events is not None:
            self.num_written["events"] = 1 + note(self.events, "x" * length)

    @rule()
    def change_columns(self) -> None:
        if self.steps is not None:
            self.schema = WIDER if self.schema is STEPS else STEPS
            self.writer.open_stream(self.schema)

    @rule(num=st.integers(1, 40))
    def write_while_memory_is_full(self, num: int) -> None:
        def refuse(*args: object) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            patch.setattr(os, "pwrite", refuse)
            self.write_steps(num)

    @rule(max_rows=st.sampled_from([3, 1024]))
    def read(self, max_rows: int) -> None:
        found = self.reader.read(max_rows=max_rows)
        steps = seqs_of(found)
        assert [float(seq) for seq in steps] == values_of(found)
        for stream in STREAMS:
            seqs = seqs_of(found, stream)
            assert sorted(set(seqs)) == seqs
            assert not self.read_seqs[stream] & set(seqs)
            self.read_seqs[stream] |= set(seqs)

    @rule()
    def make_durable_and_free(self) -> None:
        for stream in STREAMS:
            self.durable[stream] = max(self.read_seqs[stream], default=self.durable[stream])
            self.reader.release(stream, self.durable[stream])

    @rule()
    def another_agent(self) -> None:
        """The agent died; what it had not made durable is read again."""
        self.reader = JournalReader(self.folder)
        self.reader.resume_after({s: seq for s, seq in self.durable.items() if seq >= 0})
        self.resumed_at = dict(self.durable)
        for stream in STREAMS:
            self.read_seqs[stream] = {
                seq for seq in self.read_seqs[stream] if seq <= self.durable[stream]
            }

    @rule(torn=st.booleans(), cut=st.integers(1, STEPS.row_size - 1))
    def writer_is_killed(self, torn: bool, cut: int) -> None:
        """It dies between two rows, or in the middle of one; an agent closes in its place."""
        if self.steps is None:
            return
        path = self.steps._segment_path
        last = self.num_written["steps"] - 1
        unread = last not in self.read_seqs["steps"] and last > self.durable["steps"]
        self.steps = self.events = None
        if torn and unread and path is not None and path.exists() and self.lies_in(path, last):
            header, offset = read_header(path)
            size = header.stream_schema.row_size
            end = offset + (last + 1 - header.first_seq) * size
            raw = bytearray(path.read_bytes())
            raw[end - cut : end] = bytes(cut)
            if raw[end - size : end] != path.read_bytes()[end - size : end]:
                path.write_bytes(raw)
        mark_journal_closed(self.folder)

    @rule()
    def writer_says_goodbye(self) -> None:
        if self.steps is not None:
            self.steps = self.events = None
            self.writer.close()
            self.said_goodbye = True

    def lies_in(self, path: Path, seq: int) -> bool:
        header, offset = read_header(path)
        size = header.stream_schema.row_size
        end = offset + (seq + 1 - header.first_seq) * size
        return header.first_seq <= seq and end <= path.stat().st_size

    @invariant()
    def the_journal_has_its_bound(self) -> None:
        used = sum(path.stat().st_size for path in self.folder.glob("*.seg"))
        assert used <= self.writer.max_bytes

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        if self.steps is not None:
            self.writer_says_goodbye()
        for _ in range(1000):
            before = {stream: len(seqs) for stream, seqs in self.read_seqs.items()}
            self.read(1024)
            if before == {stream: len(seqs) for stream, seqs in self.read_seqs.items()}:
                break
        assert self.reader.take_end()
        num_read = num_gone = 0
        for stream in STREAMS:
            seqs = {seq for seq in self.read_seqs[stream] if seq > self.resumed_at[stream]}
            end = self.num_written[stream] if self.said_goodbye else max(seqs, default=-1) + 1
            span = max(0, end - self.resumed_at[stream] - 1)
            num_read += len(seqs)
            num_gone += span - len(seqs)
        assert num_gone == self.reader.dropped
        self.reader.remove()
        assert not self.folder.exists()
        self.patches.close()
        shutil.rmtree(self.root)


class Immediate:
    """Stands for the writing thread of a journal on disk, and writes at once."""

    def __init__(self, streams: dict[str, StreamWriter]) -> None:
        self.streams = streams

    def wake(self) -> None:
        for stream in self.streams.values():
            taken = list(stream._queue)
            stream._queue.clear()
            stream._num_queued = 0
            for schema, seq, num_rows, raw in taken:
                stream._write_rows(schema, seq, num_rows, raw)

    def stop(self) -> bool:
        return True


def test_a_journal_keeps_its_word_whoever_dies() -> None:
    run_state_machine_as_test(
        JournalMachine, settings=settings(max_examples=examples(40), stateful_step_count=25)
    )


@pytest.mark.slow
def test_a_journal_keeps_its_word_in_thousands_of_lives() -> None:
    run_state_machine_as_test(
        JournalMachine, settings=settings(max_examples=800, stateful_step_count=40)
    )
