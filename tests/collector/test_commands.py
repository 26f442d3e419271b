import stat
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from tests.collector.rows import Writer
from tests.support.orders import keys, signed
from trainvitals.errors import UnauthorizedError, UsageError
from trainvitals.identity import Identity, new_run_id
from trainvitals.io.control_key import sign_manual_command
from trainvitals.io.mailbox import verify_command
from trainvitals.io.rundir import RunDir
from trainvitals.records import (
    EVENT_SCHEMA,
    CheckpointChanged,
    Command,
    CommandAck,
    CommandAcknowledged,
    Event,
    RunInfo,
    RunStarted,
    encode_event,
)
from trainvitals.views import CommandRequest
from trainvitals.wire import BatchHeader, encode_batch
from vitals_collector.alerts import commands
from vitals_collector.alerts.commands import (
    CONFLICT,
    MAX_PENDING,
    issue,
    list_commands,
    mark_delivered,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.series import UNKNOWN
from vitals_collector.storage.schema import audit
from vitals_collector.storage.store import Store

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
RUN = new_run_id(NOW)
HALT = CommandRequest(action="halt", reason="wrong data")


def rank_zero(run_id: str = RUN, incarnation: str = "a" * 16) -> Identity:
    return Identity(run_id=run_id, incarnation=incarnation, source="rank:0", node="n0", rank=0)


def send(store: Store, *events: Event, first_seq: int = 0, run_id: str = RUN, step: int = 5) -> int:
    """Ingest events as rank 0 would; return the next sequence number."""
    rows = [
        row
        for event in events
        for row in encode_event(event, step=step, attempt=1, time_unix_ns=NOW, monotonic_ns=0)
    ]
    raw = b"".join(EVENT_SCHEMA.pack(first_seq + i, row) for i, row in enumerate(rows))
    header = BatchHeader(
        identity=rank_zero(run_id),
        stream_schema=EVENT_SCHEMA,
        first_seq=first_seq,
        num_rows=len(rows),
    )
    ingest(store, encode_batch(header, raw))
    return first_seq + len(rows)


def checkpoint(name: str, state: str = "healthy") -> CheckpointChanged:
    return CheckpointChanged(checkpoint_id=name, checkpoint_step=5, state=state, where="memory")


@pytest.fixture(autouse=True)
def known_run(store: Store) -> None:
    send(store, RunStarted(info=RunInfo(name="a run")))


def ask(store: Store, request: CommandRequest = HALT, *, now: int = NOW, **kwargs):
    newest = max((v.command.number for v in list_commands(store, RUN, now_unix_ns=now)), default=0)
    command = signed(RUN, request, now_unix_ns=now, after=newest)
    return issue(store, RUN, command, keys=keys(), now_unix_ns=now, **kwargs)


def statuses(store: Store, now: int = NOW) -> list[str]:
    return [view.status for view in list_commands(store, RUN, now_unix_ns=now)]


def test_a_command_is_numbered_by_its_microsecond_and_waits(store: Store):
    view = ask(store)
    assert NOW // 1_000 == view.command.number
    assert (NOW + 60 * SECOND, "alice", "") == (
        view.command.expires_unix_ns,
        view.command.issued_by,
        view.command.signature,
    )
    assert (view,) == list_commands(store, RUN, now_unix_ns=NOW, status="pending")


def test_numbers_grow_though_the_clock_stands_or_falls_back(store: Store):
    numbers = [ask(store, now=now).command.number for now in (NOW, NOW, NOW - 5 * SECOND)]
    first = NOW // 1_000
    assert [first, first + 1, first + 2] == numbers


@pytest.mark.parametrize(
    ("action", "argument", "message"),
    [
        ("skip", None, "needs a number of steps"),
        ("skip", 0.0, "1 to 1000"),
        ("skip", 1.5, "whole number"),
        ("skip", 1001.0, "1 to 1000"),
        ("lr", None, "needs a learning rate"),
        ("lr", 0.0, "learning rate 0"),
        ("lr", float("nan"), "learning rate nan"),
        ("lr_factor", 1000.0, "factor 1000"),
        ("checkpoint", 1.0, "checkpoint takes none"),
    ],
)
def test_a_number_that_no_run_can_take_is_refused_before_it_is_signed(action, argument, message):
    with pytest.raises(UsageError, match=message):
        signed(RUN, CommandRequest(action=action, reason="x", argument=argument), now_unix_ns=NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": ""},
        {"reason": "   "},
        {"reason": "x" * 501},
        {"reason": "line\nbreak"},
        {"reason": "nul\0"},
        {"reason": "\x1b[2J"},
        {"ttl_seconds": 0.0},
        {"ttl_seconds": -1.0},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": float("inf")},
        {"ttl_seconds": 3601.0},
        {"argument": 1.0},
        {"checkpoint_id": "c1"},
    ],
)
def test_values_out_of_bounds_are_refused_and_leave_nothing(store: Store, changes: dict):
    with pytest.raises(UsageError):
        ask(store, msgspec.structs.replace(HALT, **changes))
    assert [] == statuses(store)


