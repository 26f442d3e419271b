"""A bad step is kept, and played again: what was bad is named, and a healthy run pays nothing."""

import json
import math
import os
import random
import stat
import subprocess
import sys
from collections import UserDict, namedtuple
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_hooks
from tests.plugins.lab import bad_steps
from tests.plugins.lab.bad_steps import BAD, ROWS, train
from tests.support.watched import until
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.repro import capsule as capsules
from trainer_hooks.repro import data_writer
from trainer_hooks.repro.capsule import Content, read, rows_in, take_rows, write
from trainer_hooks.tensors.rng import capture_now, restore_rng
from trainvitals.cli import main
from trainvitals.errors import FormatError, InsecurePathError, TrainingHalted
from trainvitals.io.capsules import CapsuleFile, find_capsules, read_capsule_verdict
from trainvitals.io.rundir import RunDir
from vitals_plugins.lab.repro import verdict as verdicts
from vitals_plugins.lab.repro.play import NonfiniteTrace, ReplayLimits, ReplaySetup
from vitals_plugins.lab.repro.weights import LoadedWeights, load_step_weights

ROOT = Path(__file__).parents[3]
ENTRY = f"{bad_steps.__name__}:build"
RUN = "01JD0000000000000000000000"


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("VITALS_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("VITALS_RUN_ID", RUN)
    monkeypatch.setenv("VITALS_AGENT", "off")


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / RUN


def vitals(capsys, *arguments):
    """Return exit code, stdout and stderr of `vitals repro`."""
    try:
        code = main.main(["repro", *map(str, arguments)])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code or 0, captured.out, captured.err


def played(capsys, step=BAD, entry=ENTRY, *more):
    code, out, err = vitals(capsys, RUN, step, "--entry", entry, "--format", "json", *more)
    assert code == 0, err
    return json.loads(out)


# ------------------------------------------------------------------------------- a healthy run


def test_a_healthy_run_writes_nothing_and_is_left_as_it_was(run_dir):
    hooks, models = [], []

    def before(model, *_):
        hooks.append(len(model._forward_pre_hooks))
        models.append(model)

    monitor = train(spoil=None, before=before)
    assert {1} == set(hooks)
    assert not (run_dir / "capsules").exists()
    assert {} == monitor.swallowed_errors
    assert 0 == len(models[-1]._forward_pre_hooks)


def test_generators_are_captured_only_where_batches_are_kept(run_dir, monkeypatch):
    calls = []
    monkeypatch.setattr("trainer_hooks.data.loader.capture_now", lambda: calls.append(1))
    before = []
    train(keep_batches=False, before=lambda m, *_: before.append(len(m._forward_pre_hooks)))
    assert ([], {0}) == (calls, set(before))
    assert not (run_dir / "capsules").exists()


def test_a_capsule_that_fails_is_counted_and_the_run_is_not_harmed(monkeypatch, run_dir):
    def fails(self):
        raise RuntimeError("no versions")

    monkeypatch.setattr(capsules.CapsuleContext, "describe_state", fails)
    monitor = train()
    assert {"capsule": 1} == monitor.swallowed_errors
    assert bad_steps.STEPS == monitor.step_index


# ------------------------------------------------------------------------------- what is kept


def test_a_bad_step_is_kept_privately_within_twice_its_batch_and_without_secrets(
    run_dir, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "s3cret-of-the-environment")
    monkeypatch.setattr(bad_steps, "ROWS", 128)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "s3cret-of-argv"])
    train(steps=14)
    (file,) = find_capsules(run_dir)
    assert (BAD, 0) == (file.step, file.rank)
    assert 0o600 == stat.S_IMODE(file.path.stat().st_mode)
    assert 0o700 == stat.S_IMODE(file.path.parent.stat().st_mode)
    assert file.path.stat().st_size <= 2 * 128 * 64 * 4
    with numpy.load(file.path, allow_pickle=False) as members:
        raw = b"".join(members[name].tobytes() for name in members.files)
    assert b"s3cret" not in raw
    kept = read(file)
    assert (128, 64) == tuple(kept.batches[0]["x"].shape)
    assert -1.0 == kept.batches[0]["x"][3, 0]
    assert 0 < rows_in(kept.good) < 128
    assert ["cpu", ""] == kept.facts["autocast"]
    assert {"bad": []}.items() <= kept.facts["state"].items()
    assert list(range(BAD * 128, BAD * 128 + 128)) == list(kept.sample_ids)


