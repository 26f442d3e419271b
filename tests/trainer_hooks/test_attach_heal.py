"""``attach(mode="heal")``: the state goes back inside ``optimizer.step()``, the loop moves on."""

import copy
import os
from itertools import pairwise
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

    @torch.no_grad()
    def spoil(self, factor: float = float("nan")) -> None:
        """Damage a weight."""
        self.model[3].weight.mul_(factor)

    def update(self, attached: trainer_hooks.Attached, factor: float = 1.0) -> float:
        """Train on a batch from torch's own random numbers; return its first number."""
        batch = torch.randn(8, 6)
        loss = self.loss_of(batch) * factor
        self.optimizer.zero_grad()
        loss.backward()
        attached.loss(loss)
        self.optimizer.step()
        return batch[0, 0].item()

    def rewind(self, num: int) -> None:
        self.count -= num

    def run(self, attached: trainer_hooks.Attached | None, damage: dict[int, float]) -> list[int]:
        """Train; return the numbers of batches at which the state went back."""
        if attached is not None:
            attached.when_rolled_back(self.rewind)
        went_back = []
        for batch_number in range(STEPS):
            if batch_number in damage:
                self.spoil(damage[batch_number])
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
    assert "skipping" not in decision.reason
    assert 0 == decision.skip_batches
    assert text.startswith(f"data: continues after the batch of step {went_back[0]} (not exact")


def test_damage_right_after_a_resume_goes_back_to_the_resumed_state():
    loop = Loop()
    with trainer_hooks.attach(loop.model, loop.optimizer, loop.scheduler, mode="heal") as attached:
        loop.run(attached, {})
        saved = attached.state_dict()
    before = loop.state()
    with trainer_hooks.attach(loop.model, loop.optimizer, loop.scheduler, mode="heal") as attached:
        attached.load_state_dict(saved)
        loop.count = first = attached.step_index
        loop.states = {first: before}
        (went_back,) = loop.run(attached, {5: float("nan")})
    assert 5 <= went_back < 15
    assert attached.step_index > first


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


@pytest.mark.parametrize("fused", [True, False])
def test_a_rollback_inside_the_scaler_s_step_lets_the_loop_update_it(fused):
    loop = Loop()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
    with trainer_hooks.attach(loop.model, loop.optimizer, scaler=scaler, mode="heal") as attached:
        back = []
        attached.when_rolled_back(back.append)
        for number in range(120):
            if number == 80:
                loop.spoil()
            loss = loop.loss_of(torch.ones(4, 6) * (1 + number % 5))
            scaler.scale(loss).backward()
            attached.loss(loss)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        assert 1 == len(back)
        assert {} == attached.swallowed_errors
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    assert 256.0 >= scaler.get_scale() > 0.0


def test_random_numbers_move_on_with_the_data():
    loop, drawn, back = Loop(), [], []
    torch.manual_seed(1)
    with trainer_hooks.attach(loop.model, loop.optimizer, mode="heal") as attached:
        attached.when_rolled_back(back.append)
        for number in range(120):
            drawn.append(loop.update(attached, float("nan") if 70 <= number < 110 else 1.0))
    assert len(set(drawn)) == len(drawn)
    assert 1 == len(back)


@pytest.mark.parametrize("bad", [3, 80])
def test_the_scheduler_and_an_average_are_where_they_were_also_before_the_first_step(bad):
    loop = Loop()
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    found = []
    with trainer_hooks.attach(
        loop.model, loop.optimizer, loop.scheduler, mode="heal", state={"average": average}
    ) as attached:
        for number in range(120):
            if number == bad:
                loop.spoil()
            loop.update(attached)
            average.update_parameters(loop.model)
            assert "step" not in loop.scheduler.state_dict()
            loop.scheduler.step()
            found.append((attached.step_index, loop.scheduler.last_epoch))
    assert any(later[0] < earlier[0] for earlier, later in pairwise(found))
    assert all(step == epoch for step, epoch in found)
    assert LambdaLR is type(loop.scheduler)
    assert found[-1][0] == average.n_averaged


def test_a_plateau_is_given_as_a_scheduler_and_goes_back():
    loop = Loop()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=1)
    before = []
    with trainer_hooks.attach(loop.model, loop.optimizer, plateau, mode="heal") as attached:
        attached.when_rolled_back(lambda num: before.append(plateau.num_bad_epochs))
        for number in range(120):
            if number == 80:
                plateau.num_bad_epochs = 77
                loop.spoil()
            loop.update(attached)
    assert [0] == before


def test_off_counts_its_updates():
    loop = Loop()
    with trainer_hooks.attach(loop.model, loop.optimizer, mode="off") as attached:
        while attached.step_index < 3:
            loop.loss_of(torch.ones(4, 6)).backward()
            loop.optimizer.step()


def test_sigterm_saves_nothing_because_the_loop_has_its_own_checkpoints():
    loop = Loop()
    with trainer_hooks.attach(loop.model, loop.optimizer, mode="heal") as attached:
        assert not attached.shutdown.saves


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
