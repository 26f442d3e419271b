"""The first losses of a start are compared with those of the run's earlier starts."""

import random

import pytest

from tests.collector.rows import RUN, Writer
from tests.support.watched import Loop, own_place  # noqa: F401
from trainer_hooks.features.earlier_losses import (
    EarlierLosses,
    RestartCheck,
    read_earlier_losses,
)
from trainvitals.io.rundir import RunDir
from trainvitals.io.spool import Spool
from trainvitals.records import StepRecord

REACHED = EarlierLosses(first=8.0, latest=0.1, highest=0.3, step=511)


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "runs", RUN)


def store(run_dir: RunDir, losses: list[float], *, node: str = "a", first_step: int = 0) -> None:
    """Store a start's losses as the node's agent does, among rows of another rank."""
    path = run_dir.agent_dir(node) / "spool"
    spool = Spool(path, max_bytes=1 << 26, keep=True, file_bytes=4096)
    steps = range(first_step, first_step + len(losses))
    for rank, values in (("rank:0", losses), ("rank:1", [1e6] * len(losses))):
        spool.append(Writer(rank).steps(steps, loss=values))
    spool.sync()
    spool.close()


def warnings(earlier: EarlierLosses, *losses: float | None) -> list[str]:
    check = RestartCheck(earlier)
    texts = [check.add(StepRecord(step=i, attempt=1, loss=x)) for i, x in enumerate(losses)]
    return [text for text in texts if text]


def test_first_and_latest_losses_are_those_of_rank_0_in_the_order_of_time(run_dir):
    store(run_dir, [8.0] * 20 + [4.0] * 80)
    store(run_dir, [0.2] * 60 + [float("nan"), 0.3], node="b", first_step=100)
    assert EarlierLosses(8.0, 0.2, 0.3, 161) == read_earlier_losses(run_dir)


def test_too_few_losses_are_not_compared(run_dir):
    assert read_earlier_losses(run_dir) is None
    store(run_dir, [8.0] * 31)
    assert read_earlier_losses(run_dir) is None


def test_losses_back_at_the_start_are_one_warning_with_the_remedy():
    (text,) = warnings(REACHED, *[7.5, None, 8.5, float("inf")], *[8.0] * 30)
    assert "are about 8, but the run started at 8 and had reached 0.1 at step 511" in text
    assert "load the checkpoint into the model and the optimizer before the first step" in text


@pytest.mark.parametrize("level", [0.1, 0.5, 3.9])
def test_a_checkpoint_with_half_of_the_progress_is_a_resume(level):
    chance = random.Random(3)
    assert [] == warnings(REACHED, *(level * chance.uniform(0.8, 1.2) for _ in range(30)))


def test_one_hard_batch_after_a_resume_is_no_warning():
    assert [] == warnings(REACHED, 9.0, *[0.1] * 30)


def test_a_loss_that_never_fell_is_not_compared():
    flat = EarlierLosses(first=1.0, latest=1.0, highest=1.2, step=99)
    assert [] == warnings(flat, *[1.1] * 30)


@pytest.mark.parametrize(("reached", "num_warnings"), [(1e-6, 1), (1e3, 0)])
def test_watch_compares_a_start_with_the_earlier_ones_in_its_directory(
    monkeypatch, caplog, run_dir, reached, num_warnings
):
    monkeypatch.setenv("VITALS_RUN_ID", RUN)
    for _ in range(2):
        loop = Loop(mode="guard")
        with loop.monitor as monitor:
            for _ in range(12):
                monitor.step(loop.forward())
        store(run_dir, [2 * reached] * 20 + [reached] * 80)
    warned = [text for text in caplog.messages if "weights are not restored" in text]
    assert num_warnings == len(warned)
