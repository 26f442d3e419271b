"""A policy that collapses: its samples are stored, and the run halts if it was told to.

The policy is a table of logits for a prompt; the reward is the share of one token, which a fixed
text satisfies. A healthy run is compared bit by bit.
"""

import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.support.inside import events_of, feature_named, run_of
from tests.support.watched import Loop, assert_same, own_place, until  # noqa: F401
from trainer_hooks.features.post_training import UNSEEN_AFTER, PostTrainingFeature
from trainvitals.detect.posttraining.set import PostTrainingDetectors
from trainvitals.errors import TrainingHalted, UsageError
from trainvitals.io.completions import FOLDER, completions_of
from trainvitals.io.rundir import RunDir
from trainvitals.records import DecisionMade, FindingRaised, Note

LOW, LOST = 40, 60
"""Steps at which the entropy and the reward fall."""


def scalars(step: int) -> dict[str, float]:
    reward = 0.1 + 0.01 * min(step, LOW) if step < LOST else 0.1
    return {"entropy": 1.0 if step < LOW else 0.01, "reward": reward}


def healthy(step: int) -> dict[str, float]:
    return {"entropy": 1.0 / (1 + step), "reward": min(1.0, 0.02 * step)}


def a_loop(**watch):
    return Loop(**{"task": "grpo", **watch})


def train(loop, until: int, scalars_of=scalars, *, samples: bool = False) -> None:
    monitor = loop.monitor
    while (step := monitor.step_index) < until:
        monitor.observe(**scalars_of(step))
        if samples:
            texts = [f"completion {step}.{number}" for number in range(5)]
            rewards = [0.1 * number for number in range(5)]
            monitor.observe_samples(["2 + 2 ="] * 5, texts, rewards)
        monitor.step(loop.forward())


def bare_state() -> dict:
    """Return the state after 80 steps without Vitals."""
    loop = Loop()
    for _ in range(80):
        loop.bare_step()
    return loop.state()


def test_by_default_a_collapse_changes_nothing_of_the_training():
    bare = bare_state()
    watched = a_loop()
    with watched.monitor as monitor:
        events = events_of(monitor)
        train(watched, 80)
    assert_same(bare, watched.state())
    found = [e.finding.kind for e in events if isinstance(e, FindingRaised)]
    assert not {"policy_collapse", "kl_runaway"} & set(found)
    assert [] == [e for e in events if isinstance(e, DecisionMade)]
    assert not (run_of(monitor).run_dir.path / FOLDER).exists()


def test_a_healthy_run_trains_bit_by_bit_as_without_with_all_of_it_on(tmp_path):
    bare = bare_state()
    watched = a_loop(on_collapse="stop", checkpoints=True)
    with watched.monitor as monitor:
        train(watched, 80, healthy, samples=True)
    assert_same(bare, watched.state())
    assert {} == monitor.swallowed_errors
    assert not (run_of(monitor).run_dir.path / FOLDER).exists()


def test_the_samples_of_the_step_where_it_began_are_stored_and_only_there():
    loop = a_loop()
    with loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, 80, samples=True)
        until(lambda: any(isinstance(e, Note) and e.code == "completions" for e in events))
    run_dir = run_of(monitor).run_dir.path
    (path,) = (run_dir / FOLDER).iterdir()
    (stored,) = completions_of([run_dir], json.loads(path.read_text())["step"])
    assert "policy_collapse" == stored.finding
    assert LOW <= stored.step == stored.onset_step < LOST < stored.reported_step < 80
    texts = [f"completion {stored.step}.{number}" for number in (0, 2, 4)]
    assert texts == [sample.completion for sample in stored.samples]
    (note,) = [e for e in events if isinstance(e, Note) and e.code == "completions"]
    assert stored.name in note.text
    assert {} == monitor.swallowed_errors
    # No row and no event has a text: nothing that an agent reads.
    others = [p for p in run_dir.rglob("*") if p.is_file() and p != path]
    others += [p for p in (run_dir.parents[1] / "shm").rglob("*") if p.is_file()]
    assert others
    assert [] == [p for p in others if b"completion 4" in p.read_bytes()]


