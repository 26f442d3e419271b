import msgspec
import pytest

from tests.agent.builders import RUN
from tests.agent.stub_collector import StubCollector
from tests.support.agent_commands import NS, command, in_mailbox, pending
from trainvitals.errors import VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.io.control_key import make_control_key, sign_manual_command
from trainvitals.io.mailbox import sign_command, verify_command
from trainvitals.records import CommandAck, CommandAcknowledged
from trainvitals.views import CommandView


@pytest.fixture
def stub():
    made = StubCollector()
    yield made
    made.close()


@pytest.fixture
def client(stub):
    with CollectorClient(stub.url, "token", timeout=60.0) as made:
        yield made


def test_a_command_from_the_collector_reaches_the_mailbox_signed_and_is_marked_delivered(
    world, stub, client
):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    agent.cycle(0.0)
    found = in_mailbox(world)
    key = world.run_dir().command_key()
    assert found == verify_command(
        found, key, run_id=RUN, now_unix_ns=world.clock.now_ns, last_number=6
    )
    assert [7] == stub.delivered
    assert 1 == agent.relay.num_delivered


def test_an_accepted_step_reaches_the_mailbox_with_the_signature_over_it(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7, action="accept", argument=31_219.0))
    agent.cycle(0.0)
    found = in_mailbox(world)
    assert ("accept", 31_219.0) == (found.action, found.argument)
    how = {"run_id": RUN, "now_unix_ns": world.clock.now_ns, "last_number": 6}
    key = world.run_dir().command_key()
    assert found == verify_command(found, key, **how)
    with pytest.raises(VitalsError, match="signed"):
        verify_command(msgspec.structs.replace(found, argument=1.0), key, **how)


def test_the_next_command_waits_until_rank_zero_has_answered_the_last(world, stub, client):
    rank = world.rank()
    rank.step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7), command(world, 8))
    agent.cycle(0.0)
    stub.commands = pending(world, command(world, 8))
    agent.cycle(1.0)
    assert 7 == in_mailbox(world).number
    rank.say(CommandAcknowledged(ack=CommandAck(number=7, status="done", step=1, detail="")))
    agent.cycle(2.0)
    assert 8 == in_mailbox(world).number
    assert [7, 8] == stub.delivered


def test_a_command_that_is_never_answered_stops_blocking_when_it_expires(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7, ttl_seconds=5.0), command(world, 8))
    agent.cycle(0.0)
    world.clock.now_ns += 6 * NS
    agent.cycle(6.0)
    assert 8 == in_mailbox(world).number


def test_a_file_signed_with_the_runs_key_is_delivered_without_any_collector(world):
    world.rank().step(0)
    agent = world.agent()
    run_dir = world.run_dir()
    run_dir.put_command(sign_command(command(world, 9), run_dir.command_key()))
    agent.cycle(0.0)
    assert 9 == in_mailbox(world).number


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"signature": "0" * 64}, "not signed with this run's key"),
        ({"argument": 3.0}, "not signed with this run's key"),
        ({"signature": ""}, "not signed with this run's key"),
    ],
)
def test_a_file_without_the_right_signature_is_refused_and_said(world, change, why):
    world.rank().step(0)
    agent = world.agent()
    run_dir = world.run_dir()
    signed = sign_command(command(world, 9), run_dir.command_key())
    run_dir.put_command(msgspec.structs.replace(signed, **change))
    agent.cycle(0.0)
    agent.cycle(1.0)
    assert in_mailbox(world) is None
    (note,) = [row.event for row in world.events() if row.event.code == "command_refused"]
    assert why in note.text


