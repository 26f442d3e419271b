"""Early stopping in a rank: what reaches all ranks, what is kept of what was evaluated."""

import math
from unittest import mock

import pytest
import torch

from tests.trainer_hooks.packs import FIELDS, contribution
from tests.trainer_hooks.training import Training
from trainer_hooks.callbacks.early_stopping import RankEarlyStopping, RestoredBest
from trainer_hooks.exchange.reduce_vector import (
    Rank0Values,
    ReducedNumbers,
    ReduceVector,
    ReduceVectorLayout,
)
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.checkpoints.index import BestMark
from trainer_hooks.recovery.manager import Restored, SnapshotRing
from trainvitals.early_stopping import EarlyStopping
from trainvitals.errors import CheckpointError, UsageError

NAN = math.nan


def evaluated(value):
    """Return rank 0's values of early stopping; None: no evaluation."""
    return {"evaluated": float(value is not None), "evaluation": 0.0 if value is None else value}


class Emitter:
    """Stands for rank 0's journal: keeps what was said."""

    def __init__(self, *, is_rank0):
        self.notes, self._is_rank0 = [], is_rank0

    def note(self, code, text, severity="info", *, step, attempt):
        if self._is_rank0:
            self.notes.append((step, code, text))

    def codes(self):
        return [code for _, code, _ in self.notes]


class Store:
    """Keeps what was saved, held as while it is being written; ``finish`` ends the writing."""

    def __init__(self):
        self.saved, self.loaded, self._writing = [], [], []
        self.folder = self

    def save(self, snapshot):
        snapshot.hold()
        self.saved.append(snapshot)
        self._writing.append(snapshot)

    def finish(self):
        while self._writing:
            self._writing.pop().release()

    def wait(self, timeout):
        self.finish()
        return True

    def best(self):
        if not self.saved:
            return None
        newest = self.saved[-1]
        metric, value = newest.best
        return f"step-{newest.step:08d}-{newest.attempt}", BestMark(metric=metric, value=value)

    def load(self, name):
        self.loaded.append(name)
        _, step, attempt = name.split("-")
        return Restored(name, int(step), int(attempt), {})


class Rank:
    """One rank of some, with a real training, a real pack, and a reduction that adds the others."""

    def __init__(self, *, rank=0, world_size=1, keeps=True, **settings):
        self.training = Training()
        self.ring = SnapshotRing(
            self.training.state, num_slots=2, interval=9, healthy_after=3, keep_evaluated=keeps
        )
        self.ranks = Ranks(rank, world_size, 0, None)
        self.layout = ReduceVectorLayout.of(1, self.ranks, fields=FIELDS)
        self.store, self.emitter = Store(), Emitter(is_rank0=rank == 0)
        self.attempt, self.step = 1, 0
        self.evaluations = RankEarlyStopping(
            EarlyStopping(**settings),
            ranks=self.ranks,
            emitter=self.emitter,
            ring=self.ring if keeps else None,
            store=self.store if keeps else None,
        )
        self.in_flight = []

    def evaluate(self, value=None, **others):
        values = others if value is None else {"loss": value, **others}
        self.evaluations.evaluated(
            values, step=self.step, attempt=self.attempt, meta=lambda: {"at": self.step}
        )

    def pack(self):
        """Return what this rank brings to the step."""
        evaluations, packer = self.evaluations, ReduceVector(self.layout, torch.device("cpu"))
        value = evaluations.rank0_metric(self.step, self.attempt)
        root = Rank0Values(values=evaluated(value)) if self.ranks.rank == 0 else None
        holds = evaluations.has_state_copy(self.step, self.attempt)
        packer.fill(contribution(None, weight=0.0, holds_evaluated=holds), root)
        return packer.pack

    def train(self, others=0.0):
        """Make a step; its numbers come back in the next one."""
        self.training.run(1)
        self.in_flight.append((self.step, self.attempt, self.pack() + others))
        if len(self.in_flight) > 1:
            self.back()
        self.step += 1

    def back(self):
        step, attempt, pack = self.in_flight.pop(0)
        if attempt == self.attempt:
            reduced = ReducedNumbers(self.layout, pack.tolist())
            self.evaluations.apply_reduced_metric(reduced, step=step, attempt=attempt)

    def restore_best(self):
        while self.in_flight:
            self.back()
        step, attempt = self.step, self.attempt
        return self.evaluations.restore_best(step=step, attempt=attempt, meta=lambda: {"at": step})


