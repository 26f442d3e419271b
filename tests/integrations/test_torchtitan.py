"""torchtitan's real Trainer on two ranks, beside the fault matrix: resuming, ends, refusals."""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.conftest import GLOO_ABORT, WORLD
from tests.support.watched import own_place  # noqa: F401
from tests.trainer_hooks.measures.journal import Journal
from trainer_hooks.integrations import torchtitan as adapter
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.records import AttemptStarted, DecisionMade, RunEnded

pytest.importorskip("torchtitan", reason="not installed: torchtitan", exc_type=ImportError)
pytestmark = [pytest.mark.integrations, pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return what both ranks saw in a case, and its folder; all cases run in one launch."""

    @cache
    def launched():
        for attempt in range(3):
            folder = tmp_path_factory.mktemp(f"torchtitan{attempt}")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(WORLD), "-m", "tests.integrations.torchtitan_cases"]
            done = subprocess.run(
                [*command, str(folder)], capture_output=True, text=True, timeout=300
            )
            if done.returncode == 0:
                ranks = [json.loads((folder / f"{r}.json").read_text()) for r in range(WORLD)]
                return folder, ranks
            if GLOO_ABORT not in done.stderr:
                break
        raise AssertionError(done.stderr[-6000:])

    def look(case):
        folder, ranks = launched()
        place = folder / case.replace(", ", "-").replace(" ", "-")
        return [rank[case] for rank in ranks], Journal(place / "shm"), place

    return look


def of(journal, kind):
    return [event for event in journal.events if isinstance(event, kind)]


def skipped(changed):
    return [step for step, one in enumerate(changed, 1) if not one]


# --------------------------------------------------------------------------- how it parallelizes


@pytest.mark.parametrize("case", ["ddp", "tensor parallel", "pipeline", "pipeline, interleaved"])
def test_a_nan_on_one_rank_leaves_no_trace_on_any(played, case):
    ranks, journal, _ = played(case)
    assert [[4]] * WORLD == [skipped(rank["changed"]) for rank in ranks]
    assert {3} == {step for step, yes in journal.steps("skipped").items() if yes}
    assert [{}] * WORLD == [rank["faults"] for rank in ranks]


@pytest.mark.parametrize("case", ["ddp", "tensor parallel", "resuming"])
def test_loss_and_norm_are_those_that_torchtitan_logs_and_its_steps_count_from_one(played, case):
    _, journal, _ = played(case)
    logged = {(name, step): value for step, name, value in journal.scalars()}
    losses, norms = journal.steps("loss"), journal.steps("grad_norm")
    assert len(losses) >= 6
    for step, loss in losses.items():
        expected = logged["loss_metrics/global_avg_loss", step + 1]
        assert pytest.approx(expected, rel=1e-5) == loss
        if math.isfinite(norms[step]):  # else rank 1 alone saw it under DDP
            assert pytest.approx(logged["grad_norm", step + 1], rel=1e-4) == norms[step]


def test_only_labels_that_count_are_tokens_and_ranks_that_share_them_count_them_once(played):
    _, journal, _ = played("tensor parallel")
    valid = 4 * (32 - 7)
    assert {s: valid * (s + 1) for s in range(6)} == journal.steps("tokens_seen")


class Small:
    """What a torchtitan Trainer has, as far as the guard looks at it, with losses of its own."""

    def __init__(self, parts, *, valid=(1,), cp=1, tp=1):
        self.model_parts = [torch.nn.Linear(2, 1)]
        self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)]
        self.parallel_dims = SimpleNamespace(pp_enabled=False, cp=cp, tp=tp)
        self.gradient_accumulation_steps = len(parts)
        self.config = SimpleNamespace(training=SimpleNamespace(max_norm=1.0))
        self.metrics_processor = SimpleNamespace(logger=SimpleNamespace(log=self.keep_log))
        self.checkpointer = SimpleNamespace()
        self.step, self.parts, self.valid = 1, parts, valid
        self.logged, self.returned = [], []

    def keep_log(self, metrics, step):
        self.logged.append((metrics, step))

    def forward_backward_step(self, *, labels, global_valid_tokens):
        self.model_parts[0](torch.ones(1, 2)).sum().backward()
        return torch.tensor(self.parts[len(self.returned)])

    def train(self, metrics=None):
        tokens = torch.tensor(float(sum(self.valid)))
        for i in range(len(self.parts)):
            num_valid = self.valid[i * len(self.valid) // len(self.parts)]
            labels = torch.tensor([1] * num_valid + [-100] * 3)
            loss = self.forward_backward_step(labels=labels, global_valid_tokens=tokens)
            self.returned.append(loss.item())
        self.optimizers[0].step()
        if metrics is not None:
            self.metrics_processor.logger.log(metrics, self.step)


@pytest.mark.usefixtures("own_place")
def test_weights_are_torchtitan_s_tokens_over_every_mesh(tmp_path):
    """Two data parallel ranks, each as two of context by two of tensor parallelism.

    All eight are one rank's batches here: the mean over batches is that over ranks.
    """
    valid, parts = [6, 10], [[0.25, 0.5], [0.75, 0.125]]  # of global_avg_loss
    by_rank = [part for of_context in parts for part in of_context * 2]
    trainer = Small(by_rank, valid=valid, cp=2, tp=2)
    adapter.attach(trainer)
    trainer.train()
    journal = Journal(tmp_path / "shm")
    assert {0: 16} == journal.steps("tokens_seen")
    assert pytest.approx({0: sum(map(sum, parts))}, rel=1e-6) == journal.steps("loss")


@pytest.mark.usefixtures("own_place")
def test_what_is_logged_is_kept_once_and_validation_as_evaluation(tmp_path):
    trainer = Small([0.5])
    logger = trainer.metrics_processor.logger
    before = logger.log
    adapter.attach(trainer)
    assert before is not logger.log
    metrics = {"grad_norm": 1.5, "validation_metrics/loss": 2.0, "note": "no number"}
    trainer.train(metrics)
    assert [(metrics, 1)] == trainer.logged
    scalars = {name: value for _, name, value in Journal(tmp_path / "shm").scalars()}
    assert {"grad_norm": 1.5, "eval/loss": 2.0} == scalars
    assert before is logger.log


def test_of_what_both_ranks_log_rank_0_alone_keeps_it(played):
    _, journal, place = played("ddp")
    assert journal.scalars()
    assert [] == Journal(place / "shm", rank=1).scalars()


def test_in_heal_a_damaged_shard_sends_the_trainer_back_and_it_trains_to_its_last_step(played):
    ranks, journal, _ = played("healing")
    ((num,),) = {tuple(rank["back"]) for rank in ranks}
    (branch,) = [a for a in of(journal, AttemptStarted) if a.fork_step]
    assert (0 < branch.fork_step < 59, num in range(10, 62)) == (True, True)
    for rank in ranks:
        assert (70, 70, 70, True) == (rank["step"], rank["last"], rank["rate_at"], rank["finite"])
        assert 70 + num == len(rank["changed"])
        assert {} == rank["faults"]


# ------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("case", ["resuming", "resuming, async"])
def test_a_resumed_training_goes_on_at_its_step_with_its_limits(played, case):
    ranks, journal, _ = played(case)
    for rank in ranks:
        assert 4 == rank["begins"]
        assert {"step", "detectors", "tokens_seen", "tokens_trained"} <= set(rank["kept"])
        assert [3] == skipped(rank["changed"])  # torchtitan's 7th, after 4 in the run before
        assert 8 == rank["step"]
    (branch,) = [a for a in of(journal, AttemptStarted) if a.fork_step]
    assert 4 == branch.fork_step
    assert {6} == {step for step, yes in journal.steps("skipped").items() if yes}


def test_a_checkpoint_made_without_it_is_loaded_and_one_made_with_it_is_without(played):
    ranks, _, _ = played("adopting")
    for rank in ranks:
        assert [True, True] == rank["changed"]
        assert 2 == rank["step"]
        assert 6 == rank["after"]


# ------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("case", ["ddp", "failing", "halting", "off", "resuming", "asserting"])
def test_everything_is_put_back_at_the_end(played, case):
    ranks, _, _ = played(case)
    assert [[]] * WORLD == [rank["left"] for rank in ranks]


def test_a_training_that_is_over_is_finished(played):
    _, journal, _ = played("ddp")
    assert [RunEnded(state="finished", reason="")] == of(journal, RunEnded)


def test_a_training_that_raises_has_failed(played):
    _, journal, _ = played("failing")
    assert [RunEnded(state="failed", reason="RuntimeError: boom")] == of(journal, RunEnded)


def test_a_run_that_its_ladder_stops_ends_train_on_all_ranks_in_the_same_step(played):
    ranks, journal, _ = played("halting")
    assert ["halted by Vitals at step 4"] * WORLD == [r["halted"].split(":")[0] for r in ranks]
    assert 1 == len({rank["step"] for rank in ranks})
    assert ["halted"] == [end.state for end in of(journal, RunEnded)]


def test_off_leaves_the_trainer_as_it_is_and_writes_nothing(played):
    ranks, _, place = played("off")
    for rank in ranks:
        assert rank["untouched"]
        assert [] == skipped(rank["changed"])
    assert not (place / "runs").exists()


# ------------------------------------------- a torchtitan that stops at what is not finite


def test_a_skip_comes_before_torchtitan_s_own_assertion(played):
    ranks, journal, _ = played("asserting")
    assert [[4, 6]] * WORLD == [skipped(rank["changed"]) for rank in ranks]
    decided = [event.decision for event in of(journal, DecisionMade)]
    expected = [("nonfinite_gradient", 1), ("nonfinite_loss", 1)]
    assert expected == [(decision.cause, decision.rank) for decision in decided]


def test_where_we_only_observe_torchtitan_stops_as_it_would(played):
    ranks, journal, _ = played("asserting, observed")
    assert ["not finite at step 4"] * WORLD == [rank["said"] for rank in ranks]
    assert ["failed"] == [end.state for end in of(journal, RunEnded)]


class Checking(Small):
    def train_step(self):
        torch._assert_async(torch.isfinite(torch.zeros(())))


class Derived(Checking):
    @torch.no_grad()
    def train_step(self):
        super().train_step()


class Decorated(Small):
    @torch.no_grad()
    def train_step(self):
        assert math.isfinite(0.0)


@pytest.mark.usefixtures("own_place")
@pytest.mark.parametrize(("kind", "hides"), [(Derived, True), (Decorated, True), (Small, False)])
def test_torchtitan_s_own_check_is_seen_in_a_base_class_and_below_a_decorator(kind, hides):
    """A loss that is not finite is hidden from a check alone."""
    trainer = kind([math.nan])
    adapter.attach(trainer)
    trainer.train()
    assert hides == math.isfinite(trainer.returned[0])


# ------------------------------------------------------------------------ what is not guarded


def test_more_backwards_than_said_are_refused_in_the_first_step(played):
    ranks, _, _ = played("more calls than said")
    for rank in ranks:
        assert (
            "called 2 times in a step, of which gradient_accumulation_steps says 1" in rank["said"]
        )


def test_later_they_are_counted_and_the_step_is_judged_with_them(played):
    ranks, journal, _ = played("more calls later")
    for rank in ranks:
        assert [4] == skipped(rank["changed"])
        assert {"forward_backward_step": 1} == rank["faults"]
    assert 6 == len(journal.steps("skipped"))


def test_optimizers_in_backward_are_refused(played):
    ranks, _, _ = played("in backward")
    for rank in ranks:
        assert "early_step_in_backward" in rank["said"]


def trainer(**changes):
    dims = SimpleNamespace(pp_enabled=False)
    standard = {"forward_backward_step": 0, "train": 0, "gradient_accumulation_steps": 1}
    standard |= {"parallel_dims": dims, "model_parts": [0], "optimizers": []}
    return SimpleNamespace(**{**standard, **changes})


def test_torchft_is_refused():
    container = type("FTOptimizersContainer", (list,), {})()
    with pytest.raises(UsageError, match=r"FTOptimizersContainer cannot.*\n*.*fault_tolerance"):
        adapter.attach(trainer(optimizers=container))


def test_a_second_guard_is_refused(played):
    ranks, _, _ = played("failing")
    for rank in ranks:
        assert "this Spoiled is already guarded" in rank["again"]


def test_what_is_no_trainer_is_refused():
    with pytest.raises(UsageError, match="it is not a torchtitan Trainer"):
        adapter.attach(torch.nn.Linear(1, 1))


def test_a_missing_torchtitan_is_said_with_the_extra(monkeypatch):
    monkeypatch.setattr(adapter, "find_spec", lambda _: None)
    monkeypatch.setattr(adapter, "version", version_of_nothing)
    monkeypatch.setattr("trainer_hooks.integrations.framework.version", version_of_nothing)
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[torchtitan\]"):
        adapter.attach(trainer())


@pytest.mark.usefixtures("own_place")
def test_one_that_is_run_from_its_repository_is_taken(monkeypatch):
    monkeypatch.setattr(adapter, "version", version_of_nothing)
    trainer = Small([0.5])
    adapter.attach(trainer).close()
    assert "train" not in vars(trainer)


def test_one_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("trainer_hooks.integrations.framework.version", lambda _: "0.2.1")
    with pytest.raises(MissingDependencyError, match=r"0\.2\.1; at least 0\.2\.2"):
        adapter.attach(trainer())


def version_of_nothing(name):
    raise adapter.PackageNotFoundError(name)


def test_the_adapter_is_imported_without_torchtitan():
    code = "import sys, trainer_hooks.integrations.torchtitan; print('torchtitan' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert "False" == done.stdout.strip()
