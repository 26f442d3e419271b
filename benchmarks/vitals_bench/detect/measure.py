"""Parts of the benchmark `detect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vitals_bench.detect.judged import ACT, TELL, Judged, best_peer, full_name, judge_all
from vitals_bench.detect.logs import Logs, read_logs
from vitals_bench.detect.rules import PEERS
from vitals_bench.detect.scoring import Total
from vitals_bench.detect.series import Series
from vitals_bench.detect.shapes import BLOOM_PEAK, ONSET, SHAPES, make_shape
from vitals_bench.detect.tables import (
    act_grid,
    better_than_ours,
    num_outside,
    peers_grid,
    rules_grid,
    series_grid,
    shapes_grid,
    thinning_grid,
)
from vitals_bench.rows import Grid, Row, at_least, at_most, exactly

SEEDS = 20
LONG = 1000
"""Records of a log that has enough of them left to learn from when it is thinned."""
QUIET = 400
"""Records after a single NaN in which no alarm is expected."""
LEAD = 3
RECALL, RECALL_BY_HAND, PRECISION = 0.9, 0.8, 0.97
FALSE_SKIPS = 1.0

_Groups = Mapping[str, Callable[[Series], bool]]


def measure_shapes(*, quick: bool, logs: Logs | None = None) -> Iterator[Row | Grid]:
    """Yield what is found in logs that we made, of which we know all."""
    del logs
    seeds = 2 if quick else SEEDS
    judged = judge_all(make_shape(shape, seed) for shape in SHAPES for seed in range(seeds))
    yield from _promises(judged)
    totals = judged.totals()
    yield peers_grid()
    yield rules_grid(
        f"{len(SHAPES)} shapes of {seeds} logs each, {totals[TELL].num_records:,} steps, "
        f"{totals[TELL].num_events} major events",
        totals,
        kinds=True,
        note=better_than_ours(totals),
    )
    yield shapes_grid(judged)
    yield act_grid(judged, {"all shapes": lambda series: True})
    names = [shape.name for shape in SHAPES]
    yield thinning_grid(judged, {name: _named(name) for name in names})


def _named(name: str) -> Callable[[Series], bool]:
    return lambda series: series.name == name


def _promises(judged: Judged) -> Iterator[Row]:
    """Yield the figures that we promise, with the peer that comes closest."""
    for shape in SHAPES:
        if not shape.must:
            continue
        totals = judged.totals(_named(shape.name))
        peer = max(PEERS, key=lambda name: _closeness(totals[name]))
        yield Row(
            name=f"found: {shape.name}",
            ours=100.0 * (totals[TELL].recall or 0.0),
            unit="%",
            peer=full_name(peer),
            theirs=100.0 * (totals[peer].recall or 0.0),
            goal=exactly(100.0),
            note=f"false alarms in 10k records: ours {totals[TELL].false_per_10k:.3g}, "
            f"theirs {totals[peer].false_per_10k:.3g}",
        )
    leads = {rule: _lead(judged, rule) for rule in (TELL, *PEERS)}
    earliest = max(PEERS, key=lambda name: leads[name])
    yield Row(
        name="BLOOM-176B's spike is announced before the peak of the loss, in the worst log",
        ours=leads[TELL],
        unit="steps",
        peer=full_name(earliest),
        theirs=leads[earliest],
        goal=at_least(LEAD),
    )
    yield Row(
        name=f"records with an alarm in the {QUIET} after a single NaN, in the worst log",
        ours=_after_nan(judged, TELL),
        unit="records",
        peer=PEERS["OLMo"].name,
        theirs=_after_nan(judged, "OLMo"),
        goal=exactly(0),
    )


def _closeness(total: Total) -> tuple[float, float]:
    return (total.recall or 0.0, -total.false_per_10k)


def _lead(judged: Judged, rule: str) -> int:
    """Return the records from the first alarm about BLOOM's spike to its peak, at least."""
    leads = [
        BLOOM_PEAK - min([a.row for a in alarms if a.row >= ONSET - 1], default=BLOOM_PEAK)
        for series, alarms in zip(judged.series, judged.alarms[rule], strict=True)
        if series.name == SHAPES[0].name
    ]
    return max(0, min(leads))


def _after_nan(judged: Judged, rule: str) -> int:
    return max(
        len({alarm.row for alarm in alarms if ONSET < alarm.row <= ONSET + QUIET})
        for series, alarms in zip(judged.series, judged.alarms[rule], strict=True)
        if series.name == "NaN once"
    )


def measure_logs(*, quick: bool, logs: Logs | None = None) -> Iterator[Row | Grid]:
    """Yield what is found in labelled logs of real trainings."""
    if logs is None:
        yield Row(
            name="labelled logs", ours=None, unit="", note="skipped: --traces names no folder"
        )
        return
    series = read_logs(logs)
    judged = judge_all(series[:6] if quick else series)
    yield from _goals(judged, logs)
    groups: _Groups = {
        "all": lambda log: True,
        "logged every step": lambda log: log.cadence == 1,
        "coarser": lambda log: log.cadence > 1,
    }
    for name, predicate in groups.items():
        totals = judged.totals(predicate)
        ours = totals[TELL]
        title = f"{len(ours.scores)} labelled logs, {logs.words}: {name}, {ours.num_records:,} "
        yield rules_grid(
            f"{title}records, {ours.num_events} major events",
            totals,
            kinds=True,
            note=better_than_ours(totals),
        )
    yield act_grid(judged, groups)
    yield series_grid(judged)
    longer = f"logged every step, {LONG:,} records or more"
    is_longer = lambda log: log.cadence == 1 and len(log) >= LONG  # noqa: E731
    yield thinning_grid(judged, {longer: is_longer})


def _goals(judged: Judged, logs: Logs) -> Iterator[Row]:
    totals = judged.totals()
    ours, skipped, best = totals[TELL], totals[ACT], best_peer(totals)
    peer, theirs = full_name(best), totals[best]
    recall = RECALL_BY_HAND if logs.manual else RECALL
    where = "labelled logs"
    yield Row(
        name=f"{where}: recall of what is reported", ours=ours.recall, unit="", peer=peer,
        theirs=theirs.recall, goal=at_least(recall), note="the peer best in both at once",
    )  # fmt: skip
    yield Row(
        name=f"{where}: its precision", ours=ours.precision, unit="", peer=peer,
        theirs=theirs.precision, goal=at_least(PRECISION),
    )  # fmt: skip
    yield Row(
        name=f"{where}: clean ones paged", ours=ours.clean_paged[0], unit="logs", peer=peer,
        theirs=theirs.clean_paged[0], goal=exactly(0), note=f"of {ours.clean_paged[1]}",
    )  # fmt: skip
    num_found, num = ours.kinds().get("plateau", (0, 0))
    if num:
        yield Row(
            name=f"{where}: plateaus found", ours=num_found, unit="plateaus", peer=peer, theirs=0,
            goal=exactly(num), note="no peer looks for them",
        )  # fmt: skip
    yield Row(
        name=f"{where}: false skips in 20,000 records", ours=skipped.false_records_per_20k,
        unit="skips", peer=peer, theirs=theirs.false_records_per_20k, goal=at_most(FALSE_SKIPS),
    )  # fmt: skip
    for what in ("rollbacks", "halts"):
        rows = [(i, row) for i, made in enumerate(judged.verdicts) for row in getattr(made, what)]
        yield Row(
            name=f"{where}: {what} without a cause",
            ours=num_outside(judged, rows),
            unit=what,
            goal=exactly(0),
            note=f"of {len(rows)}",
        )
