import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.orders import keys
from tests.trainvitals.io.builders import RUN_ID, a_command
from trainvitals.errors import FormatError, NewerVersionError, UnauthorizedError, UsageError
from trainvitals.identity import new_run_id
from trainvitals.io.control_key import sign_manual_command
from trainvitals.io.mailbox import (
    MAILBOX_BYTES,
    CommandInbox,
    Mailbox,
    sign_command,
    verify_command,
)
from trainvitals.testing.clock import ManualClock

KEY = bytes(range(32))


@pytest.fixture
def mailbox(shm: Path) -> Iterator[Mailbox]:
    with Mailbox.create(shm / "mailbox") as box:
        yield box


def test_an_empty_mailbox_has_number_zero(mailbox: Mailbox) -> None:
    assert 0 == mailbox.number()
    with pytest.raises(FormatError, match="empty"):
        mailbox.read()


def test_what_one_side_puts_the_other_reads(mailbox: Mailbox) -> None:
    command = a_command(number=1_700_000_000_000_000, checkpoint_id="snap-3")
    with Mailbox.open(mailbox.path) as other:
        mailbox.put(command)
        assert command.number == other.number()
        assert command == other.read()
        mailbox.put(a_command(number=command.number + 1, reason=""))
        assert a_command(number=command.number + 1, reason="") == other.read()


def test_whoever_comes_second_finds_the_same_mailbox(mailbox: Mailbox) -> None:
    mailbox.put(a_command(number=5))
    with Mailbox.create(mailbox.path) as again:
        assert 5 == again.number()
    assert ["mailbox"] == [path.name for path in mailbox.path.parent.iterdir()]
    assert MAILBOX_BYTES == mailbox.path.stat().st_size


def write_into(mailbox: Mailbox, raw: bytes, *, at: int = 0) -> None:
    """Write into the file, which every process that has the mailbox open sees."""
    with mailbox.path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), raw, at)


def test_a_torn_write_is_never_acted_on(mailbox: Mailbox) -> None:
    old = a_command(number=5, reason="the old one")
    new = a_command(number=9, reason="the new and longer one")
    mailbox.put(old)
    before = mailbox.path.read_bytes()
    mailbox.put(new)
    after = mailbox.path.read_bytes()
    refused = 0
    changed = [i for i in range(MAILBOX_BYTES) if before[i] != after[i]]
    for cut in changed:  # any prefix and any suffix of the write has arrived
        for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            write_into(mailbox, torn)
            if torn in (before, after):
                continue
            try:
                assert mailbox.read() in (old, new)  # bytes behind the command do not matter
            except FormatError:
                refused += 1
    assert refused > len(changed)


def test_a_command_longer_than_the_page_is_refused(mailbox: Mailbox) -> None:
    with pytest.raises(UsageError, match="a mailbox holds") as caught:
        mailbox.put(a_command(reason="x" * 5000))
    assert "shorten" in caught.value.hint
    assert 0 == mailbox.number()


@pytest.mark.parametrize("content", [b"", b"x" * 10, bytes(4096), b"x" * 4096, bytes(5000)])
def test_what_is_no_mailbox_is_said_so(shm: Path, content: bytes) -> None:
    (shm / "mailbox").write_bytes(content)
    (shm / "mailbox").chmod(0o600)
    with pytest.raises(FormatError, match="not a mailbox"):
        Mailbox.open(shm / "mailbox")


def test_a_newer_mailbox_is_said_so(mailbox: Mailbox) -> None:
    write_into(mailbox, (7).to_bytes(4, "little"), at=4)
    with pytest.raises(NewerVersionError, match="format version 7"):
        Mailbox.open(mailbox.path)


