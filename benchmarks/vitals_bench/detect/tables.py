"""What the benchmark shows of what was judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from vitals_bench.detect.judged import ACT, TELL, Judged, full_name
from vitals_bench.detect.ours import judge
from vitals_bench.detect.rules import PEERS
from vitals_bench.detect.scoring import SKIPS_PER, SeriesScore, Total, is_near, score
from vitals_bench.detect.series import KINDS, Series
from vitals_bench.rows import Cell, Grid

THIN = 10
SHOWN = 4
"""Rules that are named, at most, where several are better than ours."""

_Figure = Callable[[Total], float | None]
_METRICS: Mapping[str, tuple[_Figure, int]] = {
    "recall": (lambda total: total.recall, 1),
    "precision": (lambda total: total.precision, 1),
    "false alarms per 10k": (lambda total: total.false_per_10k, -1),
    "delay": (lambda total: total.delay, -1),
    "clean logs paged": (lambda total: total.clean_paged[0], -1),
}
"""What rules are compared in, and whether more of it is better."""


def rules_grid(title: str, totals: Mapping[str, Total], *, kinds: bool, note: str = "") -> Grid:
    """Return one line a rule: how much it finds, how often it is wrong, how late it is."""
    shown = [kind for kind in KINDS if kinds and kind in totals[TELL].kinds()]
    columns = (
        "rule", "recall", "precision", "false alarms per 10k", f"false records per {SKIPS_PER:,}",
        "delay", "clean logs paged", *shown,
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, total in totals.items():
        counts = total.kinds()
        paged, clean = total.clean_paged
        figures: tuple[Cell, ...] = (
            full_name(name), total.recall, total.precision, total.false_per_10k,
            total.false_records_per_20k, total.delay, f"{paged}/{clean}",
        )  # fmt: skip
        rows.append(figures + tuple("{}/{}".format(*counts[kind]) for kind in shown))
    return Grid(title=title, columns=columns, rows=tuple(rows), note=note)


def peers_grid() -> Grid:
    """Return what the peers' rules are."""
    return Grid(
        title="other rules next to ours, implemented from their publications, at their defaults",
        columns=("rule", "short", "what it does, and where it is published"),
        rows=tuple((peer.name, peer.short, peer.about) for peer in PEERS.values()),
        note="Each judges the log record by record; a skip, a clip or an exception is an alarm.",
    )


def better_than_ours(totals: Mapping[str, Total]) -> str:
    """Say in which figures which peer is better than what we tell; made from the numbers alone."""
    ours = totals[TELL]
    parts = []
    for metric, (figure, sign) in _METRICS.items():
        mine = figure(ours)
        better = [
            (value, name)
            for name in PEERS
            if (value := figure(totals[name])) is not None
            and (mine is None or sign * value > sign * mine)
        ]
        better.sort(key=lambda pair: (-sign * pair[0], -(totals[pair[1]].recall or 0.0)))
        if better:
            words = [
                f"{full_name(name)} {value:.3g}"
                + (
                    ""
                    if metric == "recall"
                    else f" (at a recall of {totals[name].recall or 0:.2f})"
                )
                for value, name in better[:SHOWN]
            ]
            more = f" and {len(better) - SHOWN} more" if len(better) > SHOWN else ""
            our_figure = "nothing" if mine is None else f"{mine:.3g}"
            parts.append(f"{metric}: {', '.join(words)}{more}; ours {our_figure}")
    both = [full_name(name) for name in PEERS if _is_better_in_both(totals[name], ours)]
    end = f"In recall and precision at once: {', '.join(both) or 'none'}."
    if not parts:
        return f"No peer is better than ours (tell) in any column. {end}"
    return f"Where a peer is better than ours (tell): {'. '.join(parts)}. {end}"


def _is_better_in_both(peer: Total, ours: Total) -> bool:
    theirs = (peer.recall or 0.0, peer.precision or 0.0)
    mine = (ours.recall or 0.0, ours.precision or 0.0)
    return theirs != mine and theirs[0] >= mine[0] and theirs[1] >= mine[1]


