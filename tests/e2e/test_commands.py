"""A person steers a training from the command line, through collector, agent and mailbox."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tests.agent.stub_collector import StubCollector
from tests.e2e.lab import Lab, free_port, open_lab, until
from tests.trainer_hooks.short_demo import SMALL
from trainvitals.io.client import CollectorClient
from trainvitals.io.control_key import make_control_key, sign_manual_command
from trainvitals.io.mailbox import Mailbox, sign_command
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.records import Command, CommandAcknowledged, decode_events
from trainvitals.views import (
    AlertsQuestion,
    AlertView,
    CommandRequest,
    CommandsQuestion,
    CommandView,
    DecisionsQuestion,
    DecisionView,
    EventsQuestion,
    RunDetail,
    RunQuestion,
    RunsQuestion,
)
from trainvitals.wire import decode_batch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RANKS = ("--standalone", "--nproc-per-node", "2")
ONE = ("--standalone", "--nproc-per-node", "1")


@dataclass
class Steered:
    """What was seen of a run that was rolled back, halted, kept from starting, and resumed."""

    accepted: CommandView | None = None
    others: dict[str, CommandView] = field(default_factory=dict)
    rolled_back: CommandView | None = None
    halted: CommandView | None = None
    states: list[str] = field(default_factory=list)
    decisions: tuple[DecisionView, ...] = ()
    notes: list[str] = field(default_factory=list)
    profiles: list[Path] = field(default_factory=list)
    alerts: tuple[AlertView, ...] = ()
    marker: dict = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)
    detail: RunDetail | None = None


def command(
    lab: Lab, client: CollectorClient, action: str, *argument: str, reason: str
) -> CommandView:
    """Propose it as a person does, and wait for the answer."""
    url, tokens = client.url, lab.tokens
    where = ("--collector", url, "--token-file", tokens, "--format", "json")
    done = lab.vitals("command", lab.run_id(), action, *argument, "--reason", reason, *where)
    assert 0 == done.returncode, done.stderr
    (sent,) = json.loads(done.stdout)
    number = sent["command"]["number"]

    def answer() -> CommandView:
        (view,) = [
            v
            for v in client.ask(CommandsQuestion(run_id=lab.run_id()))
            if v.command.number == number
        ]
        return view

    until(lambda: answer().status not in ("pending", "delivered"), f"{action} is answered")
    return answer()


def state(client: CollectorClient, run_id: str) -> str:
    return client.ask(RunQuestion(run_id=run_id)).summary.state


def steer(lab: Lab, client: CollectorClient) -> Steered:
    """Train; accept a step, roll back, halt; start again in vain; resume; start again."""
    seen = Steered()
    # All starts use the small model, or its checkpoint would not fit.
    environ = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens), SMALL: "1"}
    training = lab.train(*RANKS, steps=100_000, mode="heal", **environ)
    run_id = lab.run_id()
    until(
        lambda: (
            run_id in {run.run_id for run in client.ask(RunsQuestion())}
            and client.ask(RunQuestion(run_id=run_id)).summary.last_step >= 25
        ),
        "some steps are trained",
    )
    seen.accepted = command(lab, client, "accept", "20", reason="a new task")
    for words in (
        ("pause",), ("lr", "x0.5"), ("checkpoint",), ("resume",), ("skip", "5"), ("profile",),
        ("lr", "x1"),
    ):  # fmt: skip
        seen.others[" ".join(words)] = command(lab, client, *words, reason="to see")
    seen.rolled_back = command(lab, client, "rollback", reason="bad data since nine")
    seen.states.append(state(client, run_id))
    seen.halted = command(lab, client, "halt", reason="enough")
    seen.exit_codes["halted"] = training.wait(60)
    seen.outputs["halted"] = lab.log("training").read_text()
    until(lambda: state(client, run_id) == "halted", "the collector knows of the halt")
    until(lambda: client.ask(AlertsQuestion(run_id=run_id, state="firing")), "an alert fires")
    seen.states.append(state(client, run_id))
    seen.marker = json.loads((lab.runs / run_id / "HALTED").read_text())

    environ["VITALS_RUN_ID"] = run_id
    again = lab.train(*ONE, steps=3, mode="heal", name="refused", **environ)
    seen.exit_codes["refused"] = again.wait(60)
    seen.outputs["refused"] = lab.log("refused").read_text()
    seen.alerts = client.ask(AlertsQuestion(run_id=run_id))
    resumed = lab.vitals("resume", run_id)
    seen.exit_codes["resume"] = resumed.returncode
    seen.outputs["resume"] = resumed.stdout
    resumed = lab.train(*ONE, steps=3, mode="heal", name="resumed", **environ)
    seen.exit_codes["resumed"] = resumed.wait(60)
    seen.outputs["resumed"] = lab.log("resumed").read_text()
    until(lambda: state(client, run_id) == "finished", "the run is seen to finish")
    seen.states.append(state(client, run_id))
    seen.decisions = client.ask(DecisionsQuestion(run_id=run_id))
    events = client.ask(EventsQuestion(run_id=run_id, kind="Note"))
    seen.notes = [event.text for event in events]
    seen.profiles = [*(lab.runs / run_id / "profiles").glob("step-*.json.gz")]
    seen.detail = client.ask(RunQuestion(run_id=run_id))
    return seen


@pytest.fixture(scope="module")
def steered(tmp_path_factory):
    with open_lab(tmp_path_factory.mktemp("commands")) as lab:
        port = free_port()
        lab.collector(port)
        lab.agent(port)
        with lab.client(port) as client:
            yield steer(lab, client)


def test_a_step_that_a_person_accepts_reaches_the_ladder(steered):
    assert "done" == steered.accepted.status, steered.accepted
    assert "the level at step 20 counts as normal" in steered.accepted.detail
    made = steered.decisions[0].decision
    assert ("accept_level", "operator_accepted", 20.0) == (
        made.action, made.rule, made.evidence["accepted_step"],
    )  # fmt: skip


def test_what_changes_the_steps_to_come_is_done_on_all_ranks_at_one_step(steered):
    assert {"done"} == {view.status for view in steered.others.values()}, steered.others
    paused, resumed = steered.others["pause"], steered.others["resume"]
    # Nothing was trained in between, and the learning rate was set in the pause.
    assert paused.step <= steered.others["lr x0.5"].step == resumed.step <= paused.step + 1
    assert "training continues with step" in resumed.detail
    skipped = [
        view.decision
        for view in steered.decisions
        if (view.decision.action, view.decision.rule) == ("skip_step", "command")
    ]
    assert 5 == len(skipped)
    assert steered.others["skip 5"].detail == (
        f"the updates of steps {skipped[0].step} to {skipped[-1].step} are skipped"
    )
    assert [] == [text for text in steered.notes if "disagree" in text]


def test_a_profile_lies_in_the_runs_folder(steered):
    assert steered.others["profile"].status == "done"
    assert len(steered.profiles) in (1, 2), "the slowest rank can be the typical one too"


def test_a_rollback_that_was_asked_for_is_done_and_in_the_ledger(steered):
    assert "done" == steered.rolled_back.status, steered.rolled_back
    ledger = [v.decision for v in steered.decisions[1:] if v.decision.action != "skip_step"]
    assert [("rollback", "command", True), ("halt", "command", True)] == [
        (d.action, d.rule, d.acted) for d in ledger
    ]
    assert "bad data since nine" == steered.rolled_back.command.reason
    assert steered.rolled_back.step == ledger[0].decided_at_step
    assert ledger[0].rollback_to_step < ledger[0].step


def test_a_halt_ends_the_training_durably_and_says_why(steered):
    assert "done" == steered.halted.status, steered.halted
    assert 0 != steered.exit_codes["halted"]
    assert "TrainingHalted" in steered.outputs["halted"]
    assert steered.decisions[-1].decision.step == steered.marker["step"]
    assert steered.marker["reason"]
    assert ["running", "halted", "finished"] == steered.states


def test_a_halt_pages_once(steered):
    pages = [(a.name, a.severity, a.state) for a in steered.alerts if a.severity == "page"]
    assert [("TrainingHalted", "page", "firing")] == pages


def test_a_halted_run_does_not_start_again_until_it_is_resumed(steered):
    assert 0 != steered.exit_codes["refused"]
    assert "TrainingHalted" in steered.outputs["refused"]
    assert "vitals resume" in steered.outputs["refused"]
    assert 0 == steered.exit_codes["resume"]
    assert steered.marker["reason"] in steered.outputs["resume"]
    assert 0 == steered.exit_codes["resumed"], steered.outputs["resumed"][-3000:]


def test_no_row_is_lost_over_all_starts_of_the_run(steered):
    assert {0} == {source.num_lost_rows for source in steered.detail.sources}
    assert 3 == sum(s.source.startswith("rank:") for s in steered.detail.sources)


# ---------------------------------------------------------------- who sits at the collector's port


def test_who_answers_as_the_collector_cannot_act_on_the_run(tmp_path):
    stub = StubCollector()
    try:
        with open_lab(tmp_path) as lab:
            lab.data.mkdir(parents=True)
            make_control_key(lab.data)
            lab.tokens.touch(0o600)
            lab.tokens.write_text('{"read": "r", "ingest": "i", "control": "c"}')
            lab.agent(stub.port, "--collector", stub.url)
            environ = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens)}
            training = lab.train(*RANKS, steps=100_000, mode="heal", **environ)
            run_id = lab.run_id()
            until(lambda: stub.batches, "rows are sent")
            genuine, forged = _orders(lab, run_id)
            stub.commands = [CommandView(command=forged, status="pending")]
            until(lambda: "not signed with the control key" in _events(stub), "it is refused")
            assert [] == stub.delivered
            # Nor can who has the agent's run key on the node, but not the control key.
            run_dir = RunDir.open(lab.runs / run_id)
            with Mailbox.open(private_base(lab.environ()) / run_id / "mailbox") as mailbox:
                mailbox.put(sign_command(forged, run_dir.command_key()))
            until(lambda: "invalid" in _events(stub), "rank 0 refuses it")
            assert training.poll() is None
            stub.commands = [CommandView(command=genuine, status="pending")]
            assert 0 != training.wait(60)
            assert "TrainingHalted" in lab.log("training").read_text()
    finally:
        stub.close()


def test_a_captured_answer_that_is_sent_again_is_not_carried_out_twice(tmp_path):
    stub = StubCollector()
    try:
        with open_lab(tmp_path) as lab:
            lab.data.mkdir(parents=True)
            make_control_key(lab.data)
            lab.tokens.touch(0o600)
            lab.tokens.write_text('{"read": "r", "ingest": "i", "control": "c"}')
            agent = lab.agent(stub.port, "--collector", stub.url)
            environ = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens)}
            training = lab.train(*RANKS, steps=100_000, mode="heal", **environ)
            run_id = lab.run_id()
            until(lambda: stub.batches, "rows are sent")
            captured = CommandView(command=_order(lab, run_id, "lr", 0.5), status="pending")
            stub.commands = [captured]
            until(lambda: "done" in _answers_to(stub, captured), "it is carried out")
            agent.kill()  # what it has delivered is forgotten with it
            agent.wait()
            lab.agent(stub.port, "--collector", stub.url)
            run_dir = RunDir.open(lab.runs / run_id)
            with Mailbox.open(private_base(lab.environ()) / run_id / "mailbox") as mailbox:
                mailbox.put(sign_command(captured.command, run_dir.command_key()))
            later = CommandView(command=_order(lab, run_id, "lr", 0.25), status="pending")
            stub.commands = [captured, later, captured]
            until(lambda: "done" in _answers_to(stub, later), "the next one is carried out")
            assert ["done"] == _answers_to(stub, captured)
            assert ["done"] == _answers_to(stub, later)
            assert training.poll() is None
    finally:
        stub.close()


def _order(lab: Lab, run_id: str, action: str, argument: float) -> Command:
    """Return a command as a person signs it."""
    request = CommandRequest(action=action, argument=argument, reason="to see")
    return sign_manual_command(
        request.command(run_id, issued_by="ada", now_unix_ns=time.time_ns()), lab.data
    )


def _answers_to(stub: StubCollector, view: CommandView) -> list[str]:
    """Return each answer of rank 0 to the command."""
    batches = [decode_batch(raw) for raw in stub.batches]
    rows = [
        row
        for batch in batches
        if batch.header.stream == "events"
        for row in decode_events(batch.header.stream_schema, batch.rows)
    ]
    acks = {
        (row.seq, row.event.ack.status)
        for row in rows
        if isinstance(row.event, CommandAcknowledged)
        and row.event.ack.number == view.command.number
    }
    return [status for _, status in sorted(acks)]


def _orders(lab: Lab, run_id: str) -> tuple[Command, Command]:
    """Return a halt as a person signs it, and one with a made-up number and the same signature."""
    request = CommandRequest(action="halt", reason="enough")
    genuine = sign_manual_command(
        request.command(run_id, issued_by="ada", now_unix_ns=time.time_ns()), lab.data
    )
    return genuine, msgspec.structs.replace(genuine, number=genuine.number - 1)


def _events(stub: StubCollector) -> str:
    return b"".join(stub.batches).decode(errors="replace")