def test_of_bad_steps_in_a_row_the_first_is_kept(run_dir):
    def before(model, optimizer, step):
        if step in (4, 5, 6, 9):
            model.first.register_forward_hook(_spoil_once())

    monitor = train(spoil=None, before=before, steps=14)
    assert [4, 9] == [file.step for file in find_capsules(run_dir)]
    assert {} == monitor.swallowed_errors


def _spoil_once():
    calls = []

    def spoil(module, inputs, output):
        calls.append(1)
        return output * math.nan if len(calls) == 1 else output

    return spoil


def test_only_so_many_capsules_of_a_rank_are_kept_and_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(data_writer, "MAX_FILES", 3)
    writer = data_writer.DataWriter(tmp_path, rank=0, incarnation="a", faults=FaultCounter())
    for step in range(6):
        content = Content(facts={"versions": {}}, batches=[torch.ones(4)], rng=[None])
        one = data_writer.BadStep(f"capsules/step-{step:08d}-1-rank-0.npz", content)
        until(lambda one=one: writer.enqueue(one))
    writer.close()
    assert [3, 4, 5] == [file.step for file in find_capsules(tmp_path)]


Pair = namedtuple("Pair", "x y")
FACTS = {
    "reason": "loss is nan",
    "versions": {},
    "state": {"bad": [], "largest": {}},
    "applied": False,
    "world_size": 1,
}


def kept(tmp_path, **content):
    """Write a capsule and return what is read of it."""
    path = tmp_path / "step-00000001-1-rank-0.npz"
    with path.open("wb") as file:
        write(file, Content(**{"facts": FACTS, "rng": [None]} | content))
    path.chmod(0o600)
    return read(CapsuleFile(1, 1, 0, path))


def test_a_batch_comes_back_as_it_was(tmp_path):
    batch = {
        "words": torch.arange(6).reshape(2, 3),
        "half": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "pair": Pair(torch.ones(2, dtype=torch.float16), [torch.tensor(True), "text", None]),
        3: (numpy.arange(2.0), 7, 2.5),
    }
    back = kept(tmp_path, batches=[batch]).batches[0]
    assert list(batch) == list(back)
    assert torch.equal(batch["words"], back["words"])
    assert torch.bfloat16 == back["half"].dtype
    assert torch.equal(batch["half"].view(torch.int16), back["half"].view(torch.int16))
    assert (Pair._fields, torch.float16) == (back["pair"]._fields, back["pair"].x.dtype)
    assert [True, "text", None] == back["pair"].y
    assert ([0.0, 1.0], 7, 2.5) == (back[3][0].tolist(), *back[3][1:])


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": object()}, "the batch holds an object"),
        (torch.eye(2).to_sparse(), "not dense"),
        ({(1, 2): torch.ones(1)}, "a key of the batch"),
    ],
)
def test_what_cannot_be_kept_without_code_is_not_and_says_so(tmp_path, batch, why):
    back = kept(tmp_path, batches=[batch])
    assert [] == back.batches
    assert why in back.facts["why_no_batch"]


def test_generators_come_back_and_draw_the_same(tmp_path):
    def draw():
        return random.random(), numpy.random.randn(), torch.rand(1).item()

    numpy.random.randn()  # one of a pair: the other half is part of the state
    state = capture_now()
    expected = draw()
    (back,) = kept(tmp_path, batches=[torch.ones(1)], rng=[state]).rng
    restore_rng(back)
    assert expected == draw()


def test_rows_are_taken_of_whatever_has_one_for_each():
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": torch.ones(())}
    taken = take_rows(batch, [1, 3])
    assert ([1, 3], ["b", "d"], 1.0) == (taken["x"].tolist(), taken["names"], taken["scale"])


# --------------------------------------------------------------------------------- the verdict


def test_a_poisoned_sample_is_named_with_its_module_and_the_verdict_is_kept(run_dir, capsys):
    train()
    said = played(capsys)
    assert ("data", [3], "Net", "sqrt", "forward") == (
        said["verdict"],
        said["rows"],
        said["module"],
        said["operator"],
        said["direction"],
    )
    (file,) = find_capsules(run_dir)
    path = file.path.with_name(file.path.stem + ".verdict.json")
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert said["sentence"] == read_capsule_verdict(run_dir, f"capsules/{file.path.name}")
    assert said["sentence"].startswith("Data: sample 3 of 8 makes the batch bad in every precision")


