"""Protection that stops is told, and where a rollback may help it rolls back."""

import threading

import pytest
import torch

import trainer_hooks
from tests.support.examples import each_once
from tests.support.inside import events_of, nonfinite_parameters_of, refs_of, snapshots_of, store_of
from tests.support.watched import Loop, own_place  # noqa: F401
from tests.trainer_hooks.ranks_with_bad_state import main
from tests.trainer_hooks.spawned import spawned
from trainer_hooks import CheckpointSettings
from trainer_hooks.exchange.emit import LayerAggregator
from trainer_hooks.measures.sampled import SampledSignals
from trainer_hooks.recovery.checkpoints import payload
from trainer_hooks.recovery.manager import kept_steps
from trainer_hooks.recovery.state import StateCheck
from trainvitals.errors import CheckpointError, TrainingHalted
from trainvitals.records import DecisionMade, FindingRaised, Note

BROKEN_AT, STEPS = 40, 120
EVERY = kept_steps(healthy_after=20, lag=1)
"""Steps between two snapshots by default."""
KIND = "nonfinite_state"


@pytest.fixture(autouse=True)
def short_interval():
    """Check the state every 100 steps instead of 200: the interval is not the subject here."""
    interval, StateCheck.EVERY = StateCheck.EVERY, 100
    yield
    StateCheck.EVERY = interval


def break_moment(loop):
    loop.optimizer.state[loop.model[3].weight]["exp_avg_sq"][0, 3] = float("inf")


def break_buffer(loop):
    loop.model[1].running_mean[2] = float("nan")


def break_weight(loop):
    loop.model[3].weight[0, 3] = float("nan")


def train(loop, break_it, *, steps=STEPS, times=1):
    """Train; break something before one step, so often; return what each rollback went back to."""
    back, loop.events = [], events_of(loop.monitor)
    with loop.monitor as monitor:
        while monitor.step_index < steps:
            if monitor.step_index == BROKEN_AT and times:
                times -= 1
                with torch.no_grad():
                    break_it(loop)
            outcome = monitor.step(loop.forward())
            back += [] if outcome.rolled_back_to is None else [outcome.rolled_back_to]
    assert {} == monitor.swallowed_errors
    return back


def healing(tmp_path, **options):
    checkpoints = CheckpointSettings(directory=tmp_path / "checkpoints", save_every=10**6)
    return Loop(mode="heal", checkpoints=checkpoints, **options)


def findings(loop, kind):
    return [
        e.finding for e in loop.events if isinstance(e, FindingRaised) and e.finding.kind == kind
    ]


def notes(loop, code):
    return [e.text for e in loop.events if isinstance(e, Note) and e.code == code]


@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_parameters_that_are_nan_are_named_with_their_layer(tmp_path, mode):
    loop = healing(tmp_path) if mode == "heal" else Loop(mode=mode)
    written = nonfinite_parameters_of(loop.monitor)
    if mode == "heal":
        assert [0] == train(loop, break_weight)
    else:
        with pytest.raises(TrainingHalted, match=r"on 1 rank \(3\.weight\): all further"):
            train(loop, break_weight)
    (finding,) = findings(loop, "nonfinite_params")
    assert "parameters are non-finite on 1 rank (3.weight)" == finding.reason
    decided = [e.decision for e in loop.events if isinstance(e, DecisionMade)]
    assert decided[-1].reason.startswith(finding.reason)
    assert {(finding.step, "3.weight")} == written


def test_a_layer_with_a_nan_parameter_has_a_nan_weight_norm():
    layers = LayerAggregator(["1.weight", "1.bias", "3.weight"])
    rows = layers.rows([9.0, 16.0, 4.0], SampledSignals(nonfinite_parameters=["3.weight"]))
    assert [(0, 5.0, None), (1, 2.0, "nan")] == [
        (layer, gradient, weight if weight is None else str(weight))
        for layer, gradient, weight, *_ in rows
    ]


@pytest.mark.parametrize(
    ("break_it", "name"),
    [(break_moment, "optim.0.3.weight.exp_avg_sq"), (break_buffer, "buffer.1.running_mean")],
)
def test_what_a_finite_loss_hides_is_rolled_back_and_the_run_is_protected_again(
    tmp_path, break_it, name
):
    loop = healing(tmp_path)
    assert [EVERY] == train(loop, break_it)
    refs = refs_of(loop.monitor)
    assert STEPS - refs[0].step <= 2 * EVERY and "healthy" == refs[0].state
    (decision,) = [e.decision for e in loop.events if isinstance(e, DecisionMade)]
    assert (KIND, "rollback", 2 * EVERY, 0, 0) == (
        decision.rule, decision.action, decision.step, decision.rank, decision.skip_batches,
    )  # fmt: skip
    assert name in decision.reason
    (note,) = notes(loop, KIND)
    assert name in note and "rank 0" in note


