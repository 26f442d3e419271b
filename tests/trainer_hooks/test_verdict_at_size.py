"""Of thousands of ranks the right one is named: packs of virtual ranks, summed in one process."""

import functools
import math

import pytest
import torch

from tests.support.examples import one_in
from tests.trainer_hooks.packs import FIELDS, contribution
from trainer_hooks.exchange.reduce_vector import (
    Rank0Values,
    ReducedNumbers,
    ReduceVector,
    ReduceVectorLayout,
    VerdictFigures,
    culprits,
    dissenters,
    judge_on_device,
    step_record,
)
from trainer_hooks.ranks import Ranks
from trainvitals.detect.replicas import FingerprintVote, vote_on_fingerprints
from trainvitals.records import BAD_GRADIENTS, BAD_LOSS, RANK_FAILED

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
DIGEST = 0xFFFFFFFF
"""The largest there is: sums of it must be exact."""
WORD = float(2**52 - 1)
"""The largest that replicas are compared by; of each rank it must come as it was."""
NO_ROW = torch.zeros((), dtype=torch.float64)
SIZES = one_in(2, (1500, 4096, 2048, 16384))
"""Of the first, some ranks share a slot and some have one to themselves."""


def pack_of(rank, world_size, *, squares=(1.0, 3.0), loss=2.0, **given):
    """Return (layout, pack) that one rank of so many brings."""
    layout = ReduceVectorLayout.of(2, Ranks(rank, world_size, 0, None), fields=FIELDS)
    packer = ReduceVector(layout, CPU)
    packer.squares.copy_(torch.tensor(squares, dtype=torch.float64) / world_size)
    fields = {"weight": 1.0, "num_gradients": 2, "digest": DIGEST, "probe_ready": True}
    fields |= {"replicas": WORD, **given}
    tensor = None if loss is None else torch.tensor(loss, dtype=torch.float64)
    root = Rank0Values() if rank == 0 else None
    packer.fill(contribution(tensor, **fields), root)
    return layout, packer.pack


@functools.cache
def healthy_sum(world_size):
    """Return the pack of a job without any fault, summed over all of its ranks."""
    total = pack_of(0, world_size)[1].clone()
    for rank in range(1, world_size):
        total += pack_of(rank, world_size)[1]
    return total


def reduced_with(world_size, bad):
    """Return (pack, reduced) where ``bad`` maps ranks to what they bring instead.

    All numbers of healthy ranks are whole, or halves of halves: taking one out again is exact.
    """
    total, layout = healthy_sum(world_size).clone(), None
    for rank, given in bad.items():
        total -= pack_of(rank, world_size)[1]
        layout, pack = pack_of(rank, world_size, **given)
        total += pack
    layout = layout or pack_of(0, world_size)[0]
    return layout, total, ReducedNumbers(layout, total.tolist())


def record_with(world_size, bad):
    layout, pack, reduced = reduced_with(world_size, bad)
    derived = VerdictFigures.of(
        [*torch.cat(judge_on_device(layout, pack, NO_ROW).derived()).tolist(), NAN]
    )
    record = step_record(reduced, derived, step=3, attempt=1, skipped=False, learning_rate=None)
    return record, derived.bits


