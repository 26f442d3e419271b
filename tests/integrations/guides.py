"""Programs of the frameworks' guides, and what trains them."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.conftest import GLOO_ABORT
from tests.support.forked import TRAINING

GUIDES = Path(__file__).parents[2] / "docs" / "integrations"
BLOCK = re.compile(r"<!-- test: diff -->\n```diff\n(.*?)```", re.S)


def loop(framework):
    """Return the guide's loop with its changes, line by line."""
    (body,) = BLOCK.findall((GUIDES / f"{framework.module}.md").read_text())
    return body.splitlines()


def side(lines, sign):
    return "\n".join(line[1:] for line in lines if line[:1] in (sign, " ", "")) + "\n"


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
