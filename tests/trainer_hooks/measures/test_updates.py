"""Weights and updates: what is measured is what the parameters did."""

import math
from unittest import mock

import pytest
import torch

import trainer_hooks
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks import SignalSettings
from trainer_hooks.measures.sampled import WeightUpdateNorms

UPDATES = SignalSettings(every=3, update_norm=True)


def norm(tensors) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def train(loop, steps):
    """Train, and return the parameters before every step."""
    before = []
    for _ in range(steps):
        before.append(loop.parameters())
        loop.monitor.step(loop.backward(), max_norm=1.0)
    return before


@pytest.mark.parametrize("fused", [True, False])
def test_a_row_has_the_weights_its_step_began_with_and_the_update_that_led_to_them(
    make_loop, fused
):
    loop = make_loop(fused=fused, signals=UPDATES)
    before = train(loop, 10)
    journal = loop.journal()
    moved = {t: [before[t][n] - before[t - 1][n] for n in before[t]] for t in (3, 6, 9)}
    weights = {t: norm(before[t].values()) for t in (0, *moved)}
    assert journal.steps("weight_norm") == pytest.approx(weights, rel=1e-6)
    assert journal.steps("update_norm") == pytest.approx(
        {t: norm(moved[t]) for t in moved}, rel=1e-6
    )
    assert journal.steps("update_ratio") == pytest.approx(
        {t: norm(moved[t]) / weights[t] for t in moved}, rel=1e-6
    )


def test_each_layer_has_its_own(make_loop):
    loop = make_loop(signals=UPDATES)
    before = train(loop, 5)
    journal = loop.journal()
    names = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    for step in (0, 3):
        for layer, own in names.items():
            found = journal.layers("weight_norm")[step, layer]
            assert found == pytest.approx(norm(before[step][n] for n in own), rel=1e-6)
    assert journal.layers("update_norm") == pytest.approx(
        {(3, at): norm(before[3][n] - before[2][n] for n in own) for at, own in names.items()},
        rel=1e-6,
    )
    assert {step for step, _ in journal.layers("grad_norm")} == {0, 3}


def test_the_weights_norm_alone_keeps_no_copy(make_loop):
    loop = make_loop(signals=SignalSettings(every=2, weight_norm=True))
    with mock.patch.object(WeightUpdateNorms, "keep") as keep:
        train(loop, 4)
    keep.assert_not_called()
    journal = loop.journal()
    assert set(journal.steps("weight_norm")) == {0, 2}
    assert journal.steps("update_norm") == {}


def test_a_skipped_update_has_the_norm_0(make_loop):
    loop = make_loop(signals=SignalSettings(every=1, update_norm=True))
    loop.monitor.step(loop.backward())
    loop.monitor.step(loop.backward(scale=float("nan")))
    loop.monitor.step(loop.backward())
    updates = loop.journal().steps("update_norm")
    assert updates[1] > 0
    assert updates[2] == 0.0


