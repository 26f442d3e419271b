"""A person steers a training from the command line, through collector, agent and mailbox."""

import json
from dataclasses import dataclass, field

import pytest

from tests.e2e.lab import Lab, free_port, open_lab, until
from trainvitals.io.client import CollectorClient
from trainvitals.views import (
    AlertsQuestion,
    AlertView,
    CommandsQuestion,
    CommandView,
    DecisionsQuestion,
    DecisionView,
    RunDetail,
    RunQuestion,
    RunsQuestion,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RANKS = ("--standalone", "--nproc-per-node", "2")
ONE = ("--standalone", "--nproc-per-node", "1")


@dataclass
class Steered:
    """What was seen of a run that was rolled back, halted, kept from starting, and resumed."""

    accepted: CommandView | None = None
    rolled_back: CommandView | None = None
    halted: CommandView | None = None
    states: list[str] = field(default_factory=list)
    decisions: tuple[DecisionView, ...] = ()
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
    environ = {"VITALS_AGENT": "off", "VITALS_TOKEN_FILE": str(lab.tokens)}
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


def test_a_rollback_that_was_asked_for_is_done_and_in_the_ledger(steered):
    assert "done" == steered.rolled_back.status, steered.rolled_back
    ledger = [view.decision for view in steered.decisions[1:]]
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
    assert steered.decisions[2].decision.step == steered.marker["step"]
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