def test_a_step_whose_weights_were_saved_comes_out_bit_equal_dropout_included(tmp_path, capsys):
    # A gradient alone was bad: the loss is one to compare with.
    train(spoil=(3, 1.0), before=_infinite_gradient, checkpoints=tmp_path / "checkpoints")
    said = played(capsys)
    assert math.isfinite(said["loss"])
    assert (True, said["loss"]) == (said["is_bit_equal"], said["played_loss"])
    assert f"the weights of step {BAD}" == said["weights"]
    # Nothing in code, data or state is bad: the fault was of the moment.
    assert "hardware" == said["verdict"]
    assert ["self-test of cpu: all answers right"] == said["details"]


def _infinite_gradient(model, optimizer, step):
    if step == BAD:
        handle = model.last.weight.register_hook(
            lambda gradient: (handle.remove(), gradient * math.inf)[1]
        )


def test_without_the_step_s_own_weights_a_step_that_plays_well_is_not_reproduced(capsys):
    train(spoil=None, before=bad_steps.once("first", math.nan))
    said = played(capsys)
    assert "not_reproduced" == said["verdict"]
    assert "the run has no checkpoint before this step" in said["sentence"]


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        (("last.weight", None, math.nan), "last"),
        (("first.weight", None, 3e38), "first"),
        (("first.weight", "exp_avg", math.inf), "first"),
        (("last.weight", "exp_avg_sq", -1.0), "last"),
    ],
)
def test_a_corrupted_weight_or_moment_is_named(tmp_path, capsys, fault, module):
    before = bad_steps.corrupted(*fault)
    with suppress(TrainingHalted):  # with NaN in its weights nothing is left to train
        train(spoil=None, before=before, checkpoints=tmp_path / "checkpoints")
    said = played(capsys)
    assert ("optimizer_state", module) == (said["verdict"], said["module"])


def test_a_machine_that_computes_wrongly_is_to_blame(run_dir):
    train(spoil=None, before=bad_steps.once("first", math.nan))
    (file,) = find_capsules(run_dir)
    model, loss_of = bad_steps.build()
    kept_step = read(file)
    weights = load_step_weights(kept_step, RunDir.open(run_dir), model)
    said = verdicts.judge(
        kept_step, model, loss_of, weights, kept_step.batches,
        try_machine=lambda device: "gemm float32, seed 0: element 3 is wrong",
    )  # fmt: skip
    assert "hardware" == said.verdict
    assert "gemm float32, seed 0" in said.sentence


def test_hardware_is_not_blamed_for_what_another_rank_may_have_made(tmp_path, run_dir):
    train(spoil=None, before=_infinite_gradient, checkpoints=tmp_path / "checkpoints")
    (file,) = find_capsules(run_dir)
    kept_step = read(file)
    kept_step.facts["world_size"] = 2
    model, loss_of = bad_steps.build()
    weights = load_step_weights(kept_step, RunDir.open(run_dir), model)
    said = verdicts.judge(
        kept_step, model, loss_of, weights, kept_step.batches, try_machine=lambda device: ""
    )
    assert ("not_reproduced", True) == (said.verdict, said.is_bit_equal)
    assert "re-run theirs with --rank" in said.sentence


def test_a_batch_that_was_not_kept_comes_from_the_loader_by_its_samples(
    run_dir, capsys, monkeypatch
):
    monkeypatch.setattr(capsules, "MAX_BATCH_BYTES", 100)
    train(spoil=(3, math.nan))
    code, _, err = vitals(capsys, RUN, BAD, "--entry", ENTRY)
    assert code == 2
    assert "the capsule holds no batch (it has 2,048 bytes; at most 100 are kept)" in err
    assert "return (model, loss_of, loader)" in err
    monkeypatch.setattr(bad_steps, "build_with_loader", _with_spoilt_loader)
    said = played(capsys, BAD, f"{bad_steps.__name__}:build_with_loader")
    assert ("data", [3]) == (said["verdict"], said["rows"])
    assert "sample 3 of the batch holds NaN" in said["sentence"]


def _with_spoilt_loader():
    return *bad_steps.build(), DataLoader(bad_steps.dataset((3, math.nan)), ROWS)


