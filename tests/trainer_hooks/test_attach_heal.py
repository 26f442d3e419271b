"""``attach(mode="heal")``: the state goes back inside ``optimizer.step()``, the loop moves on."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import trainer_hooks
from tests.support.watched import assert_same, own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainvitals.errors import TrainingHalted, UsageError
from trainvitals.records import AttemptStarted, DecisionMade

STEPS = 160


class Loop:
    """A loop of its own: clip, optimizer, scheduler and a counter of updates."""

    def __init__(self, *, probe: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 50))
        self.probes = probe
        self.count = 0
        self.states: dict[int, object] = {}
        """State at the end of ``optimizer.step()``, by the number of updates until then."""
        self.losses: list[float] = []

    def state(self) -> object:
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "rate": [group["lr"] for group in self.optimizer.param_groups],
            "last_epoch": self.scheduler.last_epoch,
        }
        return copy.deepcopy(parts)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def rewind(self, num: int) -> None:
        self.count -= num

    def run(self, attached: trainer_hooks.Attached | None, damage: dict[int, float]) -> list[int]:
        """Train; return the numbers of batches at which the state went back."""
        if attached is not None:
            attached.when_rolled_back(self.rewind)
        went_back = []
        for batch_number in range(STEPS):
            if batch_number in damage:
                with torch.no_grad():
                    self.model[3].weight.mul_(damage[batch_number])
            batch = torch.randn(32, 6, generator=torch.Generator().manual_seed(batch_number))
            if attached is not None and self.probes:
                attached.keep_batch(batch, self.loss_of)
            loss = self.loss_of(batch)
            loss.backward()
            if attached is not None:
                attached.loss(loss)
                attached.before_clip(1.0)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            before = self.count
            self.optimizer.step()
            self.count += 1
            if self.count <= before:
                went_back.append(batch_number)
                assert_same(self.states[self.count], self.state())
            self.states[self.count] = self.state()
            assert attached is None or self.count == attached.step_index
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return went_back


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("factor", [float("nan"), 40.0])
def test_a_damaged_state_goes_back_with_the_scheduler_and_the_data_moves_on(probe, factor):
    loop = Loop(probe=probe)
    with trainer_hooks.attach(loop.model, loop.optimizer, loop.scheduler, mode="heal") as attached:
        went_back = loop.run(attached, {100: factor})
    if factor == 40.0 and not probe:
        assert [] == went_back  # a finite loss alone is no evidence
        return
    assert 1 == len(went_back)
    assert went_back[0] in range(100, 110 if factor != 40.0 else 150)
    assert max(loop.losses[-8:]) < 3 * max(loop.losses[60:100])
    rows = Journal(Path(os.environ["VITALS_SHM"]))
    (decision,) = [
        e.decision
        for e in rows.events
        if isinstance(e, DecisionMade) and e.decision.acted and e.decision.action == "rollback"
    ]
    assert decision.rollback_to_step < 100
    attempts = [e for e in rows.events if isinstance(e, AttemptStarted)]
    assert [0, decision.rollback_to_step] == [attempt.fork_step for attempt in attempts]
    (text,) = rows.notes("data")
    assert text.startswith(f"data: continues after the batch of step {went_back[0]} (not exact")


def test_a_healthy_loop_trains_bit_for_bit_as_without_us():
    states = []
    for mode in ("guard", "heal"):
        loop = Loop()
        with trainer_hooks.attach(loop.model, loop.optimizer, loop.scheduler, mode=mode) as ours:
            assert [] == loop.run(ours, {})
        states.append(loop.state())
    assert_same(*states)
    bare = Loop()
    bare.run(None, {})
    assert_same(bare.state(), states[0])


def test_two_optimizers_are_refused():
    loop = Loop()
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (loop.model[0], loop.model[3])]
    with pytest.raises(UsageError, match="2 optimizers cannot roll back"):
        trainer_hooks.attach(loop.model, halves, mode="heal")


def test_nothing_is_written_to_a_checkpoint_directory_and_a_restart_is_the_loop_s(tmp_path):
    loop = Loop()
    with trainer_hooks.attach(
        loop.model, loop.optimizer, loop.scheduler, mode="heal", dir=tmp_path
    ) as attached:
        loop.run(attached, {})
        kept = attached.state_dict()
        folder = tmp_path / attached.run_id
    assert [] == list((folder / "checkpoints").glob("*"))
    again = Loop()
    with trainer_hooks.attach(
        again.model, again.optimizer, again.scheduler, mode="heal", dir=tmp_path
    ) as attached:
        attached.load_state_dict(kept)
        again.count = attached.step_index
        assert STEPS - 1 <= again.count <= STEPS
        assert 1 == len(again.run(attached, {100: float("nan")}))


def test_a_problem_in_every_batch_halts_the_run_in_the_end():
    loop = Loop()
    attached = trainer_hooks.attach(loop.model, loop.optimizer, loop.scheduler, mode="heal")
    with attached, pytest.raises(TrainingHalted):
        loop.run(attached, {step: float("nan") for step in range(60, STEPS)})
