"""Settings of parameter groups: changes are seen, bounded, and never waited for."""

import pytest
import torch

from trainer_hooks.measures.host import GroupSettings


def optimizer():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


def test_a_change_names_group_key_and_both_values():
    adam = optimizer()
    settings = GroupSettings([adam])
    assert settings.take_changes() == []
    adam.param_groups[1]["weight_decay"] = 0.01
    adam.param_groups[0]["betas"] = (0.8, 0.999)
    found = [(c.group, c.key, c.before, c.after) for c in settings.take_changes()]
    assert found == [(0, "betas", (0.9, 0.999), (0.8, 0.999)), (1, "weight_decay", 0.0, 0.01)]
    assert settings.take_changes() == []


def test_the_learning_rate_and_an_equal_value_are_no_change():
    adam = optimizer()
    settings = GroupSettings([adam])
    adam.param_groups[0]["lr"] = 0.5
    adam.param_groups[0]["betas"] = (0.9, 0.999)
    assert settings.take_changes() == []


def test_a_tensor_is_not_read():
    adam = optimizer()
    settings = GroupSettings([adam])
    adam.param_groups[0]["weight_decay"] = torch.tensor(0.3)
    assert settings.take_changes() == []


def test_a_new_value_is_a_scalar_for_each_of_its_numbers():
    adam = optimizer()
    settings = GroupSettings([adam])
    adam.param_groups[0].update(betas=(0.8, 0.99), amsgrad=True)
    numbers = {k: v for change in settings.take_changes() for k, v in change.numbers().items()}
    assert numbers == {"group0/betas.0": 0.8, "group0/betas.1": 0.99, "group0/amsgrad": 1.0}


def test_a_schedule_is_told_at_powers_of_two_and_kept_in_full(make_loop):
    loop = make_loop()
    decays = {}
    for step in range(20):
        loss = loop.backward()
        if step >= 4:
            decays[step] = loop.optimizer.param_groups[0]["weight_decay"] = 0.01 + step / 1000
        loop.monitor.step(loss)
    journal = loop.journal()
    assert {s: v for s, n, v in journal.scalars() if n == "group0/weight_decay"} == decays
    told = journal.notes("group_setting")
    assert told[0] == "group 0: weight_decay 0.01 -> 0.014"
    assert len(told) == 5  # the 1st, 2nd, 4th, 8th and 16th of 16 changes


@pytest.mark.parametrize("fused", [True, False])
def test_a_row_has_the_rate_that_its_update_was_made_with(make_loop, fused):
    schedulers = []

    def scheduled(params):
        optimizer = torch.optim.AdamW(params, lr=0.01, fused=fused)
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + t)))
        return optimizer

    loop = make_loop(optimizer=scheduled, schedulers=schedulers)
    for _ in range(3):
        loop.monitor.step(loop.backward())
    assert loop.journal().steps("learning_rate") == pytest.approx(
        {0: 0.01, 1: 0.01 / 2, 2: 0.01 / 3}
    )