def test_an_accepted_step_travels_as_the_argument(store: Store):
    ingest(store, Writer(run=RUN).steps(range(8), loss=1.0))
    view = ask(store, CommandRequest(action="accept", reason="a new task", argument=7.0))
    assert ("accept", 7.0) == (view.command.action, view.command.argument)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (None, "accept needs a step"),
        (-1.0, "must be a whole number"),
        (2.5, "must be a whole number"),
        (float("nan"), "must be a whole number"),
        (8.0, "step 8 of the run is not there; its newest is step 7"),
    ],
)
def test_only_a_step_of_the_run_can_be_accepted(store: Store, argument: float | None, message: str):
    ingest(store, Writer(run=RUN).steps(range(8), loss=1.0))
    with pytest.raises(UsageError, match=message):
        ask(store, CommandRequest(action="accept", reason="x", argument=argument))
    assert [] == statuses(store)


@pytest.mark.parametrize("run_id", ["01HF7YATZ8VYW6G08PMYVT7WNM", "../../etc", "x", ""])
def test_a_run_that_is_not_known_gets_no_command(store: Store, run_id: str):
    command = signed(run_id, HALT, now_unix_ns=NOW)
    with pytest.raises(UsageError):
        issue(store, run_id, command, keys=keys(), now_unix_ns=NOW)


@pytest.mark.parametrize(
    "name", ["nope", "../c1", "/etc/passwd", "c1/../c1", "C1", "c1\0", "' OR 1=1 --", "c1%2e"]
)
def test_a_rollback_names_an_announced_checkpoint_and_never_a_path(store: Store, name: str):
    send(store, checkpoint("c1"), first_seq=1)
    with pytest.raises(UsageError) as caught:
        ask(store, CommandRequest(action="rollback", reason="x", checkpoint_id=name))
    assert (UNKNOWN, "healthy are c1") == (caught.value.code, caught.value.hint)


def test_only_a_healthy_checkpoint_can_be_named(store: Store):
    seq = send(store, checkpoint("c1", "candidate"), checkpoint("c2", "bad"), first_seq=1)
    for name in ("c1", "c2"):
        with pytest.raises(UsageError) as caught:
            ask(store, CommandRequest(action="rollback", reason="x", checkpoint_id=name))
        assert caught.value.code == CONFLICT
    send(store, checkpoint("c1"), first_seq=seq)
    view = ask(store, CommandRequest(action="rollback", reason="x", checkpoint_id="c1"))
    assert "c1" == view.command.checkpoint_id


def test_another_runs_checkpoint_is_unknown(store: Store):
    other = new_run_id(NOW + SECOND)
    send(store, RunStarted(info=RunInfo()), checkpoint("theirs"), run_id=other)
    with pytest.raises(UsageError):
        ask(store, CommandRequest(action="rollback", reason="x", checkpoint_id="theirs"))


def test_the_queue_of_waiting_commands_is_bounded_and_empties_by_itself(store: Store):
    for _ in range(MAX_PENDING):
        ask(store)
    with pytest.raises(UsageError) as caught:
        ask(store)
    assert caught.value.code == CONFLICT
    ask(store, now=NOW + 61 * SECOND)