def test_an_expired_command_or_one_for_another_run_never_reaches_the_mailbox(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    late = command(world, 7, ttl_seconds=-1.0)
    stray = command(world, 8, run_id="01JD0000000000000000000009")
    stub.commands = pending(world, late, stray)
    for second in range(5):
        agent.cycle(float(second))
    assert in_mailbox(world) is None
    assert [] == stub.delivered
    assert 2 == agent.faults.counts["relay.refused"]  # said once each, not at every poll


def test_a_node_without_rank_zero_delivers_nothing_even_with_a_mailbox_left_behind(
    world, stub, client
):
    gone = world.rank(0, pid=0)  # rank 0 lived here once
    gone.step(0)
    world.rank(1).step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    run_dir = world.run_dir()
    run_dir.put_command(sign_command(command(world, 9), run_dir.command_key()))
    agent.cycle(0.0)
    agent.cycle(1.0)
    assert in_mailbox(world) is None
    assert [9] == [each.number for each in run_dir.take_commands()]  # left for the other node


def test_a_restarted_agent_does_not_put_a_command_twice_but_says_that_it_was_delivered(
    world, stub, client
):
    world.rank().step(0)
    first = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    first.cycle(0.0)
    first.stop()
    stub.delivered.clear()  # the collector did not hear of it
    again = world.agent(client=client)
    again.cycle(0.0)
    assert ([7], 0) == (stub.delivered, again.relay.num_delivered)
    assert "command_refused" not in world.notes()


def test_a_delivery_that_the_collector_did_not_hear_of_is_said_again(world, stub, client):
    rank = world.rank()
    rank.step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    agent.cycle(0.0)
    stub.delivered.clear()
    rank.say(CommandAcknowledged(ack=CommandAck(number=7, status="done", step=1, detail="")))
    agent.cycle(1.0)
    agent.cycle(2.0)
    assert set(stub.delivered) == {7}
    assert 1 == agent.relay.num_delivered


def test_a_run_without_a_key_refuses_commands_and_goes_on(world, stub, client):
    rank = world.rank()
    (world.run_dir().path / "command.key").unlink()
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    rank.step(0)
    agent.cycle(0.0)
    assert in_mailbox(world) is None
    assert ["command_refused"] == [n for n in world.notes() if n.startswith("command")]


def test_no_command_is_asked_for_while_the_collector_is_away_more_often_than_the_backoff_allows(
    world, stub, client
):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.failing = True
    for second in range(60):
        agent.cycle(float(second))
    asked = [path for method, path in stub.requests if method == "GET"]
    assert 1 <= len(asked) < 30


def test_no_command_is_asked_for_before_the_time_that_the_collector_named(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.failing, stub.retry_after = True, 40
    for second in range(40):
        agent.cycle(float(second))
    assert 1 == sum(method == "GET" for method, _ in stub.requests)
    stub.failing = False
    agent.cycle(81.0)
    assert 2 == sum(method == "GET" for method, _ in stub.requests)


# -------------------------------------------------------------------------- who is not believed


@pytest.mark.parametrize(
    "change",
    [
        {"control_signature": ""},
        {"control_signature": "0" * 128},
        {"control_signature": "no hex"},
        {"action": "halt"},
        {"argument": 3.0},
        {"checkpoint_id": "c9"},
        {"issued_by": "root"},
        {"number": 8},
        {"expires_unix_ns": 2**62},
    ],
)
def test_who_sits_at_the_collectors_port_cannot_have_the_agent_sign(world, stub, client, change):
    world.rank().step(0)
    agent = world.agent(client=client)
    (genuine,) = pending(world, command(world, 7))
    forged = msgspec.structs.replace(genuine.command, **change)
    stub.commands = [CommandView(command=forged, status="pending")]
    for second in range(3):
        agent.cycle(float(second))
    assert (None, []) == (in_mailbox(world), stub.delivered)
    (note,) = [row.event for row in world.events() if row.event.code == "command_refused"]
    assert "not signed with the control key" in note.text
    stub.commands = [genuine]  # what was made up keeps nothing genuine away
    agent.cycle(3.0)
    assert 7 == in_mailbox(world).number


def test_a_made_up_number_does_not_keep_later_commands_away(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    made_up = CommandView(command=command(world, 2**52), status="pending")
    stub.commands = [made_up, *pending(world, command(world, 7))]
    agent.cycle(0.0)
    assert 7 == in_mailbox(world).number


def test_a_key_of_the_takers_own_does_not_do(world, stub, client, tmp_path):
    world.rank().step(0)
    agent = world.agent(client=client)
    make_control_key(tmp_path)
    forged = sign_manual_command(command(world, 7), tmp_path)
    stub.commands = [CommandView(command=forged, status="pending")]
    agent.cycle(0.0)
    assert in_mailbox(world) is None


def test_a_signed_command_of_another_run_or_one_sent_again_is_refused(world, stub, client):
    rank = world.rank()
    rank.step(0)
    agent = world.agent(client=client)
    other = "01JD0000000000000000000009"
    stub.commands = pending(world, command(world, 6, run_id=other), command(world, 7))
    agent.cycle(0.0)
    assert 7 == in_mailbox(world).number
    rank.say(CommandAcknowledged(ack=CommandAck(number=7, status="done", step=1, detail="")))
    stub.commands = pending(world, command(world, 7), command(world, 5))
    agent.cycle(1.0)
    agent.cycle(2.0)
    assert 7 == in_mailbox(world).number
    assert 1 == agent.relay.num_delivered


def test_without_the_public_key_no_command_passes_and_the_way_out_is_said(world, stub, client):
    world.rank().step(0)
    agent = world.agent(client=client)
    stub.commands = pending(world, command(world, 7))
    (world.keys / "control.pub").unlink()
    agent.cycle(0.0)
    assert in_mailbox(world) is None
    (note,) = [row.event for row in world.events() if row.event.code == "command_refused"]
    assert "control.pub" in note.text
