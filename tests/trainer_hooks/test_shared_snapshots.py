"""Replicas are kept once a node: exact for every rank, or not at all."""

import json
import os
import random
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.examples import one_in
from tests.trainer_hooks.ranks_sharing_snapshots import STEPS, four, killed, two
from tests.trainer_hooks.side_streams import SIDES
from tests.trainer_hooks.spawned import spawned, start_ranks
from tests.trainer_hooks.training import Training
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery import manager, node_memory
from trainer_hooks.recovery.manager import SnapshotRing
from trainer_hooks.recovery.node_memory import (
    NodeGroup,
    NodeRegions,
    SharedLayout,
    SharedRegion,
    join_node,
)
from trainer_hooks.tensors.copying import CopyPlan, Pair, as_int64, fingerprint_on_device, word_of
from trainvitals.detect.replicas import minority


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return spawned(four, tmp_path_factory.mktemp("four"), ranks=4)


@pytest.fixture(params=one_in(2, ["of_two", "of_four"]))
def found(request):
    return request.getfixturevalue(request.param)


@pytest.mark.dist
def test_every_snapshot_of_a_shared_copy_comes_back_bit_for_bit_on_every_rank(found):
    for one in found:
        case = one["healed"]
        assert case["shares"]
        assert len(found) == case["ranks_per_copy"]
        assert 2 <= case["snapshots"] == case["exact"].count(True)
        assert one["start"] == {"exact": True}
        assert case["faults"] == {}


@pytest.mark.dist
def test_what_one_rank_alone_has_wrong_still_takes_all_back_and_sharing_goes_on(found):
    for one in found:
        assert [12] == one["healed"]["back"]
        assert "replicas_differ" not in one["healed"]["notes"]


@pytest.mark.dist
def test_each_rank_copies_its_share_and_the_node_holds_one_copy(found):
    copied = [one["healed"]["copied"] for one in found]
    units = found[0]["healed"]["units"]
    assert sum(copied) == units
    assert max(copied) <= units / len(found) * 1.5
    for one in found:
        case = one["healed"]
        assert 2 * case["whole"] <= case["taken"] <= 2.1 * case["whole"] + 2 * 8192
        assert case["pss"] <= case["taken"], "a copy for each would be as many times that"
        assert case["ring"] < 2 * case["whole"] * (1 / len(found) + 0.1)


@pytest.mark.dist
def test_replicas_that_differ_in_one_bit_are_no_snapshot_and_go_back_to_the_one_before(found):
    last = len(found) - 1
    for one in found:
        case = one["differing"]
        assert case["shares"]
        assert (case["newest"], case["exact"]) == (STEPS - 2, True)
        assert (case["regions"], case["back"]) == ([True, True], [4])
        assert case["faults"] == {}
        assert case["missed"] == 0
    assert [[8, f"replicas differ: rank {last}"]] == found[0]["differing"]["bad"]
    assert "replicas_differ" not in found[0]["differing"]["notes"]


@pytest.mark.dist
def test_a_save_that_takes_long_is_of_its_step_while_snapshots_go_on(found):
    for one in found:
        case = one["saving"]
        assert case["shares"]
        assert (case["failed"], case["faults"]) == (0, {})
        assert 2 <= case["saved"] == len(case["right"])
        assert all(case["right"])


@pytest.mark.dist
def test_where_one_rank_cannot_open_the_memory_each_keeps_a_whole_copy(found):
    for one in found:
        case = one["refused"]
        assert not case["shares"]
        assert 0 == case["taken"]
        assert case["exact"]
    assert "Permission denied" in found[0]["refused"]["notes"]["snapshot_not_shared"]


@pytest.mark.dist
def test_what_is_overwritten_while_a_rank_writes_it_alone_is_not_kept(found):
    for rank, one in enumerate(found):
        case = one["overwritten"]
        assert (case["fine"], case["torn"]) == (True, False)
        assert [f"rank-{rank}-of-{len(found)}"] == case["names"]
        assert [] == case["again"]


@pytest.mark.dist
def test_models_that_take_turns_share_both(found):
    for one in found:
        case = one["turns"]
        assert (case["shares"], case["exact"], case["faults"]) == (True, True, {})
        assert case["step"] >= 20
        assert ["0", "1", "d", "g"] == case["kinds"], "both models, both optimizers"


@pytest.mark.dist
def test_the_copy_outlives_the_rank_that_made_it(tmp_path):
    (tmp_path / "shm").mkdir()
    environ = {"VITALS_DIR": str(tmp_path / "runs"), "VITALS_SHM": str(tmp_path / "shm")}
    ranks = start_ranks(killed, str(tmp_path), ranks=2, environ=environ)
    assert -9 == ranks[0].wait(120)
    (tmp_path / "dead").touch()
    assert 0 == ranks[1].wait(120)
    assert {"shares": True, "same": True, "written": True} == json.loads(
        (tmp_path / "1.json").read_text()
    )


