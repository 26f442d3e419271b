"""One of torchrun's ranks: measures our ways back in its first life, then dies and comes again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks.ranks import Ranks
from vitals_bench.checkpoint.kept import Kept
from vitals_bench.training import gpt, tokens

_SAVED = "saved.pt"


def main() -> None:
    """Measure, die as often as asked for, and end well in the last life."""
    millions, rounds, deaths = (int(text) for text in sys.argv[1:4])
    folder = Path(sys.argv[4])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if life == 0:
        _first_life(millions, rounds, folder)
    else:
        _loaded_life(millions, folder)
        _write_time(folder / f"stepped-{life}-{dist.get_rank()}")
    dist.barrier()
    if life < deaths:
        _die(folder, life)
    dist.destroy_process_group()


def _first_life(millions: int, rounds: int, folder: Path) -> None:
    kept = Kept(millions, wrap=DistributedDataParallel)
    ranks = Ranks.join()
    newest = kept.ring.newest_committed()
    assert newest is not None
    store = kept.store(folder / "checkpoints", ranks)
    name = store.save(newest)
    if not store.wait(None) or store.num_failed:
        raise RuntimeError("the checkpoint was not saved")
    measured = {
        "size": kept.size(),
        "memory": _times(kept, kept.restore, rounds),
        "disk": _times(kept, lambda: store.load(name), rounds),
    }
    if ranks.rank == 0:
        torch.save(kept.for_peers(), folder / _SAVED)
        (folder / "found.json").write_text(json.dumps(measured))


def _times(kept: Kept, go_back: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds from NaN on all ranks to the end of the next step."""
    times = []
    for _ in range(rounds):
        kept.spoil()
        dist.barrier()
        begin = time.perf_counter()
        go_back()
        kept.step()
        times.append(time.perf_counter() - begin)
        if any(not torch.isfinite(param).all() for param in kept.model.parameters()):
            raise RuntimeError("the step after the way back was no good one")
    return times


def _loaded_life(millions: int, folder: Path) -> None:
    """Do what a loop does that loads its checkpoint at its start, and train a step."""
    bare = gpt(millions)
    content = torch.load(folder / _SAVED, weights_only=True)
    bare.load_state_dict(content["model"])
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer.load_state_dict(content["optimizer"])
    model(tokens(1)).backward()
    optimizer.step()


def _die(folder: Path, life: int) -> NoReturn:
    """Rank 1 is gone at once; the other waits for torchrun to end it."""
    if dist.get_rank() == 1:
        _write_time(folder / f"died-{life}")
        os._exit(13)
    while True:
        time.sleep(1.0)


def _write_time(path: Path) -> None:
    path.write_text(str(time.time_ns()))


if __name__ == "__main__":
    main()