def test_scalars_from_before_the_first_samples_count_too():
    """The collector has them: with them the entropy is low before step 50."""

    def falling(step: int) -> dict[str, float]:
        entropy = 3.0 if step < 20 else 0.2 if step < 50 else 0.01
        return scalars(step) | {"entropy": entropy}

    loop = a_loop()
    with loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, 20, falling)
        train(loop, 80, falling, samples=True)
        until(lambda: any(isinstance(e, Note) and e.code == "completions" for e in events))
    (path,) = (run_of(monitor).run_dir.path / FOLDER).iterdir()
    assert LOW <= json.loads(path.read_text())["onset_step"] < 50


def test_a_collapse_halts_with_a_checkpoint_if_the_run_was_told_to(tmp_path):
    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    with pytest.raises(TrainingHalted), loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, 100)
    (decision,) = [e.decision for e in events if isinstance(e, DecisionMade)]
    assert ("halt", True, "post_training") == (decision.action, decision.acted, decision.rule)
    assert "policy_collapse" == decision.cause
    assert LOST < decision.step < 80
    assert "the policy collapsed: its entropy fell from 1 to 0.01" in decision.reason
    name = decision.reason.rpartition("saved ")[2]
    assert name.startswith(f"step-{monitor.step_index:08d}-")
    assert (tmp_path / "kept" / name).is_dir()
    marker = run_of(monitor).run_dir.halted()
    assert marker is not None and marker.step == decision.step


def test_after_a_resume_the_run_goes_on_and_is_not_halted_for_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_RUN_ID", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    options = {"on_collapse": "stop", "checkpoints": tmp_path / "kept"}
    loop = a_loop(**options)
    with pytest.raises(TrainingHalted), loop.monitor as monitor:
        train(loop, 100)
    halted_at = monitor.step_index
    with pytest.raises(TrainingHalted, match="vitals resume"):
        a_loop(seed=1, **options)
    RunDir(run_of(monitor).run_dir.path).clear_halted()
    again = a_loop(seed=1, **options)
    with again.monitor as monitor:
        assert halted_at == monitor.step_index
        assert_same(loop.state()["model"], again.state()["model"])
        train(again, halted_at + 30)
        assert {} == monitor.swallowed_errors


def test_in_observe_mode_the_halt_is_only_recorded(tmp_path):
    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept", mode="observe")
    with loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, 90)
    (decision,) = [e.decision for e in events if isinstance(e, DecisionMade)]
    assert ("halt", False, "policy_collapse") == (decision.action, decision.acted, decision.cause)


def test_a_loop_that_steps_itself_is_halted_in_its_step():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainer_hooks.attach(model, optimizer, task="ppo", on_collapse="stop") as attached:
        with pytest.raises(TrainingHalted, match="the policy collapsed"):
            for step in range(100):
                attached.observe(**scalars(step))
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert LOST < step < 90


def test_a_lost_reward_without_a_lost_policy_does_not_halt(tmp_path):
    def parser_breaks(step: int) -> dict[str, float]:
        is_broken = step >= LOW
        share, reward = (1.0, 0.0) if is_broken else (0.2, 0.01 * step)
        return {"entropy": 1.0, "frac_reward_zero_std": share, "reward": reward}

    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    with loop.monitor as monitor:
        train(loop, 80, parser_breaks, samples=True)
        folder = run_of(monitor).run_dir.path / FOLDER
        until(lambda: any(folder.glob("step-*.json")))
    (path,) = folder.iterdir()
    assert "dead_reward" == json.loads(path.read_text())["finding"]