def shapes_grid(judged: Judged) -> Grid:
    """Return one line a shape: in how many percent of its logs each rule finds what there is.

    For a clean shape it is the share of logs with an alarm, and fewer are better.
    """
    names = list(dict.fromkeys(series.name for series in judged.series))
    rows: list[tuple[Cell, ...]] = []
    better: list[str] = []
    for shape in names:
        logs = [log for log in judged.series if log.name == shape]
        shares = {rule: _share(judged, rule, shape) for rule in judged.scores}
        rows.append((shape, *shares.values()))
        if all(log.is_clean for log in logs) and any(log.events for log in logs):
            continue  # minor: neither for a rule nor against it
        words = _better_in_shape(judged, shares, fewer=logs[0].is_clean)
        if words:
            better.append(f"{shape}: {words}; ours {shares[TELL]} %")
    better_peers = ". ".join(better) or "none"
    return Grid(
        title="logs of each shape in which a rule found all that there is, or, where they are "
        "clean, said anything; percent",
        columns=("shape", *judged.scores),
        rows=tuple(rows),
        note="What speaks often finds some by chance; see what it says about the clean ones. "
        f"Shapes in which a peer is better than ours (tell): {better_peers}.",
        detail={rule: _by_seed(judged, rule) for rule in (TELL, ACT)},
    )


def _by_seed(judged: Judged, rule: str) -> list[dict[str, object]]:
    """Return the logs in which a rule of ours missed something or made something up."""
    seeds: Counter[str] = Counter()
    wrong: list[dict[str, object]] = []
    for series, scored in zip(judged.series, judged.scores[rule], strict=True):
        seed = seeds[series.name]
        seeds[series.name] += 1
        if scored.missed or scored.false:
            missed = [event.onset for event in scored.missed]
            mistakes = {"missed": missed, "false": list(scored.false)}
            wrong.append({"shape": series.name, "seed": seed, **mistakes})
    return wrong


def _better_in_shape(judged: Judged, shares: Mapping[str, int], *, fewer: bool) -> str:
    sign = -1 if fewer else 1
    better = [rule for rule in PEERS if sign * shares[rule] > sign * shares[TELL]]
    better.sort(key=lambda rule: -sign * shares[rule])
    words = []
    for rule in better[:SHOWN]:
        paged, clean = Total.of(judged.scores[rule]).clean_paged
        also = f", with false alarms in {paged} of {clean} clean logs" if not fewer else ""
        words.append(f"{full_name(rule)} {shares[rule]} %{also}")
    more = f" and {len(better) - SHOWN} more" if len(better) > SHOWN else ""
    return "; ".join(words) + more


def _share(judged: Judged, rule: str, shape: str) -> int:
    """Return the percent of a shape's logs in which a rule found everything, or said anything."""
    hits = [
        _found_all(series, judged.scores[rule][i], len(judged.alarms[rule][i]))
        for i, series in enumerate(judged.series)
        if series.name == shape
    ]
    return round(100 * sum(hits) / len(hits))


def _found_all(series: Series, scored: SeriesScore, num_alarms: int) -> bool:
    if any(event.severity == "major" for event in series.events):
        return not scored.missed
    return num_alarms > 0


def act_grid(judged: Judged, groups: Mapping[str, Callable[[Series], bool]]) -> Grid:
    """Return what would have been done, and how much of it without a cause."""
    rows: list[tuple[Cell, ...]] = []
    for group, predicate in groups.items():
        chosen = [i for i, series in enumerate(judged.series) if predicate(series)]
        total = Total.of(judged.scores[ACT][i] for i in chosen)
        skips = sum(len(judged.verdicts[i].skipped) for i in chosen)
        false = sum(scored.num_false_records for scored in total.scores)
        rollbacks = [(i, row) for i in chosen for row in judged.verdicts[i].rollbacks]
        halts = [(i, row) for i in chosen for row in judged.verdicts[i].halts]
        rows.append(
            (
                group, len(chosen), total.num_records, skips, false, total.false_records_per_20k,
                len(rollbacks), num_outside(judged, rollbacks),
                len(halts), num_outside(judged, halts),
            )
        )  # fmt: skip
    return Grid(
        title="what our escalation policy would have done",
        columns=(
            "logs", "number", "records", "skips", "false skips", f"per {SKIPS_PER:,}",
            "rollbacks", "of these false", "halts", "of these false ",
        ),
        rows=tuple(rows),
        note="False is what happened outside every event, major or minor, and its margins.",
        detail={
            "where": [
                {"log": series.name, "rollbacks": verdict.rollbacks, "halts": verdict.halts}
                for series, verdict in zip(judged.series, judged.verdicts, strict=True)
                if verdict.rollbacks or verdict.halts
            ]
        },
    )  # fmt: skip


