"""Describes which ranks and nodes are slower than the others. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainvitals.units import humanize_count
from trainvitals.views import RunDetail
from vitals_dashboard import formatting
from vitals_dashboard.charts import heatmap

SLOWER = 0.05
"""Part by which a rank must be slower than the middle of all to be named."""
SCALES = 3.0
"""And by how many robust standard deviations of the ranks' step times."""
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank or node whose steps take longer than those of the others."""

    name: str
    node: str
    seconds: float
    middle: float
    of: int

    @property
    def slower(self) -> float:
        """Return by which part the rank or node is slower, as the dashboard shows it."""
        return self.seconds / self.middle - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSummary:
    """Examined steps and ranks, and the slow ones."""

    num_ranks: int
    middle: float
    ranks: tuple[Straggler, ...]
    nodes: tuple[Straggler, ...]


def nodes_of(detail: RunDetail) -> dict[str, str]:
    """Return the node each source was last seen on, for the names of ranks on the dashboard."""
    seen = sorted(detail.sources, key=lambda source: source.last_seen_unix_ns)
    return {source.source: source.node for source in seen if source.node}


def summarize_stragglers(
    cells: heatmap.Floats, rows: Sequence[str], detail: RunDetail
) -> StragglerSummary:
    """Return the ranks and nodes that the dashboard names as slow, by their median step."""
    medians = heatmap.median_along_axis(cells, 1)[:, 0]
    nodes = nodes_of(detail)
    of_ranks = {
        row: float(pace) for row, pace in zip(rows, medians, strict=True) if np.isfinite(pace)
    }
    by_node: dict[str, list[float]] = {}
    for row, pace in of_ranks.items():
        if row in nodes:
            by_node.setdefault(nodes[row], []).append(pace)
    of_nodes = {node: float(np.median(paces)) for node, paces in by_node.items()}
    middle = float(np.median(list(of_ranks.values()))) if of_ranks else 0.0
    return StragglerSummary(
        num_ranks=len(of_ranks),
        middle=middle,
        ranks=_find_stragglers(of_ranks, nodes),
        nodes=_find_stragglers(of_nodes, {}) if len(of_nodes) > 2 else (),
    )


def _find_stragglers(paces: dict[str, float], nodes: dict[str, str]) -> tuple[Straggler, ...]:
    """Return ranks or nodes that the dashboard names as unusually slow, slowest first."""
    if len(paces) < 2:
        return ()
    values = np.array(list(paces.values()))
    # For two, the faster one is the reference: a straggler is detected in the smallest job too.
    middle = float(np.median(values)) if len(values) > 2 else float(values.min())
    spread = 1.4826 * float(np.median(np.abs(values - middle))) if len(values) > 2 else 0.0
    slow = [
        Straggler(name=name, node=nodes.get(name, ""), seconds=pace, middle=middle, of=len(paces))
        for name, pace in paces.items()
        if middle > 0 and pace - middle > max(SLOWER * middle, SCALES * spread)
    ]
    return tuple(sorted(slow, key=lambda straggler: -straggler.seconds))


def straggler_sentences(what: StragglerSummary) -> list[str]:
    """Return sentences about stragglers for a dashboard page; one if there are none."""
    if not what.num_ranks:
        return ["No step time was measured here, so no straggler can be named."]
    if what.num_ranks == 1:
        return [
            f"One rank, median step {_format_seconds(what.middle)}: no other rank to compare with."
        ]
    sentences = [_straggler_sentence(straggler, "node") for straggler in what.nodes[:MAX_NAMED]]
    sentences += [_straggler_sentence(straggler, "rank") for straggler in what.ranks[:MAX_NAMED]]
    if len(what.ranks) > MAX_NAMED:
        others = humanize_count(len(what.ranks) - MAX_NAMED, "other rank")
        sentences.append(f"As slow: {others}.")
    if not sentences:
        sentences = [
            f"No straggler. Median step {_format_seconds(what.middle)} over "
            f"{what.num_ranks:,} ranks."
        ]
    return sentences


def _straggler_sentence(straggler: Straggler, kind: str) -> str:
    """Return the dashboard's sentence about a slow rank or node."""
    name = straggler.name.replace(":", " ", 1) if kind == "rank" else f"node {straggler.name}"
    where = f" on {straggler.node}" if straggler.node else ""
    others = f"the median of {straggler.of:,} {kind}s" if straggler.of > 2 else f"the other {kind}"
    return (
        f"{formatting.plain(name + where, 120)} is slow: {_format_seconds(straggler.seconds)} "
        f"a step,"
        f" {straggler.slower:.0%} above {others} ({_format_seconds(straggler.middle)})."
    )


def blocking_rank_sentence(cells: heatmap.Floats, rows: Sequence[str], steps: Sequence[int]) -> str:
    """Return a page's sentence about the blocking rank: it waits least in most steps.

    ``cells`` (ranks, steps) are the seconds that each waited.
    """
    whole = cells[:, np.isfinite(cells).all(axis=0)]
    if len(rows) < 2 or not whole.size:
        return "Too few ranks or steps to say who waits for whom."
    lost = np.median(whole, axis=0) - whole if len(rows) > 2 else whole.max(axis=0) - whole
    least = whole.argmin(axis=0)
    rank = int(np.bincount(least, minlength=len(rows)).argmax())
    share = float(np.mean(least == rank))
    seconds = float(np.median(lost[rank]))
    span = f"in {share:.0%} of the columns from step {steps[0]:,} to {steps[-1]:,}"
    if seconds <= 0.0 or share <= max(0.5, 1.5 / len(rows)):
        return f"No straggler: the latest rank changes from step to step ({span})."
    name = rows[rank].replace(":", " ", 1)
    return f"The others wait for {name} {span}, about {_format_seconds(seconds)} per step."


def _format_seconds(seconds: float) -> str:
    """Return a step's duration as text in the dashboard's sentences about stragglers."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
