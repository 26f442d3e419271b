"""DeepSpeed's engine on two ranks, beside the fault matrix: what else it may do, and the ends."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.conftest import GLOO_ABORT, WORLD
from tests.integrations.script import LR, MAX_NORM
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.integrations import deepspeed as adapter
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.records import (
    BAD_GRADIENTS,
    BAD_LOSS,
    CLIPS,
    NORM_OUTLIER,
    OVERFLOW,
    RATE_DECLARED,
    WITHHELD,
    AttemptStarted,
    ChangeExpected,
    DecisionMade,
    RunEnded,
)

pytest.importorskip("deepspeed", reason="not installed: deepspeed", exc_type=ImportError)

from tests.integrations.deepspeed_cases import (
    HEALED,
    HEALED_KINDS,
    KINDS,
    LOADED_AT,
    LOADED_KINDS,
    SAVED_AT,
    WARM,
)

LAST = 96
"""Steps of ``engine_heal``."""

pytestmark = [pytest.mark.integrations, pytest.mark.dist, pytest.mark.timeout(400)]

EVERY = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return what both ranks saw in a case, and rank 0's journal; all cases run in one launch."""

    folder = tmp_path_factory.mktemp("deepspeed")

    @cache
    def run():
        return launched("tests.integrations.deepspeed_cases", folder)

    def look(case):
        ranks = run()
        place = folder / case.replace(": ", "-").replace(", ", "-").replace(" ", "-")
        return [rank[case] for rank in ranks], Journal(place / "shm")

    return look