def evaluated_every_step(rank, given_values):
    """Evaluate, then make two steps, for each value; the writing ends in time."""
    for value in given_values:
        rank.evaluate(value)
        rank.train()
        rank.train()
        rank.store.finish()


def test_a_value_counts_when_it_is_back_and_the_run_stops_with_its_reason_once():
    rank = Rank(patience=1)
    rank.evaluate(1.0)
    rank.train()
    rank.evaluate(2.0)
    rank.train()  # brings back the first
    assert not rank.evaluations.should_stop
    rank.train()
    assert rank.evaluations.should_stop
    rank.evaluate(3.0)
    rank.train()
    rank.train()
    (said,) = [note for note in rank.emitter.notes if note[1] == "early_stopping"]
    assert said[0] == 1
    assert "loss was best at step 0 (1) and has not improved in 1 evaluations" in said[2]


def test_the_copy_is_the_state_that_was_evaluated_whatever_was_trained_since():
    rank = Rank()
    rank.training.run(3)
    before = {k: t.clone() for k, t in rank.training.state.tensors().items()}
    rank.evaluate(0.5)
    rank.train()
    rank.train()
    (best,) = rank.store.saved
    assert (0, 1, {"at": 0}, "verified", ("loss", 0.5)) == (
        best.step, best.attempt, best.meta, best.state, best.best
    )  # fmt: skip
    assert before.keys() == best.tensors().keys()
    assert all(torch.equal(t, before[k]) for k, t in best.tensors().items())


def test_only_what_improves_is_written():
    rank = Rank(patience=9)
    evaluated_every_step(rank, [3.0, 4.0, NAN, 2.0, 2.0, 1.0])
    assert [3.0, 2.0, 1.0] == [saved.best[1] for saved in rank.store.saved]
    assert [(4, "early_stopping_not_finite", "loss is nan at step 4: no improvement")] == (
        rank.emitter.notes
    )


def test_a_state_can_be_evaluated_in_inference_mode_and_copied_again_out_of_it():
    rank = Rank(patience=9)
    with torch.inference_mode():
        rank.evaluate(2.0)
    rank.train()
    rank.train()
    rank.store.finish()
    rank.evaluate(1.0)
    rank.train()
    rank.train()
    assert [2.0, 1.0] == [saved.best[1] for saved in rank.store.saved]


def test_the_slot_is_not_filled_while_it_is_written_and_that_best_is_said_not_to_be_kept():
    rank = Rank()
    rank.evaluate(2.0)
    rank.train()
    rank.train()
    (first,) = rank.store.saved
    before = {k: t.clone() for k, t in first.tensors().items()}
    rank.evaluate(1.0)
    rank.train()
    rank.train()
    assert all(torch.equal(t, before[k]) for k, t in first.tensors().items())
    ((step, code, text),) = rank.emitter.notes
    assert (2, "best_not_kept") == (step, code)
    assert "(loss 1, step 2) is not kept" in text
    assert "still being kept" in text
    rank.store.finish()
    rank.evaluate(0.5)
    rank.train()
    rank.train()
    assert [2.0, 0.5] == [saved.best[1] for saved in rank.store.saved]


def test_an_evaluation_before_the_last_one_is_decided_counts_but_its_state_is_not_kept():
    rank = Rank()
    rank.evaluate(2.0)
    rank.train()
    rank.evaluate(1.0)
    rank.train()
    rank.train()
    assert [2.0] == [saved.best[1] for saved in rank.store.saved]
    assert 1.0 == rank.evaluations.state_dict()["best"]
    assert "evaluation of step 0 is not decided yet" in rank.emitter.notes[0][2]


