"""State that explains a problem: read when it is found, and named only if it was damaged."""

import math

import pytest
import torch

from trainvitals import CheckpointSettings

LAYERS = 5


def stack():
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    ("huge", "factor", "written"),
    [(3e37, math.nan, [41]), (3.0, math.nan, []), (3e12, 1.0, [40, 43])],
)
def test_a_huge_weight_is_read_at_the_second_nan_or_at_a_huge_gradient(
    make_loop, huge, factor, written
):
    loop = make_loop(model=stack())
    for step in range(45):
        x = torch.randn(8, 4, generator=loop.data)
        loss = loop.model(x).square().mean()
        if step >= 40:
            loop.model[2].weight.data[0, 0] = huge
            loss = loss * factor
        loss.backward()
        loop.monitor.step(loss, max_norm=1.0)
    found = loop.journal().layers("weight_norm")
    assert {(step, "2"): pytest.approx(huge) for step in written} == found


def test_a_problem_after_a_rollback_is_explained_at_its_first_step(make_loop, tmp_path):
    where = CheckpointSettings(directory=tmp_path / "kept", snapshot_every=5)
    loop = make_loop(model=stack(), mode="heal", checkpoints=where)
    weight, factors, restored = loop.model[2].weight.data, {40: math.nan, 41: math.nan}, None
    for attempted in range(45):
        if attempted == 42:
            weight[0, 0] = math.nan
        if restored is not None:
            weight[0, 0] = 3e12
        x = torch.randn(8, 4, generator=loop.data)
        loss = loop.model(x).square().mean() * factors.get(attempted, 1.0)
        loss.backward()
        outcome = loop.monitor.step(loss, max_norm=1.0)
        if outcome.rolled_back_to is not None:
            restored = outcome.next_step
    assert restored < 40
    # The weights were read at 41, too, and so not before 44 had there been no rollback.
    assert pytest.approx(3e12) == loop.journal().layers("weight_norm")[restored, "2"]
