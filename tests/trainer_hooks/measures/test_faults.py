"""What fails while measuring is counted, and the training goes on as without us."""

import pytest
import torch

from tests.support.inside import device_of, facts_of
from trainer_hooks import SignalSettings
from trainer_hooks.exchange.emit import Rank0Columns
from trainer_hooks.measures import activations
from trainer_hooks.measures.sampled import WeightUpdateNorms
from trainer_hooks.step import phases

ALL = SignalSettings(every=1, update_norm=True, activations=("*",))


def broken(*_arguments, **_named):
    raise RuntimeError("no figure today")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m, patch: patch.setattr(WeightUpdateNorms, "weight_squares", broken),
        lambda m, patch: patch.setattr(WeightUpdateNorms, "keep", broken),
        lambda m, patch: patch.setattr(WeightUpdateNorms, "update_squares", broken),
        lambda m, patch: patch.setattr(activations.Activations, "reset", broken),
        lambda m, patch: patch.setattr(device_of(m).memory, "count_step", broken),
        lambda m, patch: patch.setattr(Rank0Columns, "of", broken),
        lambda m, patch: patch.setattr(phases, "learning_rates", broken),
        lambda m, patch: patch.setattr(activations, "local_tensor", broken),
    ],
    ids=["weights", "keep", "update", "begin", "memory", "columns", "groups", "figures"],
)
def test_a_signal_that_fails_is_missing_and_no_more(make_loop, monkeypatch, break_it):
    plain, measured = make_loop(), make_loop(signals=ALL)
    break_it(measured.monitor, monkeypatch)
    for loop in (plain, measured):
        for _ in range(4):
            loop.monitor.step(loop.backward())
        loop.monitor.close()
    errors = measured.monitor.swallowed_errors
    assert set(errors) <= {"signals", "columns", "activations"}
    assert sum(errors.values()) >= 3
    for one, other in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert facts_of(measured.monitor).num_skips == 0
