"""Four real ranks: a run that was rolled back, killed or told to stop ends as one that was not.

Each training leaves a digest of every rank's parameters, moments, buffers and generators after each
step (``exact_training``). Relaunches are torchrun's own; nobody tells the new ranks what run it is.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support.forked import TRAINING
from tests.trainer_hooks.exact_training import calm_and_corrupted
from tests.trainer_hooks.spawned import spawned
from tests.trainer_hooks.torchrun import GLOO_ABORT

pytestmark = pytest.mark.dist

RANKS, STEPS = 4, 22
PLACES = ["kill_before_restore", "kill_amid_restore", "kill_after_restore"]


class Training:
    """One launch of torchrun on four ranks in a folder of its own."""

    def __init__(self, folder, kind, *, restarts=0, **arguments):
        self.folder, self.restarts = folder, restarts
        self.arguments = {"kind": kind, "folder": str(folder), "steps": STEPS, **arguments}

    def start(self, **environ):
        self.folder.mkdir(exist_ok=True)
        (self.folder / "shm").mkdir(exist_ok=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VITALS_")}
        return TRAINING.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(RANKS), "--max-restarts", str(self.restarts)),
                *("--monitor-interval", "0.1", "-m", "tests.trainer_hooks.exact_training"),
            ],
            env={
                **clean,
                "EXACT": json.dumps(self.arguments),
                "VITALS_SHM": str(self.folder / "shm"),
                "VITALS_AGENT": "off",
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self):
        for _ in range(3):
            process = self.start()
            said, _ = process.communicate(timeout=240)
            if process.returncode == 0 or GLOO_ABORT not in said:
                break
            shutil.rmtree(self.folder)
        assert process.returncode == 0, said[-6000:]
        return self.told()

    def told(self):
        return [json.loads((self.folder / f"rank-{r}.json").read_text()) for r in range(RANKS)]


@pytest.fixture(scope="module")
def calm_of(tmp_path_factory):
    """What each rank of an uninterrupted run has after each step; trained once for each kind."""

    @functools.cache
    def train(kind):
        return Training(tmp_path_factory.mktemp("calm") / kind, kind).run()

    return train


@pytest.fixture
def calm(kind, calm_of):
    return calm_of(kind)


both = pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
both_slowly = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "fsdp2")]
)


def digests(told):
    return [one["digests"] for one in told]


@both
def test_a_run_that_was_rolled_back_equals_one_that_was_not_bit_for_bit(kind, tmp_path):
    main = functools.partial(calm_and_corrupted, kind=kind, steps=STEPS)
    ranks = spawned(main, tmp_path, ranks=RANKS)
    calm, told = zip(*ranks, strict=True)
    assert [1] * RANKS == [len(one["back"]) for one in told]
    assert digests(calm) == digests(told)
    assert [one["fed"] for one in calm] == [one["fed"] for one in told]


@both_slowly
@pytest.mark.parametrize("rank", [0, 3])
def test_a_run_whose_rank_was_killed_finds_its_checkpoint_and_equals_one_that_was_not(
    kind, calm, rank, tmp_path
):
    wanted = {"kill": {"rank": rank, "step": 14}}
    told = Training(tmp_path / "run", kind, restarts=1, wanted=wanted).run()
    assert [2] * RANKS == [len(one["starts"]) for one in told]
    assert all(0 < one["starts"][1] <= 14 for one in told)
    assert digests(calm) == digests(told)


@both_slowly
@pytest.mark.parametrize("place", PLACES)
def test_a_rollback_that_was_killed_goes_on_after_the_relaunch_and_is_counted_once(
    kind, calm, place, tmp_path
):
    wanted = {"corrupt": {"rank": 1, "step": 13}, place: {"rank": 2}}
    told = Training(tmp_path / "run", kind, restarts=1, wanted=wanted).run()
    assert [2] * RANKS == [len(one["starts"]) for one in told]
    assert [[1, 1]] * RANKS == [one["spent"] for one in told]
    assert digests(calm) == digests(told)


@both_slowly
def test_a_run_that_skipped_a_window_equals_one_that_never_saw_it(kind, tmp_path):
    calm = Training(tmp_path / "calm", kind, leave_out=[[0, b] for b in range(12, 17)]).run()
    # Sample ids of rank 0 in batches 13 to 15, which nobody is fed otherwise.
    (seen,) = [one["fed"] for one in Training(tmp_path / "look", kind).run()[:1]]
    poisoned = [i for batch in ("13", "14", "15") for i in seen[batch]]
    told = Training(
        tmp_path / "run", kind, margin=1, wanted={"poisoned": poisoned}
    ).run()  # fmt: skip
    assert [1] * RANKS == [len(one["back"]) for one in told]
    assert digests(calm) == digests(told)


@both_slowly
def test_a_run_that_is_told_to_stop_saves_and_goes_on_where_it_stopped(kind, calm, tmp_path):
    training = Training(tmp_path / "run", kind)
    process = training.start()
    path = training.folder / "rank-0.json"
    while not (path.exists() and len(_read(path).get("digests", ())) > 9):
        assert process.poll() is None, process.communicate()[0][-6000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    stopped = [max(map(int, one["digests"])) for one in training.told()]
    assert len(set(stopped)) == 1, said
    training.arguments["run"] = training.told()[0]["run"]
    told = training.run()
    last = stopped[0] + 1  # its call saved and ended the process, so nobody wrote its digest
    assert [last + 1] * RANKS == [one["starts"][1] for one in told]
    assert [without(last, of_rank) for of_rank in digests(calm)] == digests(told)


def without(step, found):
    return {of_step: word for of_step, word in found.items() if of_step != str(step)}


def _read(path):
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}  # in the middle of being written