# ------------------------------------------------------------------------------ one process


def test_one_process_alone_shares_nothing():
    assert (None, ()) == join_node(Ranks(0, 1, 0, None), num_regions=3, has_replicas=True)


def is_replica(key):
    return key.startswith(("model.", "optim."))


class TwoRanks:
    """Two ranks of one node in one process: a training and a ring for each, and one memory."""

    def __init__(self, side):
        self.trainings = [Training("adamw"), Training("adamw")]
        fds = [os.memfd_create("vitals-snapshot") for _ in range(3)]
        self.rings = [
            SnapshotRing(
                training.state,
                num_slots=2,
                interval=1,
                healthy_after=0,
                side=side(),
                joined=NodeRegions(
                    tuple(SharedRegion(os.dup(fd), NodeGroup(i, 2), n) for n, fd in enumerate(fds)),
                    (),
                ),
                is_replica=is_replica,
            )
            for i, training in enumerate(self.trainings)
        ]
        for fd in fds:
            os.close(fd)

    def train(self, steps=1):
        """Both on the same batches, from the same generators."""
        for i, training in enumerate(self.trainings):
            torch.manual_seed(steps)
            random.seed(steps)
            np.random.seed(steps)
            training.run(steps)
            with torch.no_grad():  # buffers are each rank's own
                training.model[1].running_mean.fill_(float(i))

    def take(self, step):
        """Return what is wrong on each, and whether they are equal."""
        wrong = [ring.capture(step, 1).item() for ring in self.rings]
        for ring in self.rings:
            ring.before_update()
        words = [ring.word().item() for ring in self.rings]
        return wrong, minority(words)

    def commit(self, step, ok=True):
        for ring in self.rings:
            ring.commit(step, ok)
            ring.promote(step, -1)


@pytest.fixture(params=SIDES)
def pair(request, monkeypatch):
    monkeypatch.setattr(node_memory, "UNIT_BYTES", 64)
    return TwoRanks(SIDES[request.param])


def test_a_shared_copy_comes_back_whenever_a_device_runs_it(pair):
    bits = {}
    for step in range(4):
        pair.train(1 + step % 2)
        bits[step] = [training.bits() for training in pair.trainings]
        assert ([0.0, 0.0], ()) == pair.take(step)
        pair.commit(step)
    pair.train(3)
    for step in (3, 2):
        for ring in pair.rings:
            ring.restore(f"memory-{step:08d}-1")
        assert bits[step] == [training.bits() for training in pair.trainings]


def test_what_is_wrong_on_one_rank_is_seen_by_it_wherever_it_lies(pair):
    """The sound part of the other rank's is what is copied; the rank itself says all the same."""
    pair.train()
    names = [k for k in pair.trainings[1].state.tensors() if is_replica(k)]
    for step, name in enumerate(names):
        tensor = pair.trainings[1].state.tensors()[name].view(-1)
        before = tensor[-1].clone()
        tensor[-1] = float("nan")
        assert [0.0, 1.0] == pair.take(step)[0]
        pair.commit(step, ok=False)
        assert [name] == pair.rings[1].nonfinite_names()
        assert [] == pair.rings[0].nonfinite_names()
        tensor[-1] = before


def test_one_bit_on_one_rank_makes_the_words_differ_and_a_buffer_none(pair):
    pair.train()
    assert ([0.0, 0.0], ()) == pair.take(1)
    pair.trainings[0].model[3].weight.detach().view(torch.int32)[0, 0] ^= 1
    assert ([0.0, 0.0], (1,)) == pair.take(2)


def test_ranks_that_would_fill_another_slot_differ(pair):
    pair.train()
    pair.rings[1].slots.reverse()
    assert (1,) == pair.take(1)[1]


def test_a_slot_that_is_being_saved_is_left_until_all_know_that_it_is_over(pair):
    for step in range(2):
        pair.take(step)
        pair.commit(step)
    for ring in pair.rings:
        ring.save_begins(ring.newest_healthy())
    saved = [ring.newest_healthy() for ring in pair.rings]
    for step in range(2, 6):
        pair.train()
        wrong, _ = (
            pair.take(step) if step < 3 else ([r.capture(step, 1).item() for r in pair.rings], ())
        )
        pair.commit(step, ok=not any(wrong))
    for entry in saved:
        entry.check_whole()
    for ring in pair.rings:
        ring.saves_ended()
    assert ([0.0, 0.0], ()) == pair.take(6)