def test_precision_is_to_blame_where_more_of_it_cures_the_step():
    linear = nn.Linear(4, 4)
    nn.init.constant_(linear.weight, 300.0)

    def loss_of(batch):
        with torch.autocast("cpu", torch.float16):
            return (linear(batch) * 300).float().mean()

    scene = ReplaySetup(model=linear, loss_of=loss_of)
    batch = torch.full((2, 4), 2.0)
    assert scene.replay([batch]).is_bad(ReplayLimits())
    precise = scene.replay([batch], dtype=torch.float32)
    assert ("", False) == (precise.error, precise.is_bad(ReplayLimits()))
    assert (torch.float32, None) == (linear.weight.dtype, linear.weight.grad)


def test_a_play_leaves_weights_buffers_and_generators_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    scene = ReplaySetup(model=model, loss_of=lambda batch: model(batch).sum())
    for dtype in (None, torch.float64):
        first = scene.replay([torch.randn(4, 3, generator=torch.Generator().manual_seed(1))],
                           dtype=dtype)  # fmt: skip
        assert not first.error
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


def test_a_finite_step_is_bad_above_the_limits_that_it_was_judged_by():
    model = nn.Linear(2, 1)
    played = ReplaySetup(model=model, loss_of=lambda batch: model(batch).square().mean()).replay(
        [torch.full((4, 2), 100.0)]
    )
    assert (False, True) == (played.is_bad(ReplayLimits()), played.is_bad(ReplayLimits(loss=1e-6)))
    assert played.is_bad(ReplayLimits(grad_norm=1e-6))
    assert not played.is_bad(ReplayLimits(loss=1e9, grad_norm=1e9))


