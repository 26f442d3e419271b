"""A spool against a model of it, on a disk that fails, dies and loses power at every call."""

import errno
import random
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

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
from tests.trainvitals.io.builders import a_batch, an_identity
from tests.trainvitals.io.faulty_disk import Crash, FaultyDisk
from trainvitals.errors import StorageError
from trainvitals.io.spool import Spool
from trainvitals.wire import decode_batch

ROWS = 5
WRITERS = (an_identity(source="rank:0"), an_identity(source="rank:1"))
SIZE = len(a_batch(WRITERS[0], 0, ROWS))
AFTER = st.integers(1, 6)


class SpoolMachine(RuleBasedStateMachine):
    """An agent that appends numbered batches of two writers, and a shipper that acknowledges some.

    As a tailer does, it goes back to what was synced where a sync fails, and after a restart goes
    on behind the last number that the spool knows.
    """

    @initialize(
        keep=st.booleans(),
        num_batches=st.integers(4, 15),
        saved_after=st.sampled_from([-1, 1 << 18]),
        header_every=st.sampled_from([0, SIZE, 1 << 18]),
        seed=st.integers(0, 99),
    )
    def begin(
        self, keep: bool, num_batches: int, saved_after: int, header_every: int, seed: int
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vitals-test-spool-"))
        self.keep, self.max_bytes = keep, num_batches * SIZE
        self.rng = random.Random(seed)
        self.disk = FaultyDisk(self.root)
        self.mount = ExitStack()
        self.mount.enter_context(self.disk.mounted())
        patch = self.mount.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("trainvitals.io.spool.SAVE_BYTES", saved_after)
        patch.setattr("trainvitals.io.spool_files.HEADER_EVERY_BYTES", header_every)
        self.next = self.synced = self.newest = 0
        self.acked: set[int] = set()
        self.is_pristine = True
        self.spool: Spool | None = self.made()

    def made(self) -> Spool:
        return Spool(self.root, max_bytes=self.max_bytes, keep=self.keep, file_bytes=3 * SIZE)

    @rule(num=st.integers(1, 6))
    def append(self, num: int) -> None:
        for _ in range(num):
            if self.attempt(lambda spool: spool.append(batch_of(self.next))):
                self.next += 1
                self.newest = max(self.newest, self.next)

    @rule()
    def sync(self) -> None:
        alive = self.spool is not None
        if self.attempt(lambda spool: spool.sync()):
            self.synced = self.next
        elif alive and self.spool is not None:
            self.next = self.synced

    @rule(num=st.integers(1, 9))
    def ack(self, num: int) -> None:
        if self.spool is None:
            return
        found = self.spool.pending(num)
        if not found:
            return
        # What the disk refused to note is acknowledged all the same: the store has it.
        self.acked |= {number_of(raw) for _, raw in found}
        self.attempt(lambda spool: spool.ack(found[-1][0]))

    @rule()
    def restart(self) -> None:
        self.attempt(lambda spool: spool.close())
        self.come_back()

    @rule(code=st.sampled_from([errno.ENOSPC, errno.EIO]), after=AFTER)
    def fail_soon(self, code: int, after: int) -> None:
        self.is_pristine = False
        self.disk.fail(code, after)

    @rule(after=AFTER)
    def die_soon(self, after: int) -> None:
        self.is_pristine = False
        self.disk.crash(after)

    @rule(power=st.booleans())
    def die(self, power: bool) -> None:
        self.is_pristine = False
        self.spool = None
        self.come_back(power=power)

    def attempt(self, action) -> bool:  # type: ignore[no-untyped-def]
        """Do it; False where the disk refused, or the process died of it."""
        if self.spool is None:
            return False
        try:
            action(self.spool)
        except StorageError:
            return False
        except Crash:
            self.spool = None
            return False
        return True

    def come_back(self, power: bool = False) -> None:
        """Start another owner after a death, with or without the loss of power."""
        self.disk.revive()
        if power:
            self.disk.lose_power(self.rng)
        self.spool = self.made()
        last = self.spool.last_seqs()
        keys = [(writer.run_id, writer.incarnation, "steps") for writer in WRITERS]
        known = sum((last.get(key, -1) + 1) // ROWS for key in keys)
        assert self.synced <= known <= self.newest
        self.next = self.synced = known

    @invariant()
    def nothing_that_was_synced_is_lost(self) -> None:
        if self.spool is None:
            return
        found = list(dict.fromkeys(number_of(raw) for _, raw in self.spool.pending(10**6)))
        assert sorted(found) == found
        gone = set(range(self.synced)) - set(found) - self.acked
        assert ROWS * len(gone) <= self.spool.dropped_rows
        if self.is_pristine:
            gone = set(range(self.next)) - set(found) - self.acked
            assert ROWS * len(gone) == self.spool.dropped_rows
            size = sum(path.stat().st_size for path in self.root.glob("*.tvs"))
            assert size == self.spool.num_bytes
        assert self.spool.num_bytes <= self.max_bytes

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.revive()
            self.mount.close()
            shutil.rmtree(self.root)


def batch_of(number: int) -> bytes:
    """The batch of that number: the writers take turns."""
    turn, index = divmod(number, len(WRITERS))
    return a_batch(WRITERS[index], ROWS * turn, ROWS)


def number_of(raw: bytes) -> int:
    header = decode_batch(raw).header
    index = [writer.source for writer in WRITERS].index(header.identity.source)
    return header.first_seq // ROWS * len(WRITERS) + index


def test_a_spool_keeps_its_word_whatever_the_disk_does() -> None:
    run_state_machine_as_test(
        SpoolMachine, settings=settings(max_examples=examples(40), stateful_step_count=40)
    )


def test_what_cannot_be_counted_on_disk_is_not_dropped() -> None:
    machine = SpoolMachine()
    machine.begin(keep=False, num_batches=4, saved_after=-1, header_every=0, seed=0)
    machine.append(4)
    machine.fail_soon(errno.ENOSPC, after=1)
    machine.append(1)
    machine.die(power=False)
    machine.nothing_that_was_synced_is_lost()
    assert machine.spool is not None and machine.spool.dropped_rows == 0
    machine.teardown()


def test_what_is_durable_is_not_added_again_behind_what_came_after_it() -> None:
    machine = SpoolMachine()
    machine.begin(keep=False, num_batches=4, saved_after=-1, header_every=0, seed=0)
    machine.append(1)
    machine.ack(1)
    machine.append(2)
    machine.fail_soon(errno.ENOSPC, after=1)
    machine.sync()
    machine.append(1)
    machine.nothing_that_was_synced_is_lost()
    machine.append(2)
    assert machine.spool is not None
    assert [1, 2] == [number_of(raw) for _, raw in machine.spool.pending(9)]
    machine.teardown()


def test_acknowledged_files_keep_their_numbers_until_the_state_has_them() -> None:
    machine = SpoolMachine()
    machine.begin(keep=False, num_batches=4, saved_after=-1, header_every=0, seed=0)
    machine.append(1)
    machine.sync()
    machine.die(power=False)
    machine.append(1)
    machine.fail_soon(errno.ENOSPC, after=1)
    machine.ack(2)
    machine.die(power=False)  # asserts that the numbers of what was synced are known
    assert machine.spool is not None and machine.spool.last_seqs()
    machine.teardown()


@pytest.mark.slow
def test_a_spool_keeps_its_word_over_thousands_of_disks() -> None:
    run_state_machine_as_test(
        SpoolMachine, settings=settings(max_examples=800, stateful_step_count=50)
    )