def launched(module, folder):
    """Return what each rank of a program wrote; one more try where gloo aborted a process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "-m", module, str(folder)]
    for _ in range(3):
        shutil.rmtree(folder)
        folder.mkdir()
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode == 0:
            return [json.loads((folder / f"{r}.json").read_text()) for r in range(WORLD)]
        if GLOO_ABORT not in done.stderr:
            break
    raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])


def of(journal, kind):
    return [event for event in journal.events if isinstance(event, kind)]


def skipped(seen):
    return [step for step, trained in enumerate(seen["trained"]) if not trained]


def verdicts(journal):
    """Return what was seen in each step, but for the clip and the schedule."""
    facts = {
        step: int(bits) & ~(CLIPS | RATE_DECLARED)
        for step, bits in journal.steps("verdict").items()
    }
    return {step: bits for step, bits in facts.items() if bits}


# ---------------------------------------------------------------------------- sound trainings


@EVERY
def test_a_guarded_training_is_bit_for_bit_the_bare_one(played, kind):
    bare, _ = played(f"bare: {kind}")
    guarded, _ = played(f"guarded: {kind}")
    assert [seen["digest"] for seen in bare] == [seen["digest"] for seen in guarded]
    assert [seen["norms"] for seen in bare if kind != "no ZeRO"] == [
        seen["norms"] for seen in guarded if kind != "no ZeRO"
    ]


@EVERY
def test_the_norm_is_the_one_that_the_engine_finds(played, kind):
    seen, journal = played(f"guarded: {kind}")
    found = journal.steps("grad_norm")
    for step, norm in enumerate(seen[0]["norms"]):
        if kind == "no ZeRO":
            assert math.isnan(norm), "the engine keeps none there"
        else:
            assert pytest.approx(norm, rel=1e-6) == found[step]


@EVERY
def test_what_the_engine_clips_to_is_known_but_where_it_mistakes_the_scale(played, kind):
    _, journal = played(f"guarded: {kind}")
    # Without ZeRO the engine divides by a scale that the loss was not multiplied by.
    clips = {} if kind == "no ZeRO, float16" else dict.fromkeys(range(3), MAX_NORM)
    assert clips == journal.steps("grad_norm_clipped")


@EVERY
def test_the_loss_scale_is_recorded_where_there_is_one(played, kind):
    _, journal = played(f"guarded: {kind}")
    scales = dict.fromkeys(range(3), 256.0) if "float16" in kind and "b" not in kind else {}
    assert scales == journal.steps("loss_scale")


@pytest.mark.parametrize("kind", ["ZeRO 1", "ZeRO 3", "no ZeRO", "no ZeRO, bfloat16"])
def test_weights_and_updates_are_measured_where_their_parts_are(played, kind):
    (seen, _), journal = played(f"measured: {kind}")
    assert pytest.approx(seen["weight"], rel=1e-5) == journal.steps("weight_norm")[0]
    assert pytest.approx(seen["update"], rel=1e-3) == journal.steps("update_norm")[1]


def test_losses_that_were_divided_by_the_loop_are_taken_as_they_were(played):
    (seen, _), journal = played("divided")
    _, plain = played("guarded: no ZeRO")
    assert 2 == seen["steps"]
    assert pytest.approx(plain.steps("loss")[0], rel=1e-6) == journal.steps("loss")[0]


def test_what_the_engine_logs_is_kept(played):
    _, journal = played("logged")
    name, value = next((n, v) for _, n, v in journal.scalars())
    assert ("Train/Samples/lr", pytest.approx(0.99 * LR)) == (name, value)


def test_the_probe_is_refused_under_zero_3_where_it_leaves_a_trace(played):
    assert all(
        "does not work with ZeRO 3" in seen["said"] for seen in played("probe under ZeRO 3")[0]
    )


@pytest.mark.parametrize("kind", ["no ZeRO", "ZeRO 2"])
def test_a_loop_that_gives_its_batches_has_the_state_asked_and_trains_as_before(played, kind):
    probed, _ = played(f"probed: {kind}")
    plain, _ = played(f"not probed: {kind}")
    assert [seen["digest"] for seen in plain] == [seen["digest"] for seen in probed]
    for seen in probed:
        assert seen["is_on"]
        assert "rl" == seen["kind"], "what the loss is good for is told on"
        assert 0 < seen["num_batches"]


# ------------------------------------------------------------------------------------- faults


@EVERY
def test_a_nan_and_two_spikes_in_rank_1_s_gradients_are_skipped_on_both(played, kind):
    ranks, journal = played(f"faults: {kind}")
    scaled = kind.endswith("float16") and not kind.endswith("bfloat16")
    held_back = [WARM, WARM + 1]
    assert [[1, *held_back]] * WORLD == [skipped(seen) for seen in ranks]
    expected = {1: OVERFLOW if scaled else BAD_GRADIENTS}
    for step in (WARM, WARM + 1):
        expected[step] = NORM_OUTLIER | WITHHELD
    assert expected == verdicts(journal)
    for seen in ranks:
        assert not any(seen["buffers"][step] for step in (1, *held_back))
        assert seen["finite"]
        assert (0 if kind == "no ZeRO" else 1 + len(held_back)) == seen["skipped_steps"]


@EVERY
def test_an_overflow_lowers_the_loss_scale_on_all_ranks_and_a_spike_does_not(played, kind):
    ranks, _ = played(f"faults: {kind}")
    if not kind.endswith(" float16"):
        pytest.skip("it has no loss scale")
    for seen in ranks:
        assert 256.0 == seen["scales"][0]
        assert {128.0} == set(seen["scales"][1:])


@pytest.mark.parametrize("kind", HEALED_KINDS)
def test_a_damaged_weight_of_rank_1_goes_back_on_both_and_the_training_goes_on_bit_for_bit(
    played, kind
):
    ranks, journal = played(f"healed: {kind}")
    (decision,) = [d.decision for d in of(journal, DecisionMade) if d.decision.action == "rollback"]
    for seen in ranks:
        (num,) = seen["rewound"]
        assert seen["at"] == HEALED - num
        assert seen["bare"] == pytest.approx(seen["healed"], rel=0, abs=0, nan_ok=True)
        assert seen["at"] == seen["healed"][-2], "the engine counts its steps from there too"
    assert ranks[0]["rewound"] == ranks[1]["rewound"]
    assert decision.rule in ("nonfinite_params", "nonfinite_state")


@pytest.mark.parametrize("kind", LOADED_KINDS)
def test_an_earlier_checkpoint_loaded_in_mid_run_is_a_planned_change(played, kind):
    ranks, journal = played(f"loaded: {kind}")
    (expected,) = of(journal, ChangeExpected)
    assert "engine.load_checkpoint() was called" == expected.reason
    assert [] == of(journal, DecisionMade)
    for seen in ranks:
        assert [] == seen["rewound"]
        assert [LOADED_AT, SAVED_AT] == seen["loaded"], "each counts on from its own"
        assert HEALED == seen["at"]
        assert HEALED - LOADED_AT + SAVED_AT == seen["healed"][-2]
    # On the other rank the engine has loaded the buffers of this one.
    assert ranks[0]["bare"] == pytest.approx(ranks[0]["healed"], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("kind", LOADED_KINDS)
def test_a_rollback_over_a_loaded_checkpoint_takes_the_engine_s_numbers_along(played, kind):
    ranks, _ = played(f"loaded and healed: {kind}")
    for seen in ranks:
        (num,) = seen["rewound"]
        assert seen["at"] == seen["healed"][-2] == HEALED - num
        assert seen["bare"] == pytest.approx(seen["healed"], rel=0, abs=0, nan_ok=True)


def test_a_trainer_of_hugging_face_goes_back_with_its_engine(tmp_path):
    pytest.importorskip("transformers", reason="not installed: transformers")
    ranks = launched("tests.integrations.engine_heal", tmp_path)
    steps = ranks[0]["steps"]
    for (before, _, _), (step, of_engine, rate) in itertools.pairwise(steps):
        assert step == of_engine
        if step < before:
            back, num = step, before + 1 - step
            assert rate == steps[back - 1][2], "the rate of that step"
    assert 20 <= num <= 60
    assert LAST == steps[-1][0] == len(steps) - num
    assert all(seen["finite"] for seen in ranks)
    assert ranks[0]["sum"] == ranks[1]["sum"]


def test_a_nan_that_the_engine_is_told_not_to_look_for_ruins_a_bare_run_and_no_guarded_one(played):
    bare, _ = played("NaN that nobody checks, bare")
    guarded, journal = played("NaN that nobody checks, guarded")
    assert [False] * WORLD == [seen["finite"] for seen in bare]
    assert [True] * WORLD == [seen["finite"] for seen in guarded]
    assert [[1]] * WORLD == [skipped(seen) for seen in guarded]
    assert {1: BAD_GRADIENTS} == verdicts(journal)


def test_an_observed_run_does_what_the_bare_one_does(played):
    bare, _ = played("NaN that nobody checks, bare")
    observed, journal = played("NaN that nobody checks, observed")
    assert [seen["trained"] for seen in bare] == [seen["trained"] for seen in observed]
    assert {1: BAD_GRADIENTS, 2: BAD_LOSS | BAD_GRADIENTS} == verdicts(journal)


def test_a_step_that_the_engine_alone_keeps_back_is_recorded_and_leaves_no_trace(played):
    ranks, journal = played("beyond float32")  # in the first step, which has no limit yet
    assert [[0]] * WORLD == [skipped(seen) for seen in ranks]
    assert [False] * WORLD == [seen["buffers"][0] for seen in ranks]
    assert {0: OVERFLOW} == verdicts(journal)
    assert [] == of(journal, DecisionMade)


@EVERY
def test_a_rate_that_the_ladder_puts_down_is_that_of_the_step_alone(played, kind):
    for seen in played(f"slowed: {kind}")[0]:
        assert seen["still"]
        assert pytest.approx([0.99 * LR]) == seen["rates"], "the schedule went on from its own"


# -------------------------------------------------------------------- beginnings and ends


@pytest.mark.parametrize(
    "kind", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "no ZeRO", "ZeRO 1, bfloat16, wide gradients"]
)
def test_a_resumed_run_is_guarded_from_its_first_step(played, kind):
    ranks, journal = played(f"resumed: {kind}")
    for seen in ranks:
        assert WARM == seen["began"]
        assert [0, 1] == skipped(seen)
    assert dict.fromkeys((WARM, WARM + 1), NORM_OUTLIER | WITHHELD) == verdicts(journal)
    assert WARM in [event.fork_step for event in of(journal, AttemptStarted)]


@EVERY
def test_closing_puts_everything_back(played, kind):
    for seen in played(f"put back: {kind}")[0]:
        assert seen["found"] == seen["left"]
        assert set(seen["found"]) < set(seen["hooked"])
        assert [True, True] == seen["trained"]


@EVERY
def test_off_leaves_the_engine_as_it_was(played, kind):
    for seen in played(f"off: {kind}")[0]:
        assert seen["found"] == seen["left"]
        assert {"kept": 1} == seen["state"]
        assert [True, True] == seen["trained"]


def test_a_run_in_which_every_step_is_bad_is_stopped_on_all_ranks_at_once(played):
    ranks, journal = played("halted")
    assert ranks[0]["at"] == ranks[1]["at"]
    assert "halted by Vitals at step" in ranks[0]["said"]
    assert ["halted"] == [event.state for event in of(journal, RunEnded)]


def test_a_loop_that_raises_has_failed(played):
    _, journal = played("failed")
    (ended,) = of(journal, RunEnded)
    assert ("failed", "ValueError: no such file") == (ended.state, ended.reason)


def test_a_second_guard_is_refused(played):
    assert "already guarded" in played("twice")[0][0]["said"]


# --------------------------------------------------------------------------------- what is refused


def test_offload_is_refused_and_the_engine_is_left_as_it_was(played):
    (seen, _), _ = played("refused")
    assert "offload cannot be guarded" in seen["said"]
    assert seen["found"] == seen["left"]


def engine_of(optimizer, **more):
    return SimpleNamespace(gradient_clipping=lambda: 1.0, optimizer=optimizer, **more)


def named(name, **more):
    return type(name, (), more)()


PLAIN = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
ZERO = named("DeepSpeedZeroOptimizer", optimizer=PLAIN)


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (engine_of(ZERO, pipeline_parallelism=True), "a pipeline"),
        (engine_of(None), "no optimizer"),
        (engine_of(named("BF16_Optimizer", optimizer=named("DummyOptim"))), "no optimizer"),
        (
            engine_of(
                type("OnebitAdam", (torch.optim.SGD,), {})(
                    [PLAIN.param_groups[0]["params"][0]], lr=1.0
                )
            ),
            "OnebitAdam",
        ),
        (engine_of(named("DeepSpeedZeroOptimizer", optimizer=named("MuonWithAuxAdam"))), "Muon"),
        (engine_of(ZERO, has_moe_layers=True), "MoE"),
        (engine_of(ZERO, mpu=object()), "tensor parallelism"),
        (engine_of(ZERO, autotp_size=lambda: 2), "tensor parallelism"),
        (engine_of(ZERO, zenflow=True), "ZenFlow"),
        (engine_of(ZERO, is_deepcompile_enabled=lambda: True), "DeepCompile"),
        (engine_of(named("MiCS_Optimizer", optimizer=PLAIN)), "MiCS_Optimizer"),
        (engine_of(named("FP16_Optimizer", optimizer=PLAIN, fused_adam_legacy=True)), "legacy"),
        (
            engine_of(
                named("DeepSpeedZeroOptimizer", optimizer=PLAIN, torch_autocast_gradscaler=1)
            ),
            "torch_autocast",
        ),
    ],
)
def test_what_cannot_be_guarded_is_refused_in_words(engine, what):
    with pytest.raises(UsageError, match="cannot be guarded") as caught:
        adapter.attach(engine)
    assert what in str(caught.value)


def test_off_refuses_nothing(monkeypatch):
    monkeypatch.setenv("VITALS_MODE", "off")
    engine = engine_of(ZERO, pipeline_parallelism=True, module=torch.nn.Linear(1, 1))
    attached = adapter.attach(engine)
    assert "" == attached.run_id


def test_what_is_no_engine_is_refused():
    with pytest.raises(UsageError, match="not a DeepSpeed engine"):
        adapter.attach(torch.nn.Linear(1, 1))


def test_without_deepspeed_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(adapter, "OLDEST", "99.0")
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[deepspeed\]"):
        adapter.attach(engine_of(ZERO))


def test_the_adapter_imports_nothing_of_deepspeed():
    code = "import sys, trainer_hooks.integrations.deepspeed; assert 'deepspeed' not in sys.modules"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
