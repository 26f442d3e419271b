"""Time for which a loop is blocked by a snapshot of its state, and by a restore."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from vitals_bench.checkpoint.kept import Kept, expect_no_dist_warning
from vitals_bench.measure import Call, interleave, medians, spread
from vitals_bench.rows import Goal, Row, ratio_at_most

_COPY = "copy_ of each tensor, preallocated"


def measure_take(*, quick: bool) -> Iterator[Row]:
    """Yield a snapshot in memory compared with a plain copy, and with peers' blocking time."""
    yield _small(rounds=5 if quick else 45)
    millions, rounds = (5, 5) if quick else (50, 15)
    with TemporaryDirectory(prefix="vitals-bench-") as folder, _Async(Path(folder)) as peers:
        kept = Kept(millions)
        plain = _plain_copy(kept)
        saved = Path(folder) / "saved"
        content = kept.for_peers()
        arms: dict[str, Call] = {
            "ours": kept.take,
            "copy": plain,
            "again": plain,
            "torch.save": lambda: torch.save(content, saved),
            "dcp": partial(peers.save, content),
            "dcp cached": partial(peers.save, content, staged=peers.cached),
        }
        safetensors = _safetensors_save(kept, saved)
        if safetensors is not None:
            arms["safetensors"] = safetensors

        def between() -> None:
            peers.settle()
            kept.commit()

        median_ms = medians(interleave(arms, rounds=rounds, between=between), scale=1e3)
        between()
    torch_version = f"torch {torch.__version__}"
    goals: list[tuple[str, str, Goal | None, str]] = [
        ("copy", _COPY, ratio_at_most(1.25), torch_version),
        ("torch.save", "torch.save", ratio_at_most(1 / 8), f"{torch_version}; not fsynced"),
        ("dcp", "dcp.async_save, its blocking call", ratio_at_most(0.5), torch_version),
        ("dcp cached", "the same, staging buffers kept", ratio_at_most(0.5), torch_version),
        ("safetensors", "safetensors' save_file", None, _safetensors_version()),
    ]
    for arm, peer, goal, note in goals:
        yield Row(
            name=f"a snapshot in memory, checked, {kept.size()}",
            ours=median_ms["ours"],
            unit="ms",
            peer=peer,
            theirs=median_ms.get(arm),
            goal=goal,
            spread=spread(median_ms["again"], median_ms["copy"]) if arm == "copy" else None,
            note=note,
        )


def _small(rounds: int) -> Row:
    """Return the row of a state that a copy takes milliseconds for: what is fixed shows in it."""
    kept = Kept(5)
    plain = _plain_copy(kept)
    arms: dict[str, Call] = {"ours": kept.take, "copy": plain, "again": plain}
    median_ms = medians(interleave(arms, rounds=rounds, between=kept.commit), scale=1e3)
    return Row(
        name=f"a snapshot in memory, checked, {kept.size()}",
        ours=median_ms["ours"],
        unit="ms",
        peer=_COPY,
        theirs=median_ms["copy"],
        goal=ratio_at_most(1.5),
        spread=spread(median_ms["again"], median_ms["copy"]),
        note=f"torch {torch.__version__}",
    )


def measure_restore(*, quick: bool) -> Iterator[Row]:
    """Yield a restore from memory compared with a load of the same state from a cached file."""
    millions, rounds = (5, 5) if quick else (50, 15)
    with TemporaryDirectory(prefix="vitals-bench-") as folder:
        kept, peer = Kept(millions), Kept(millions)
        saved = Path(folder) / "saved"
        torch.save(peer.for_peers(), saved)

        def load(*, mmap: bool = False) -> None:
            content = torch.load(saved, weights_only=True, mmap=mmap)
            peer.bare.load_state_dict(content["model"])
            peer.optimizer.load_state_dict(content["optimizer"])

        arms: dict[str, Call] = {
            "ours": kept.restore,
            "load": load,
            "again": load,
            "mmap": partial(load, mmap=True),
        }
        median_ms = medians(interleave(arms, rounds=rounds), scale=1e3)
    for arm, name, goal in [
        ("load", "torch.load and load_state_dict", ratio_at_most(1 / 3)),
        ("mmap", "the same with mmap=True", None),
    ]:
        yield Row(
            name=f"a restore from memory, {kept.size()}",
            ours=median_ms["ours"],
            unit="ms",
            peer=name,
            theirs=median_ms[arm],
            goal=goal,
            spread=spread(median_ms["again"], median_ms["load"]) if arm == "load" else None,
            note=f"torch {torch.__version__}; the file is in the page cache",
        )


def _plain_copy(kept: Kept) -> Callable[[], None]:
    live = list(kept.state.tensors().values())
    into = [torch.empty_like(tensor) for tensor in live]

    @torch.no_grad()
    def copy() -> None:
        for target, tensor in zip(into, live, strict=True):
            target.copy_(tensor)

    return copy


def _safetensors_save(kept: Kept, path: Path) -> Callable[[], None] | None:
    if importlib.util.find_spec("safetensors") is None:
        return None
    save_file: Any = importlib.import_module("safetensors.torch").save_file

    def save() -> None:
        save_file(kept.state.tensors(), path)

    return save


def _safetensors_version() -> str:
    if importlib.util.find_spec("safetensors") is None:
        return "safetensors: not installed"
    return f"safetensors {importlib.metadata.version('safetensors')}"


class _Async:
    """``dcp.async_save``; only the call is timed, its background work ends in between."""

    def __init__(self, folder: Path) -> None:
        expect_no_dist_warning()
        self._folder = folder
        self._names = itertools.count()
        self._running: Future[Any] | None = None
        self._path = folder
        # As the call itself makes one, but kept: it then finds its buffers again.
        self.cached = DefaultStager(StagingOptions(False, False, False, False))

    def __enter__(self) -> _Async:
        return self

    def __exit__(self, *raised: object) -> None:
        self.settle()
        self.cached.close()

    def save(self, content: dict[str, Any], staged: DefaultStager | None = None) -> None:
        """Begin to save."""
        self._path = self._folder / f"dcp-{next(self._names)}"
        begun = async_save(content, checkpoint_id=self._path, async_stager=staged, no_dist=True)
        self._running = begun if isinstance(begun, Future) else begun.upload_completion

    def settle(self) -> None:
        """Wait until it is saved, and remove it."""
        if self._running is not None:
            self._running.result()
            self._running = None
            shutil.rmtree(self._path)
