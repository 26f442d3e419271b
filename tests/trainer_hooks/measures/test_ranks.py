"""Two real ranks: what they measure together is what one process finds on the whole batch."""

import json
import math

import pytest
import torch

from tests.trainer_hooks.measures import ranks_measured as ranks
from tests.trainer_hooks.measures.journal import Journal
from tests.trainer_hooks.spawned import start_ranks, wait_for_ranks
from trainer_hooks.measures.noise import NoiseScale, bucket_sums, rounding_of

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run all cases in one launch."""
    folder = tmp_path_factory.mktemp("measured")
    environ = {"VITALS_DIR": str(folder / "runs"), "VITALS_SHM": str(folder)}
    wait_for_ranks(start_ranks(ranks.main, str(folder), ranks=2, environ=environ))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def norm(tensors) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@pytest.fixture(scope="module")
def reference():
    """Train on the whole batch; return parameters, losses and pairs of squares by step."""
    model = ranks.network()
    optimizer = ranks.optimizer_of(model)
    parameters, losses, pairs = [], [], []
    for step in range(ranks.STEPS):
        parameters.append([p.detach().clone() for p in model.parameters()])
        own = []
        for rank in range(2):
            loss = ranks.loss_of(model, ranks.data(step, rank))
            own.append(torch.autograd.grad(loss, list(model.parameters())))
            losses.append(loss.item())
        for p, one, other in zip(model.parameters(), *own, strict=True):
            p.grad = (one + other) / 2
        grads = [p.grad for p in model.parameters()]
        pairs.append((sum(norm(g) ** 2 for g in own) / 2, norm(grads) ** 2))
        optimizer.step()
    return parameters, losses, pairs


@pytest.mark.parametrize("case", ["ddp", "fsdp2", "fsdp1"])
def test_weights_and_updates_are_those_of_one_process(folder, found, reference, case):
    parameters, _, _ = reference
    journal = Journal(folder / case)
    sampled = range(3, ranks.STEPS, 3)
    moved = {
        t: [a - b for a, b in zip(parameters[t], parameters[t - 1], strict=True)] for t in sampled
    }
    assert found[0]["trainings"][case]["errors"] == {}
    assert journal.steps("weight_norm") == pytest.approx(
        {t: norm(parameters[t]) for t in (0, *sampled)}, rel=1e-5
    )
    assert journal.steps("update_norm") == pytest.approx(
        {t: norm(moved[t]) for t in sampled}, rel=1e-4
    )
    if case != "fsdp1":
        assert journal.layers("update_norm")[6, "2"] == pytest.approx(norm(moved[6][2:]), rel=1e-4)


def test_the_losses_spread_and_the_exchange_are_in_the_row(folder, reference):
    _, losses, _ = reference
    journal = Journal(folder / "ddp")
    spread = {t: abs(losses[2 * t] - losses[2 * t + 1]) for t in range(ranks.STEPS)}
    assert journal.steps("loss_spread") == pytest.approx(spread, rel=1e-4)
    other = Journal(folder / "ddp", rank=1)
    for each in (journal, other):
        assert len(each.steps("communication_seconds")) == ranks.STEPS
        assert min(each.steps("communication_seconds").values()) > 0
    assert other.steps("loss_spread") == {}


@pytest.mark.parametrize("case", ["noise", "no_sync", "scaled", "again"])
def test_the_ranks_own_gradients_are_seen_before_they_are_averaged(found, reference, case):
    _, _, pairs = reference
    seen = found[0]["trainings"][case]["pairs"]
    assert len(seen) == ranks.STEPS
    if case == "again":  # it goes on where another monitor's training ended
        assert all(small > big > 0 for small, big in seen)
        return
    wanted = pairs if case != "no_sync" else seen[:1] + pairs[1:]
    assert [x for pair in seen for x in pair] == pytest.approx(
        [x for pair in wanted for x in pair], rel=2e-4
    )


def test_the_noise_scale_is_written_from_the_tenth_sample_on(folder, reference):
    _, _, pairs = reference
    estimate, wanted = NoiseScale(2), {}
    for step, (small, big) in enumerate(pairs):
        estimate.add(small_square=small, big_square=big)
        wanted[step] = estimate.ratio()
    known = {step: ratio for step, ratio in wanted.items() if ratio is not None}
    assert min(known) == 9
    journal = Journal(folder / "noise")
    assert journal.steps("noise_scale_ratio") == pytest.approx(known, rel=1e-3)
    assert journal.steps("critical_batch_tokens") == pytest.approx(
        {step: 12 * ratio for step, ratio in known.items()}, rel=1e-3
    )


def test_where_each_backward_is_averaged_there_is_no_rank_s_own_gradient(found):
    assert found[0]["trainings"]["synced twice"]["pairs"] == []


@pytest.mark.parametrize("case", ["reduction", "reduction_no_sync"])
@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_were_averaged_rightly_are_off_by_rounding_alone(folder, case, rank):
    errors = Journal(folder / case, rank=rank).steps("reduction_error")
    # Where steps have two backwards, DDP's first step reduces both: it waits for none of them.
    assert errors.keys() >= set(range(1, ranks.STEPS))
    assert 0.0 <= max(errors.values()) < 2.0


def test_a_bit_that_a_link_flips_is_seen_on_its_rank_alone(folder):
    seen, other = (Journal(folder / "flipped", rank=r).steps("reduction_error") for r in (1, 0))
    assert seen.pop(ranks.FLIPPED_AT) > 1000.0
    assert max(seen.values()) < 2.0
    assert max(other.values()) < 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_rounding_is_told_from_a_flipped_bit_whatever_the_type(dtype, num_ranks):
    generator = torch.Generator().manual_seed(num_ranks)
    size = 10_000
    scales = torch.logspace(-6, 0, size)[torch.randperm(size, generator=generator)]
    worst = 0.0
    for _ in range(20):
        own = [
            (torch.randn(size, generator=generator) * scales).to(dtype) for _ in range(num_ranks)
        ]
        sums = [bucket_sums(gradient) for gradient in own]
        reduced = torch.zeros(size, dtype=dtype)
        for gradient in own:  # as a ring adds them, one after the other, in their type
            reduced += gradient / num_ranks
        put_in = sum(float(s.checksum) for s in sums) / num_ranks
        rounding = rounding_of(sum(float(s.roundings) for s in sums), num_ranks=num_ranks)
        worst = max(worst, abs(float(bucket_sums(reduced).checksum) - put_in) / rounding)
        reduced[int(reduced.abs().argmax())] *= 2
        broken = abs(float(bucket_sums(reduced).checksum) - put_in) / rounding
    assert worst < 2.0
    if dtype == torch.float32:  # in shorter types the others' rounding hides one element
        assert broken > 1000.0


def test_a_checksum_is_linear_and_knows_the_places_of_its_elements():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(3_000_001, generator=generator) for _ in range(2))
    together = bucket_sums(one.double() + other.double()).checksum
    assert float(together) == pytest.approx(
        float(bucket_sums(one).checksum + bucket_sums(other).checksum), rel=1e-9
    )
    before = float(bucket_sums(one).checksum)
    for a, b in ((0, 1), (5, 4101), (7, 2_500_000)):
        swapped = one.clone()
        swapped[a], swapped[b] = one[b], one[a]
        assert abs(float(bucket_sums(swapped).checksum) - before) > 1e-3


def test_measuring_noise_changes_no_bit_on_two_ranks(found):
    for one in found:
        assert one["trainings"]["noise"]["last"] == one["trainings"]["bare"]["last"]


def test_a_measurement_that_one_rank_lacks_is_none(folder, found):
    assert found[1]["trainings"]["failing"]["errors"] == {"signals": 6}, (
        "before the update and behind it"
    )
    assert set(Journal(folder / "failing").steps("weight_norm")) == {0, 3}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hook", "needs DDP's communication hook, and this model has one"),
        ("builtin", "needs DDP's communication hook, and this model has one"),
        ("plain", "needs DDP; the model is Sequential"),
        ("differing", "every=3"),
        ("other parameters", "DDP and the optimizers hold other parameters"),
    ],
)
def test_what_cannot_work_is_refused_on_both_ranks(found, case, words):
    assert words in found[0]["refusals"][case]
    assert words in found[1]["refusals"][case]
