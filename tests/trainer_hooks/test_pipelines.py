"""Pipelines of torch.distributed.pipelining: one norm, one verdict, exact on every stage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.pages import block
from tests.support.examples import one_in
from tests.trainer_hooks.pipelined import BAD
from tests.trainer_hooks.ranks_pipelined import eight, four, two
from tests.trainer_hooks.spawned import spawned

pytestmark = pytest.mark.dist
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
UNKNOWN = "loss is nan (stage unknown: a NaN of any stage reaches the loss)"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return spawned(two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return spawned(four, tmp_path_factory.mktemp("four"), ranks=4)


@pytest.fixture(params=one_in(2, ["of_two", "of_four"]))
def found(request):
    return request.getfixturevalue(request.param)


def test_skips_are_exact_on_every_stage(found):
    for rank in found:
        for name, case in rank["skips"].items():
            assert case["exact"], name
            assert case["skipped"] == list(BAD), name
            assert case["faults"] == {}, name


def test_the_norm_counts_every_stage_once_and_the_loss_is_the_last_stage_s(found):
    for name in found[0]["skips"]:
        with_loss = [rank["skips"][name] for rank in found if any(rank["skips"][name]["losses"])]
        (expected,) = with_loss  # the rank of the last stage
        for rank in found:
            case = rank["skips"][name]
            assert case["recorded norms"] == pytest.approx(expected["norms"], rel=1e-6), name
            assert case["recorded losses"] == pytest.approx(expected["losses"], rel=1e-6), name


def test_equal_names_of_stages_get_the_stage_and_other_names_stay(found):
    for rank in found:
        same = rank["skips"]["gpipe adamw-fused"]["names"]
        assert [f"stage{i}.layers.0.weight" for i in range(len(found))] == same[::4]
        other = rank["skips"]["gpipe adamw, other names"]["names"]
        assert ["0.weight", "0.bias"] == [name.removeprefix("stage0.") for name in other[:2]]


def check_meshes(ranks):
    """Check that all pipelines of a mesh have one norm, one loss and exact skips."""
    for name in ranks[0]["meshes"]:
        cases = [rank["meshes"][name] for rank in ranks]
        last = [case["losses"] for case in cases if any(case["losses"])]
        mean = [sum(losses) / len(last) for losses in zip(*last, strict=True)]
        for case in cases:
            assert case["exact"], name
            assert case["skipped"] == list(BAD), name
            assert case["recorded norms"] == pytest.approx(case["norms"], rel=1e-6), name
            assert case["recorded losses"] == pytest.approx(mean, rel=1e-6), name
            assert case["faults"] == {}, name


@pytest.mark.nightly
def test_pipelines_with_ddp_fsdp2_or_tensor_parallelism_are_exact(of_four):
    check_meshes(of_four)


@pytest.mark.nightly
def test_a_pipeline_with_fsdp2_and_tensor_parallelism_is_exact_on_eight_ranks(tmp_path):
    check_meshes(spawned(eight, tmp_path, ranks=8))


def test_a_loop_with_its_own_optimizer_step_is_guarded(of_two):
    expected = {"exact": True, "skipped": list(BAD), "faults": {}}
    assert [expected, expected] == [rank["attached"] for rank in of_two]


def test_a_loop_with_its_own_optimizer_step_rolls_back_on_every_stage(of_two):
    expected = {"back": [32], "finite": True, "faults": {}, "is_on": True}
    assert [expected, expected] == [rank["attached heals"] for rank in of_two]


def test_a_nan_loss_does_not_blame_the_last_stage(found):
    assert [UNKNOWN] * len(BAD) == found[0]["skips"]["gpipe adamw-fused"]["reasons"]


@pytest.mark.parametrize(("case_index", "bad", "stage"), [(0, 0, 0), (1, 1, 1), (2, 0, 2)])
def test_a_nan_gradient_names_the_rank_and_its_stage(of_two, case_index, bad, stage):
    for rank in of_two:
        case = rank["bad gradient"][case_index]
        # Forward's writes are undone too, so these differ from the state before the step.
        assert all("running" in key or "batches" in key for key in case["changed"])
        assert case["skipped"] == [3]
        assert case["ranks"] == [[bad]]
    (reason,) = of_two[0]["bad gradient"][case_index]["reasons"]
    assert f"on rank {bad} (stage {stage} of the pipeline)" in reason


def test_a_rollback_and_a_restart_are_exact_on_every_stage(found):
    for rank in found:
        for name, case in rank["heals"].items():
            assert case["exact"], name
            assert len(case["back"]) == 1, name
            assert 0 < case["resumed"], name
            assert case["exact after a restart"], name
            assert case["faults"] == {}, name
    for case in found[0]["heals"].values():
        assert any("stage0.layers.0.weight" in reason for reason in case["reasons"])
        assert any("(stage" in reason for reason in case["reasons"])


def test_a_clip_uses_the_norm_of_all_stages(of_two):
    assert all(rank["clips"] < 1e-6 for rank in of_two)


@pytest.mark.nightly
def test_replicas_of_a_stage_are_compared_and_stages_are_not(of_four):
    case = of_four[0]["corrupted"]
    assert ["replica_corrupted"] == case["kinds"]
    assert all(re.search("on rank 1 .* or rank 3 ", reason) for reason in case["reasons"])


def test_the_probe_evaluates_the_schedule_and_leaves_the_training_bit_for_bit(found):
    for rank in found:
        for name, case in rank["probes"].items():
            healthy, damaged = case["readings"]
            assert (True, True) == (case["exact"], case["is_on"]), (name, case["off"])
            assert case["faults"] == {}, name
            assert healthy < 1.2 and damaged > 1.5, (name, case["readings"])
    for case in found[0]["probes"].values():
        (text,) = case["on"]
        assert "loss_of gave 0 " not in text


def test_a_probe_that_fails_on_one_rank_is_switched_off_on_all(of_two):
    expected = "the probe is off: loss_of raised ValueError: no such key on rank 1"
    assert [[expected], []] == [rank["wrong probe"] for rank in of_two]


def test_signals_have_the_values_of_all_stages(of_two):
    for rank in of_two:
        for case in rank["signals"]:
            stages = range(2 if case is rank["signals"][0] else 4)
            assert case["expected"] == pytest.approx(case["weights"], rel=1e-6)
            assert (True, {}) == (case["updated"], case["faults"])
            assert sorted(f"stage{i}.layers.0" for i in stages) == sorted(case["modules"])
            assert [f"stage{stages[-1]}.layers.0"] == case["nonfinite"]


def test_a_stage_trains_without_its_pipeline_in_mode_off(of_two):
    assert ["", ""] == [rank["refusals"]["no pipeline, off"] for rank in of_two]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no pipeline", "of a pipeline with 2 stages"),
        ("attach", "of a pipeline with 2 stages"),
        ("not a schedule", "it must be a schedule"),
        ("signals", "signals of each rank's own gradients are not measured in a pipeline"),
        ("another module", "the model does not contain stage"),
        ("another pipeline", "rank 0: stage 0 of 2, rank 1: stage 1 of 3"),
        ("added group", "a parameter group was added to the guarded optimizer of a pipeline"),
        ("probe", "probe was given in a pipeline with Other, which cannot run forward only"),
        ("optimizer", "all optimizers step together"),
    ],
)
def test_what_is_not_supported_is_refused_on_every_rank(of_two, name, text):
    for rank in of_two:
        assert text in rank["refusals"][name]


@pytest.mark.parametrize(
    ("page", "num_steps"),
    [("pipelines.md", 100), pytest.param("parallelism.md", 60, marks=pytest.mark.nightly)],
)
def test_the_program_of_a_guide_runs_on_two_ranks(tmp_path, page, num_steps):
    program = tmp_path / "program.py"
    program.write_text(block(GUIDES / page, "test: ranks").body)
    settings = {"VITALS_AGENT": "off", "OMP_NUM_THREADS": "1", "VITALS_SHM": str(tmp_path)}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            program,
        ],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = f"finished after {num_steps} steps: no updates skipped"
    assert expected in ended.stderr, ended.stderr
    assert "probe is off" not in ended.stderr, ended.stderr
