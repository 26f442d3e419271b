"""The learning rates of all parameter groups stand in each step's row, and are shown."""

import sys

import pytest
import torch
from torch import nn

import trainer_hooks
from tests.house.pages import ROOT
from tests.support.examples import one_in
from tests.support.forked import COMMANDS
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainvitals.catalog import MAX_GROUPS


def train(num_groups, *, steps=3):
    """Train each parameter in a group of its own; return what was swallowed."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(num_groups)]
    groups = [{"params": [param], "lr": 1e-3 * i} for i, param in enumerate(params, start=1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with trainer_hooks.watch(nn.ParameterList(params), optimizer, scheduler) as monitor:
        for _ in range(steps):
            loss = sum(param.square().sum() for param in params)
            loss.backward()
            monitor.step(loss)
    return monitor.swallowed_errors


@pytest.mark.parametrize("num_groups", [1, 3, 100, MAX_GROUPS])
def test_each_step_s_row_has_the_rate_of_every_group_as_applied(tmp_path, num_groups):
    assert {} == train(num_groups)
    journal = Journal(tmp_path / "shm")
    for i in range(num_groups):
        rates = journal.steps(f"learning_rate.{i}" if i else "learning_rate")
        assert [pytest.approx(1e-3 * (i + 1) * 0.5**step) for step in range(3)] == [*rates.values()]


def test_of_more_groups_than_a_row_holds_the_first_are_kept_and_it_is_said(tmp_path):
    assert {} == train(1000)
    journal = Journal(tmp_path / "shm")
    (row, *_) = journal.rows["steps"]
    assert MAX_GROUPS == sum(column.startswith("learning_rate") for column in row)
    assert pytest.approx(MAX_GROUPS * 1e-3) == row[f"learning_rate.{MAX_GROUPS - 1}"]
    (text,) = journal.notes("many_groups")
    assert text == f"1000 parameter groups: the rates of the first {MAX_GROUPS} are kept"


@pytest.mark.parametrize(
    ("num_groups", "shown"),
    one_in(
        3,
        [
            (100, "0.00025 to 0.025 (of 100 groups)"),
            (1, "0.00025"),
            (3, "0.00025, 0.0005, 0.00075 (of 3 groups)"),
        ],
    ),
)
def test_show_and_why_say_the_rates_of_all_groups(tmp_path, num_groups, shown):
    train(num_groups)
    vitals(tmp_path, "agent", "--dir", "--once")
    assert f"learning rate {shown}" in vitals(tmp_path, "show")
    rate = "rate" if num_groups == 1 else "rates"
    assert f", learning {rate} {shown}." in vitals(tmp_path, "why", "2")


def vitals(folder, command, *arguments):
    """Run a command on the folder of runs; return what it printed, as one line."""
    runs = str(folder / "runs")
    if arguments[:1] == ("--dir",):
        arguments = ("--dir", runs, *arguments[1:])
    else:
        arguments = (runs, *arguments)
    words = [sys.executable, "-m", "trainvitals", command, *arguments]
    done = COMMANDS.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    return " ".join(done.stdout.split())