def test_the_last_value_before_a_step_counts():
    rank = Rank()
    rank.evaluate(2.0)
    rank.evaluate(3.0)
    rank.evaluate(accuracy=0.5)
    rank.train()
    rank.train()
    assert [3.0] == [saved.best[1] for saved in rank.store.saved]


def test_a_metric_that_never_comes_is_said_once():
    rank = Rank(patience=2)
    for _ in range(5):
        rank.evaluate(accuracy=0.5)
    ((_, code, text),) = rank.emitter.notes
    assert "early_stopping_waits" == code
    assert "waits for 'loss', which was in none of 2 calls" in text


def test_state_that_cannot_be_copied_never_reaches_the_loop():
    rank = Rank()
    rank.training.state.host_state = lambda: 1 / 0
    rank.evaluate(1.0)
    rank.train()
    rank.train()
    assert ["best_not_kept"] == rank.emitter.codes()
    assert "division by zero" in rank.emitter.notes[0][2]


def test_without_checkpoints_it_stops_all_the_same_and_keeps_nothing():
    rank = Rank(keeps=False, patience=1)
    evaluated_every_step(rank, [1.0, 2.0])
    assert rank.evaluations.should_stop
    assert ["early_stopping"] == rank.emitter.codes()
    with pytest.raises(UsageError, match="this run keeps no best state"):
        rank.restore_best()


def test_without_keep_best_no_state_is_copied():
    rank = Rank(keep_best=False)
    with mock.patch.object(SnapshotRing, "take_evaluated") as take_evaluated:
        evaluated_every_step(rank, [1.0])
    assert not rank.store.saved
    take_evaluated.assert_not_called()


# ---------------------------------------------------------------------------- beside others


def others_of(two, *, holds=0.0, value=None, failed=0.0):
    """Return what the other rank of two adds to the pack."""
    other = 1 - two.ranks.rank
    layout = ReduceVectorLayout.of(1, Ranks(other, 2, 0, None), fields=FIELDS)
    packer = ReduceVector(layout, torch.device("cpu"))
    root = Rank0Values(values=evaluated(value), loss_limit=0.0) if other == 0 else None
    packer.fill(contribution(None, weight=0.0, holds_evaluated=bool(holds)), root)
    return packer.pack


def test_a_best_that_the_other_rank_does_not_hold_is_not_written_and_said_once():
    rank = Rank(world_size=2, patience=2)
    nothing = others_of(rank)
    for value in (3.0, 2.0, 4.0, 4.0):
        rank.evaluate(value)
        rank.train(nothing)
        rank.train(nothing)
    assert not rank.store.saved
    assert ["best_not_on_all_ranks", "early_stopping"] == rank.emitter.codes()
    assert "1 of 2 ranks have a copy of it" in rank.emitter.notes[0][2]
    assert 9 == rank.ring.take_evaluated(9, 1, {}).step, "its place is free again"


def test_a_rank_that_evaluates_alone_lets_its_copy_go():
    rank = Rank(rank=1, world_size=2)
    nothing = others_of(rank)
    rank.evaluate(1.0)
    rank.train(nothing)
    rank.train(nothing)
    assert 9 == rank.ring.take_evaluated(9, 1, {}).step, "its place is free again"
    assert None is rank.evaluations.state_dict()["best"]


def test_a_copy_of_a_later_step_waits_for_its_own_numbers():
    rank = Rank(rank=1, world_size=2)
    rank.train(others_of(rank, holds=1.0, value=2.0))
    rank.evaluate(7.0)
    rank.train(others_of(rank, holds=1.0, value=1.0))  # brings the first one back
    rank.train(others_of(rank))
    assert [(1, ("loss", 1.0))] == [(saved.step, saved.best) for saved in rank.store.saved]


def test_the_value_of_another_rank_is_not_looked_at():
    rank = Rank(rank=1, world_size=2, patience=1)
    for value in (1.0, 2.0):
        rank.evaluate("no number at all")
        rank.train(others_of(rank, holds=1.0, value=value))
        rank.train(others_of(rank))
    assert rank.evaluations.should_stop
    assert [("loss", 1.0)] == [saved.best for saved in rank.store.saved]