@pytest.mark.parametrize(
    ("watch", "text"),
    [
        ({"on_collapse": "halt"}, "on_collapse is 'halt'; it must be 'report' or 'stop'"),
        ({"on_collapse": "stop", "task": None, "checkpoints": True}, "but task is None"),
        ({"on_collapse": "stop", "task": "dpo", "checkpoints": True}, "but task is 'dpo'"),
        ({"on_collapse": "stop"}, "saves a checkpoint before it halts, so it needs checkpoints"),
    ],
)
def test_a_reaction_that_cannot_work_is_refused(watch, text):
    with pytest.raises(UsageError, match=text):
        a_loop(**watch)


def test_samples_of_a_run_without_a_kind_are_not_kept_and_it_is_said_once(caplog):
    loop = a_loop(task=None)
    with loop.monitor as monitor:
        for _ in range(2):
            monitor.observe_samples(["a"], ["b"], [0.0])
        train(loop, 2)
    assert 2 == monitor.swallowed_errors["observe_samples"]
    assert "watch(..., task='grpo')" in caplog.text


def test_wrong_samples_never_reach_the_loop():
    loop = a_loop()
    with loop.monitor as monitor:
        monitor.observe_samples(["a"], ["b", "c"], [0.0])
        monitor.observe_samples(None, None, None)
        monitor.observe_samples(["a"], ["b"], torch.tensor([math.nan]))
        train(loop, 2)
    assert 2 == monitor.swallowed_errors["observe_samples"]


@pytest.mark.parametrize(("task", "is_withheld"), [("grpo", False), (None, True)])
def test_a_finite_outlier_of_the_loss_is_withheld_only_where_the_loss_means_something(
    task, is_withheld
):
    """The gradient norm is judged in both, so the outlier has usual gradients."""
    loop = a_loop(task=task)
    with loop.monitor as monitor:
        train(loop, 60)
        before = loop.state()["model"]
        loss = loop.forward()
        monitor.step(loss.detach() * 1e6)
        after = loop.state()["model"]
    weight = "0.weight"
    assert is_withheld == torch.equal(before[weight], after[weight])


def test_a_nonfinite_step_of_a_policy_loss_is_skipped_as_everywhere():
    loop = a_loop()
    with loop.monitor as monitor:
        train(loop, 30)
        before = loop.state()["model"]
        monitor.step(loop.forward(math.nan))
        assert_same(before["0.weight"], loop.state()["model"]["0.weight"])


def test_a_run_that_is_off_keeps_nothing(tmp_path):
    with a_loop(mode="off").monitor as monitor:
        monitor.observe_samples(["a"], ["b"], [0.0])
    assert {} == monitor.swallowed_errors
    assert not (tmp_path / "runs").exists()