def test_whole_copies_that_do_not_fit_are_missed_and_the_last_equal_one_stays(pair, monkeypatch):
    pair.take(0)
    pair.commit(0)
    for ring in pair.rings:
        ring.stop_sharing()
    monkeypatch.setattr(manager, "host_memory_left", lambda: 1000)
    assert [1.0, 1.0] == [ring.capture(1, 1).item() for ring in pair.rings]
    assert "half of the memory" in pair.rings[0].failure
    pair.commit(1, ok=False)
    monkeypatch.setattr(manager, "host_memory_left", lambda: None)
    assert [0.0, 0.0] == [ring.capture(2, 1).item() for ring in pair.rings]
    pair.commit(2)
    assert [None, None] == [ring.word() for ring in pair.rings]
    assert [0, 2] == [ref.step for ref in pair.rings[0].refs()]


class Gathering:
    """One of two ranks of a node, as ``join_node`` sees it; ``offers`` is what rank 0 offers."""

    world_size = 2

    def __init__(self, rank, *, offers):
        self.rank, self.given, self._offers = rank, [], offers

    def gather(self, value):
        """Return what both ranks have: the same node, the offer, and no failure of rank 0."""
        self.given.append(value)
        if self.rank == 0:
            return [value, value if isinstance(value, str) and value else None]
        return [(value, self._offers, "")[len(self.given) - 1], value]


def test_a_process_of_another_container_is_found_out(tmp_path):
    first = Gathering(0, offers=None)
    shared = join_node(first, num_regions=1, has_replicas=True)
    assert 2 == shared.num_ranks
    (offer,) = (given for given in first.given if isinstance(given, tuple))
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    def refusal(**changes):
        joined = join_node(
            Gathering(1, offers=offer._replace(**changes)), num_regions=1, has_replicas=True
        )
        assert joined.regions is None
        return joined.failures

    assert (f"rank 1: /proc/{os.getpid()} is another process here",) == refusal(fds=(file,))
    (why,) = refusal(pid=2**22 + 1)
    assert "No such file" in why
    os.close(file)


@pytest.mark.parametrize("world_size", [2, 3, 8, 64, 256])
def test_each_unit_is_one_rank_s_and_shares_are_even_from_2_to_256_ranks(world_size):
    tensors = {
        f"model.{i}": torch.empty(size, device="meta") for i, size in enumerate([7, 3 << 28])
    }
    layout = SharedLayout(tensors)
    sizes = []
    for rank in range(world_size):
        units = layout.units(rank, world_size)
        sizes.append(sum(4 * (u.end - u.begin) for u in units if u.is_mine))
    total = 4 * sum(t.numel() for t in tensors.values())
    assert sum(sizes) == total
    assert max(sizes) <= total / world_size + node_memory.UNIT_BYTES


def test_memory_that_is_not_there_is_an_error_and_no_signal():
    fd = os.memfd_create("test")
    region = SharedRegion(fd, NodeGroup(0, 1))
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left"))
    with full, pytest.raises(OSError, match="No space"):
        region.views(SharedLayout({"a": torch.ones(8)}), {"a": torch.ones(8)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 5000, 300_001])
def test_every_flipped_bit_changes_the_word(dtype, size):
    source = torch.arange(size).to(dtype)
    pairs = [Pair(None, source, checked=False, name="a", unit=3)]
    plan, cpu = CopyPlan(pairs), torch.device("cpu")
    raw = source.view(torch.uint8)
    words = [as_int64(plan.run().fingerprint), fingerprint_on_device(pairs, cpu)]
    for at in [*torch.randint(raw.numel(), (12,)).tolist(), 0, raw.numel() - 1]:
        for bit in (0, 7):
            raw[at] ^= 1 << bit
            assert word_of(as_int64(plan.run().fingerprint)) != word_of(words[0])
            assert word_of(fingerprint_on_device(pairs, cpu)) != word_of(words[1])
            raw[at] ^= 1 << bit
    assert word_of(as_int64(plan.run().fingerprint)) == word_of(words[0])


def test_a_word_is_never_nothing_and_travels_exactly():
    numbers = [0, 1, 2**63, 2**64 - 1]
    words = [word_of(as_int64(number)).item() for number in numbers]
    assert all(0 < word < 2**52 and word == int(word) for word in words)
    assert len(numbers) == len(set(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([5.0, 5.0, 5.0], ()),
        ([5.0, 6.0, 5.0], (1,)),
        ([5.0, 6.0], (1,)),
        ([6.0, 5.0, 5.0], (0,)),
        ([0.0, 5.0, 0.0, 5.0], ()),
        ([0.0, 5.0, 6.0, 5.0], (2,)),
        ([0.0, 0.0], ()),
        ([], ()),
    ],
)
def test_the_ranks_that_differ_are_those_that_are_not_like_most(words, expected):
    assert expected == minority(words)
