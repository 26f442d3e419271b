"""The steps of a training while a checkpoint of it is being written, and while none is."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from trainer_hooks.ranks import Ranks
from vitals_bench.checkpoint.kept import Kept, expect_no_dist_warning
from vitals_bench.measure import spread
from vitals_bench.rows import Row

_BATCH = 4


def measure_writing(*, quick: bool) -> Iterator[Row]:
    """Yield the median and the slowest 5% of the steps, compared with an idle disk."""
    millions, saves = (1, 2) if quick else (10, 8)
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        kept = Kept(millions, batch=_BATCH)
        steps = _measure(kept, Path(folder), saves)
    for which, of in (("median", statistics.median), ("95th percentile", _p95)):
        in_ms = {name: of(times) * 1e3 for name, times in steps.items()}
        for arm, peer in [("none", "while none is"), ("dcp", "during dcp.async_save")]:
            yield Row(
                name=f"a step while a checkpoint is written: {which}, {kept.size()}",
                ours=in_ms["ours"],
                unit="ms",
                peer=f"a step {peer}",
                theirs=in_ms[arm],
                spread=spread(in_ms["again"], in_ms["none"]) if arm == "none" else None,
                note=f"{len(steps['ours'])} steps in {saves} saves, {len(steps[arm])} steps {peer};"
                f" ours is read back and verified too; torch {torch.__version__}",
            )


def _measure(kept: Kept, folder: Path, saves: int) -> dict[str, list[float]]:
    """Return the seconds of the steps: during our saves, during the peer's, and between them."""
    expect_no_dist_warning()
    store = kept.store(folder / "ours", Ranks.join())
    seconds: dict[str, list[float]] = {"ours": [], "dcp": [], "none": [], "again": []}
    for i in range(saves):
        kept.take()
        kept.commit()
        newest = kept.ring.newest_committed()
        assert newest is not None
        store.save(newest)
        mine = _steps_until(kept, lambda: store.wait(0.0))
        seconds["ours"] += mine
        seconds["none" if i % 2 else "again"] += _steps(kept, len(mine))
        path = folder / f"dcp-{i}"
        begun = async_save(kept.for_peers(), checkpoint_id=path, no_dist=True)
        upload = begun if isinstance(begun, Future) else begun.upload_completion
        seconds["dcp"] += _steps_until(kept, upload.done)
        upload.result()
        shutil.rmtree(path)
        seconds["again" if i % 2 else "none"] += _steps(kept, len(mine))
    if store.num_saved != saves:
        raise RuntimeError(f"{store.num_failed} of {saves} saves failed")
    return seconds


def _steps_until(kept: Kept, done: Callable[[], bool]) -> list[float]:
    times = [_timed(kept)]
    while not done():
        times.append(_timed(kept))
    return times


def _steps(kept: Kept, count: int) -> list[float]:
    return [_timed(kept) for _ in range(count)]


def _timed(kept: Kept) -> float:
    begin = time.perf_counter()
    kept.step()
    return time.perf_counter() - begin


def _p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20, method="inclusive")[-1] if times[1:] else times[0]