def test_a_spike_that_was_withheld_is_played_against_its_limit(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(bad_steps, "BAD", 60)
    monkeypatch.setattr(bad_steps, "STEPS", 64)
    monitor = train(spoil=(3, 4e9), steps=64, max_norm=None)  # no clip: the first is withheld
    assert {} == monitor.swallowed_errors
    assert [60] == [file.step for file in find_capsules(run_dir)]
    said = played(capsys, 60)
    assert ("data", [3], "") == (said["verdict"], said["rows"], said["module"])
    assert "sample 3 of the batch holds 4e+09" in said["sentence"]


def judged(tmp_path, model, loss_of, batch):
    """Return the verdict on a step with this batch, played with its own weights."""
    here = capsules.versions(torch.device("cpu"))
    step = kept(tmp_path, facts=FACTS | {"loss": math.nan, "versions": here}, batches=[batch])
    own = LoadedWeights(text="the weights of step 1", is_exact=True)
    return verdicts.judge(step, model, loss_of, own, step.batches, try_machine=lambda device: "")


def test_a_sample_without_labels_is_not_blamed_for_the_one_beside_it(tmp_path):
    model = nn.Linear(4, 3)
    labels = torch.zeros(8, dtype=torch.int64)
    labels[4] = -100  # alone its loss is 0/0

    def loss_of(batch):
        scores = model(batch["x"]) + batch["w"].log()
        return nn.functional.cross_entropy(scores, batch["labels"])

    weights = torch.ones(8, 1)
    weights[5] = -1.0
    said = judged(tmp_path, model, loss_of, {"x": torch.ones(8, 4), "labels": labels, "w": weights})
    assert ("data", (5,)) == (said.verdict, said.rows)
    assert "sample 5 of 8 makes the batch bad" in said.sentence


def test_nan_in_a_batch_is_named_where_its_samples_cannot_be_left_out(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # refuses a batch of one
    x = torch.randn(8, 4)
    x[3, 1] = math.inf
    for batch, loss_of in (
        (x, lambda batch: model(batch).square().mean()),
        ({"x": list(x)}, lambda batch: model(torch.stack(batch["x"])).square().mean()),
    ):
        said = judged(tmp_path, model, loss_of, batch)
        assert "data" == said.verdict
        assert "the batch holds NaN or an infinity; with 0 in its place" in said.sentence


def test_of_several_samples_all_are_named_that_must_go(tmp_path):
    model = nn.Linear(4, 1)
    x = torch.ones(16, 4)
    x[[2, 9]] = math.nan
    said = judged(tmp_path, model, lambda batch: model(batch).mean(), x)
    assert (2, 9) == said.rows
    assert "sample 2 of the batch holds NaN; without samples 2, 9 the batch" in said.sentence


def test_the_precision_is_the_one_that_began_within_the_model(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            nn.init.constant_(self.inner.weight, 300.0)

        @torch.autocast("cpu", dtype=torch.float16)
        def forward(self, x):
            return self.inner(x) * 300

    model = Half()
    said = judged(tmp_path, model, lambda b: model(b).float().mean(), torch.full((2, 4), 2.0))
    assert "arithmetic" == said.verdict
    assert "fine in float32, and bad in the run's float16" in said.sentence


def test_hardware_is_blamed_for_what_was_played_alone(tmp_path):
    model = nn.Linear(4, 1)
    said = judged(tmp_path, model, lambda batch: model(batch).mean(), torch.ones(8, 4))
    assert "hardware" == said.verdict
    assert "Code of the loop outside loss_of is not re-run" in said.sentence


class Encoding(UserDict):
    """As Hugging Face's BatchEncoding: entries are attributes too."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


def test_a_batch_with_attributes_is_played_as_it_was_written_for(tmp_path):
    model = nn.Linear(4, 1)

    def loss_of(batch):
        batch = batch.to("cpu") if hasattr(batch, "to") else batch
        return model(batch.x).mean() + batch["y"].mean()

    x = torch.ones(8, 4)
    x[6] = math.nan
    whole = Encoding(x=x, y=torch.ones(8))
    assert (6,) == judged(tmp_path, model, loss_of, whole).rows
    played_live = ReplaySetup(model=model, loss_of=loss_of).replay([whole])  # as from the loader
    assert "" == played_live.error
    assert isinstance(take_rows(whole, [1]), Encoding)
    back = kept(tmp_path, batches=[whole]).batches[0]
    with pytest.raises(AttributeError, match="the kept batch has no z; its entries: x, y"):
        _ = back.z


@pytest.mark.parametrize("missing", sorted(FACTS))
def test_a_capsule_that_lacks_a_fact_is_damaged(tmp_path, missing):
    facts = {name: value for name, value in FACTS.items() if name != missing}
    with pytest.raises(FormatError, match=f"it does not tell {missing}"):
        kept(tmp_path, facts=facts, batches=[torch.ones(1)])


def test_a_capsule_whose_loss_is_no_number_is_damaged(tmp_path):
    with pytest.raises(FormatError, match="the loss it tells is '1'"):
        kept(tmp_path, facts=FACTS | {"loss": "1"}, batches=[torch.ones(1)])


def test_a_capsule_with_a_state_that_no_generator_takes_is_damaged(tmp_path):
    rng = capture_now()
    rng["torch"] = rng["torch"][:-8]
    with pytest.raises(FormatError, match="cannot be read: RuntimeError"):
        kept(tmp_path, batches=[torch.ones(1)], rng=[rng])


def test_a_folder_in_place_of_a_capsule_is_said(tmp_path):
    path = tmp_path / "step-00000001-1-rank-0.npz"
    path.mkdir()
    with pytest.raises(FormatError, match="cannot be read: IsADirectoryError"):
        read(CapsuleFile(1, 1, 0, path))


ARGUMENTS = """
import argparse, sys
from tests.plugins.lab.bad_steps import build as made
def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.parse_args()
    return made()
def leaves():
    sys.exit("no GPU")
"""


def test_the_entry_reads_a_command_line_of_its_own(run_dir, tmp_path, capsys):
    train()
    path = tmp_path / "with_arguments.py"
    path.write_text(ARGUMENTS)
    before = list(sys.argv)
    assert "data" == played(capsys, BAD, f"{path}:build")["verdict"]
    assert before == sys.argv
    code, _, err = vitals(capsys, RUN, BAD, "--entry", f"{path}:leaves")
    assert 2 == code
    assert "leaves raised SystemExit: no GPU" in err
    path.write_text("import sys\nsys.exit(3)\n")
    code, _, err = vitals(capsys, RUN, BAD, "--entry", f"{path}:build")
    assert 2 == code
    assert "cannot be imported: SystemExit: 3" in err


def test_the_reason_is_no_command_to_the_terminal(run_dir, capsys):
    train()
    (file,) = find_capsules(run_dir)
    with numpy.load(file.path) as members:
        arrays = {name: members[name] for name in members.files}
    facts = json.loads(arrays["capsule"].tobytes()) | {"reason": "\x07all is well"}
    arrays["capsule"] = numpy.frombuffer(json.dumps(facts).encode(), dtype=numpy.uint8)
    numpy.savez(file.path, **arrays)
    code, out, _ = vitals(capsys, RUN, BAD, "--entry", ENTRY)
    assert (0, False, True) == (code, "\x07" in out, "all is well" in out)


def test_a_rank_below_0_is_refused(capsys):
    code, _, err = vitals(capsys, RUN, BAD, "--rank", "-5", "--entry", ENTRY)
    assert 2 == code
    assert "should be greater than or equal to -1" in err


@pytest.mark.parametrize("place", ["module", "function"])
def test_the_hook_is_nothing_in_a_compiled_graph(run_dir, place):
    model, loss_of = bad_steps.build()
    step = loss_of
    if place == "module":
        model.compile(backend="eager", fullgraph=True)
    else:
        step = torch.compile(loss_of, backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainer_hooks.watch(model, optimizer) as monitor:
        for batch in monitor.batches(DataLoader(bad_steps.dataset(), ROWS), keep_batches=True):
            loss = step(batch)
            loss.backward()
            monitor.step(loss, max_norm=1.0)
    assert {} == monitor.swallowed_errors


# ---------------------------------------------------------------------------------- the origin


class Masked(nn.Module):
    """Softmax behind a mask of -inf: not a fault, unless a whole row is masked."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(3, 3, bias=False)

    def forward(self, x, mask):
        return self.scores(x).masked_fill(mask, -math.inf).softmax(dim=-1)


def origin_of(model, loss_of, batch):
    trace = NonfiniteTrace()
    ReplaySetup(model=model, loss_of=loss_of).replay([batch], trace=trace)
    return trace.origin


def test_a_mask_that_the_code_writes_is_not_where_a_nan_began():
    model = Masked()
    mask = torch.tensor([[False, True, True], [True, True, True]])
    found = origin_of(model, lambda batch: model(batch, mask).sum(), torch.ones(2, 3))
    assert ("Masked", "softmax", "forward") == found


def test_a_harmless_infinity_beside_the_way_to_the_loss_is_passed_over():
    model = nn.Linear(2, 2)

    def loss_of(batch):
        log = torch.where(batch > 0, batch.log(), 0.0)  # log(0) is computed, and not used
        return (model(batch) + log).sum() / (batch.sum() - batch.sum())

    found = origin_of(model, loss_of, torch.tensor([[0.0, 1.0]]))
    assert ("the loss function", "div", "forward") == found


def test_the_slope_of_a_root_of_0_is_named_with_the_module_around_it():
    class Distance(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(2, 2), nn.Linear(1, 1)

        def forward(self, x):
            return self.outer((self.inner(x) * 0).square().sum(dim=1, keepdim=True).sqrt())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.distance = Distance()

        def forward(self, x):
            return self.distance(x)

    model = Net()
    found = origin_of(model, lambda batch: model(batch).sum(), torch.ones(2, 2))
    assert ("distance", "Sqrt", "backward") == found


def test_a_nan_that_the_batch_brings_is_named_where_it_is_first_computed_with():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = origin_of(model, lambda b: model(b.view(1, 2)).sum(), torch.tensor([1.0, math.nan]))
    assert ("0", "forward") == (found.module, found.direction)


# ----------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """Return a folder of runs with one bad step in it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "shm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VITALS_SHM": str(folder / "shm"), "VITALS_DIR": str(folder), "VITALS_RUN_ID": RUN,
            "VITALS_AGENT": "off",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        train(steps=14)
    return folder


ENTRIES = {
    "good": "from tests.plugins.lab.bad_steps import build",
    "raises": "def build():\n    raise ValueError('no GPU here')",
    "one": "import torch\ndef build():\n    return torch.nn.Linear(1, 1)",
    "swapped": "import torch\ndef build():\n    return print, torch.nn.Linear(1, 1)",
    "other model": "import torch\ndef build():\n    m = torch.nn.Linear(3, 3)\n    "
    "return m, lambda batch: m(batch['x']).sum()",
    "two numbers": "from tests.plugins.lab import bad_steps\ndef build():\n    "
    "m, _ = bad_steps.build()\n    return m, lambda batch: m(batch['x'])",
    "broken": "import no_such_module_of_anybody",
}


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (("nobody", 10, "good"), 2, ["there is no run 'nobody'"]),
        ((RUN, 11, "good"), 2, ["step 11 of", "has no capsule", "steps with one: 10"]),
        (
            (RUN, 10, "good", "--rank", 5),
            2,
            ["step 10 of rank 5", "rank 5 with one: none"],
        ),
        ((RUN, 10, "raises"), 2, ["raised ValueError: no GPU here", "returns (model, loss_of)"]),
        ((RUN, 10, "one"), 2, ["returned (Linear)", "returns (model, loss_of)"]),
        ((RUN, 10, "swapped"), 2, ["returned (builtin_function_or_method, Linear)"]),
        ((RUN, 10, "other model"), 2, ["loss_of raised RuntimeError", "as the loader gave it"]),
        ((RUN, 10, "two numbers"), 2, ["returned a Tensor of shape (8, 1), not a tensor of one"]),
        ((RUN, 10, "broken"), 2, ["cannot be imported: ModuleNotFoundError", "__main__"]),
        ((RUN, 10, "train.py"), 2, ["--entry is", "must be FILE:FUNCTION"]),
        ((RUN, 10, "nowhere.py:build"), 2, ["nowhere.py is not a file"]),
        ((RUN, 10, "nowhere.at.all:build"), 2, ["nowhere.at.all cannot be imported"]),
        ((RUN, 10, "json:build"), 2, ["json has no function build"]),
        ((RUN, "ten", "good"), 2, ["Invalid value for 'step'"]),
    ],
)
def test_what_cannot_be_played_says_why_and_what_to_do(
    a_run, tmp_path, capsys, monkeypatch, arguments, code, texts
):
    run, step, entry, *more = arguments
    monkeypatch.syspath_prepend(str(ROOT))
    if entry in ENTRIES:
        path = tmp_path / "entry_of_test.py"
        path.write_text(ENTRIES[entry])
        entry = f"{path}:build"
    result = vitals(capsys, run, step, "--entry", entry, "--dir", a_run, *more)
    assert code == result[0]
    said = " ".join(result[2].split())
    assert [] == [text for text in texts if text not in said], said
    sys.modules.pop("entry_of_test", None)


def test_a_run_that_kept_no_step_says_how_it_would_have(tmp_path, capsys):
    train(keep_batches=False, steps=12)
    code, _, err = vitals(capsys, RUN, BAD, "--entry", ENTRY)
    assert (2, True, True) == (code, "has no capsules" in err, "keep_batches=True" in err)


@pytest.mark.parametrize("how", ["cut", "other bytes", "pickled"])
def test_a_damaged_capsule_and_one_with_a_pickle_are_refused(a_run, tmp_path, how):
    (file,) = find_capsules(a_run / RUN)
    path = tmp_path / file.path.name
    raw = file.path.read_bytes()
    path.write_bytes({"cut": raw[:-200], "other bytes": b"no zip"}.get(how, raw))
    if how == "pickled":
        with path.open("wb") as opened:
            numpy.savez(opened, capsule=numpy.array([{"a": 1}], dtype=object))
    with pytest.raises(FormatError, match="cannot be read"):
        read(file._replace(path=path))


def test_a_capsule_that_unpacks_to_far_more_than_one_holds_is_refused(a_run, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer_hooks.repro.capsule._MAX_ARRAY_BYTES", 1 << 20)
    (file,) = find_capsules(a_run / RUN)
    path = tmp_path / file.path.name
    with path.open("wb") as opened:
        numpy.savez_compressed(opened, capsule=numpy.zeros(1 << 21, dtype=numpy.uint8))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(FormatError, match=r"it unpacks to 2097[0-9]* bytes, above 1048576"):
        read(file._replace(path=path))


def test_a_capsule_that_is_a_link_is_refused(a_run, tmp_path):
    (file,) = find_capsules(a_run / RUN)
    path = tmp_path / file.path.name
    path.symlink_to(file.path)
    with pytest.raises(InsecurePathError, match="symbolic link"):
        read(file._replace(path=path))


def test_without_torch_the_command_says_what_to_install(a_run):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trainvitals.cli.main import main\n"
        f"sys.exit(main(['repro', '{RUN}', '10', '--entry', 'a.py:b', '--dir', {str(a_run)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ
    )
    assert 2 == done.returncode
    assert "playing a step needs torch" in done.stderr