def test_delivery_is_noted_once_and_takes_it_off_the_list(store: Store):
    number = ask(store).command.number
    for _ in range(2):
        view = mark_delivered(store, RUN, number, by="agent", now_unix_ns=NOW)
        assert "delivered" == view.status
    assert () == list_commands(store, RUN, now_unix_ns=NOW, status="pending")
    with store.read_transaction() as connection:
        actions = connection.execute(select(audit.c.action).order_by(audit.c.id)).scalars().all()
    assert ["command halt", "delivered"] == actions


def test_a_command_that_is_not_known_cannot_be_delivered(store: Store):
    with pytest.raises(UsageError) as caught:
        mark_delivered(store, RUN, 1, by="agent", now_unix_ns=NOW)
    assert caught.value.code == UNKNOWN


@pytest.mark.parametrize(
    "change",
    [
        {"action": "rollback"},
        {"reason": "something else"},
        {"number": NOW // 1_000 + 1},
        {"expires_unix_ns": NOW + 3600 * SECOND},
        {"issued_by": "bob"},
        {"control_signature": ""},
    ],
)
def test_what_the_control_key_did_not_sign_is_refused_and_leaves_nothing(store: Store, change):
    forged = msgspec.structs.replace(signed(RUN, HALT, now_unix_ns=NOW), **change)
    with pytest.raises(UnauthorizedError, match="not signed with the control key"):
        issue(store, RUN, forged, keys=keys(), now_unix_ns=NOW)
    assert [] == statuses(store)


def test_a_command_that_is_sent_again_or_to_another_run_is_refused(store: Store):
    command = signed(RUN, HALT, now_unix_ns=NOW)
    issue(store, RUN, command, keys=keys(), now_unix_ns=NOW)
    with pytest.raises(UsageError, match="not newer"):
        issue(store, RUN, command, keys=keys(), now_unix_ns=NOW)
    other = new_run_id(NOW + SECOND)
    send(store, RunStarted(info=RunInfo()), run_id=other)
    with pytest.raises(UsageError, match=f"for run {RUN}"):
        issue(store, other, command, keys=keys(), now_unix_ns=NOW)


def test_clocks_that_differ_are_told(store: Store):
    command = signed(RUN, HALT, now_unix_ns=NOW)
    with pytest.raises(UsageError, match=r"issued 90\.0 seconds in the future"):
        issue(store, RUN, command, keys=keys(), now_unix_ns=NOW - 90 * SECOND)
    with pytest.raises(UsageError, match=r"issued 90\.0 seconds ago, for 60 seconds") as caught:
        issue(store, RUN, command, keys=keys(), now_unix_ns=NOW + 90 * SECOND)
    assert "the clocks of the machines differ" in caught.value.hint


def test_the_audit_names_who_signed(store: Store):
    ask(store)
    with store.read_transaction() as connection:
        assert "alice (control key)" == connection.execute(select(audit.c.actor)).scalar_one()


def test_a_secret_in_a_reason_is_gone_before_it_is_signed_and_in_the_audit(store: Store):
    secret = "4f1Kq9ZtT7xWbV2mR8sYcD3e"
    request = msgspec.structs.replace(HALT, reason=f"leaked api_key={secret}")
    assert "leaked api_key=***" == ask(store, request).command.reason
    ours = signed(RUN, HALT, now_unix_ns=NOW + SECOND)
    of_another_client = sign_manual_command(
        msgspec.structs.replace(ours, reason=request.reason), keys()
    )
    issue(store, RUN, of_another_client, keys=keys(), now_unix_ns=NOW + SECOND)
    with store.read_transaction() as connection:
        details = connection.execute(select(audit.c.detail)).scalars().all()
    assert ["leaked api_key=***"] * 2 == details


def test_only_the_agent_beside_rank_0_marks_a_delivery(store: Store):
    number = ask(store).command.number
    for stranger in ("", "b" * 16):
        with pytest.raises(UnauthorizedError, match="on rank 0's node"):
            mark_delivered(store, RUN, number, by="x", now_unix_ns=NOW, incarnation=stranger)
    assert ["pending"] == statuses(store)
    view = mark_delivered(store, RUN, number, by="x", now_unix_ns=NOW, incarnation="a" * 16)
    assert "delivered" == view.status


def test_an_expired_command_is_not_handed_out(store: Store):
    number = ask(store).command.number
    late = NOW + 60 * SECOND
    assert () == list_commands(store, RUN, now_unix_ns=late, status="pending")
    assert ["expired"] == statuses(store, late)
    with pytest.raises(UsageError, match="expired"):
        mark_delivered(store, RUN, number, by="agent", now_unix_ns=late)


def test_expiry_is_written_down_once(store: Store):
    ask(store)
    assert 0 == commands.expire_commands(store, NOW)
    assert [1, 0] == [commands.expire_commands(store, NOW + 60 * SECOND) for _ in range(2)]
    assert {"expired": 1} == commands.count_commands(store)


def test_the_acknowledgement_is_what_became_of_it_even_after_expiry(store: Store):
    number = ask(store).command.number
    commands.expire_commands(store, NOW + 60 * SECOND)
    ack = CommandAck(number=number, status="done", step=31, detail="the run halts")
    send(store, CommandAcknowledged(ack=ack), first_seq=1)
    (view,) = list_commands(store, RUN, now_unix_ns=NOW + 70 * SECOND)
    assert ("done", 31, "the run halts") == (view.status, view.step, view.detail)
    assert view == mark_delivered(store, RUN, number, by="agent", now_unix_ns=NOW)


def test_an_acknowledgement_of_another_run_or_number_changes_nothing(store: Store):
    number = ask(store).command.number
    other = new_run_id(NOW + SECOND)
    ack = CommandAck(number=number, status="done", step=1, detail="")
    send(store, CommandAcknowledged(ack=ack), run_id=other)
    wrong = msgspec.structs.replace(ack, number=number + 1)
    send(store, CommandAcknowledged(ack=wrong), first_seq=1)
    assert ["pending"] == statuses(store)


# ------------------------------------------------------------------------------ watched folder


def test_in_a_watched_folder_the_command_is_left_signed_with_the_runs_key(
    store: Store, tmp_path: Path
):
    run_dir = RunDir.create(tmp_path, RUN)
    key = run_dir.command_key(create=True)
    view = ask(store, folders=[tmp_path / "other", tmp_path])
    assert "delivered" == view.status
    (command,) = run_dir.take_commands()
    assert command == verify_command(command, key, run_id=RUN, now_unix_ns=NOW, last_number=0)
    assert [] == run_dir.take_commands()


def test_a_command_that_was_changed_or_replayed_does_not_verify(store: Store, tmp_path: Path):
    run_dir = RunDir.create(tmp_path, RUN)
    key = run_dir.command_key(create=True)
    ask(store, folders=[tmp_path])
    (command,) = run_dir.take_commands()

    def verify(forged: Command, *, now: int = NOW, last: int = 0, run_id: str = RUN) -> None:
        verify_command(forged, key, run_id=run_id, now_unix_ns=now, last_number=last)

    forgeries = [
        {"action": "rollback"},
        {"expires_unix_ns": NOW + 10**15},
        {"number": command.number + 1},
        {"signature": ""},
    ]
    for change in forgeries:
        with pytest.raises(Exception, match="not signed"):
            verify(msgspec.structs.replace(command, **change))
    with pytest.raises(UsageError, match="not newer"):
        verify(command, last=command.number)
    with pytest.raises(UsageError, match="expired"):
        verify(command, now=command.expires_unix_ns)


def test_a_folder_without_a_key_leaves_the_command_for_an_agent(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    RunDir.create(tmp_path, RUN)
    assert "pending" == ask(store, folders=[tmp_path]).status
    assert "command.key is missing" in caplog.text


def test_a_key_that_others_can_read_is_not_used(store: Store, tmp_path: Path):
    run_dir = RunDir.create(tmp_path, RUN)
    run_dir.command_key(create=True)
    (run_dir.path / "command.key").chmod(0o644)
    assert stat.S_IMODE((run_dir.path / "command.key").stat().st_mode) == 0o644
    assert "pending" == ask(store, folders=[tmp_path]).status
    assert [] == run_dir.take_commands()
