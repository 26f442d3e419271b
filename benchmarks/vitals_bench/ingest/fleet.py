"""A run of 4,096 ranks at one step a second through the real wire: what the collector needs for it.

511 nodes are simulated, one is real: journals of eight ranks and their agent.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np

from trainvitals.errors import TransportError
from trainvitals.identity import new_run_id
from trainvitals.io.client import CollectorClient, read_tokens
from trainvitals.io.server_identity import UNPROVEN
from trainvitals.views import RunQuestion, SeriesQuestion
from vitals_bench.ingest import servers
from vitals_bench.ingest.asked import Asked
from vitals_bench.ingest.driver import Outcome, Plan, outcome_of, started_driver
from vitals_bench.ingest.node import RealNode, Receiver
from vitals_bench.ingest.records import RANKS_PER_NODE
from vitals_bench.processes import Started
from vitals_bench.rows import Row, at_most, exactly

NUM_NODES = 512
_CONNECT_SECONDS = 5.0
_WARM_UP_STEPS = 5
_POLL_SECONDS = 0.02
_GIVE_UP_SECONDS = 30.0
_BEHIND_SECONDS = 3.0
"""Rows that may be on their way for the CPU time to be that of all of them, in seconds."""
_FLAT = 0.05
"""Growth of the resident memory over the second half that still counts as flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large and how long."""

    num_nodes: int = NUM_NODES
    num_steps: int
    """Seconds that CPU and memory are looked at, warm-up included."""
    num_probes: int
    """Seconds after these, in which rows and alerts are awaited."""


@dataclass(slots=True)
class Seen:
    """What was measured."""

    cpu: list[tuple[float, float]] = field(default_factory=list)
    """The time and the collector's CPU time at each step."""
    resident: list[int] = field(default_factory=list)
    queryable: list[float] = field(default_factory=list)
    alerted: list[float] = field(default_factory=list)
    stored_share: float = 0.0
    """Of the rows that were written by the end of these steps, those that were stored by then."""
    num_lost: int = 0
    outcome: Outcome | None = None