# ------------------------------------------------------------------------------- going back


def test_after_a_rollback_what_was_evaluated_on_the_branch_left_is_gone():
    rank = Rank(patience=1)
    evaluated_every_step(rank, [1.0])
    kept = rank.evaluations.state_dict()
    rank.evaluate(0.5)
    rank.train()
    rank.evaluations.load_state_dict(kept)
    rank.step, rank.attempt = 1, 2
    for _ in range(4):  # passes the step of the evaluation again
        rank.train()
    assert kept == rank.evaluations.state_dict()
    rank.evaluate(0.7)
    rank.train()
    rank.train()
    assert [1.0, 0.7] == [saved.best[1] for saved in rank.store.saved]


def test_a_run_that_was_about_to_stop_goes_on_after_a_rollback():
    rank = Rank(patience=1)
    evaluated_every_step(rank, [1.0])
    kept = rank.evaluations.state_dict()
    evaluated_every_step(rank, [2.0])
    assert rank.evaluations.should_stop
    rank.evaluations.load_state_dict(kept)
    assert not rank.evaluations.should_stop


# ---------------------------------------------------------------------------------- the end


def test_the_best_is_restored_with_its_value():
    rank = Rank(patience=9)
    evaluated_every_step(rank, [2.0, 1.0, 3.0])
    assert RestoredBest("step-00000002-1", 2, "loss", 1.0) == rank.restore_best()
    assert ["step-00000002-1"] == rank.store.loaded
    assert "loss 1 of step 2" in rank.emitter.notes[-1][2]


def test_an_evaluation_after_the_last_step_counts():
    rank = Rank(patience=9)
    evaluated_every_step(rank, [2.0])
    rank.evaluate(1.0)
    assert (2, 1.0) == (rank.restore_best().step, rank.restore_best().value)
    assert 0 == rank.evaluations.state_dict()["num_without"]


def test_a_last_state_for_which_there_was_no_room_is_copied_when_there_is():
    rank = Rank(patience=9)
    rank.evaluate(2.0)
    rank.train()
    rank.train()
    rank.evaluate(1.0)  # the first is still being written
    assert not rank.evaluations.has_state_copy(2, 1)
    assert (2, 1.0) == (rank.restore_best().step, rank.store.saved[-1].best[1])
    assert ["best_restored"] == rank.emitter.codes()


def test_a_best_that_could_not_be_kept_is_told_when_an_older_one_comes_back():
    rank = Rank(patience=9)
    rank.evaluate(2.0)
    rank.train()
    rank.train()
    rank.evaluate(1.0)  # the first is still being written
    rank.train()
    rank.train()
    assert 2.0 == rank.restore_best().value
    assert "of step 2 (1) was not kept" in rank.emitter.notes[-1][2]


def test_without_a_best_there_is_nothing_to_restore():
    rank = Rank(patience=9)
    evaluated_every_step(rank, [NAN])
    with pytest.raises(UsageError, match="no state was kept as the best of loss"):
        rank.restore_best()


def test_the_best_of_another_metric_is_not_taken_for_it():
    rank = Rank(patience=9)
    evaluated_every_step(rank, [1.0])
    rank.store.saved[0].best = ("accuracy", 0.5)
    with pytest.raises(UsageError, match="best of loss"):
        rank.restore_best()


# ------------------------------------------------------------------------------ its memory


def test_the_slot_beside_the_ring_is_in_the_bytes_and_in_the_words():
    training = Training()
    plain, with_it = (
        SnapshotRing(training.state, num_slots=2, interval=4, healthy_after=3, keep_evaluated=one)
        for one in (False, True)
    )
    assert 3 * plain.bytes() == 2 * with_it.bytes()
    with pytest.raises(CheckpointError, match="2 slots and one for the state that was evaluated"):
        with_it.check_memory(free=2 * plain.bytes())


def test_a_ring_without_that_slot_says_so():
    ring = SnapshotRing(Training().state, num_slots=2, interval=4, healthy_after=3)
    with pytest.raises(CheckpointError):
        ring.take_evaluated(0, 1, {})
