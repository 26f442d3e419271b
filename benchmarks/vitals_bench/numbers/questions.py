"""CPU of a question: of a long run's curves, and of one step of thousands of ranks."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from trainvitals.wire import Batch
from vitals_bench import wide
from vitals_bench.measure import halves, interleave
from vitals_bench.numbers.commits import PEER, Case, Fleet, decoded
from vitals_bench.query.filling import Filling, Size
from vitals_bench.query.measure import Asking
from vitals_bench.rows import Goal, Row, at_most, ratio_at_most
from vitals_collector.ingest.ingest import ingest_bodies
from vitals_collector.ingest.validate import check_batches
from vitals_collector.numbers.interface import Span
from vitals_collector.numbers.lake import Lake
from vitals_collector.storage.compaction import compact
from vitals_collector.storage.read_rows import rows_at_step
from vitals_collector.storage.store import Store

FULL = Size(num_steps=1_000_000, num_metrics=50)
QUICK = Size(num_steps=20_000, num_metrics=10, num_ranks=4, num_last=200)
_RANKS = Case(1, 4_096, 20)
_RANKS_QUICK = Case(1, 64, 20)
_NUM_COMMITS = 30
_WINDOW = 200


def measure_questions(*, quick: bool) -> Iterator[Row]:
    """Yield what curves of one long run cost, before and after merging."""
    filling = Filling(QUICK if quick else FULL)
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "chunks") as store,
    ):
        lake = Lake(Path(folder) / "lake")
        filling.fill(store)
        for batches in filling.row_batches():
            lake.append([b for b in check_batches(list(batches)) if isinstance(b, Batch)])
        asking = Asking(store, filling)
        words = f"of {filling.size.num_steps:,} steps x {filling.size.num_metrics} metrics"
        rounds = 3 if quick else 7
        yield _row(f"whole curve {words}, never merged", asking, lake, rounds, ratio_at_most(3.0))
        lake.merge()
        yield _row(f"whole curve {words}, merged", asking, lake, rounds, ratio_at_most(1.5))
        lake.close()
        begin = time.monotonic()
        lake = Lake(Path(folder) / "lake")
        yield Row(
            name="from opening a lake to its first answer",
            ours=time.monotonic() - begin,
            unit="s",
            note="wall time",
        )
        span = Span(filling.run_id, "steps", (0,))
        names = list(filling.names[:9])
        arms = {
            "nine": lambda: lake.scan(span, names),
            "one": lambda: [lake.scan(span, [name]) for name in names],
            "window": lambda: lake.scan(
                span._replace(from_step=filling.incident, to_step=filling.incident + _WINDOW), names
            ),
        }
        times = _timed(arms, rounds)
        yield Row(
            name=f"nine whole curves {words} in one question",
            ours=1e3 * times["nine"],
            unit="ms",
            peer="in nine questions",
            theirs=1e3 * times["one"],
        )
        yield Row(
            name=f"nine metrics of {_WINDOW} steps {words}", ours=1e3 * times["window"], unit="ms"
        )
        lake.close()


def _row(name: str, asking: Asking, lake: Lake, rounds: int, goal: Goal) -> Row:
    span = Span(asking.filling.run_id, "steps", (0,))
    arms: dict[str, Callable[[], object]] = {
        "ours": lambda: lake.scan(span, ["step", "attempt", "time_unix_ns", "loss"]),
        "theirs": asking.whole,
    }
    if len(lake.scan(span, ["loss"])["loss"].values) != len(asking.whole()):
        raise RuntimeError("the two do not hold the same rows")
    times = interleave(arms, rounds=rounds, clock_ns=time.process_time_ns)
    return Row(
        name=name,
        ours=1e3 * statistics.median(times["ours"]),
        unit="ms",
        peer=PEER,
        theirs=1e3 * statistics.median(times["theirs"]),
        goal=goal,
        spread=halves(times["theirs"]),
        note="CPU; value, step, attempt and time of each row",
    )


def measure_ranks(*, quick: bool) -> Iterator[Row]:
    """Yield what questions across ranks cost, before and after merging."""
    case = _RANKS_QUICK if quick else _RANKS
    fleet = Fleet(case)
    (run_id,) = fleet.run_ids
    with (
        TemporaryDirectory(prefix="vitals-bench-") as folder,
        wide.sqlite_store(Path(folder), "chunks") as store,
    ):
        lake = Lake(Path(folder) / "lake")
        for second in range(_NUM_COMMITS):
            bodies = fleet.bodies(second)
            lake.append(decoded(bodies))
            ingest_bodies(store, bodies, 1)
        step = _NUM_COMMITS * case.num_rows // 2
        yield _at_step("never merged", case, store, lake, run_id, step)
        lake.merge()
        compact(store)
        yield _at_step("merged", case, store, lake, run_id, step)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        yield Row(
            name="peak memory of this process, both stores in it",
            ours=peak,
            unit="MB",
            goal=at_most(2_000.0),
        )
        lake.close()


def _at_step(when: str, case: Case, store: Store, lake: Lake, run_id: str, step: int) -> Row:
    span = Span(run_id, "steps", (), step, step + 1)

    def theirs() -> int:
        with store.read() as connection:
            return len(rows_at_step(connection, run_id, step))

    def ours() -> int:
        names = ["loss", "grad_norm", "rank_loss", "tokens_per_second"]
        return len(lake.scan(span, names)["loss"].values)

    if not ours() == theirs() == case.num_ranks:
        raise RuntimeError(f"a step of {case.num_ranks} ranks was not answered whole")
    times = _timed({"ours": ours, "theirs": theirs}, 3)
    return Row(
        name=f"one step of {case.num_ranks:,} ranks, {when}",
        ours=1e3 * times["ours"],
        unit="ms",
        peer=PEER,
        theirs=1e3 * times["theirs"],
        goal=ratio_at_most(0.5),
        note="CPU; ours four columns, theirs the rows",
    )


def _timed(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times = interleave(arms, rounds=rounds, warm_up=1, clock_ns=time.process_time_ns)
    return {name: statistics.median(values) for name, values in times.items()}