def test_what_comes_again_after_the_rollback_is_told_and_training_goes_on(tmp_path, lines):
    loop = healing(tmp_path)
    assert [EVERY] == train(loop, break_moment, times=10**6, steps=7 * EVERY)
    finding, *others = findings(loop, KIND)
    assert ("actionable", 2 * EVERY, 0) == (finding.level, finding.step, finding.rank)
    assert "again" in finding.reason and "exp_avg_sq" in finding.reason
    assert [4 * EVERY, 6 * EVERY] == [f.step for f in others]
    assert {2 * EVERY} == {f.onset_step for f in others}
    assert 2 == len(notes(loop, KIND))  # with the rollback, and where it was there again
    assert 7 * EVERY == loop.monitor.step_index
    text = "\n".join(lines())
    assert 1 == text.count(f"rolled back to step {EVERY}")
    assert 1 == text.count("no snapshot or checkpoint is made while it is so")


@pytest.mark.parametrize(
    ("mode", "break_it"), each_once(("guard", "observe"), (break_moment, break_buffer))
)
def test_without_snapshots_it_is_told_at_the_next_check_by_one_name(mode, break_it):
    loop = Loop(mode=mode)
    assert [] == train(loop, break_it, steps=StateCheck.EVERY + 2 * StateCheck.AGAIN)
    first, again = StateCheck.EVERY, StateCheck.AGAIN
    assert [("actionable", first, first, 0), ("actionable", first + again, first, 0)] == [
        (f.level, f.step, f.onset_step, f.rank) for f in findings(loop, KIND)
    ]
    assert 1 == len(notes(loop, KIND))


def with_parameter(value, *, is_trained=False, **watch):
    loop = Loop()
    loop.model[0].extra = torch.nn.Parameter(torch.full((3,), value), requires_grad=is_trained)
    if is_trained:
        loop.optimizer.add_param_group({"params": [loop.model[0].extra]})
    loop.monitor = trainer_hooks.watch(loop.model, loop.optimizer, loop.scheduler, **watch)
    return loop


@pytest.mark.parametrize("mode", ["guard", "observe"])
def test_a_frozen_parameter_that_becomes_nan_is_told_without_snapshots_too(mode):
    loop = with_parameter(1.0, mode=mode)

    def break_it(loop):
        loop.model[0].extra[1] = float("nan")

    assert [] == train(loop, break_it, steps=StateCheck.EVERY + 2)
    assert [StateCheck.EVERY] == [f.step for f in findings(loop, KIND)]
    (note,) = notes(loop, KIND)
    assert "model.0.extra" in note


@pytest.mark.parametrize("mode", ["guard", "heal"])
def test_a_frozen_parameter_that_is_infinite_from_the_start_is_no_fault(tmp_path, mode):
    checkpoints = CheckpointSettings(directory=tmp_path / "c", save_every=EVERY)
    options = {"checkpoints": checkpoints} if mode == "heal" else {}
    loop = with_parameter(float("-inf"), mode=mode, **options)
    assert [] == train(loop, break_moment, times=0, steps=StateCheck.EVERY + 2)
    assert [] == findings(loop, KIND)
    if mode == "heal":
        memory, store = snapshots_of(loop.monitor), store_of(loop.monitor)
        assert store.wait(), "a thread writes the checkpoints"
        for refs in (memory.refs(), store.loadable_refs()):
            states = {ref.state for ref in refs}
            assert states and states <= {"healthy", "verified"}


def test_a_start_that_is_not_finite_is_refused_by_the_tensor_s_name(tmp_path):
    checkpoints = CheckpointSettings(directory=tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"rank 0: NaN or infinite: model\.0\.extra"):
        with_parameter(float("nan"), is_trained=True, mode="heal", checkpoints=checkpoints)


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.delenv("VITALS_QUIET", raising=False)
    caplog.set_level("INFO", "trainvitals")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "trainvitals"]


def test_the_terminal_says_once_that_protection_is_lost_and_again_at_the_end(lines):
    loop = Loop(mode="guard")
    train(loop, break_moment, steps=StateCheck.EVERY + 2 * StateCheck.AGAIN)
    first, last = [line for line in lines() if "NaN or infinite" in line]
    assert first.startswith(f"vitals: step {StateCheck.EVERY}: ")
    assert "NaN or infinite on rank 0" in first and "exp_avg_sq" in first and "show" in first
    assert f"at step {StateCheck.EVERY + StateCheck.AGAIN}" in last


def mask(loop):
    loop.model[0].register_buffer("mask", torch.full((4, 4), float("-inf")))


def grow(loop):
    loop.model[1].running_mean_of_all = torch.full((9,), float("inf"))


