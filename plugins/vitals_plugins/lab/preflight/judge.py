"""Decides from the reports of all ranks which ranks, nodes and links are faulty.

Pure: no clock, no file, no torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
OWN_STAGES = frozenset({"gemm", "memory"})
"""Measurements that use nothing outside of the node."""
_UNKNOWN = "; it is unknown whether a node is the cause"
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
    """Earlier checks of one node without a fault and with the same settings, oldest first."""

    device: str
    figures: tuple[dict[str, float], ...] = ()
    num_gpus: int = 0
    """Ranks with a GPU in the latest of them; 0 if the number is not comparable."""


def judge(
    reports: Sequence[PreflightReport],
    *,
    world_size: int | None = None,
    baselines: Mapping[str, Baseline] | None = None,
    num_gpus: int = 0,
) -> tuple[PreflightFinding, ...]:
    """Return the problems, failures first.

    Args:
        reports: the latest report of each rank that sent one.
        world_size: expected number of ranks; None takes it from the reports.
        baselines: history by node.
        num_gpus: GPUs that each node must have; 0 if unknown.
    """
    if not reports:
        return (
            PreflightFinding(
                kind="no_report",
                severity="fail",
                text="no rank reported anything",
                hint="see the launcher's output above. Vitals must be installed where torchrun "
                "runs, also in a container; on a busy machine, raise --budget",
            ),
        )
    reports = sorted(reports, key=lambda each: each.rank)
    baselines = baselines or {}
    world_size = world_size or max(each.world_size for each in reports)
    slow = _slow_ranks(reports, baselines)
    slow_ranks = {rank for each in slow if each.severity == "fail" for rank in each.ranks}
    findings = [
        *_silent_ranks(reports, world_size),
        *(_missing_gpus(reports, baselines, num_gpus) if len(reports) == world_size else ()),
        *_errors(reports),
        *_wrong_results(reports),
        *slow,
        *_slow_pairs(reports, slow_ranks),
        *_skipped_disks(reports),
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
    if first < NUM_LOCAL:
        local = [each for each in running if each.stage < NUM_LOCAL]
        # A rank without a timeout may have started late, or was stopped because of another.
        is_slow = all(each.timed_out for each in behind)
        nodes = _nodes(behind) if is_slow and _culprits(local, reports, first) else ()
    else:
        # All others got an error before the end: this rank was killed. After a timeout, the ranks
        # that ended first cause the errors of the others.
        is_early = any(each.errors and not each.timed_out for each in running)
        dead = [each for each in behind if not each.errors and not each.timed_out]
        behind = dead if is_early and dead else running
        nodes = _culprits(dead, reports, first) if is_early else ()
        if not nodes and any(each.errors for each in running):
            return  # reported as an error
    yield PreflightFinding(
        kind="no_answer",
        severity="fail",
        ranks=tuple(each.rank for each in behind),
        nodes=nodes,
        text=f"{_ranks_on_nodes(behind)} stopped in {STAGES[first]}{'' if nodes else _UNKNOWN}",
        hint="see dmesg on the node, or raise --budget on a busy machine"
        if nodes
        else "check the file server, and the network between the nodes (NCCL_SOCKET_IFNAME, "
        "firewall), or raise --budget on a busy machine",
    )


def _culprits(
    at_fault: Sequence[PreflightReport], reports: Sequence[PreflightReport], stage: int
) -> tuple[str, ...]:
    """Return the nodes at fault, or none if their cause may be a shared one.

    A file server, a quota or an image affects many nodes, and each of them if it is checked alone.
    """
    nodes, num_nodes = _nodes(at_fault), len(_nodes(reports))
    if len(nodes) > 1:
        return nodes if 2 * len(nodes) < num_nodes else ()
    return nodes if num_nodes > 1 or STAGES[stage] in OWN_STAGES else ()


def _missing_gpus(
    reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline], num_gpus: int
) -> Iterable[PreflightFinding]:
    least = int(any(each.is_gpu for each in reports))
    counts: dict[str, int] = defaultdict(int)
    for report in reports:
        counts[report.node] += report.is_gpu
    few = {}
    for node, num in counts.items():
        earlier = baselines[node].num_gpus if node in baselines else 0
        expected = max(num_gpus or earlier, least)
        if num < expected:
            few[node] = f"{node} has {num} of {expected} GPUs"
    if few:
        lost = [each for each in reports if each.node in few]
        nodes = _culprits(lost, reports, STAGES.index("gemm"))
        yield PreflightFinding(
            kind="missing_gpu",
            severity="fail",
            ranks=tuple(each.rank for each in lost),
            nodes=nodes,
            text=f"{'; '.join(few.values())}{'' if nodes else _UNKNOWN}",
            hint="see nvidia-smi and dmesg on the node",
        )


def _errors(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    local = [each for each in reports if any(_is_local(stage) for stage in each.errors)]
    for index, stage in enumerate(STAGES[:NUM_LOCAL]):
        failed = [each for each in reports if stage in each.errors]
        if failed:
            nodes = _culprits(failed, reports, index)
            yield PreflightFinding(
                kind="failed",
                severity="fail",
                ranks=tuple(each.rank for each in failed),
                nodes=nodes,
                text=f"{_ranks_on_nodes(failed)}: {stage} failed: {failed[0].errors[stage]}"
                f"{'' if nodes else _UNKNOWN}",
                hint="fix the node, or train without it"
                if nodes
                else "check the file server, its quota, the image and the limits",
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
        yield PreflightFinding(
            kind="wrong_result",
            severity="fail",
            ranks=tuple(each.rank for each in wrong_reports),
            # All ranks get the same wrong sum, so a wrong sum of all ranks has no culprit.
            nodes=_culprits(wrong_reports, reports, STAGES.index("gemm")),
            text=f"{kernel} was wrong on {_ranks_on_nodes(wrong_reports)}: "
            f"{wrong_reports[0].wrong[0]}",
            hint="drain the node, and test it: vitals doctor --burn-in 600",
        )


# ------------------------------------------------------------------------------------ slow ranks


def _slow_ranks(
    reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline]
) -> Iterable[PreflightFinding]:
    """Return one finding per slow rank, and notes about those that cannot be attributed."""
    reasons: dict[int, list[str]] = defaultdict(list)
    unclear: list[PreflightFinding] = []
    by_rank = {each.rank: each for each in reports}
    num_ranks = Counter(each.node for each in reports)
    # The ranks of a node share its memory, cores and disk.
    by_kind: dict[tuple[str, int], list[PreflightReport]] = defaultdict(list)
    for report in reports:
        by_kind[report.device, num_ranks[report.node]].append(report)
    shared: list[PreflightFinding] = []
    for spec in FIGURES:
        slower, num_compared = _slower_than_history(spec, reports, baselines)
        nodes = _nodes([by_rank[rank] for rank in slower])
        if len(nodes) > 1 and 2 * len(nodes) >= num_compared:
            shared.append(_slower_nodes(spec, nodes))
        else:
            for rank, reason in slower.items():
                reasons[rank].append(reason)
        for peers in by_kind.values():
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
    return [*slow, *shared, *(each for each in unclear if not named & set(each.ranks))]


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
    spec: FigureSpec, reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline]
) -> tuple[dict[int, str], int]:
    """Return why ranks are slower than earlier, and the number of nodes that were compared.

    Disks are not compared: the speed of a file server depends on other nodes and jobs.
    """
    slower, compared = {}, set()
    by_rank = {each.rank: each for each in reports}
    for rank, speed in _speeds(spec, reports).items() if not spec.is_of_node else ():
        report = by_rank[rank]
        baseline = baselines.get(report.node)
        if baseline is None or baseline.device != report.device:
            continue
        stored = (_as_speed(spec, figures.get(spec.name)) for figures in baseline.figures)
        earlier = [each for each in stored if each is not None]
        if len(earlier) < MIN_HISTORY:
            continue
        compared.add(report.node)
        if _is_slow(speed, earlier, HISTORY_RATIO * _ratio(spec, report)):
            of_whom = f"{len(earlier)} earlier checks of this node"
            slower[rank] = _slow_text(spec, speed, median(earlier), of_whom)
    return slower, len(compared)


def _slower_nodes(spec: FigureSpec, nodes: Sequence[str]) -> PreflightFinding:
    return PreflightFinding(
        kind="slower_nodes",
        severity="note",
        text=f"{spec.label}: {_count_nodes(nodes)} are slower than in their earlier checks",
        hint="the cause is probably shared: another image, setting or power limit",
    )


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
    inside: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    between: dict[tuple[int, int], float] = {}
    for ends, speed in speeds.items():
        first, second = (by_rank[rank].node for rank in ends)
        (inside[first] if first == second else between)[ends] = speed
    yield from _unequal_links(inside, by_rank)
    # A slow rank explains its slow pairs.
    between = {pair: speed for pair, speed in between.items() if not slow_ranks & set(pair)}
    if len(between) > 1:  # one link has nothing to be compared with
        yield from _slow_links(between, by_rank)


def _pair_ratio(reports: Iterable[PreflightReport]) -> float:
    return GPU_PAIR_RATIO if any(each.is_gpu for each in reports) else CPU_PAIR_RATIO


def _unequal_links(
    inside: Mapping[str, Mapping[tuple[int, int], float]], by_rank: Mapping[int, PreflightReport]
) -> Iterable[PreflightFinding]:
    """Yield a note: the links of healthy GPUs differ by NVLink bridges and PCIe switches."""
    ratio = _pair_ratio(by_rank.values())
    unequal = {
        node: speeds
        for node, speeds in inside.items()
        if min(speeds.values()) < ratio * max(speeds.values())
    }
    if unequal:
        speeds = next(iter(unequal.values()))
        slow, fast = min(speeds, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
        yield PreflightFinding(
            kind="unequal_links",
            severity="note",
            text=f"inside of {_count_nodes([*unequal])}: {humanize_bytes(speeds[slow])}/s between "
            f"{name_ranks(slow)}, {humanize_bytes(speeds[fast])}/s between {name_ranks(fast)}",
            hint="compare with the wiring: nvidia-smi topo -m",
        )


def _slow_links(
    speeds: Mapping[tuple[int, int], float], by_rank: Mapping[int, PreflightReport]
) -> Iterable[PreflightFinding]:
    """Yield the slow nodes and the slow links between nodes, or a note if the links form groups.

    A node is slow if most of its links are, with at least two others; otherwise the link is. One
    slow node of n slows 2 / n of the pairs, so the reference is the median of the fastest
    (n - 2) / n: the quantile 1/2 + 1/n. Two nodes have one link, and the median of its pairs.
    """
    links: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    peers: dict[str, set[str]] = defaultdict(set)
    slow_peers: dict[str, set[str]] = defaultdict(set)
    for first, second in (_ends(pair, by_rank) for pair in speeds):
        peers[first].add(second)
        peers[second].add(first)
    values, last = sorted(speeds.values()), len(speeds) - 1
    reference = values[last // 2 if len(peers) == 2 else math.ceil((0.5 + 1 / len(peers)) * last)]
    bound = _pair_ratio(by_rank.values()) * reference
    for pair in sorted(pair for pair, speed in speeds.items() if speed < bound):
        first, second = _ends(pair, by_rank)
        links[first, second].append(pair)
        slow_peers[first].add(second)
        slow_peers[second].add(first)
    slow_nodes = {
        node
        for node, others in slow_peers.items()
        if len(others) > 1 and 2 * len(others) > len(peers[node])
    }
    single = {ends: pairs for ends, pairs in links.items() if not slow_nodes & {*ends}}
    # Slow nodes with a fast link between them, and several slow links of a fast node: racks.
    has_fast_link = any(slow_nodes & peers[node] - slow_peers[node] for node in slow_nodes)
    most = max(Counter(node for ends in single for node in ends).values(), default=0)
    if 2 * len(slow_nodes) >= len(peers) or has_fast_link or most > 1:
        yield PreflightFinding(
            kind="link_groups",
            severity="note",
            text=f"{len(links)} links between nodes are slow, below {humanize_bytes(bound)}/s; "
            f"they form groups, so no node is named",
            hint="nodes of one rack are often faster with each other than with another rack",
        )
        return
    for node in sorted(slow_nodes):
        of_node = [pair for ends, pairs in links.items() if node in ends for pair in pairs]
        ranks = sorted({rank for pair in of_node for rank in pair if by_rank[rank].node == node})
        yield PreflightFinding(
            kind="slow_network",
            severity="fail",
            ranks=tuple(ranks),
            nodes=(node,),
            text=f"{name_ranks(ranks)} on {node}: exchanges with {len(slow_peers[node])} others "
            f"have {humanize_bytes(median(speeds[pair] for pair in of_node))}/s; other pairs have "
            f"{humanize_bytes(reference)}/s",
            hint="check the network card of the node: link speed, errors, PCIe width",
        )
    for ends, pairs in single.items():
        speed = median(speeds[pair] for pair in pairs)
        yield PreflightFinding(
            kind="slow_link",
            severity="fail",
            ranks=tuple(sorted({rank for pair in pairs for rank in pair})),
            text=f"the link between {ends[0]} and {ends[1]} has {humanize_bytes(speed)}/s; other "
            f"pairs have {humanize_bytes(reference)}/s",
            hint="check the cable and the switch port between them; both are fast with others",
        )


def _ends(pair: tuple[int, int], by_rank: Mapping[int, PreflightReport]) -> tuple[str, str]:
    first, second = sorted(by_rank[rank].node for rank in pair)
    return first, second


# ------------------------------------------------------------ disks, clocks, limits and versions


def _skipped_disks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    disk = STAGES.index("disk")
    skipped = [
        each
        for each in reports
        if each.stage > disk
        and "disk" not in each.errors
        and "disk_bytes_per_second" not in each.figures
    ]
    if skipped:
        yield PreflightFinding(
            kind="disk_full",
            severity="note",
            ranks=tuple(each.rank for each in skipped),
            text=f"{_ranks_on_nodes(skipped)} wrote nothing: the disk is almost full",
            hint="free space in --dir",
        )


def _skewed_clocks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    # A clock belongs to a node: take the rank of each node with the best estimate.
    best: dict[str, PreflightReport] = {}
    for report in reports:
        offset = report.offset
        if offset is None or not math.isfinite(offset.seconds) or offset.uncertainty < 0:
            continue
        other = best.get(report.node)
        if other is None or other.offset is None or offset.uncertainty < other.offset.uncertainty:
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
                # The launcher and the image set limits, not the node.
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


def _count_nodes(nodes: Sequence[str]) -> str:
    return nodes[0] + (f" and {len(nodes) - 1} more nodes" if len(nodes) > 1 else "")


def _ranks_on_nodes(reports: Sequence[PreflightReport]) -> str:
    return f"{name_ranks([each.rank for each in reports])} on {_count_nodes(_nodes(reports))}"
