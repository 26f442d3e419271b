"""FSDP2 on two ranks: our exchange against ``clip_grad_norm_().full_tensor()``.

Each is measured as what it adds to a fused step: ours leaves the clip to that step.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from vitals_bench.guard.norms import Limits
from vitals_bench.measure import interleave, medians, spread
from vitals_bench.rows import Row, ratio_at_most
from vitals_bench.training import Gradients, gpt, size_of, tokens, watched

LIMITS: dict[str, Limits] = {
    "a norm below the limit": lambda: itertools.repeat(1e9),
    # All arms clip the same gradients, and each call must find something left to clip.
    "a norm above the limit": lambda: (0.98**i for i in itertools.count()),
}
TRIES = 3
"""torch 2.13's gloo aborts a rank at exit now and then on a busy machine, watched or not."""


def measure_sharded(*, quick: bool) -> Iterator[Row]:
    """Start two real ranks and yield their rows."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        millions, rounds = (1, 6) if quick else (50, 30)
        for _ in range(TRIES):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", "2", "-m", "vitals_bench.guard.sharded"),
                    *(str(millions), str(rounds), str(out)),
                ],
                env={**os.environ, "TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if out.exists():
                break
        else:
            raise RuntimeError(f"the ranks left nothing:\n{done.stderr[-2000:]}")
        by_kind = json.loads(out.read_text())
    for kind, measured in by_kind.items():
        base = measured["bare"]
        yield Row(
            name=f"FSDP2 on 2 ranks, added to a fused step: norms, exchange, clip, {kind}",
            ours=measured["ours"] - base,
            unit="ms",
            peer="clip_grad_norm_().full_tensor()",
            theirs=measured["peer"] - base,
            goal=ratio_at_most(0.8),
            spread=spread(measured["again"] - base, measured["peer"] - base),
            note=f"gloo, one thread a rank; the fused step alone takes {base:.0f} ms",
        )


def measure_on_this_rank(millions: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return this rank's medians in milliseconds, below and above the limit."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = gpt(millions)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model(tokens(1)).backward()
    params = list(model.parameters())
    grads = Gradients(params, filled=False)
    guarded, plain = (torch.optim.AdamW(params, lr=1e-4, fused=True) for _ in range(2))
    limit: Iterator[float] = iter(())
    measured = {}
    with watched(model, guarded) as monitor:

        def ours() -> None:
            grads.give_back()
            monitor.step(torch.tensor(1.0), max_norm=next(limit))

        def bare() -> None:
            grads.give_back()
            plain.step()
            plain.zero_grad()

        def clip() -> None:
            grads.give_back()
            norm = torch.nn.utils.clip_grad_norm_(params, next(limit), foreach=True)
            assert isinstance(norm, DTensor)
            norm.full_tensor()
            plain.step()
            plain.zero_grad()

        arms = {"ours": ours, "peer": clip, "again": clip, "bare": bare}
        for kind, limits in LIMITS.items():
            limit = limits()
            times = interleave(arms, rounds=rounds, between=dist.barrier)
            measured[f"{size_of(model)}, {kind}"] = medians(times, scale=1e3)
    return measured


def main() -> None:
    """Measure on one of torchrun's ranks; rank 0 writes what it found."""
    millions, rounds, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    measured = measure_on_this_rank(millions, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
