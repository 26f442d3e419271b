"""A monitor's loops over data: one around another, beside another, of several batches a step."""

import weakref

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.inside import events_of
from tests.support.watched import Loop, own_place  # noqa: F401
from tests.trainer_hooks.spawned import spawned
from trainer_hooks import CheckpointSettings
from trainer_hooks.data.loader import Batches
from trainer_hooks.repro.capsule import read
from trainvitals.clock import SystemClock
from trainvitals.io.capsules import find_capsules
from trainvitals.records import DataWindowSkipped, Note

NAN = float("nan")


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_MARGIN", "2")
    monkeypatch.setenv("VITALS_LADDER_LEAVE_OUT_MARGIN", "2")
    monkeypatch.setenv("VITALS_LADDER_NONFINITE_IN_A_ROW", "3")
    checkpoints = CheckpointSettings(
        directory=tmp_path / "checkpoints", healthy_after=3, snapshot_every=4, save_every=100
    )
    return Loop(mode="heal", checkpoints=checkpoints)


ALIVE = weakref.WeakSet()


class Big:
    """A batch that is counted while somebody holds it."""

    def __init__(self):
        ALIVE.add(self)


def test_no_loop_holds_the_batches_that_it_handed_out(loop):
    most = []
    with loop.monitor as monitor:
        for _ in monitor.batches(Big() for _ in range(4)):
            for _ in monitor.batches(Big() for _ in range(20)):
                most.append(len(ALIVE))
            monitor.step(loop.forward())
    assert max(most) <= 4
    assert {} == monitor.swallowed_errors


def test_batches_that_are_to_be_kept_are_held_until_their_step(loop, tmp_path):
    with loop.monitor as monitor:
        for number, _ in enumerate(
            monitor.batches(({"number": torch.tensor(n)} for n in range(8)), keep_batches=True)
        ):
            monitor.micro(loop.forward(NAN if number == 5 else 1.0))
            if number % 2:
                monitor.step()
    (file,) = find_capsules(next((tmp_path / "runs").glob("0*")))
    assert [{"number": torch.tensor(4)}, {"number": torch.tensor(5)}] == read(file).batches


def broken_once(loop, monitor, at):
    if monitor.step_index == at and not loop.__dict__.setdefault("broken", False):
        loop.broken = True
        with torch.no_grad():
            loop.model[0].weight.fill_(NAN)


def test_two_loops_that_feed_the_same_steps_do_not_go_back_and_say_so(loop):
    back = []
    with loop.monitor as monitor:
        said = events_of(monitor)
        both = [monitor.batches(list(range(60)), after_rollback="replay") for _ in range(2)]
        for _ in zip(*both, strict=False):
            broken_once(loop, monitor, 20)
            back.append(monitor.step(loop.forward()).rolled_back_to)
    assert 1 == sum(step is not None for step in back)
    (text,) = [e.text for e in said if isinstance(e, Note) and e.code == "data"]
    assert "not exact: " in text and text.startswith("data: continues at batch ")
    assert text.endswith("another loop over data feeds the same steps)")


@pytest.mark.parametrize("after", ["move_on", "replay"])
def test_a_window_is_as_many_steps_long_where_a_step_takes_several_batches(loop, after):
    fed = []
    with loop.monitor as monitor:
        said = events_of(monitor)
        for number in monitor.batches(list(range(140)), after_rollback=after):
            fed.append(number)
            monitor.micro(loop.forward(NAN if 80 <= number < 100 else 1.0))
            if len(fed) % 4 == 0:
                monitor.step()
    (window,) = [e for e in said if isinstance(e, DataWindowSkipped)]
    assert (72, 100) == (window.first_batch, window.last_batch)  # 20 to 22 are bad, 18 to 24 go
    assert 100 in fed
    assert not set(range(92, 100)) & set(fed)  # each bad step is known before the next one


def test_a_sampler_that_is_set_to_another_epoch_is_not_said_to_go_on_exactly():
    def batches(epoch, state=None):
        data = torch.arange(12)
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        loader = DataLoader(data, 2, sampler=sampler)
        return Batches(loader, epochs=1, clock=SystemClock(), waited=lambda _: None, state=state)

    made = batches(2)
    order = [batch.tolist() for batch in made]
    made = batches(2)
    next(iter(made))
    state = made.state_dict()
    assert "the sampler was at epoch 2, and is set to 0" == batches(0).why_not_exact(state)
    again = batches(2, state)
    assert "" == again.why_not_exact(state)
    assert order[1:] == [batch.tolist() for batch in again]


def relaunched(rank, folder):
    """Train on two ranks; go on with a loader that rank 1 alone has more batches of."""
    import json
    import os
    from pathlib import Path

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import trainer_hooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    steps, run = [], None
    for start in range(2):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        checkpoints = CheckpointSettings(
            directory=Path(folder) / "checkpoints", healthy_after=20, snapshot_every=2, save_every=2
        )
        if run is not None:
            os.environ["VITALS_RUN_ID"] = run
        with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=checkpoints) as monitor:
            run = monitor.run_id
            data = list(torch.randn(100 + 10 * rank * start, 8, 4))
            for batch in monitor.batches(data):
                loss = model(batch).square().mean()
                loss.backward()
                outcome = monitor.step(loss)
                steps.append([outcome.step, outcome.next_step])
                if len(steps) == 60 or (start and outcome.next_step >= 70):
                    break
    Path(folder, f"{rank}.json").write_text(json.dumps(steps))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def steps_of_both(tmp_path_factory):
    return spawned(relaunched, tmp_path_factory.mktemp("relaunched"))


@pytest.mark.slow
def test_where_one_rank_s_data_cannot_begin_again_no_rank_takes_its_first_batch_twice(
    steps_of_both,
):
    first, second = steps_of_both
    assert first == second
    assert first[60][0] > 0  # it went on from a checkpoint
    assert all(after == before + 1 for before, after in first)
