"""Replicas that differ are seen, named and healed; healthy trainings are left alone."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.support.examples import one_in
from tests.trainer_hooks.ranks_corrupted import EVERY, healthy_three, healthy_two, made, three, two
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.ranks import Ranks
from trainer_hooks.recovery.replicas import STATE_EVERY, Replicas
from trainer_hooks.recovery.state import TrainingState
from trainer_hooks.tensors.copying import fingerprint_of, word_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    return spawned(three, tmp_path_factory.mktemp("three"), ranks=3)


@pytest.fixture(params=["of_two", "of_three"])
def ranks(request):
    return request.getfixturevalue(request.param)


def findings(case):
    return [(kind, rank) for kind, _, rank, _ in case["findings"]]


@pytest.mark.dist
def test_a_healthy_training_says_nothing(ranks):
    for rank in ranks:
        assert ([], [], {}) == (
            rank["clean"]["findings"], rank["clean"]["decisions"], rank["clean"]["faults"],
        )  # fmt: skip


@pytest.mark.dist
def test_a_flipped_bit_is_seen_within_a_round_and_its_element_is_named(ranks):
    (kind, step, rank, reason), *_ = ranks[0]["guard"]["findings"]
    assert "replica_corrupted" == kind
    assert 20 <= step < 20 + EVERY
    assert "element 3 of model.3.weight is 0.0354" in reason
    if len(ranks) > 2:
        assert 1 == rank
        assert "model.3.weight on rank 1 (" in reason
    else:
        assert -1 == rank
        assert "two replicas have no majority" in reason
    assert "'guard' does not roll back" in reason


@pytest.mark.dist
def test_a_run_that_was_healed_ends_as_the_clean_one_bit_for_bit(ranks):
    for rank in ranks:
        case = rank["heal"]
        assert [20] == case["back"]
        assert rank["clean"]["weights"] == case["weights"]
        assert {} == case["faults"]


@pytest.mark.dist
def test_what_the_replay_came_to_names_the_rank_of_two(ranks):
    assert [("replica_named", 1)] == findings(ranks[0]["heal"])
    assert "rank 1" in ranks[0]["heal"]["findings"][0][3]


@pytest.mark.dist
def test_no_snapshot_of_a_state_that_differs_is_kept(ranks):
    case = ranks[0]["heal"]
    assert [24] == case["bad"]
    assert [36, "healthy"] in case["refs"]


@pytest.mark.dist
def test_what_comes_again_elsewhere_on_the_rank_halts_and_names_it(ranks):
    for rank in ranks:
        assert "a persistent fault" in rank["persistent"]["halted"]
    *_, (action, _, rank, reason) = ranks[0]["persistent"]["decisions"]
    assert ("halt", 2 if len(ranks) > 2 else -1) == (action, rank)
    assert ("on rank 2" if len(ranks) > 2 else "a replay found rank 1 wrong before") in reason


@pytest.mark.dist
def test_what_comes_again_bit_for_bit_is_software_and_nothing_more_is_kept(of_two):
    case = of_two[0]["software"]
    assert ([20], "") == (case["back"], case["halted"])
    assert [("replica_corrupted", -1)] == findings(case)
    assert "bit for bit" in case["findings"][0][3]
    assert all(step <= 20 for step, state in case["refs"] if state != "candidate")


@pytest.mark.dist
def test_another_learning_rate_on_one_rank_is_told_and_named(ranks):
    kind, step, rank, reason = ranks[0]["rate"]["findings"][0]
    assert ("settings_differ", 6) == (kind, step)
    wrong = len(ranks) - 1
    assert (wrong if len(ranks) > 2 else -1) == rank
    assert f"lr of group 0 is 0.015 on rank {wrong} and 0.01 on rank 0" in reason
    assert {"settings_differ"} == {kind for kind, _ in findings(ranks[0]["rate"])}


@pytest.mark.dist
def test_another_max_norm_on_one_rank_is_told(of_two):
    assert "max_norm is 0.25 on rank 1 and none on rank 0" in of_two[0]["clip"]["findings"][0][3]


@pytest.mark.dist
def test_another_seed_of_the_sampler_on_one_rank_is_told(of_two):
    (kind, _, _, reason), *_ = of_two[0]["sampled"]["findings"]
    assert "settings_differ" == kind
    assert "the sampler's seed is 2147483649 on rank 1 and 2147483648 on rank 0" in reason


@pytest.mark.dist
def test_a_flipped_bit_of_a_moment_is_seen_within_ten_rounds(of_two):
    kind, step, _, _ = of_two[0]["moment"]["findings"][0]
    assert "replica_corrupted" == kind
    assert 9 <= step < 9 + 10 * EVERY


@pytest.mark.dist
@pytest.mark.parametrize(("main", "num"), one_in(2, [(healthy_two, 2), (healthy_three, 3)]))
def test_no_healthy_training_is_accused_and_what_is_not_equal_by_design_abstains(
    main, num, tmp_path
):
    ranks = spawned(main, tmp_path, ranks=num)
    flipped = [rank.pop("flipped") for rank in ranks]
    for rank in ranks:
        for name, case in rank.items():
            assert [] == case["findings"], name
            assert ({}, [], [], "") == (
                case["faults"], case["back"], case["bad"], case["halted"],
            ), name  # fmt: skip
    notes = {name: case["notes"] for name, case in ranks[0].items()}
    alike = ("power", "half", "accumulated", "unused", "experts", "hybrid")
    for name in alike if num == 2 else (*alike, "compiled"):
        assert f"compared among {num} ranks" in notes[f"{name}-heal"]["replicas"]
    for name in ("local", "alone", "unmarked"):
        assert "neither DDP, FSDP nor tensor parallelism" in notes[f"{name}-heal"]["replicas"]
    assert "replicas_not_alike" not in notes["alone-heal"]
    text = notes["unmarked-heal"]["replicas_not_alike"]
    assert text.startswith("model.expert.weight, model.expert.bias differ between ranks")
    assert "another part of them" in notes["cut-heal"]["replicas"]
    assert "differ between ranks before the first step" in notes["apart-heal"]["replicas_not_alike"]
    assert "since the first steps" in notes["drifting-heal"]["replicas_not_alike"]
    assert [("replica_corrupted", 1 if num > 2 else -1)] == findings(flipped[0])


# ------------------------------------------------------------------------ one rank of two


@pytest.fixture
def averaged():
    return AveragedModel(made())


@pytest.fixture
def compared(averaged):
    """Comparison of one rank, which is not connected to the other, with averaged weights."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState(model, [optimizer], extra={"average": averaged})
    return Replicas(
        state, Ranks(0, 2, 0, None), keys=list(state.parameters), groups=((0, 1),),
        places=("a", "b"), optimizers=[optimizer], faults=FaultCounter(), every=EVERY,
    )  # fmt: skip


