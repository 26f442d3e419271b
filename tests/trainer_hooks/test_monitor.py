"""One process: what the monitor changes in a loop (nothing), skips, and brings back."""

import gzip
import json
import os
import sys
import threading
import time
import warnings
from contextlib import contextmanager

import msgspec
import pytest
import torch

import trainer_hooks
from tests.support.forked import TRAINING
from tests.support.inside import (
    acks_of,
    device_of,
    facts_of,
    is_paused,
    run_of,
    snapshots_of,
    store_of,
)
from tests.support.watched import Loop, assert_same, own_place, run_directory, send_command, until  # noqa: F401
from tests.trainer_hooks.torchrun import Trained, reader_of, wait_for_agents
from trainvitals.errors import CheckpointError, ConfigError, TrainingHalted, UsageError
from trainvitals.io.mailbox import Mailbox, sign_command
from trainvitals.io.private import private_base
from trainvitals.io.rundir import RunDir
from trainvitals.records import Command
from trainvitals.views import DecisionsQuestion, RunQuestion, RunsQuestion, SeriesQuestion


@pytest.mark.parametrize("mode", ["observe", "guard", "heal"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_run_is_bit_for_bit_what_it_was_without_us(mode, fused):
    bare = Loop(fused=fused)
    for _ in range(50):
        bare.bare_step()
    plain = bare.state()
    ours = Loop(fused=fused, mode=mode, checkpoints=True)
    with ours.monitor as monitor:
        for _ in range(50):
            monitor.step(ours.forward())
        after = ours.state()
    assert_same(plain, after)
    assert monitor.swallowed_errors == {}


def test_off_trains_as_before_and_writes_nothing(tmp_path):
    bare = Loop()
    for _ in range(5):
        bare.bare_step()
    ours = Loop(mode="off")
    for _ in range(5):
        ours.monitor.step(ours.forward())
    assert_same(bare.state(), ours.state())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_step_leaves_no_trace_but_the_schedule(fused):
    loop = Loop(fused=fused, mode="guard")
    with loop.monitor as monitor:
        for _ in range(5):
            monitor.step(loop.forward())
        before = loop.state()
        loss = loop.forward(scale=float("nan"))
        monitor.step(loss)
        after = loop.state()
    for part in ("model", "optimizer"):
        assert_same(before[part], after[part], part)
    assert after["scheduler"]["last_epoch"] == before["scheduler"]["last_epoch"] + 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_rollback_brings_back_every_bit(fused):
    loop = Loop(fused=fused, mode="heal", checkpoints=True)
    kept, outcomes = {}, []
    with loop.monitor as monitor:
        broken = False
        while monitor.step_index < 70:
            kept.setdefault(monitor.step_index, loop.state())
            if monitor.step_index == 60 and not broken:
                broken = True
                with torch.no_grad():
                    loop.model[0].weight.fill_(float("nan"))
            outcomes.append(monitor.step(loop.forward()))
            if outcomes[-1].rolled_back_to is not None:
                back = outcomes[-1].rolled_back_to
                assert_same(kept[back], loop.state())
                assert monitor.step_index == back
    rollbacks = [o.rolled_back_to for o in outcomes if o.rolled_back_to is not None]
    assert len(rollbacks) == 1
    assert 0 < rollbacks[0] <= 40
    assert torch.isfinite(loop.model[0].weight).all()


def test_without_checkpoints_nan_parameters_halt_and_the_relaunch_stays_stopped(monkeypatch):
    loop = Loop(mode="guard")
    monitor = loop.monitor
    with pytest.raises(TrainingHalted, match="non-finite"), monitor:
        for step in range(40):
            if step == 30:
                with torch.no_grad():
                    loop.model[0].weight.fill_(float("nan"))
            monitor.step(loop.forward())
    monkeypatch.setenv("VITALS_RUN_ID", monitor.run_id)
    with pytest.raises(TrainingHalted, match="vitals resume"):
        Loop(mode="guard")
    RunDir.open(run_directory(monitor)).clear_halted()
    with Loop(mode="guard").monitor as again:
        assert again.run_id == monitor.run_id


def test_an_operator_s_rollback_goes_through_the_ladder():
    loop = Loop(mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        for _ in range(50):
            monitor.step(loop.forward())
        send_command(monitor, action="rollback")
        outcomes = [monitor.step(loop.forward()) for _ in range(3)]
    decisions = [o.decision for o in outcomes if o.decision is not None]
    assert [(d.action, d.rule) for d in decisions] == [("rollback", "command")]


def test_an_operator_s_halt_stops_the_run_at_a_step_boundary():
    loop = Loop(mode="guard")
    with pytest.raises(TrainingHalted, match="command"), loop.monitor as monitor:
        for step in range(20):
            if step == 10:
                send_command(monitor, action="halt")
            monitor.step(loop.forward())
    assert monitor.step_index <= 13


def _acks(monitor):
    """Return a function that returns status and detail of each command carried out or refused."""
    acks = acks_of(monitor)
    return lambda: [(ack.status, ack.detail) for ack in acks()]


def test_an_operator_s_skip_leaves_the_weights_as_they_are_for_its_steps():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks, moved, outcomes = _acks(monitor), [], []
        for step in range(40):
            if step == 30:
                send_command(monitor, action="skip", argument=3.0)
            before = loop.model[0].weight.detach().clone()
            outcomes.append(monitor.step(loop.forward()))
            moved.append(not torch.equal(before, loop.model[0].weight.detach()))
    (ack,) = acks()
    first = moved.index(False)
    assert ("done", f"the updates of steps {first} to {first + 2} are skipped") == ack
    assert first in (31, 32, 33)
    assert [first, first + 1, first + 2] == [i for i, m in enumerate(moved) if not m]
    decisions = [o.decision for o in outcomes if o.decision is not None]
    assert {("skip_step", "command")} == {(d.action, d.rule) for d in decisions}


def test_an_operator_s_learning_rate_is_what_the_optimizer_takes_until_the_next_word():
    loop = Loop(mode="guard")
    seen = []
    guard = device_of(loop.monitor).engine.guards[0]
    whole = guard.apply
    group = loop.monitor.optimizers[0].param_groups[0]
    rate = group["lr"]

    def apply(*args, lr_factor, **how):
        seen.append((lr_factor, group["lr"] * lr_factor))
        whole(*args, lr_factor=lr_factor, **how)

    guard.apply = apply
    with loop.monitor as monitor:
        acks = _acks(monitor)
        for step in range(40):
            if step == 10:
                send_command(monitor, action="lr", argument=rate / 4)
            if step == 20:
                send_command(monitor, action="lr_factor", argument=0.5)
            if step == 30:
                send_command(monitor, action="lr_factor", argument=1.0)
            monitor.step(loop.forward())
    assert ["done"] * 3 == [status for status, _ in acks()]
    assert [1.0, 0.5, 1.0] == [seen[i][0] for i in (9, 25, 35)]
    assert rate / 4 == pytest.approx(seen[15][1])


def test_an_operator_s_pause_holds_the_step_until_a_resume_and_answers_meanwhile(monkeypatch):
    monkeypatch.setattr("trainer_hooks.features.commands.ROUND_SECONDS", 0.01)
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks = _acks(monitor)
        done = threading.Event()

        def operator():
            until(lambda: is_paused(monitor))
            send_command(monitor, action="lr_factor", argument=0.5)
            until(lambda: len(acks()) == 2)
            send_command(monitor, action="resume")
            done.set()

        person = threading.Thread(target=operator)
        person.start()
        for step in range(12):
            if step == 5:
                send_command(monitor, action="pause")
            monitor.step(loop.forward())
        person.join()
        assert done.is_set()
        steps = run_of(monitor).last_step
    assert ["done"] * 3 == [status for status, _ in acks()]
    assert "until `vitals command RUN resume`" in acks()[0][1]
    assert steps >= 10


def test_a_halt_ends_a_pause(monkeypatch):
    monkeypatch.setattr("trainer_hooks.features.commands.ROUND_SECONDS", 0.01)
    loop = Loop(mode="guard")
    with pytest.raises(TrainingHalted, match="command"), loop.monitor as monitor:
        send_command(monitor, action="pause")
        person = threading.Thread(
            target=lambda: (
                until(lambda: is_paused(monitor)), send_command(monitor, action="halt")
            )
        )  # fmt: skip
        person.start()
        for _ in range(12):
            monitor.step(loop.forward())
    person.join()


def test_a_resume_of_a_run_that_is_not_paused_is_refused():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks = _acks(monitor)
        send_command(monitor, action="resume")
        for _ in range(3):
            monitor.step(loop.forward())
    assert [("refused", "the run is not paused")] == acks()


def test_an_operator_s_profile_is_a_trace_in_the_run_s_folder():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks, folder = _acks(monitor), run_directory(monitor) / "profiles"
        for step in range(12):
            if step == 3:
                send_command(monitor, action="profile", argument=3.0)
            monitor.step(loop.forward())
        until(lambda: list(folder.glob("step-*.json.gz")))
    (trace,) = folder.glob("step-*.json.gz")
    assert ["done"] == [status for status, _ in acks()]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)
    assert 0o700 == folder.stat().st_mode & 0o777


def test_an_operator_s_checkpoint_is_written_long_before_it_is_due():
    loop = Loop(mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        acks, recovery = _acks(monitor), run_of(monitor).recovery
        for step in range(120):
            if step == 60:
                assert (0, 0) == recovery.newest_saved
                send_command(monitor, action="checkpoint")
            monitor.step(loop.forward())
            store_of(monitor).wait(None)
        assert 0 < recovery.newest_saved[0] < 120
    assert ["done"] == [status for status, _ in acks()]


def test_a_checkpoint_is_refused_with_the_reason_where_there_can_be_none():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks = _acks(monitor)
        send_command(monitor, action="checkpoint")
        for _ in range(3):
            monitor.step(loop.forward())
    assert [("refused", "the run makes no checkpoints: watch(checkpoints=...) does")] == acks()


def test_an_operator_s_word_on_a_step_reaches_the_ladder_and_its_level_passes_from_then_on():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        acks = _acks(monitor)
        scales = {60: 1e5, 62: 1e5, 80: 3e4}
        outcomes = []
        for step in range(84):
            if step == 70:
                send_command(monitor, action="accept", argument=60.0)
            outcomes.append(monitor.step(loop.forward(scales.get(step, 1.0))))
    decisions = [o.decision for o in outcomes if o.decision is not None]
    assert [("skip_step", 60), ("skip_step", 62), ("accept_level", 70)] == [
        (d.action, d.step) for d in decisions
    ]  # the one of step 80 passes
    assert [("done", "2 outliers, steps 60 to 62, count as normal")] == acks()
    assert {"accepted_step": 60.0}.items() <= decisions[-1].evidence.items()


def test_a_command_with_a_wrong_signature_is_refused_and_training_goes_on():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
        path = private_base(os.environ) / monitor.run_id / "mailbox"
        forged = Command(
            number=time.time_ns() // 1000,
            run_id=monitor.run_id,
            action="halt",
            reason="",
            issued_by="mallory",
            issued_unix_ns=0,
            expires_unix_ns=2**62,
        )
        with Mailbox.open(path) as mailbox:
            mailbox.put(sign_command(forged, b"wrong" * 8))
        for _ in range(4):
            monitor.step(loop.forward())
    assert monitor.step_index == 5


def test_a_fault_of_ours_never_reaches_the_loop(monkeypatch):
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        norms = device_of(monitor).norms
        monkeypatch.setattr(norms, "squares_into", lambda *_: 1 / 0)
        monkeypatch.setattr(run_of(monitor).emitter, "_get_or_open_stream", lambda *_: 1 / 0)
        monkeypatch.setattr(run_of(monitor).emitter, "_row", lambda *_: 1 / 0)
        before = loop.state()
        for _ in range(3):
            monitor.step(loop.forward())
        assert monitor.swallowed_errors["prepare"] == 3
        assert monitor.swallowed_errors["journal.step"] > 0
    assert not torch.equal(before["model"]["0.weight"], loop.model[0].weight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "heal"}, "checkpoints"),
        ({"mode": "loud"}, "observe, guard, heal"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_a_way_out(arguments, words):
    with pytest.raises(UsageError, match=words):
        Loop(**arguments)


def test_no_gradient_at_the_first_step_is_an_error_and_later_unknown():
    loop = Loop(mode="guard")
    with loop.monitor as monitor, pytest.raises(UsageError, match="backward"):
        monitor.step(torch.tensor(1.0))
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        monitor.step(loop.forward())
        monitor.step(torch.tensor(1.0))
        monitor.step(loop.forward())


def test_the_environment_can_turn_it_down_and_not_up(monkeypatch):
    monkeypatch.setenv("VITALS_MODE", "heal")
    with pytest.raises(UsageError, match="VITALS_MODE"):
        Loop(mode="guard")
    monkeypatch.setenv("VITALS_MODE", "off")
    assert Loop(mode="guard").monitor.run_id == ""
    monkeypatch.setenv("VITALS_MODE", "observe")
    assert Loop(mode="off").monitor.run_id == ""


def test_an_empty_variable_says_nothing(monkeypatch):
    monkeypatch.setenv("VITALS_MODE", "")
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        assert "guard" == run_of(monitor).mode


def test_a_number_with_gradients_is_recorded_without_a_warning_of_torch():
    loop = Loop(mode="guard")
    with loop.monitor as monitor, warnings.catch_warnings(), warn_always():
        warnings.simplefilter("error")
        loss = loop.forward()
        monitor.observe(mine=loss)
        monitor.evaluate(other=loss)
        assert {} == monitor.swallowed_errors


@contextmanager
def warn_always():
    """Let torch repeat the warnings that it otherwise gives once per process."""
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


ALONE = """
from tests.support.watched import Loop

loop = Loop(mode="guard", run="alone <script>", config={"lr": 0.01, "api_key": "hush"})
with loop.monitor as monitor:
    for step in range(30):
        monitor.step(loop.forward(float("nan") if step == 20 else 1.0), max_norm=1.0)
    monitor.observe(temperature=3.0)
    monitor.evaluate(accuracy=0.5)
"""


def test_the_run_directory_alone_answers_afterwards(tmp_path):
    environ = {**os.environ, "VITALS_AGENT": "auto"}
    TRAINING.run([sys.executable, "-c", ALONE], env=environ, check=True, timeout=120)
    wait_for_agents(tmp_path / "runs")
    with reader_of(Trained(0, "", {}, tmp_path / "runs")) as reader:
        (run,) = reader.ask(RunsQuestion())
        detail = reader.ask(RunQuestion(run_id=run.run_id))
        losses = reader.ask(SeriesQuestion(run_id=run.run_id, metric="steps.loss", source="rank:0"))
        scalar = reader.ask(
            SeriesQuestion(run_id=run.run_id, metric="scalars.eval/accuracy", source="rank:0")
        )
    assert (run.name, run.state, run.num_skips) == ("alone <script>", "finished", 1)
    assert detail.info.config == {"lr": 0.01, "api_key": "***"}
    assert list(losses.step) == list(range(30))
    assert [m.step for m in losses.nonfinite] == [20]
    assert scalar.value == (0.5,)


def test_a_relaunch_goes_on_from_its_newest_checkpoint_on_disk(tmp_path, monkeypatch):
    settings = trainer_hooks.CheckpointSettings(directory=tmp_path / "kept", save_every=20)
    loop, kept = Loop(mode="heal", checkpoints=settings), {}
    with loop.monitor as monitor:
        while monitor.step_index < 70:
            kept[monitor.step_index] = loop.state()
            monitor.step(loop.forward())
    monkeypatch.setenv("VITALS_RUN_ID", monitor.run_id)
    again = Loop(seed=9, mode="heal", checkpoints=settings)
    with again.monitor as relaunched:
        step = relaunched.step_index
        assert 20 <= step < 70
        assert_same(kept[step], again.state())
        assert relaunched.attempt != monitor.attempt
        for _ in range(3):
            relaunched.step(again.forward())


def test_spent_budgets_and_applied_commands_survive_a_relaunch(monkeypatch):
    loop = Loop(mode="heal", checkpoints=True)
    with loop.monitor as monitor:
        for _ in range(50):
            monitor.step(loop.forward())
        command = send_command(monitor, action="rollback")
        for _ in range(3):
            monitor.step(loop.forward())
        spent = facts_of(monitor)
    monkeypatch.setenv("VITALS_RUN_ID", monitor.run_id)
    with Loop(mode="heal", checkpoints=True).monitor as again:
        facts = facts_of(again)
    assert (facts.causes, facts.num_rollbacks) == (spent.causes, spent.num_rollbacks) == ((), 1)
    assert facts.last_command == command.number


def _decisions(tmp_path):
    wait_for_agents(tmp_path / "runs")
    with reader_of(Trained(0, "", {}, tmp_path / "runs")) as reader:
        (run,) = reader.ask(RunsQuestion())
        return run, [v.decision for v in reader.ask(DecisionsQuestion(run_id=run.run_id))]


LAST_STEP_BAD = """
from tests.support.watched import Loop

loop = Loop(mode="guard")
with loop.monitor as monitor:
    for step in range(30):
        monitor.step(loop.forward(float("nan") if step == 29 else 1.0))
"""


def test_what_the_last_step_s_numbers_say_is_in_the_ledger(tmp_path):
    environ = {**os.environ, "VITALS_AGENT": "auto"}
    TRAINING.run([sys.executable, "-c", LAST_STEP_BAD], env=environ, check=True, timeout=120)
    run, decisions = _decisions(tmp_path)
    assert run.state == "finished"
    assert [(d.action, d.step) for d in decisions] == [("skip_step", 29)]


@pytest.mark.parametrize(("ending", "state"), [("1 / 0", "failed"), ("exit(0)", "finished")])
def test_how_a_loop_ended_is_how_the_run_ended(tmp_path, ending, state):
    script = f"""
from tests.support.watched import Loop

loop = Loop(mode="guard")
with loop.monitor as monitor:
    monitor.step(loop.forward())
    {ending}
"""
    environ = {**os.environ, "VITALS_AGENT": "auto"}
    TRAINING.run([sys.executable, "-c", script], env=environ, stderr=-3, timeout=120)
    run, _ = _decisions(tmp_path)
    assert run.state == state


def test_a_run_turned_down_to_observe_still_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    settings = trainer_hooks.CheckpointSettings(directory=tmp_path / "kept", save_every=20)
    loop = Loop(mode="heal", checkpoints=settings)
    with loop.monitor as monitor:
        while monitor.step_index < 70:
            monitor.step(loop.forward())
    monkeypatch.setenv("VITALS_RUN_ID", monitor.run_id)
    monkeypatch.setenv("VITALS_MODE", "observe")
    with Loop(seed=9, mode="heal", checkpoints=settings).monitor as again:
        assert again.step_index >= 20


def test_a_restore_that_fails_halts_and_says_so(monkeypatch):
    loop = Loop(mode="heal", checkpoints=True)
    with pytest.raises(TrainingHalted, match="restore failed"), loop.monitor as monitor:
        ring = snapshots_of(monitor)

        def broken(checkpoint_id):
            raise CheckpointError("the model has changed")

        monkeypatch.setattr(ring, "restore", broken)
        for _ in range(50):
            monitor.step(loop.forward())
        command = send_command(monitor, action="rollback")
        for _ in range(4):
            monitor.step(loop.forward())
    assert RunDir.open(run_directory(monitor)).halted() is not None
    assert command.number > 0


def test_settings_come_from_a_file_and_the_environment_and_are_recorded(tmp_path, monkeypatch):
    (tmp_path / "vitals.toml").write_text("[ladder]\nmargin = 30\n[outlier]\nsigmas = 9\n")
    monkeypatch.setenv("VITALS_CONFIG", str(tmp_path / "vitals.toml"))
    monkeypatch.setenv("VITALS_LADDER_MAX_TRIES", "5")
    with Loop(mode="guard").monitor as monitor:
        config = run_of(monitor).judge.config
        info = RunDir.open(run_directory(monitor)).info()
    assert (config.ladder.margin, config.ladder.max_tries) == (30, 5)
    assert (config.outlier.sigmas, config.outlier.progress) == (9.0, 25.0)
    assert info.judge["ladder"]["margin"] == 30
    assert msgspec.convert(info.judge, type(config)) == config


def test_the_kind_of_post_training_is_recorded_and_gives_the_meaning_of_the_loss():
    with Loop(mode="guard", task="grpo").monitor as monitor:
        kind = run_of(monitor).judge.config.loss_kind
        info = RunDir.open(run_directory(monitor)).info()
    assert ("grpo", "rl") == (info.task, kind)
    with Loop(mode="guard", task="grpo", loss_kind="minimize").monitor as monitor:
        assert "minimize" == run_of(monitor).judge.config.loss_kind


def test_a_setting_that_does_not_exist_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_MARGINS", "5")
    with pytest.raises(ConfigError, match="VITALS_LADDER_MARGINS"):
        Loop(mode="guard")


def test_the_finite_rules_come_back_after_an_announced_change():
    loop = Loop(mode="guard")
    with loop.monitor as monitor:
        for _ in range(40):
            monitor.step(loop.forward())
        monitor.expect("longer context", steps=5)
        for step in range(60):
            monitor.step(loop.forward(1e6 if step == 55 else 1.0))
    assert facts_of(monitor).num_skips == 1


def test_the_folder_of_checkpoints_stays_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = trainer_hooks.CheckpointSettings(directory="checkpoints")
    monkeypatch.chdir(tmp_path.parent)
    assert tmp_path / "checkpoints" == settings.directory