def measure_fleet(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield what the simulated run needed."""
    seconds = 20 if quick else max(20, round(60 * asked.minutes))
    yield from measure_size(Size(num_steps=seconds, num_probes=10 if quick else 60))


def measure_alert(*, quick: bool, asked: Asked = Asked()) -> Iterator[Row]:  # noqa: B008 - frozen
    """Yield how soon a run of two nodes is alerted on, the merging of its rows included."""
    size = Size(num_nodes=2, num_steps=10, num_probes=10 if quick else 90)
    yield from (row for row in measure_size(size) if "webhook" in row.name)


def measure_size(size: Size) -> Iterator[Row]:
    """Yield what a run of this size needed."""
    shm = Path("/dev/shm")
    with ExitStack() as leave:
        temporary = TemporaryDirectory(prefix="vitals-bench-")
        folder = Path(leave.enter_context(temporary))
        memory = TemporaryDirectory(prefix="vitals-bench-", dir=shm if shm.is_dir() else None)
        receiver = leave.enter_context(Receiver())
        told = folder / "receivers.toml"
        told.touch(0o600)
        named = '[[receivers]]\nname = "bench"\nkind = "webhook"\n'
        told.write_text(f'{named}url = "{receiver.url}"\n')
        collector, url, tokens = leave.enter_context(
            servers.collector(folder, "--receivers", str(told))
        )
        run_id, world_size = new_run_id(time.time_ns()), size.num_nodes * RANKS_PER_NODE
        place = Path(leave.enter_context(memory))
        node = leave.enter_context(RealNode(folder, place, run_id, world_size=world_size))
        leave.enter_context(node.agent(UNPROVEN + url, tokens))
        begin_ns = time.time_ns() + int(_CONNECT_SECONDS * 1e9)
        plan = Plan(
            addresses=(urlsplit(url).netloc,),
            token_file=str(tokens),
            run_ids=(run_id,),
            first_rank=RANKS_PER_NODE,
            num_nodes=size.num_nodes - 1,
            world_size=world_size,
            begin_ns=begin_ns,
            num_steps=size.num_steps + size.num_probes,
        )
        driver = leave.enter_context(started_driver(plan, folder))
        reader = leave.enter_context(
            CollectorClient(UNPROVEN + url, read_tokens(tokens).read, timeout=30.0)
        )
        seen = _watch(size, plan, collector, node, reader, receiver)
        seen.outcome = outcome_of(driver)
        seen.num_lost = _count_lost(plan, node, reader)
    yield from rows_of(size, seen)


def _watch(
    size: Size,
    plan: Plan,
    collector: Started,
    node: RealNode,
    reader: CollectorClient,
    receiver: Receiver,
) -> Seen:
    seen, rng = Seen(), random.Random(0)
    for step in range(size.num_steps):
        time.sleep(max(0.0, (plan.begin_ns + step * plan.step_ns - time.time_ns()) / 1e9))
        node.step(step)
        seen.cpu.append((time.monotonic(), collector.cpu_seconds()))
        seen.resident.append(collector.resident_bytes())
    seen.stored_share = _num_stored(plan, reader) / (size.num_steps * plan.world_size)
    began_at: dict[str, float] = {}
    for step in range(size.num_steps, plan.num_steps):
        # Not at the second's turn, where it would always find the agent in the same place.
        due = plan.begin_ns + step * plan.step_ns + int(rng.random() * 0.5e9)
        time.sleep(max(0.0, (due - time.time_ns()) / 1e9))
        began = time.monotonic()
        node.step(step)
        began_at[f"probe-{step}"] = began
        node.decide(step, f"probe-{step}")
        _wait_for_row(reader, plan.run_ids[0], step, began)
        seen.queryable.append(time.monotonic() - began)
    until = time.monotonic() + _GIVE_UP_SECONDS
    while began_at.keys() - receiver.came_at.keys() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    late = time.monotonic()
    seen.alerted = [receiver.came_at.get(cause, late) - began for cause, began in began_at.items()]
    return seen


def _wait_for_row(reader: CollectorClient, run_id: str, step: int, began: float) -> None:
    """Return once an answer has the row of rank 0, or after half a minute all the same."""
    while time.monotonic() - began < _GIVE_UP_SECONDS:
        with contextlib.suppress(TransportError):  # no answer is no answer with the row
            reply = reader.ask(
                SeriesQuestion(
                    run_id=run_id,
                    metric="steps.rank_loss",
                    source="rank:0",
                    points=2,
                    from_step=step,
                    to_step=step,
                )
            )
            if reply.num_total:
                return
        time.sleep(_POLL_SECONDS)


def _count_lost(plan: Plan, node: RealNode, reader: CollectorClient) -> int:
    """Return how many rows of ranks the collector does not have; it gets a while to come to it."""
    sent = plan.num_nodes * RANKS_PER_NODE * plan.num_steps + node.num_rows
    until = time.monotonic() + _GIVE_UP_SECONDS
    while True:
        num_stored = _num_stored(plan, reader)
        if num_stored >= sent or time.monotonic() > until:
            return sent - num_stored
        time.sleep(0.5)


def _num_stored(plan: Plan, reader: CollectorClient) -> int:
    sources = reader.ask(RunQuestion(run_id=plan.run_ids[0])).sources
    return sum(source.num_rows for source in sources if source.source.startswith("rank:"))


def rows_of(size: Size, seen: Seen) -> Iterator[Row]:
    """Yield the figures with their goals."""
    assert seen.outcome is not None
    ranks = f"{size.num_nodes * RANKS_PER_NODE:,} ranks at a step a second"
    (begin, used), (end, used_then) = seen.cpu[_WARM_UP_STEPS], seen.cpu[-1]
    behind = (1.0 - seen.stored_share) * size.num_steps
    kept_up = behind <= _BEHIND_SECONDS
    median, worst = seen.outcome.reply_seconds
    yield Row(
        name=f"CPU of the collector, {ranks}",
        ours=100.0 * (used_then - used) / (end - begin) if kept_up else None,
        unit="% of a core",
        goal=at_most(40.0),
        note=("" if kept_up else "void, it fell behind: ")
        + f"rows of {behind:.1f} s were on their way at the end of these "
        f"{end - begin:.0f} s; the driver takes {100 * seen.outcome.cpu_share:.0f} % of a core and "
        f"was {1e3 * seen.outcome.late_seconds:.0f} ms late at most"
        + f"; {seen.outcome.num_unanswered} nodes were not answered"
        * (seen.outcome.num_unanswered > 0),
    )
    yield Row(
        name=f"from a post to its answer, p99, {ranks}",
        ours=worst,
        unit="s",
        goal=at_most(2.0),
        note=f"{seen.outcome.num_posts:,} posts, median {median:.2f} s; files are merged once a"
        " minute meanwhile, and who posts waits for the commit of its second",
    )
    grown = growth([float(value) for value in seen.resident[len(seen.resident) // 2 :]])
    middle = float(np.median(seen.resident))
    yield Row(
        name=f"growth of the collector's memory in the second half of {len(seen.resident)} s",
        ours=100.0 * grown / middle,
        unit="%",
        goal=at_most(100.0 * _FLAT),
        note=f"{seen.resident[0] / 1e6:.0f} MB at first, {seen.resident[-1] / 1e6:.0f} MB at last,"
        f" {max(seen.resident) / 1e6:.0f} MB at most",
    )
    for name, times, limit in (
        ("from a rank's write to an answer with its row, p99", seen.queryable, 2.0),
        ("from a decision's write to its webhook, p99", seen.alerted, _alert_goal(size)),
    ):
        yield Row(
            name=f"{name}, {ranks}",
            ours=float(np.quantile(times, 0.99)),
            unit="s",
            goal=at_most(limit),
            note=f"{len(times)} times, median {np.median(times):.2f} s",
        )
    yield Row(name=f"rows lost, {ranks}", ours=float(seen.num_lost), unit="rows", goal=exactly(0))


def _alert_goal(size: Size) -> float:
    return 1.0 if size.num_nodes < NUM_NODES else 2.0


def growth(values: list[float]) -> float:
    """Return how much a line through the values rises from the first to the last."""
    if len(values) < 2:
        return 0.0
    slope = np.polyfit(np.arange(len(values)), values, 1)[0]
    return float(slope * (len(values) - 1))