def num_outside(judged: Judged, rows: Sequence[tuple[int, int]]) -> int:
    """Return how many of these records, each with its log, are outside every event."""
    return sum(not is_near(row, judged.series[i].events) for i, row in rows)


def series_grid(judged: Judged) -> Grid:
    """Return one line for each log with an event, or with a false alarm."""
    rows: list[tuple[Cell, ...]] = []
    for series, scored in zip(judged.series, judged.scores[TELL], strict=True):
        num = len(scored.hits) + len(scored.missed)
        if not num and not scored.false:
            continue
        missed = [f"{e.kind} at {e.onset}: {e.reason or 'no reason given'}" for e in scored.missed]
        rows.append(
            (
                series.name, len(series), series.cadence, f"{len(scored.hits)}/{num}",
                ", ".join(str(hit.delay) for hit in scored.hits) or "-",
                ", ".join(map(str, scored.false)) or "-", "; ".join(missed) or "-",
            )
        )  # fmt: skip
    return Grid(
        title="log by log, ours (tell)",
        columns=(
            "log", "records", "steps a record", "found", "delays", "false alarms at",
            "missed, and what its label says",
        ),
        rows=tuple(rows),
        note="Logs without a major event and without a false alarm are left out.",
        detail={rule: _details(scores) for rule, scores in judged.scores.items()},
    )  # fmt: skip


def _details(scores: Sequence[SeriesScore]) -> dict[str, object]:
    return {
        scored.name: {
            "found": [
                {"kind": hit.event.kind, "row": hit.event.onset, "delay": hit.delay}
                for hit in scored.hits
            ],
            "missed": [{"kind": e.kind, "row": e.onset, "label": e.reason} for e in scored.missed],
            "false": list(scored.false),
        }
        for scored in scores
        if scored.hits or scored.missed or scored.false
    }


def thinning_grid(judged: Judged, groups: Mapping[str, Callable[[Series], bool]]) -> Grid:
    """Return what becomes of our verdicts where only every tenth record was logged."""
    pairs = list(zip(judged.series, judged.scores[TELL], strict=True))
    rows: list[tuple[Cell, ...]] = []
    for name, predicate in groups.items():
        chosen = [
            _thinned(log, scored, phase)
            for log, scored in pairs
            if predicate(log)
            for phase in range(THIN)
        ]
        if chosen:
            rows.append((name, len(chosen), *map(sum, zip(*chosen, strict=True))))
    return Grid(
        title=f"the same logs with every {THIN}th record only, ours (tell)",
        columns=(
            "logs", f"times {THIN} phases", "major events left", "found, every record",
            "found, thinned", "with false alarms, every record", "the same, thinned",
            "verdicts that changed",
        ),
        rows=tuple(rows),
        note="An event without any remaining record is not counted. A verdict is which of the "
        "remaining events were found, and whether there was a false alarm.",
    )  # fmt: skip


def _thinned(log: Series, scored: SeriesScore, phase: int) -> tuple[int, ...]:
    """Return events left, found in full and thinned, false in full and thinned, and if changed."""
    left = {event.onset for event in log.left(THIN, phase) if event.severity == "major"}
    thin = log.thinned(THIN, phase)
    again = score(thin, judge(thin).alarms)
    caught = (sum(hit.event.onset in left for hit in scored.hits), len(again.hits))
    false = (int(bool(scored.false)), int(bool(again.false)))
    return (len(left), *caught, *false, int(caught[0] != caught[1] or false[0] != false[1]))
