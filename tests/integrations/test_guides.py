"""Each framework's guide: at most three changed lines, and both sides of them train."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integrations.conftest import GLOO_ABORT
from tests.integrations.declared import FRAMEWORKS
from tests.support.forked import TRAINING

GUIDES = Path(__file__).parents[2] / "docs" / "integrations"
BLOCK = re.compile(r"<!-- test: diff -->\n```diff\n(.*?)```", re.S)
BEFORE = {
    "deepspeed": "import collections, deepspeed.ops\n"
    "deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)\n"
}
"""What comes before a guide's program here: DeepSpeed would compile an operator for minutes."""
EVERY = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.title)


def loop(framework):
    """Return the guide's loop with its changes, line by line."""
    (body,) = BLOCK.findall((GUIDES / f"{framework.module}.md").read_text())
    return body.splitlines()


def side(lines, sign):
    return "\n".join(line[1:] for line in lines if line[:1] in (sign, " ", "")) + "\n"


@EVERY
def test_at_most_three_lines_change(framework):
    added = [line for line in loop(framework) if line.startswith("+")]
    removed = [line for line in loop(framework) if line.startswith("-")]
    assert 1 <= len(added) <= 3
    assert len(removed) <= len(added)


@pytest.mark.dist
@pytest.mark.slow
@EVERY
def test_both_sides_train_to_the_same_loss_on_two_ranks(framework, tmp_path):
    if framework.package and importlib.util.find_spec(framework.package) is None:
        pytest.skip(f"not installed: {framework.package}")
    before = BEFORE.get(framework.module, "")
    guarded = on_two_ranks(tmp_path / "guarded", before + side(loop(framework), "+"))
    bare = on_two_ranks(tmp_path / "bare", before + side(loop(framework), "-"))
    assert pytest.approx(bare.loss, rel=1e-3) == guarded.loss
    assert [] == bare.runs
    assert 1 == len(guarded.runs)


@dataclass(frozen=True)
class Trained:
    loss: float
    runs: list[str]


def on_two_ranks(folder, program):
    """Train as a user would; the last number that rank 0 prints is the loss."""
    folder.mkdir()
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "train.py"]
    environ = {
        **os.environ,
        "VITALS_SHM": str(folder),
        "VITALS_AGENT": "off",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    for attempt in range(3):
        done = TRAINING.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240
        )
        if done.returncode == 0 or GLOO_ABORT not in done.stderr or attempt == 2:
            break
    assert 0 == done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    loss = float(re.findall(r"^loss (\S+)$", done.stdout, re.M)[-1])
    runs = folder / "vitals_runs"
    return Trained(loss, sorted(p.name for p in runs.glob("[0-9A-Z]*")) if runs.exists() else [])