def ranks_of(world_size):
    return (0, 1, 2, world_size // 3, world_size - 2, world_size - 1)


def one(number):
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize("world_size", SIZES)
def test_a_healthy_job_is_healthy_and_agreed(world_size):
    record, bits = record_with(world_size, {})
    assert bits == 0
    assert (record.loss, record.loss_max, record.loss_max_rank) == (2.0, 2.0, 0)
    assert record.nonfinite_ranks == record.failed_ranks == ()
    assert dissenters(reduced_with(world_size, {})[2]) == ()


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_names_its_rank(world_size, value):
    for rank in ranks_of(world_size):
        record, bits = record_with(world_size, {rank: {"loss": value}})
        assert bits & BAD_LOSS
        assert record.nonfinite_ranks == (rank,)


@pytest.mark.parametrize("world_size", SIZES)
def test_gradients_that_are_not_finite_name_their_rank(world_size):
    for rank in ranks_of(world_size):
        record, bits = record_with(world_size, {rank: {"squares": (1.0, NAN)}})
        assert bits == BAD_GRADIENTS
        assert record.nonfinite_ranks == (rank,)


@pytest.mark.parametrize("world_size", SIZES)
def test_several_ranks_of_one_slot_are_all_named(world_size):
    ranks = (world_size // 2, world_size // 2 + 1, world_size - 1)
    record, _ = record_with(world_size, {rank: {"loss": NAN} for rank in ranks})
    assert record.nonfinite_ranks == ranks
    record, _ = record_with(world_size, {rank: {"squares": (INF, 1.0)} for rank in ranks})
    assert record.nonfinite_ranks == ranks
    record, _ = record_with(world_size, {rank: {"failed": True} for rank in ranks})
    assert record.failed_ranks == ranks


def test_nobody_is_named_where_all_of_many_hold_the_same_bad_gradients():
    world_size = 1500
    bad = {rank: {"squares": (NAN, 1.0)} for rank in range(world_size)}
    _, _, reduced = reduced_with(world_size, bad)
    assert culprits(reduced, reduced.losses()) == ()
    del bad[7]
    _, _, reduced = reduced_with(world_size, bad)
    assert culprits(reduced, reduced.losses()) == tuple(bad)


@pytest.mark.parametrize("world_size", SIZES)
def test_the_largest_loss_is_that_of_one_rank(world_size):
    for rank in ranks_of(world_size):
        record, _ = record_with(world_size, {rank: {"loss": 66.0}})
        assert (record.loss_max, record.loss_max_rank) == (66.0, rank)
        assert record.loss == 2.0 + 64.0 / world_size


@pytest.mark.parametrize("world_size", SIZES)
def test_a_loss_that_is_missing_or_weighs_otherwise_leaves_its_neighbours_theirs(world_size):
    rank = world_size - 2
    for given, expected in (({"loss": None}, None), ({"weight": 0.0}, None), ({"weight": 4.0}, 2)):
        _, _, reduced = reduced_with(world_size, {rank: given})
        losses = reduced.losses()
        assert losses[rank] == expected
        assert [*losses[:rank], *losses[rank + 1 :]] == [2.0] * (world_size - 1)


@pytest.mark.parametrize("world_size", SIZES)
def test_a_rank_that_failed_is_named_and_its_part_is_missing_from_the_norm(world_size):
    for rank in ranks_of(world_size):
        failed = {"failed": True, "loss": None, "squares": (0.0, 0.0)}
        record, bits = record_with(world_size, {rank: failed})
        assert record.failed_ranks == (rank,)
        assert bits == RANK_FAILED
        assert math.isclose(record.grad_norm, 2.0, rel_tol=1e-12)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("field", ["nonfinite_params", "nonfinite_state"])
def test_a_count_of_what_is_wrong_names_its_rank_and_is_counted_once_a_rank(world_size, field):
    for rank in ranks_of(world_size):
        _, _, reduced = reduced_with(world_size, {rank: {field: one(5.0)}})
        assert reduced.ranks_where(field) == (rank,)
    both = {world_size - 1: {field: one(5.0)}, world_size - 2: {field: one(1.0)}}
    assert reduced_with(world_size, both)[2].ranks_where(field) == tuple(sorted(both))
    if field == "nonfinite_params":
        assert record_with(world_size, both)[0].nonfinite_params == 2


@pytest.mark.parametrize("world_size", SIZES)
def test_one_replica_that_differs_is_named_whoever_it_is(world_size):
    everyone = [range(world_size)]
    assert (
        vote_on_fingerprints(reduced_with(world_size, {})[2].by_rank("replicas"), everyone)
        == FingerprintVote()
    )
    for rank in ranks_of(world_size):
        for word in (WORD - 1, one(WORD - 1)):
            words = reduced_with(world_size, {rank: {"replicas": word}})[2].by_rank("replicas")
            assert vote_on_fingerprints(words, everyone).rank == rank
        silent = reduced_with(world_size, {rank: {"replicas": None}})[2].by_rank("replicas")
        assert vote_on_fingerprints(silent, everyone) == FingerprintVote()


@pytest.mark.parametrize("world_size", SIZES)
def test_one_digest_that_differs_is_seen_whoever_it_is(world_size):
    for rank in ranks_of(world_size):
        for digest in (0, DIGEST - 1):
            reduced = reduced_with(world_size, {rank: {"digest": digest}})[2]
            assert dissenters(reduced) == (rank,)
    # Neighbours whose differences cancel in a sum.
    pair = {world_size - 2: {"digest": DIGEST - 1}, world_size - 1: {"digest": DIGEST + 1}}
    assert dissenters(reduced_with(world_size, pair)[2]) == tuple(pair)


@pytest.mark.parametrize("world_size", SIZES)
def test_flags_are_counted_by_rank(world_size):
    """The probe asks whether all are ready, early stopping how many hold the state."""
    bad = {world_size - 1: {"probe_ready": False}, world_size - 2: {"terminating": True}}
    _, _, reduced = reduced_with(world_size, bad)
    assert reduced.total("probe_ready") == world_size - 1
    assert reduced.ranks_where("terminating") == (world_size - 2,)


def test_of_a_hundred_thousand_ranks_too_each_has_a_bit():
    world_size = 100_000
    layout = ReduceVectorLayout.of(2, Ranks(world_size - 1, world_size, 0, None), fields=FIELDS)
    sizes = {layout.first_of(i + 1) - layout.first_of(i) for i in range(layout.num_slots)}
    assert max(sizes) <= 48
    assert layout.first_of(layout.num_slots) == world_size
    given = {rank: {"failed": True} for rank in (0, 49_999, 50_000, world_size - 1)}
    total = torch.zeros(layout.size, dtype=torch.float64)
    for rank in given:
        total += pack_of(rank, world_size, **given[rank])[1]
    assert ReducedNumbers(layout, total.tolist()).ranks_where("failed") == tuple(given)


@pytest.mark.parametrize("world_size", [2, 64, 1024])
def test_up_to_1024_ranks_a_pack_is_the_slots_and_nothing_more(world_size):
    """What those jobs exchange must not change with what is done for larger ones."""
    for rank in ranks_of(world_size) if world_size > 2 else (0, 1):
        given = {"terminating": True, "nonfinite_state": one(3.0), "nonfinite_params": one(7.0)}
        layout, pack = pack_of(rank, world_size, squares=(1.0, NAN), loss=5.0, weight=3.0, **given)
        expected = dict.fromkeys(FIELDS.rank, 0.0) | {
            "weighted_loss": 15.0,
            "weight": 3.0,
            "bad_squares": 1.0,
            "num_gradients": 2.0,
            "nonfinite_params": 7.0,
            "nonfinite_state": 3.0,
            "digest": float(DIGEST),
            "terminating": 1.0,
            "probe_ready": 1.0,
            "replicas": WORD,
        }
        slots = pack[2 + len(FIELDS.rank0) :].view(world_size, len(FIELDS.rank))
        assert slots[rank].tolist() == list(expected.values())
        assert not slots[torch.arange(world_size) != rank].any()
        assert layout.size == 2 + len(FIELDS.rank0) + world_size * len(FIELDS.rank)