@pytest.mark.parametrize(("mode", "late"), each_once(("guard", "heal"), (mask, grow)))
def test_buffers_that_a_model_makes_infinite_by_itself_are_no_fault(tmp_path, mode, late):
    loop = Loop()
    loop.model[0].register_buffer("causal", torch.full((2, 2), float("-inf")))
    loop.model[1].register_buffer("running_mean_of_all", torch.zeros(1))
    options = {}
    if mode == "heal":
        options["checkpoints"] = CheckpointSettings(directory=tmp_path / "c", save_every=10**6)
    loop.monitor = trainer_hooks.watch(
        loop.model, loop.optimizer, loop.scheduler, mode=mode, **options
    )
    assert [] == train(loop, late)
    assert [] == findings(loop, KIND)
    if mode == "heal":
        assert STEPS - refs_of(loop.monitor)[0].step <= 2 * EVERY


def fill(loop):
    loop.model[1].running_mean_of_all.fill_(float("-inf"))


def test_a_buffer_that_the_model_itself_makes_infinite_costs_one_rollback_and_no_protection(
    tmp_path, lines
):
    """It was finite at the start and keeps its shape, so the first time it looks like a fault."""
    loop = Loop()
    loop.model[1].register_buffer("running_mean_of_all", torch.zeros(3))
    loop.monitor = trainer_hooks.watch(
        loop.model,
        loop.optimizer,
        loop.scheduler,
        mode="heal",
        checkpoints=CheckpointSettings(directory=tmp_path / "c", save_every=10**6),
    )
    assert [EVERY] == train(loop, fill, times=10**6, steps=150)
    (finding,) = findings(loop, KIND)
    assert "buffer.1.running_mean_of_all; no optimizer has it" in finding.reason
    refs = refs_of(loop.monitor)
    assert 150 - refs[0].step <= 2 * EVERY
    assert 1 == "\n".join(lines()).count("counts as intended from now on")
    # What is trained is looked at as before.
    ring = snapshots_of(loop.monitor)
    assert not ring.accept(["buffer.1.running_mean_of_all", "optim.0.3.weight.exp_avg_sq"])


# ------------------------------------------------------------------------- what starves


def test_a_save_that_takes_long_keeps_the_ring_fed(tmp_path, monkeypatch):
    """A disk that is slower than everything: a third slot is lent for as long as it writes."""
    checkpoints = CheckpointSettings(directory=tmp_path / "checkpoints", save_every=EVERY)
    loop = Loop(mode="heal", checkpoints=checkpoints)
    loop.optimizer.param_groups[0]["lr"] = 1e-4  # no outlier keeps a snapshot unproven
    ring = snapshots_of(loop.monitor)
    may_end, real, ages = threading.Event(), payload.write, []
    saves = []

    def slow(partial, *args, **kwargs):
        saves.append(partial)
        assert may_end.wait(60)
        return real(partial, *args, **kwargs)

    monkeypatch.setattr(payload, "write", slow)
    with loop.monitor as monitor:
        while monitor.step_index < 130:
            monitor.step(loop.forward())
            ages.append(monitor.step_index - ring.newest_healthy().step)
        may_end.set()
    assert (0, 1) == (ring.num_missed, len(saves))
    assert max(ages) <= EVERY + 20 + 2


class Broken:
    def __init__(self):
        self.fails = False

    def state_dict(self):
        if self.fails:
            raise OSError("the loader's worker died")
        return {}

    def load_state_dict(self, state_dict):
        pass


def test_snapshots_that_cannot_be_taken_are_told_with_the_reason(tmp_path, lines):
    state = Broken()
    loop = healing(tmp_path, state={"data": state})

    def break_it(loop):
        state.fails = True

    assert [] == train(loop, break_it, steps=10 * EVERY)
    missed = findings(loop, "snapshot_missed")
    assert [(times * EVERY, "advisory") for times in (2, 3, 5, 9)] == [
        (f.step, f.level) for f in missed
    ]
    (first, *_) = notes(loop, "snapshot_missed")
    assert "the loader's worker died" in first
    shown = [line for line in lines() if "in memory could not be taken" in line]
    assert 4 == len(shown) and f"step {2 * EVERY}: 1 snapshot in memory" in shown[0]


# ------------------------------------------------------------------------- on several ranks


@pytest.mark.dist
def test_a_moment_that_one_rank_alone_has_wrong_takes_all_ranks_back_and_it_says_which(tmp_path):
    first, second = spawned(main, tmp_path)
    for rank in (first, second):
        assert ([EVERY], {}) == (rank["back"], rank["faults"])
        assert "healthy" in [state for step, state in rank["refs"] if step >= 2 * EVERY]
    assert first["weights"] == second["weights"]
    assert ([1], []) == (first["ranks"], first["notes"])
    (note,) = second["notes"]
    assert "rank 1" in note and "optim.0.0.weight.exp_avg_sq" in note
