"""Memory that Vitals takes in a rank, next to the same loop without it.

python -m vitals_bench.agent.memory MODE MILLIONS
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vitals_bench.rows import Row

BARE = "bare"
_NUM_STEPS = 70
"""Enough for a snapshot in every slot after the optimizer has its state."""


class RankMemory(msgspec.Struct, kw_only=True):
    """Memory of one rank."""

    written_bytes: int
    """Pages that it has written; pages of files are shared by the ranks of a node."""
    state_bytes: int
    """Parameters and optimizer state."""


def rank_memory(mode: str, millions: int) -> RankMemory:
    """Train a GPT for some steps in a new process, and return its memory then.

    Args:
        mode: of ``watch``, or ``bare`` for the loop without Vitals.
        millions: parameters, about (``training.WIDTHS``).
    """
    command = [sys.executable, "-m", "vitals_bench.agent.memory", mode, str(millions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=RankMemory)


def main() -> None:
    """Train, and print the memory."""
    import torch

    from vitals_bench.training import Loop, tokens, watched

    mode, millions = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    loop = Loop(millions, tokens(1))
    if mode == BARE:
        for _ in range(_NUM_STEPS):
            loop.step()
        written_bytes = _written_bytes()
    else:
        has_snapshots = mode == "heal"
        with watched(loop.model, loop.optimizer, mode=mode, checkpoints=has_snapshots) as monitor:
            for _ in range(_NUM_STEPS):
                monitor.step(loop.backward(), max_norm=1.0)
            written_bytes = _written_bytes()
    optimizer_state = [value for state in loop.optimizer.state.values() for value in state.values()]
    state_bytes = sum(each.nbytes for each in [*loop.model.parameters(), *optimizer_state])
    memory = RankMemory(written_bytes=written_bytes, state_bytes=state_bytes)
    sys.stdout.buffer.write(msgspec.json.encode(memory))


def _written_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem"))


def measure_rank(*, quick: bool) -> Iterator[Row]:
    """Yield the memory that each mode adds to a rank."""
    millions = 1 if quick else 10
    bare = rank_memory(BARE, millions)
    for mode in ("guard", "heal"):
        added = rank_memory(mode, millions).written_bytes - bare.written_bytes
        yield Row(
            name=f"memory that mode {mode} adds to a rank, {millions}M parameters",
            ours=added / 1e6,
            unit="MB",
            note=f"the loop alone: {bare.written_bytes / 1e6:.0f} MB without pages of files; "
            f"its state: {bare.state_bytes / 1e6:.0f} MB, of which heal has two snapshots",
        )


if __name__ == "__main__":
    main()