def test_each_averaged_weight_is_compared_once_in_ten_rounds(averaged, compared):
    num_steps = EVERY * STATE_EVERY
    steps = range(3 * num_steps, 4 * num_steps)
    before = [float(compared.word(step, max_norm=None)) for step in steps]
    for weight in averaged.module.parameters():
        weight.data.add_(1.0)
        after = [float(compared.word(step, max_norm=None)) for step in steps]
        assert 1 == sum(old != new for old, new in zip(before, after, strict=True))
        before = after


def test_a_capsule_of_equal_ranks_has_no_differing_elements(compared):
    assert compared.bad_elements() is None


# ---------------------------------------------------------------------------- fingerprints


def word(*tensors):
    return word_of(fingerprint_of(tensors, CPU)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 5000, 300_001])
def test_every_single_flipped_bit_is_seen(dtype, size):
    torch.manual_seed(0)
    tensor = torch.randn(size).to(dtype)
    raw, before = tensor.view(torch.uint8), word(tensor)
    for at in [*torch.randint(raw.numel(), (10,)).tolist(), 0, raw.numel() - 1]:
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert word(tensor) != before
            raw[at] ^= 1 << bit
    assert word(tensor) == before


def test_what_changed_places_or_cancels_in_a_plain_sum_is_seen():
    torch.manual_seed(0)
    tensor = torch.randn(512, 256)
    before, bits = word(tensor), tensor.view(torch.int32)
    swapped = tensor.clone()
    swapped[[3, 400]] = swapped[[400, 3]]
    assert word(swapped) != before
    exchanged = tensor.view(-1).clone()
    exchanged[[10, 99_001]] = exchanged[[99_001, 10]]
    assert word(exchanged) != before
    bits[7, 1] ^= -(2**31)  # both at the highest place of their 8 bytes
    bits[300, 3] ^= -(2**31)
    assert word(tensor) != before


def test_the_same_numbers_give_the_same_word_wherever_they_lie():
    flat = torch.randn(10_001)
    copy = torch.empty(10_002)[1:].copy_(flat)
    assert copy.data_ptr() % 8
    assert word(flat) == word(copy) == word(flat.view(1, -1).t().contiguous())
    image = torch.randn(2, 3, 4, 5)
    assert word(image) == word(image.to(memory_format=torch.channels_last))
    assert word(flat[:10], flat[10:20]) != word(flat[10:20], flat[:10])
