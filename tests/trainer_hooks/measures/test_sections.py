"""Where a step's time goes: two real ranks, of which one is late; and on a device, by stand-ins."""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer_hooks.measures import ranks_placed as ranks
from tests.trainer_hooks.measures.journal import Journal
from tests.trainer_hooks.spawned import spawned
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.measures.sections import SECTIONS, SectionTimer
from trainer_hooks.tensors.events import record_event

PARTS = (
    "data_wait",
    "checkpoint",
    *SECTIONS,
    "communication",
    "optimizer",
    "monitor",
)
PLACED = ("ddp", "ddp_micro", "fsdp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITALS_DIR", str(folder / "runs"))
        patch.setenv("VITALS_AGENT", "off")
        patch.setenv("OMP_NUM_THREADS", "1")
        return spawned(ranks.main, folder)


def journals(folder: Path, kind: str) -> list[Journal]:
    return [Journal(folder / "0" / kind, rank) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("kind", [*PLACED, "compiled"])
def test_the_parts_make_up_the_step(folder: Path, said: Any, kind: str) -> None:
    assert [{}, {}] == [of_rank[kind]["errors"] for of_rank in said]
    for journal in journals(folder, kind):
        rows = journal.rows["steps"][1:]
        assert ranks.NUM + 2 == len(rows)
        gaps = []
        for row in rows:
            whole = sum(row.get(f"{part}_seconds") or 0.0 for part in PARTS)
            gaps.append(abs(whole / row["step_duration_seconds"] - 1))
            if sys.platform == "linux":
                assert 0.0 <= row["run_queue_seconds"] <= row["step_duration_seconds"]
        # A busy machine may hold a process up between two parts, in a step or two.
        assert median(gaps) < 0.03


@pytest.mark.dist
@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("place", ranks.PLACES)
def test_a_rank_is_late_where_it_slept_and_the_other_waits(
    folder: Path, said: Any, kind: str, place: str
) -> None:
    in_time, late = (journal.rows["steps"] for journal in journals(folder, kind))
    times = 3 if kind == "ddp_micro" and place in ("forward", "backward") else 1
    slept, longer, waited = ranks.LATE * times, [], []
    for step in (2 + 2 * ranks.PLACES.index(place), 3 + 2 * ranks.PLACES.index(place)):
        column = f"{place}_seconds"
        longer.append(late[step][column] - in_time[step][column])
        after = step + (place == "optimizer")  # the others wait for it in the next step
        waits = [
            rows[after]["gradient_wait_seconds"] + rows[after]["communication_seconds"]
            for rows in (in_time, late)
        ]
        waited.append(waits[0] - waits[1])
    # Of two steps: a busy machine may have slept in either.
    assert max(longer) > 0.8 * slept, "where it slept"
    assert max(waited) > 0.5 * slept, "the other waited"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fsdp1", "plain"])
def test_what_is_not_placed_has_no_columns(folder: Path, said: Any, kind: str) -> None:
    assert [{}, {}] == [of_rank[kind]["errors"] for of_rank in said]
    for journal in journals(folder, kind):
        assert {} == journal.steps("forward_seconds") == journal.steps("gradient_wait_seconds")
        assert len(journal.steps("communication_seconds")) == ranks.NUM + 3


@pytest.mark.dist
def test_a_closed_monitor_leaves_no_hook(said: Any) -> None:
    for of_rank in said:
        for kind in ("ddp", "fsdp2", "compiled"):
            assert (0, 0) == (of_rank[kind]["left"], of_rank[kind]["timed"])


@pytest.mark.dist
def test_a_copy_of_the_model_has_nothing_of_ours(said: Any) -> None:
    for of_rank in said:
        original, copied, unpickled = of_rank["copied"]["out"]
        assert original == copied == unpickled
        assert not any("trainer_hooks" in hook for hook in of_rank["copied"]["hooks"])


# ----------------------------------------------------------------------- on a device, by stand-ins


class Event:
    """A CUDA event whose device does whatever is recorded in a millisecond."""

    recorded = 0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing and blocking
        self.at = -1

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def elapsed_time(self, other: "Event") -> float:
        return float(other.at - self.at)


def test_on_a_device_the_parts_lie_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    faults, model = FaultCounter(), nn.Linear(4, 1)
    sections = SectionTimer([model], torch.device("cuda"), faults)
    sections.start_step(0)
    model(torch.ones(2, 4)).sum().backward()
    sections.end_loop_part(0)
    exchanged = record_event(torch.device("cuda"), timed=True)
    timeline = sections.pop_timeline()
    assert timeline is not None
    assert dict.fromkeys(SECTIONS, 0.001) == pytest.approx(timeline.seconds())
    assert timeline.since(exchanged) == pytest.approx(0.001), "the optimizers', by the device"
    assert 0 == faults.total


def test_a_step_without_backward_is_not_placed() -> None:
    faults, model = FaultCounter(), nn.Linear(4, 1)
    sections = SectionTimer([model], torch.device("cpu"), faults)
    sections.start_step(0)
    model(torch.ones(2, 4))
    sections.end_loop_part(0)
    assert sections.pop_timeline() is None
    sections.release()
    assert not model._forward_hooks


def ns_in_queue() -> int:
    """Return how long this thread has waited for a core, as the kernel counts it."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no count")
def test_the_wait_for_a_core_is_counted_as_the_kernel_does() -> None:
    model = nn.Linear(2, 1)
    sections = SectionTimer([model], torch.device("cpu"), FaultCounter())
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    try:
        counts = []
        for _ in range(2):
            sections.start_step(time.monotonic_ns())
            loss = model(torch.ones(1, 2)).sum()
            begin = ns_in_queue()
            loss.backward()  # its end counts as a wait for ranks
            backward = ns_in_queue() - begin
            begin = ns_in_queue()
            while ns_in_queue() < begin + 50_000_000:
                pass
            outer_begin = ns_in_queue()
            sections.start_rank_wait()
            begin = ns_in_queue()
            while (end := ns_in_queue()) < begin + 50_000_000:
                pass
            sections.end_rank_wait()
            before = ns_in_queue()
            rank_waits = (end - begin, before - outer_begin + backward)
            timeline = sections.pop_timeline()
            counts.append((before, ns_in_queue()))
        assert timeline is not None and timeline.run_queue_seconds is not None
        counted_ns = round(timeline.run_queue_seconds * 1e9)
        (first_before, first_after), (before, after) = counts
        inner, outer = rank_waits
        assert before - first_after - outer <= counted_ns, "from step to step"
        assert counted_ns <= after - first_before - inner, "without waits for other ranks"
    finally:
        os.sched_setaffinity(0, cores)
        rival.kill()
        rival.wait()
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    sections.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files - 1