def test_samples_that_cannot_be_written_do_not_prevent_the_halt(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "vitals-completions":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    with pytest.raises(TrainingHalted, match="the policy collapsed"), loop.monitor as monitor:
        train(loop, 100, samples=True)
    assert {"completions": 1} == monitor.swallowed_errors


def test_scalars_that_are_logged_after_the_gradients_were_measured_count_for_their_step():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainer_hooks.attach(model, optimizer, task="ppo", on_collapse="stop") as attached:
        with pytest.raises(TrainingHalted, match="the policy collapsed"):
            for step in range(100):
                values = scalars(step)
                attached.observe(reward=values["reward"])
                model(torch.ones(2, 4)).mean().backward()
                attached.before_clip(1.0)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                attached.observe(entropy=values["entropy"])
                optimizer.step()
                optimizer.zero_grad()
        assert LOST < step < 90


def test_each_finding_is_judged_once_even_right_after_another():
    """In observe mode the run continues, and steps in flight repeat a number."""
    given = SimpleNamespace(on_collapse="report")
    feature = PostTrainingFeature(SimpleNamespace(given=given, is_rank0=False), "")
    kinds = []
    for step, number in enumerate([0.0, 1.0, 1.0, 2.0, 2.0, 0.0, 1.0]):
        returned = SimpleNamespace(
            reduced=SimpleNamespace(root={"collapse": number}), step=step, collapse=None
        )
        feature.on_reduced(returned)
        kinds.append(returned.collapse and returned.collapse.kind)
    first, second = "policy_collapse", "kl_runaway"
    assert [None, first, None, second, None, None, first] == kinds


def test_a_damaged_state_starts_the_detectors_again(tmp_path):
    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    feature_named(loop.monitor, "PostTrainingFeature").load_state_dict({"watchers": 7}, step=0)
    with pytest.raises(TrainingHalted, match="the policy collapsed"), loop.monitor as monitor:
        train(loop, 100)
    assert {"post_training": 1} == monitor.swallowed_errors


def test_a_state_that_nothing_needs_yet_is_passed_on():
    with a_loop().monitor as monitor:
        feature = feature_named(monitor, "PostTrainingFeature")
        assert feature.state_dict() is None
        feature.load_state_dict({"watchers": {}}, step=0)
        assert {"watchers": {}} == feature.state_dict()


@pytest.mark.parametrize("recorded", [{"my_reward": 0.1}, {"loss": 2.0}, {"reward": math.nan}])
def test_a_run_that_records_nothing_to_judge_is_warned_once(caplog, recorded):
    loop = a_loop()
    with loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, UNSEEN_AFTER + 20, lambda step: recorded)
    (note,) = [e for e in events if isinstance(e, Note) and e.code == "scalars_not_judged"]
    assert "monitor.observe(reward=..., entropy=..., kl=...)" in note.text
    assert "on_collapse" not in note.text
    assert note.text in caplog.text


def test_the_warning_of_missing_scalars_says_that_nothing_halts(tmp_path, caplog):
    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    with loop.monitor:
        train(loop, 102, lambda step: {})
    assert "on_collapse='stop' cannot halt the run" in caplog.text


def test_a_reward_that_is_best_at_full_length_does_not_halt(tmp_path):
    def full_length(step: int) -> dict[str, float]:
        part = min(step / 60, 1.0)
        return {
            "entropy": 1.5 * (0.01 / 1.5) ** part,
            "reward": 0.1 + 0.85 * part + 0.02 * math.sin(step),
            "completions/clipped_ratio": 0.3 + 0.65 * part,
        }

    loop = a_loop(on_collapse="stop", checkpoints=tmp_path / "kept")
    detectors = PostTrainingDetectors("grpo")
    found = [
        finding.cause
        for step in range(120)
        for finding in detectors.update(full_length(step), step=step, attempt=1, time_unix_ns=step)
    ]
    assert ["repetition"] == found
    with loop.monitor as monitor:
        train(loop, 120, full_length)
    assert 120 == monitor.step_index


def test_a_run_whose_reward_comes_late_in_the_first_steps_is_not_warned(caplog):
    loop = a_loop()
    with loop.monitor:
        train(loop, UNSEEN_AFTER + 20, lambda step: {"reward": 1.0} if step == 999 else {})
    assert "with a known name" not in caplog.text


def test_a_rollback_restores_the_detectors_and_the_collapse_still_halts(tmp_path):
    loop = a_loop(mode="heal", on_collapse="stop", checkpoints=tmp_path / "kept")
    with pytest.raises(TrainingHalted, match="the policy collapsed"), loop.monitor as monitor:
        events = events_of(monitor)
        train(loop, LOW + 15, samples=True)
        with torch.no_grad():
            loop.model[0].weight.fill_(math.nan)
        train(loop, 100, samples=True)
    made = [e.decision for e in events if isinstance(e, DecisionMade)]
    made = [decision for decision in made if decision.action != "skip_step"]
    assert ["rollback", "halt"] == [decision.action for decision in made]
    assert made[-1].attempt == made[0].new_attempt
    assert LOST < made[-1].step < 90
    assert {} == monitor.swallowed_errors
