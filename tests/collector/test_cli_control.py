import json
import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from tests.collector.alerting import decision, started
from tests.collector.rows import RUN, SECOND, START, Writer
from tests.support.control import run_cli, spool_of
from tests.support.served import Served
from trainvitals.errors import UnauthorizedError
from trainvitals.io.client import CollectorClient
from trainvitals.io.mailbox import verify_command
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import (
    Finding,
    FindingRaised,
    RunEnded,
)
from trainvitals.views import AlertsQuestion, CommandsQuestion, TableQuestion
from vitals_collector.queries.open import open_folder
from vitals_collector.storage.schema import audit

RANK0 = "c" * 16


@pytest.fixture
def known(served: Served, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A collector that the environment names, with one run that was rolled back."""
    monkeypatch.setenv("VITALS_COLLECTOR_URL", served.url)
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(served.settings.data / "tokens.json"))
    with served.client("ingest") as client:
        writer = Writer()
        writer.identity = msgspec.structs.replace(writer.identity, incarnation=RANK0)
        client.ingest(writer.steps([0]))
        client.ingest(writer.events(started(), decision(action="rollback", budget_left=2)))
    served.app.state.acting.engine.poll()
    return served


# --------------------------------------------------------------------------------------- replay


def test_replay_of_a_folder_says_that_it_is_as_recorded(run_dir: RunDir, capsys):
    assert 0 == run_cli("replay", str(run_dir.path), "--format", "json")
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert ["skip_step"] * 3 == [d["action"] for d in document["decisions"]]
    assert {"row", "step", "kind", "level", "reason"} == set(document["findings"][0])
    assert "all as recorded" in said.err


def test_replay_exits_with_1_where_a_decision_differs(run_dir: RunDir, capsys):
    more = Writer(started=1)
    spool_of(RunDir.create(run_dir.path.parent, RUN), [])
    spool = Spool(run_dir.agent_dir("node-b") / "spool", max_bytes=1 << 24, keep=True)
    spool.append(more.events(decision(99, step=3)))
    spool.close()
    assert 1 == run_cli("replay", "--dir", str(run_dir.path.parent))
    said = capsys.readouterr()
    assert "not as recorded" in said.err
    assert "decision skip_step" in said.out


def test_replay_of_nothing_is_a_usage_error(run_dir: RunDir, tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    assert 2 == run_cli("replay", "--dir", str(tmp_path / "empty"))
    assert "Traceback" not in capsys.readouterr().err


# -------------------------------------------------------------------------------------- command


def test_a_command_for_a_folder_is_left_there_signed(run_dir: RunDir, capsys):
    key = run_dir.command_key(create=True)
    arguments = ("rollback", "--reason", "bad data", "--checkpoint", "c1", "--format", "json")
    assert 0 == run_cli("command", str(run_dir.path), *arguments)
    (shown,) = json.loads(capsys.readouterr().out)
    (left,) = run_dir.take_commands()
    assert ("c1", shown["command"]["number"]) == (left.checkpoint_id, left.number)
    verify_command(left, key, run_id=RUN, now_unix_ns=left.issued_unix_ns, last_number=0)


def test_a_step_is_accepted_as_healthy_in_a_folder(run_dir: RunDir, capsys):
    run_dir.command_key(create=True)
    assert 2 == run_cli("command", str(run_dir.path), "accept", "--reason", "x")
    assert "vitals command RUN accept STEP" in capsys.readouterr().err
    assert 2 == run_cli("command", str(run_dir.path), "halt", "3", "--reason", "x")
    assert "argument is 3; halt takes none" in capsys.readouterr().err
    assert 0 == run_cli("command", str(run_dir.path), "accept", "3", "--reason", "a new task")
    assert "accept 3" in capsys.readouterr().out
    (left,) = run_dir.take_commands()
    assert ("accept", 3.0) == (left.action, left.argument)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("lr", "x0.5", "--reason", "r"), ("lr_factor", 0.5)),
        (("lr", "1e-4", "--reason", "r"), ("lr", 1e-4)),
        (("skip", "20", "--reason", "r"), ("skip", 20.0)),
        (("checkpoint",), ("checkpoint", 0.0)),
        (("pause",), ("pause", 0.0)),
        (("profile", "--steps", "5"), ("profile", 5.0)),
        (("profile",), ("profile", 10.0)),
        (("approve",), ("approve", 0.0)),
        (("veto", "12", "--reason", "r"), ("veto", 12.0)),
    ],
)
def test_what_a_person_types_is_what_the_run_is_asked(run_dir: RunDir, words, left):
    run_dir.command_key(create=True)
    assert 0 == run_cli("command", str(run_dir.path), *words)
    (command,) = run_dir.take_commands()
    assert left == (command.action, command.argument)
    assert command.reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lr", "fast", "--reason", "r"), "lr is given 'fast'; it must be a number"),
        (("accept", "inf", "--reason", "r"), "step inf; it must be a whole number"),
        (("skip", "--reason", "r"), "vitals command RUN skip 20"),
        (("profile", "--steps", "500"), "it must be 1 to 100"),
        (("skip", "20"), "give 1 to 500 printable ones"),
    ],
)
def test_what_cannot_be_asked_is_said_before_it_is_signed(run_dir: RunDir, words, said, capsys):
    run_dir.command_key(create=True)
    assert 2 == run_cli("command", str(run_dir.path), *words)
    assert said in capsys.readouterr().err
    assert [] == run_dir.take_commands()


def test_a_refusal_is_printed_with_its_reason_and_is_exit_code_1(
    known: Served, capsys, monkeypatch: pytest.MonkeyPatch
):
    whole = CollectorClient.ask

    def answered(client: CollectorClient, question):
        views = whole(client, question)
        if isinstance(question, CommandsQuestion):
            refused = {"status": "refused", "detail": "the run makes no checkpoints"}
            views = tuple(msgspec.structs.replace(view, **refused) for view in views)
        return views

    monkeypatch.setattr(CollectorClient, "ask", answered)
    assert 1 == run_cli("command", RUN, "checkpoint")
    assert "the run makes no checkpoints" in capsys.readouterr().out


def test_nobody_is_told_that_an_ended_run_will_take_a_command(run_dir: RunDir, capsys):
    relaunch = Writer(started=START + 60 * SECOND)
    spool_of(run_dir, [relaunch.events(RunEnded(state="finished"))])
    assert 2 == run_cli("command", str(run_dir.path), "halt", "--reason", "x")
    assert "is finished, so it cannot take a command" in capsys.readouterr().err
    assert not (run_dir.path / "commands").exists()


def test_without_a_collector_the_folder_here_is_meant(run_dir: RunDir, monkeypatch, capsys):
    monkeypatch.setenv("VITALS_DIR", str(run_dir.path.parent))
    run_dir.command_key(create=True)
    assert 0 == run_cli("command", RUN, "halt", "--reason", "x")
    assert 1 == len(run_dir.take_commands())
    assert 0 == run_cli("alerts", "list")
    assert "StepSkipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("halt",), "reason has 0 characters"),
        (("halt", "--reason", "x", "--ttl", "0"), "ttl_seconds is 0"),
        (("rollback", "--reason", "x", "--checkpoint", "../c1"), "announced none of that name"),
        (("halt", "--reason", "x"), "command.key is missing"),
    ],
)
def test_what_cannot_be_asked_is_said_in_words(run_dir: RunDir, arguments, said, capsys):
    assert run_cli("command", str(run_dir.path), *arguments) in (1, 2)
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed
    assert [] == run_dir.take_commands()


def test_a_command_through_the_collector_waits_for_the_agent(known: Served, capsys):
    assert 0 == run_cli(
        "command", RUN, "halt", "--reason", "wrong data", "--format", "json", "--wait", "0"
    )
    (view,) = json.loads(capsys.readouterr().out)
    assert "pending" == view["status"]
    with known.client("ingest") as agent:
        (waiting,) = agent.ask(CommandsQuestion(run_id=RUN, status="pending"))
        with pytest.raises(UnauthorizedError, match="on rank 0's node"):
            agent.mark_delivered(RUN, waiting.command.number, "f" * 16)
        agent.mark_delivered(RUN, waiting.command.number, RANK0)
        assert () == agent.ask(CommandsQuestion(run_id=RUN, status="pending"))
    assert 0 == run_cli("command", RUN[:12], "list")
    assert "delivered" in capsys.readouterr().out


def test_without_a_collector_the_way_out_is_said(run_dir: RunDir, capsys):
    assert 2 == run_cli("command", RUN, "halt", "--reason", "x")
    assert "start `vitals collector`" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- alerts


def test_alerts_of_a_folder_are_what_the_run_would_raise(run_dir: RunDir, capsys):
    assert 0 == run_cli("alerts", "list", "--dir", str(run_dir.path.parent), "--format", "json")
    listed = {alert["name"] for alert in json.loads(capsys.readouterr().out)}
    assert "StepSkipped" in listed
    with open_folder(run_dir.path.parent) as opened:
        assert listed == {alert.name for alert in opened.reader.ask(AlertsQuestion())}
        table = opened.reader.ask(TableQuestion(table="alerts"))
        assert listed == set(table.data[table.columns.index("name")])


def test_the_alerts_of_a_folder_are_told_newest_first(run_dir: RunDir):
    more = Writer("rank:1")
    said = [more.events(decision(40 + i, step=i, action="rollback")) for i in (9, 3)]
    spool_of(run_dir, said)
    with open_folder(run_dir.path.parent) as opened:
        alerts = opened.reader.ask(AlertsQuestion())
    assert 1 < len({alert.started_unix_ns for alert in alerts})
    assert sorted(alerts, key=lambda alert: -alert.started_unix_ns) == list(alerts)


def alerts_of(folder: Path, capsys) -> dict[str, dict[str, object]]:
    assert 0 == run_cli("alerts", "list", "--dir", str(folder), "--format", "json")
    return {alert["name"]: alert for alert in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("last_step", "state"), [(150, "resolved"), (80, "firing")], ids=["long ago", "just now"]
)
def test_what_a_live_run_got_over_is_not_firing_in_its_folder(tmp_path, last_step, state, capsys):
    """Its detectors' findings are over after 100 healthy steps, as its skips are."""
    writer = Writer(started=time.time_ns() - last_step * SECOND)
    finding = Finding(
        kind="nonfinite_state", level="advisory", step=40, detector="x", reason="a NaN moment"
    )
    parts = [
        writer.events(started()),
        writer.steps(range(last_step + 1), loss=1.0),
        writer.events(FindingRaised(finding=finding), decision(step=40), step=40),
    ]
    spool_of(RunDir.create(tmp_path / "runs", RUN), parts)
    alerts = alerts_of(tmp_path / "runs", capsys)
    assert {"NonFiniteState": state, "StepSkipped": state} == {
        name: alert["state"] for name, alert in alerts.items()
    }
    assert {writer.time_of(40)} == {alert["started_unix_ns"] for alert in alerts.values()}


@pytest.mark.parametrize(
    ("name", "last_words"),
    [
        ("TrainingHalted", (decision(action="halt", step=50), RunEnded(state="halted"))),
        ("TrainingHalted", (decision(action="halt", step=50),)),
        ("RunFailed", (RunEnded(state="failed", reason="ValueError: x"),)),
        ("RunLost", ()),
    ],
    ids=["halted", "killed while it halted", "failed", "lost"],
)
def test_an_ended_run_is_in_alarm_since_it_ended_not_since_it_is_read(
    tmp_path, name, last_words, capsys
):
    writer, agent = Writer(), Writer("node:node-a")
    parts = [
        writer.events(started()),
        writer.steps(range(51), loss=1.0),
        agent.node_rows([60]),  # the agent of its node outlives it
    ]
    parts += [writer.events(event, step=50) for event in last_words]
    spool_of(RunDir.create(tmp_path / "runs", RUN), parts)
    assert writer.time_of(50) == alerts_of(tmp_path / "runs", capsys)[name]["started_unix_ns"]


def test_an_alert_is_listed_acknowledged_and_silenced(known: Served, capsys):
    assert 0 == run_cli("alerts")
    assert "TrainingRolledBack" in capsys.readouterr().out
    with known.client() as client:
        (alert,) = client.ask(AlertsQuestion(state="firing"))
    assert 0 == run_cli("alerts", "ack", alert.fingerprint, "--by", "alice")
    assert "alice" in capsys.readouterr().out
    silence = ("--hours", "2", "--reason", "known", "--format", "json")
    assert 0 == run_cli("alerts", "silence", alert.fingerprint, *silence)
    (shown,) = json.loads(capsys.readouterr().out)
    assert ("alice", "known") == (shown["acknowledged_by"], shown["silence_reason"])


def test_a_secret_in_the_reason_of_a_silence_is_kept_nowhere(known: Served, capsys):
    reason = ("--reason", "api_key=4f1Kq9ZtT7xWbV2mR8sYcD3e is changed", "--format", "json")
    assert 0 == run_cli("alerts", "silence", "TrainingRolledBack", "--run", RUN, *reason)
    assert 0 == run_cli("alerts", "silence", "--match", "name=~Training.*", *reason)
    assert 0 == run_cli("alerts", "silences", "--format", "json")
    with known.store.read_transaction() as connection:
        audited = [*connection.execute(select(audit.c.detail)).scalars()]
    said = capsys.readouterr().out + "".join(audited)
    assert "4f1Kq9" not in said
    assert "api_key=*** is changed" in said


def test_an_alert_is_silenced_by_its_name(known: Served, capsys):
    how = ("--reason", "known", "--format", "json")
    assert 0 == run_cli("alerts", "silence", "TrainingRolledBack", "--run", RUN, *how)
    (shown,) = json.loads(capsys.readouterr().out)
    assert ("TrainingRolledBack", "known") == (shown["name"], shown["silence_reason"])
    assert 2 == run_cli("alerts", "ack", "TrainingRolled")
    assert "there is no alert 'TrainingRolled'" in capsys.readouterr().err


def test_all_alerts_that_fit_are_silenced_those_to_come_included(known: Served, capsys):
    how = ("--run", RUN, "--reason", "drill", "--format", "json")
    assert 0 == run_cli("alerts", "silence", "--match", "name=~Training.*", *how)
    (shown,) = json.loads(capsys.readouterr().out)
    assert (["name=~Training.*", f"run={RUN}"], 1) == (shown["matchers"], shown["num_firing"])
    with known.client() as client:
        (alert,) = client.ask(AlertsQuestion(state="firing"))
    assert "drill" == alert.silence_reason
    assert 2 == run_cli("alerts", "silence", "--reason", "x"), "neither an alert nor a matcher"
    assert 2 == run_cli("alerts", "silence", "x", "--starts-in", "2", "--reason", "x")


def test_a_silence_is_listed_and_ended_early(known: Served, capsys):
    assert 0 == run_cli("alerts", "silences")
    assert "drill" not in capsys.readouterr().out
    run_cli("alerts", "silence", "--match", "name=~Training.*", "--reason", "drill")
    capsys.readouterr()
    assert 0 == run_cli("alerts", "silences", "--format", "json")
    (silence,) = json.loads(capsys.readouterr().out)
    assert ("drill", 1) == (silence["reason"], silence["num_firing"])
    assert 0 == run_cli("alerts", "unsilence", str(silence["id"]), "--by", "alice")
    assert 0 == run_cli("alerts", "silences", "--format", "json")
    assert [] == json.loads(capsys.readouterr().out.splitlines()[-1])
    with known.client() as client:
        (alert,) = client.ask(AlertsQuestion(state="firing"))
    assert "" == alert.silence_reason
    assert 2 == run_cli("alerts", "unsilence", str(silence["id"]))
    assert "`vitals alerts silences` shows" in capsys.readouterr().err


def test_an_unknown_alert_or_state_is_a_usage_error(known: Served, capsys):
    assert 2 == run_cli("alerts", "ack", "nope")
    assert 2 == run_cli("alerts", "list", "--state", "burning")
    assert "Traceback" not in capsys.readouterr().err


def test_a_read_token_cannot_command(known: Served, tmp_path: Path, monkeypatch, capsys):
    only_read = tmp_path / "read.json"
    only_read.write_text(json.dumps({"read": known.tokens.read}))
    only_read.chmod(0o600)
    monkeypatch.setenv("VITALS_TOKEN_FILE", str(only_read))
    assert 0 == run_cli("alerts")
    assert 1 == run_cli("command", RUN, "halt", "--reason", "x")
    with known.client() as client:
        assert () == client.ask(CommandsQuestion(run_id=RUN))