def test_what_was_measured_before_a_rollback_is_not_said_after_it(make_loop, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_NONFINITE_IN_A_ROW", "3")
    loop = make_loop(
        mode="heal", checkpoints=True, signals=SignalSettings(every=1, update_norm=True)
    )
    outcome = None
    for step in range(40):
        poisoned = step >= 25 and outcome is None
        made = loop.monitor.step(loop.backward(scale=float("nan") if poisoned else 1.0))
        outcome = outcome or (made if made.rolled_back_to is not None else None)
    assert outcome is not None
    journal = loop.journal()
    forks = [e for e in journal.events if type(e).__name__ == "AttemptStarted"][1:]
    first = next(r for r in journal.rows["steps"] if r["attempt"] == forks[0].id)
    assert "update_norm" not in first
    assert "weight_norm" in first


def test_low_precision_and_complex_parameters_are_measured(make_loop):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = torch.nn.Parameter(torch.full((5000,), 0.5, dtype=torch.bfloat16))
            self.phase = torch.nn.Parameter(torch.full((3,), 3 + 4j))

        def forward(self, x):
            return x.mean() + self.low.float().sum() * 0 + self.phase.abs().sum() * 0

    loop = make_loop(
        model=Net(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        signals=SignalSettings(every=1, weight_norm=True),
    )
    loop.monitor.step(loop.backward())
    loop.monitor.step(loop.backward())
    assert loop.journal().steps("weight_norm") == pytest.approx(
        dict.fromkeys(range(2), math.sqrt(5000 * 0.25 + 3 * 25)), rel=1e-3
    )


ALL = SignalSettings(every=2, update_norm=True, activations=("*",))


@pytest.mark.parametrize("fused", [True, False])
def test_measuring_changes_no_bit_of_the_training(make_loop, fused):
    plain, measured = (make_loop(fused=fused, signals=s) for s in (None, ALL))
    for loop in (plain, measured):
        train(loop, 12)
        loop.monitor.close()
    for one, other in zip(plain.parameters().values(), measured.parameters().values(), strict=True):
        assert torch.equal(one, other)


def test_a_loop_that_steps_by_itself_is_measured_over_all_its_optimizers(make_loop, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 1))
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    attached = trainer_hooks.attach(model, both, signals=UPDATES)
    before = []
    for step in range(5):
        before.append([p.detach().clone() for p in model.parameters()])
        model(torch.full((8, 4), float(step))).mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    attached.close()
    journal = Journal(tmp_path / "shm")
    moved = [now - then for now, then in zip(before[3], before[2], strict=True)]
    assert journal.steps("update_norm") == pytest.approx({3: norm(moved)}, rel=1e-5)
    assert journal.steps("weight_norm")[3] == pytest.approx(norm(before[3]), rel=1e-6)


@pytest.mark.usefixtures("no_read_is_free")
def test_measuring_waits_for_nothing(make_loop, monkeypatch):
    loop = make_loop(signals=ALL)
    train(loop, 3)

    def refuse(*_arguments):
        raise AssertionError("a device's value was read on the host")

    for _ in range(4):
        loss = loop.backward()
        with monkeypatch.context() as patch:
            for name in ("item", "cpu", "__bool__", "__float__", "__int__"):
                patch.setattr(torch.Tensor, name, refuse)
            loop.monitor.step(loss)
    assert loop.monitor.swallowed_errors == {}


WRITES = SignalSettings(every=1, update_norm=True, outside_writes=True)


def test_what_the_optimizer_alone_writes_is_no_outside_write(make_loop):
    loop = make_loop(signals=WRITES)
    train(loop, 6)
    journal = loop.journal()
    for column in ("weight_written_ratio", "moment_written_ratio"):
        written = journal.layers(column)
        assert {1, 2, 3, 4} <= {step for step, _ in written}
        assert {0.0} == set(written.values()), "equal to the last bit"


@pytest.mark.parametrize("fused", [True, False])
def test_a_write_into_weights_is_seen_at_the_next_step_and_is_no_update(make_loop, fused):
    loop = make_loop(fused=fused, signals=WRITES)
    train(loop, 4)
    with torch.no_grad():
        loop.model.get_parameter("2.weight").mul_(10.0)
    train(loop, 3)
    journal = loop.journal()
    weights = journal.layers("weight_written_ratio")
    assert {(4, "2")} == {key for key, ratio in weights.items() if ratio > 0}
    assert 0.9 < weights[4, "2"] <= 1.0
    assert {0.0} == set(journal.layers("moment_written_ratio").values())
    updates = journal.layers("update_norm")
    assert updates[4, "2"] < 2 * updates[3, "2"], "what was written is no update"


def test_a_write_into_the_optimizers_state_is_seen_of_its_layer(make_loop):
    loop = make_loop(signals=WRITES)
    train(loop, 4)
    param = loop.model.get_parameter("0.weight")
    loop.optimizer.state[param]["exp_avg_sq"].zero_()
    train(loop, 3)
    moments = loop.journal().layers("moment_written_ratio")
    assert {(4, "0")} == {key for key, ratio in moments.items() if ratio > 0}


def test_a_run_is_the_same_to_the_last_bit_with_every_signal(make_loop):
    plain, measured = make_loop(), make_loop(signals=WRITES)
    for loop in (plain, measured):
        train(loop, 8)
    for name, tensor in plain.parameters().items():
        assert torch.equal(tensor, measured.parameters()[name]), name