def test_no_mailbox_is_a_missing_file(shm: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Mailbox.open(shm / "mailbox")


def test_a_full_memory_gives_an_error_and_no_half_mailbox(small_tmpfs: Path) -> None:
    status = os.statvfs(small_tmpfs)
    (small_tmpfs / "hog").write_bytes(bytes(status.f_bavail * status.f_frsize))
    with pytest.raises(OSError, match="No space left"):
        Mailbox.create(small_tmpfs / "mailbox")
    assert ["hog"] == [path.name for path in small_tmpfs.iterdir()]


# --------------------------------------------------------------------------- signatures


def inbox_of(mailbox: Mailbox, clock: ManualClock, last_number: int = 0) -> CommandInbox:
    return CommandInbox(
        mailbox=mailbox, key=KEY, keys=keys(), run_id=RUN_ID, clock=clock, last_number=last_number
    )


def test_rank_0_takes_what_both_keys_signed_and_each_once(mailbox: Mailbox) -> None:
    inbox = inbox_of(mailbox, ManualClock(time_ns=500))
    command = sign_command(sign_manual_command(a_command(number=7), keys()), KEY)
    mailbox.put(command)
    assert (None, command) == (inbox.poll(step=3), inbox.waiting)
    inbox.waiting = None
    assert (None, None) == (inbox.poll(step=4), inbox.waiting)
    relaunched = inbox_of(mailbox, ManualClock(time_ns=500), last_number=7)
    assert (None, None) == (relaunched.poll(step=0), relaunched.waiting)


def test_rank_0_refuses_what_the_agent_was_made_to_sign(mailbox: Mailbox) -> None:
    inbox = inbox_of(mailbox, ManualClock(time_ns=500))
    genuine = sign_manual_command(a_command(number=7), keys())
    forged = msgspec.structs.replace(genuine, action="rollback", number=2**52)
    mailbox.put(sign_command(forged, KEY))
    refused = inbox.poll(step=3)
    assert refused is not None and inbox.waiting is None
    assert ("invalid", True) == (refused.status, "control key" in refused.detail)
    assert inbox.poll(step=4) is None, "said once"
    mailbox.put(sign_command(genuine, KEY))
    assert inbox.poll(step=5) is None
    assert inbox.waiting is not None, "what was made up keeps nothing genuine away"


def test_a_command_that_expired_is_not_revived_by_a_clock_that_is_set_back(
    mailbox: Mailbox,
) -> None:
    clock = ManualClock(time_ns=2_000)
    inbox = inbox_of(mailbox, clock)
    mailbox.put(sign_command(a_command(number=7), KEY))
    refused = inbox.poll(step=3)
    assert refused is not None and "expired" == refused.status
    clock.jump(-1.5e-6)
    assert (None, None) == (inbox.poll(step=4), inbox.waiting)
    relaunched = inbox_of(mailbox, clock, last_number=inbox.last_number)
    assert (None, None) == (relaunched.poll(step=0), relaunched.waiting)


def test_a_signed_command_passes() -> None:
    signed = sign_command(a_command(number=7), KEY)
    assert signed == verify_command(signed, KEY, run_id=RUN_ID, now_unix_ns=999, last_number=6)


def test_a_signature_survives_json() -> None:
    signed = sign_command(a_command(action="lr", argument=0.5), KEY)
    again = msgspec.json.decode(msgspec.json.encode(signed), type=type(signed))
    verify_command(again, KEY, run_id=RUN_ID, now_unix_ns=0, last_number=0)


@given(
    change=st.sampled_from(
        [
            {"number": 8},
            {"action": "rollback"},
            {"reason": "another"},
            {"issued_by": "someone else"},
            {"issued_unix_ns": 1},
            {"expires_unix_ns": 2_000},
            {"checkpoint_id": "x"},
            {"argument": 1.0},
            {"run_id": new_run_id(5)},
            {"signature": ""},
            {"signature": "\u00e9" * 64},
            {"signature": "0" * 64},
        ]
    )
)
def test_any_change_after_signing_is_found(change: dict[str, object]) -> None:
    signed = sign_command(a_command(number=7), KEY)
    forged = msgspec.structs.replace(signed, **change)
    with pytest.raises(UnauthorizedError, match="not signed"):
        verify_command(forged, KEY, run_id=RUN_ID, now_unix_ns=0, last_number=0)


def test_another_runs_key_does_not_do() -> None:
    signed = sign_command(a_command(), b"another key")
    with pytest.raises(UnauthorizedError):
        verify_command(signed, KEY, run_id=RUN_ID, now_unix_ns=0, last_number=0)


@pytest.mark.parametrize(
    ("command", "run_id", "now", "last", "reason"),
    [
        (a_command(number=7), new_run_id(5), 0, 0, "is for run"),
        (a_command(number=7), RUN_ID, 0, 7, "not newer than 7"),
        (a_command(number=7), RUN_ID, 0, 8, "not newer than 8"),
        (a_command(number=7), RUN_ID, 1_000, 0, "expired 0.0 seconds ago"),
        (a_command(number=7), RUN_ID, 3_000_001_000, 0, "expired 3.0 seconds ago"),
    ],
    ids=["another run", "the newest", "older", "expired", "long expired"],
)
def test_a_genuine_command_is_refused_with_the_reason(
    command: object, run_id: str, now: int, last: int, reason: str
) -> None:
    signed = sign_command(command, KEY)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=reason):
        verify_command(signed, KEY, run_id=run_id, now_unix_ns=now, last_number=last)
