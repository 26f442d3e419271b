"""Decides from the reports of all ranks which ranks, nodes and links are faulty.

Pure: no clock, no file, no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from trainvitals.units import humanize_bytes, humanize_seconds, name_ranks
from vitals_plugins.lab.preflight.report import (
    DONE,
    FIGURES,
    NUM_LOCAL,
    STAGES,
    FigureSpec,
    PreflightReport,
)

Severity = Literal["fail", "note"]
"""``fail``: do not train with this. ``note``: worth knowing."""

NUM_DEVIATIONS = 4.0
"""A slow rank is also this many robust standard deviations below the others."""
_MAD_TO_DEVIATION = 1.4826
TWO_RANKS_RATIO = 0.5
"""With two ranks there is no majority. One is named only if it has less than half of the other's
speed: noise on one of two equal devices explains less than that."""
HISTORY_RATIO = 0.7
"""Relative to the bound between ranks: earlier checks ran at another time, load and temperature."""
MIN_HISTORY = 3
"""Checks without a fault before a node is compared with its history."""
GPU_PAIR_RATIO = 0.5
"""A pair below half of the reference is slow: a degraded link has half of its lanes or fewer."""
CPU_PAIR_RATIO = 0.4
"""On CPUs an exchange also waits until both processes have a core."""
MAX_SKEW_SECONDS = 0.25
"""Twice the 0.128 s at which ntpd steps a clock: no synchronized clock differs by this much."""
MIN_OPEN_FILES = 1024
MAY_DIFFER = frozenset({"kernel", "driver"})
"""Versions that often differ in a healthy cluster, for example while it is upgraded."""
MIN_SHARED_BYTES = 64 << 20
"""As in `vitals doctor`: Docker's default is 64 MB in total, and loader workers need most of it."""


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a job's nodes."""

    kind: str
    severity: Severity
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes at fault; empty if the fault cannot be attributed."""
    text: str
    hint: str = ""


class Baseline(msgspec.Struct, frozen=True):
    """Figures of earlier checks of one node without a fault, oldest first."""

    device: str
    figures: tuple[dict[str, float], ...] = ()


def judge(
    reports: Sequence[PreflightReport],
    *,
    world_size: int | None = None,
    baselines: Mapping[str, Baseline] | None = None,
) -> tuple[PreflightFinding, ...]:
    """Return the problems, failures first.

    Args:
        reports: the latest report of each rank that sent one.
        world_size: expected number of ranks; None takes it from the reports.
        baselines: history by node.
    """
    if not reports:
        return (
            PreflightFinding(
                kind="no_report",
                severity="fail",
                text="no rank reported anything",
                hint="run the launcher with a training script; its output is above",
            ),
        )
    reports = sorted(reports, key=lambda each: each.rank)
    slow = _slow_ranks(reports, baselines or {})
    slow_ranks = {rank for finding in slow for rank in finding.ranks}
    findings = [
        *_silent_ranks(reports, world_size or max(each.world_size for each in reports)),
        *_errors(reports),
        *_wrong_results(reports),
        *slow,
        *_slow_pairs(reports, slow_ranks),
        *_skewed_clocks(reports),
        *_small_limits(reports),
        *_different_versions(reports),
    ]
    return tuple(sorted(findings, key=lambda each: each.severity != "fail"))


# ------------------------------------------------------------------------ ranks that did not end


def _silent_ranks(
    reports: Sequence[PreflightReport], world_size: int
) -> Iterable[PreflightFinding]:
    missing = sorted(set(range(world_size)) - {each.rank for each in reports})
    if missing:
        yield PreflightFinding(
            kind="missing_rank",
            severity="fail",
            ranks=tuple(missing),
            text=f"{name_ranks(missing)} of {world_size} did not report",
            hint="check that the launcher started them, or raise --budget on a busy machine",
        )
    running = [each for each in reports if each.stage < DONE]
    if not running or missing:
        return
    first = min(each.stage for each in running)
    behind = [each for each in running if each.stage == first]
    # A rank with an error in a collective stopped because of a rank that has no error.
    behind = [each for each in behind if not each.errors] or behind
    if len(behind) < len(reports) or first < NUM_LOCAL:
        yield PreflightFinding(
            kind="no_answer",
            severity="fail",
            ranks=tuple(each.rank for each in behind),
            nodes=_nodes(behind),
            text=f"{_ranks_on_nodes(behind)} stopped in {STAGES[first]}",
            hint="see dmesg on the node, or raise --budget on a busy machine",
        )
    elif not any(each.errors for each in running):
        yield PreflightFinding(
            kind="no_answer",
            severity="fail",
            ranks=tuple(each.rank for each in behind),
            text=f"all ranks stopped in {STAGES[first]}; none is behind the others",
            hint="check the network between the nodes (NCCL_SOCKET_IFNAME, firewall)",
        )


def _errors(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    local = [each for each in reports if any(_is_local(stage) for stage in each.errors)]
    for report in local:
        stage = next(stage for stage in report.errors if _is_local(stage))
        yield PreflightFinding(
            kind="failed",
            severity="fail",
            ranks=(report.rank,),
            nodes=(report.node,),
            text=f"rank {report.rank} on {report.node}: {stage} failed: {report.errors[stage]}",
            hint="fix the node, or train without it",
        )
    others = [each for each in reports if each.errors and each not in local]
    # An error of a collective names no culprit: all ranks get one if one of them is missing.
    if others and not local:
        stage, text = next(iter(others[0].errors.items()))
        yield PreflightFinding(
            kind="failed",
            severity="fail",
            ranks=tuple(each.rank for each in others),
            text=f"{stage} failed on {name_ranks([each.rank for each in others])}: {text}",
            hint="check the network between the nodes; see the other findings",
        )


def _is_local(stage: str) -> bool:
    return stage in STAGES[:NUM_LOCAL]


def _wrong_results(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    by_kernel: dict[str, list[PreflightReport]] = defaultdict(list)
    for report in reports:
        for wrong in report.wrong:
            by_kernel[wrong.partition(",")[0]].append(report)
    for kernel, wrong_reports in by_kernel.items():
        # All ranks get the same wrong sum, so a wrong sum of all ranks has no culprit.
        is_shared = len(wrong_reports) == len(reports) > 1
        yield PreflightFinding(
            kind="wrong_result",
            severity="fail",
            ranks=tuple(each.rank for each in wrong_reports),
            nodes=() if is_shared else _nodes(wrong_reports),
            text=f"{kernel} was wrong on {_ranks_on_nodes(wrong_reports)}: "
            f"{wrong_reports[0].wrong[0]}",
            hint="drain the node, and test it: vitals doctor --burn-in 600",
        )


# ------------------------------------------------------------------------------------ slow ranks


def _slow_ranks(
    reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline]
) -> Iterable[PreflightFinding]:
    """Return one finding per slow rank, and one per unclear pair of ranks."""
    reasons: dict[int, list[str]] = defaultdict(list)
    unclear: list[PreflightFinding] = []
    by_device: dict[str, list[PreflightReport]] = defaultdict(list)
    for report in reports:
        by_device[report.device].append(report)
    by_rank = {each.rank: each for each in reports}
    for spec in FIGURES:
        for rank, speed in _speeds(spec, reports).items():
            reason = _slower_than_history(spec, speed, by_rank[rank], baselines)
            if reason:
                reasons[rank].append(reason)
        for peers in by_device.values():
            speeds = _speeds(spec, peers)
            if len(speeds) == 2:
                unclear += _compare_two(spec, speeds, reports, reasons)
            for rank, speed in speeds.items() if len(speeds) > 2 else ():
                others = [other for each, other in speeds.items() if each != rank]
                if _is_slow(speed, others, _ratio(spec, peers[0])):
                    reasons[rank].append(_slow_text(spec, speed, median(others), "the other ranks"))
    slow = [
        PreflightFinding(
            kind="slow_rank",
            severity="fail",
            ranks=(rank,),
            nodes=(by_rank[rank].node,),
            text=f"rank {rank} on {by_rank[rank].node} is slow: {'; '.join(reasons[rank])}",
            hint="check clocks, power and temperature, other processes and CPU limits on the node",
        )
        for rank in sorted(reasons)
    ]
    named = {rank for finding in slow for rank in finding.ranks}
    return [*slow, *(each for each in unclear if not named & set(each.ranks))]


def _speeds(spec: FigureSpec, reports: Sequence[PreflightReport]) -> dict[int, float]:
    """Return the figure by rank so that more is better, without ranks that did not measure it.

    A figure of the node has one entry per node, for its first rank.
    """
    groups: dict[object, list[tuple[int, float]]] = defaultdict(list)
    for report in reports:
        speed = _as_speed(spec, report.figures.get(spec.name))
        if speed is not None:
            group = report.node if spec.is_of_node else report.rank
            groups[group].append((report.rank, speed))
    return {each[0][0]: median(speed for _, speed in each) for each in groups.values()}


def _as_speed(spec: FigureSpec, value: float | None) -> float | None:
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return 1 / value if spec.is_time else value


def _ratio(spec: FigureSpec, report: PreflightReport) -> float:
    return spec.gpu_ratio if report.is_gpu else spec.cpu_ratio


def _is_slow(speed: float, others: Sequence[float], ratio: float) -> bool:
    """Return whether a rank is below the others by the ratio and by more than their scatter.

    The reference excludes the rank itself: with three ranks it would be a third of it.
    """
    middle = median(others)
    deviation = _MAD_TO_DEVIATION * median(abs(other - middle) for other in others)
    return speed < ratio * middle and middle - speed > NUM_DEVIATIONS * deviation


def _compare_two(
    spec: FigureSpec,
    speeds: Mapping[int, float],
    reports: Sequence[PreflightReport],
    reasons: dict[int, list[str]],
) -> Iterable[PreflightFinding]:
    (slow, slow_speed), (fast, fast_speed) = sorted(speeds.items(), key=lambda each: each[1])
    by_rank = {each.rank: each for each in reports}
    bound = _ratio(spec, by_rank[slow])
    if slow_speed < min(TWO_RANKS_RATIO, bound) * fast_speed:
        reasons[slow].append(_slow_text(spec, slow_speed, fast_speed, f"rank {fast}"))
    elif slow_speed < bound * fast_speed:
        yield PreflightFinding(
            kind="unequal_ranks",
            severity="note",
            ranks=tuple(sorted(speeds)),
            text=f"{spec.label}: {_figure(spec, slow_speed)} on rank {slow} of "
            f"{by_rank[slow].node}, {_figure(spec, fast_speed)} on rank {fast} of "
            f"{by_rank[fast].node}; two ranks have no majority",
            hint="repeat it with a third node, or on each node separately",
        )


def _slower_than_history(
    spec: FigureSpec, speed: float, report: PreflightReport, baselines: Mapping[str, Baseline]
) -> str | None:
    baseline = baselines.get(report.node)
    if baseline is None or baseline.device != report.device:
        return None
    stored = (_as_speed(spec, figures.get(spec.name)) for figures in baseline.figures)
    earlier = [each for each in stored if each is not None]
    if len(earlier) < MIN_HISTORY:
        return None
    if not _is_slow(speed, earlier, HISTORY_RATIO * _ratio(spec, report)):
        return None
    return _slow_text(spec, speed, median(earlier), f"{len(earlier)} earlier checks of this node")


def _slow_text(spec: FigureSpec, speed: float, reference: float, of_whom: str) -> str:
    return (
        f"{spec.label} {_figure(spec, speed)}, {100 * speed / reference:.0f}% of the speed of "
        f"{of_whom} ({_figure(spec, reference)})"
    )


def _figure(spec: FigureSpec, speed: float) -> str:
    if spec.is_time:
        return humanize_seconds(1 / speed)
    return f"{speed:.3g} FLOP/s" if spec.unit == "FLOP/s" else f"{humanize_bytes(speed)}/s"


# ------------------------------------------------------------------------------------ slow links


def _slow_pairs(
    reports: Sequence[PreflightReport], slow_ranks: set[int]
) -> Iterable[PreflightFinding]:
    """Yield slow links, nodes or ranks; pairs of a rank that is slow anyway are explained by it."""
    by_rank = {each.rank: each for each in reports}
    speeds: dict[tuple[int, int], float] = {}
    for report in reports:
        for pair in report.pairs:
            if pair.peer in by_rank and math.isfinite(pair.bytes_per_second):
                key = (min(report.rank, pair.peer), max(report.rank, pair.peer))
                # Both ends measure an exchange; a delay of one end makes its value lower.
                speeds[key] = max(speeds.get(key, 0.0), pair.bytes_per_second)
    for is_inside in (True, False):
        chosen = {
            pair: speed
            for pair, speed in speeds.items()
            if (by_rank[pair[0]].node == by_rank[pair[1]].node) == is_inside
        }
        if is_inside:
            yield from _slow_links(chosen, by_rank, slow_ranks, lambda rank: f"rank {rank}")
        else:
            yield from _slow_links(chosen, by_rank, slow_ranks, lambda rank: by_rank[rank].node)


def _slow_links(
    speeds: Mapping[tuple[int, int], float],
    by_rank: Mapping[int, PreflightReport],
    slow_ranks: set[int],
    end_of: Callable[[int], str],
) -> Iterable[PreflightFinding]:
    """Yield the slow ends (ranks inside of a node, nodes between nodes) and the slow links.

    An end is slow if most of its links are, with at least two different other ends; otherwise the
    link itself is. One slow end of n slows 2 / n of the pairs, so the reference is the median of
    the fastest (n - 2) / n: the quantile 1/2 + 1/n.
    """
    peers: dict[str, set[str]] = defaultdict(set)
    for pair in speeds:
        first, second = map(end_of, pair)
        peers[first].add(second)
        peers[second].add(first)
    if len(speeds) < 2:
        return  # one link has nothing to be compared with
    reference = _quantile(list(speeds.values()), 0.5 + 1 / len(peers))
    is_gpu = any(by_rank[rank].is_gpu for pair in speeds for rank in pair)
    bound = (GPU_PAIR_RATIO if is_gpu else CPU_PAIR_RATIO) * reference
    slow = {
        pair: speed
        for pair, speed in speeds.items()
        if speed < bound and not slow_ranks & set(pair)
    }
    slow_ends = set()
    for end, others in peers.items():
        slow_peers = {
            other for pair in slow for other in map(end_of, pair) if end in map(end_of, pair)
        } - {end}
        if len(slow_peers) >= 2 and 2 * len(slow_peers) > len(others):
            slow_ends.add(end)
    for end in sorted(slow_ends):
        of_end = {pair: speed for pair, speed in slow.items() if end in map(end_of, pair)}
        ranks = sorted({rank for pair in of_end for rank in pair if end_of(rank) == end})
        node = by_rank[ranks[0]].node
        yield PreflightFinding(
            kind="slow_network",
            severity="fail",
            ranks=tuple(ranks),
            nodes=(node,),
            text=f"{name_ranks(ranks)} on {node}: exchanges with {len(peers[end])} others have "
            f"{humanize_bytes(median(of_end.values()))}/s; other pairs have "
            f"{humanize_bytes(reference)}/s",
            hint="check the network card of the node: link speed, errors, PCIe width",
        )
    links: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for pair in sorted(slow):
        ends = tuple(map(end_of, pair))
        if not slow_ends & {*ends}:
            links[ends].append(pair)
    for ends, pairs in links.items():
        speed = median(slow[pair] for pair in pairs)
        yield PreflightFinding(
            kind="slow_link",
            severity="fail",
            ranks=tuple(sorted({rank for pair in pairs for rank in pair})),
            text=f"the link between {ends[0]} and {ends[1]} has {humanize_bytes(speed)}/s; other "
            f"pairs have {humanize_bytes(reference)}/s",
            hint="check the cable and the switch port between them; both are fast with others",
        )


def _quantile(values: list[float], part: float) -> float:
    values.sort()
    position = min(part, 1.0) * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


# ------------------------------------------------------------------- clocks, limits and versions


def _skewed_clocks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    # A clock belongs to a node: take the rank of each node with the best estimate.
    best: dict[str, PreflightReport] = {}
    for report in reports:
        offset = report.offset
        if offset is None or not math.isfinite(offset.seconds) or offset.uncertainty < 0:
            continue
        known = best.get(report.node)
        if known is None or known.offset is None or offset.uncertainty < known.offset.uncertainty:
            best[report.node] = report
    offsets = {node: each.offset for node, each in best.items() if each.offset is not None}
    if len(offsets) < 2:
        return
    reference = sorted(offsets.values(), key=lambda each: each.seconds)[(len(offsets) - 1) // 2]
    skews = {
        node: (offset.seconds - reference.seconds, offset.uncertainty + reference.uncertainty)
        for node, offset in offsets.items()
    }
    skewed = {
        node: skew for node, skew in skews.items() if abs(skew[0]) > MAX_SKEW_SECONDS + skew[1]
    }
    # The reference is a clock of the largest group only if that is more than half of the nodes.
    has_majority = 2 * len(skewed) < len(skews)
    for node, (seconds, uncertainty) in skewed.items():
        yield PreflightFinding(
            kind="clock_skew",
            severity="fail",
            ranks=(best[node].rank,),
            nodes=(node,) if has_majority else (),
            text=f"the clock of {node} differs from {'the others' if has_majority else 'another'} "
            f"by {humanize_seconds(abs(seconds))}, +/- {humanize_seconds(uncertainty)}"
            + ("" if has_majority else "; it is unknown which of them is wrong"),
            hint="check time synchronization: chronyc tracking",
        )


def _small_limits(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    bounds = (
        ("open_files", MIN_OPEN_FILES, "open files", "raise it: ulimit -n 65536"),
        ("shared_bytes", MIN_SHARED_BYTES, "bytes of free shared memory",
         "docker run --shm-size=1g, or an emptyDir with medium Memory in Kubernetes"),
    )  # fmt: skip
    for name, least, label, hint in bounds:
        small = [each for each in reports if 0 <= each.limits.get(name, -1) < least]
        if small:
            value = min(each.limits[name] for each in small)
            yield PreflightFinding(
                kind="small_limit",
                severity="fail",
                ranks=tuple(each.rank for each in small),
                nodes=_nodes(small),
                text=f"{_ranks_on_nodes(small)}: {value:,} {label}; at least {least:,} are needed",
                hint=hint,
            )
    for name in ("open_files", "locked_bytes"):
        values = {each.node: str(each.limits[name]) for each in reports if name in each.limits}
        if len(set(values.values())) > 1:
            yield _difference("different_limits", "note", name.replace("_", " "), values)


def _different_versions(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    for name in sorted({name for each in reports for name in each.versions}):
        values = {each.node: each.versions.get(name, "missing") for each in reports}
        if len(set(values.values())) > 1:
            severity: Severity = "note" if name in MAY_DIFFER else "fail"
            yield _difference("different_versions", severity, name, values)


def _difference(
    kind: str, severity: Severity, name: str, values: Mapping[str, str]
) -> PreflightFinding:
    """Return the finding for a value that must be equal; a minority is at fault."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        nodes[value].append(node)
    groups = sorted(nodes.items(), key=lambda each: (-len(each[1]), each[0]))
    has_majority = 2 * len(groups[0][1]) > len(values)
    minority = [node for _, names in groups[1:] for node in names]
    shown = ", ".join(
        f"{value} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for value, names in groups
    )
    return PreflightFinding(
        kind=kind,
        severity=severity,
        nodes=tuple(minority) if has_majority and severity == "fail" else (),
        text=f"{name} differs: {shown}",
        hint="use the same image and settings on all nodes",
    )


def _nodes(reports: Sequence[PreflightReport]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.node for each in reports))


def _ranks_on_nodes(reports: Sequence[PreflightReport]) -> str:
    nodes = _nodes(reports)
    more = f" and {len(nodes) - 1} more nodes" if len(nodes) > 1 else ""
    return f"{name_ranks([each.rank for each in reports])} on {nodes[0]}{more}"
