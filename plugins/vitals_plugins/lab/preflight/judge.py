"""Decides from the reports of all ranks which ranks, nodes and links are faulty.

Pure: no clock, no file, no torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
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
"""The logarithm of a slow rank's speed is also this many robust standard deviations below the
others."""
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
LONE_RATIO = 0.1
"""A slow network below this part of the speed of other pairs is a failure even if it is unknown
whether the node is in another rack: links between racks are rarely shared by ten nodes."""
NEXT_LINK_RATIO = 0.7
"""A single slow link is below this part of the next slower one. Otherwise they form a group, of
which only one happened to be below the bound."""
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


_NO_BASELINE = Baseline("")


def _failure(
    kind: str, ranks: Iterable[int], text: str, hint: str, *, nodes: Sequence[str] = ()
) -> PreflightFinding:
    return PreflightFinding(
        kind=kind, severity="fail", ranks=tuple(ranks), nodes=tuple(nodes), text=text, hint=hint
    )


def _note(kind: str, ranks: Iterable[int], text: str, hint: str) -> PreflightFinding:
    return PreflightFinding(kind=kind, severity="note", ranks=tuple(ranks), text=text, hint=hint)


def judge(
    reports: Sequence[PreflightReport],
    *,
    baselines: Mapping[str, Baseline] | None = None,
    num_gpus: int = 0,
) -> tuple[PreflightFinding, ...]:
    """Return the problems that a preflight found, failures first.

    Args:
        reports: the latest report of each rank that sent one.
        baselines: history by node.
        num_gpus: GPUs that each node must have; 0 if unknown.
    """
    if not reports:
        hint = (
            "see the launcher's output above. Vitals must be installed where torchrun runs, also "
            "in a container; on a busy machine, raise --budget"
        )
        return (_failure("no_report", (), "no rank reported anything", hint),)
    reports = sorted(reports, key=lambda each: each.rank)
    baselines = baselines or {}
    slow = _slow_ranks(reports, baselines)
    slow_ranks = {rank for each in slow if each.severity == "fail" for rank in each.ranks}
    findings = [
        *_silent_ranks(reports),
        *_missing_gpus(reports, baselines, num_gpus),
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


def _missing_ranks(reports: Sequence[PreflightReport]) -> list[int]:
    world_size = max(each.world_size for each in reports)
    return sorted(set(range(world_size)) - set(_ranks(reports)))


def _silent_ranks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield the ranks of a preflight that did not report, or did not finish."""
    missing = _missing_ranks(reports)
    running = [each for each in reports if each.stage < DONE]
    if missing:
        world_size = max(each.world_size for each in reports)
        yield _failure(
            "missing_rank",
            missing,
            f"{name_ranks(missing)} of {world_size} did not report",
            "check that the launcher started them, or raise --budget on a busy machine",
        )
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
    hint = (
        "see dmesg on the node, or raise --budget on a busy machine"
        if nodes
        else "check the file server, and the network between the nodes (NCCL_SOCKET_IFNAME, "
        "firewall), or raise --budget on a busy machine"
    )
    text = f"{_ranks_on_nodes(behind)} stopped in {STAGES[first]}{'' if nodes else _UNKNOWN}"
    yield _failure("no_answer", _ranks(behind), text, hint, nodes=nodes)


def _culprits(
    at_fault: Sequence[PreflightReport], reports: Sequence[PreflightReport], stage: int
) -> tuple[str, ...]:
    """Return the nodes at fault in a preflight, or none if their cause may be a shared one.

    A file server, a quota or an image affects many nodes, and each of them if it is checked alone.
    """
    nodes, num_nodes = _nodes(at_fault), len(_nodes(reports))
    if len(nodes) > 1:
        return nodes if 2 * len(nodes) < num_nodes else ()
    return nodes if num_nodes > 1 or STAGES[stage] in OWN_STAGES else ()


def _missing_gpus(
    reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline], num_gpus: int
) -> Iterable[PreflightFinding]:
    """Yield the nodes with fewer GPUs than expected, or than in earlier preflights."""
    if _missing_ranks(reports):
        return
    least = int(any(each.is_gpu for each in reports))
    counts: dict[str, int] = defaultdict(int)
    for report in reports:
        counts[report.node] += report.is_gpu
    few = {}
    for node, num in counts.items():
        expected = max(num_gpus or baselines.get(node, _NO_BASELINE).num_gpus, least)
        if num < expected:
            few[node] = f"{node} has {num} of {expected} GPUs"
    if few:
        lost = [each for each in reports if each.node in few]
        nodes = _culprits(lost, reports, STAGES.index("gemm"))
        text = f"{'; '.join(few.values())}{'' if nodes else _UNKNOWN}"
        hint = "see nvidia-smi and dmesg on the node"
        yield _failure("missing_gpu", _ranks(lost), text, hint, nodes=nodes)


def _errors(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield the errors of ranks in a preflight, by the measurement that failed."""
    is_local = False
    for index, stage in enumerate(STAGES[:NUM_LOCAL]):
        failed = [each for each in reports if stage in each.errors]
        if failed:
            is_local = True
            nodes = _culprits(failed, reports, index)
            yield _failure(
                "failed",
                _ranks(failed),
                f"{_ranks_on_nodes(failed)}: {stage} failed: {failed[0].errors[stage]}"
                f"{'' if nodes else _UNKNOWN}",
                "fix the node, or train without it"
                if nodes
                else "check the file server, its quota, the image and the limits",
                nodes=nodes,
            )
    others = [each for each in reports if each.errors]
    # An error of a collective names no culprit: all ranks get one if one of them is missing.
    if others and not is_local:
        stage, error = next(iter(others[0].errors.items()))
        text = f"{stage} failed on {name_ranks(_ranks(others))}: {error}"
        hint = "check the network between the nodes; see the other findings"
        yield _failure("failed", _ranks(others), text, hint)


def _wrong_results(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield the ranks of a preflight that computed wrong results."""
    by_kernel: dict[str, list[PreflightReport]] = defaultdict(list)
    for report in reports:
        for wrong in report.wrong:
            by_kernel[wrong.partition(",")[0]].append(report)
    for kernel, wrong_reports in by_kernel.items():
        yield _failure(
            "wrong_result",
            _ranks(wrong_reports),
            f"{kernel} was wrong on {_ranks_on_nodes(wrong_reports)}: {wrong_reports[0].wrong[0]}",
            "drain the node, and test it: vitals doctor --burn-in 600",
            # All ranks get the same wrong sum, so a wrong sum of all ranks has no culprit.
            nodes=_culprits(wrong_reports, reports, STAGES.index("gemm")),
        )


# ------------------------------------------------------------------------------------ slow ranks


def _slow_ranks(
    reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline]
) -> Sequence[PreflightFinding]:
    """Return one finding per slow rank of a preflight, and notes on those not attributable."""
    reasons: dict[int, list[str]] = defaultdict(list)
    notes: list[PreflightFinding] = []
    by_rank = {each.rank: each for each in reports}
    num_ranks = Counter(each.node for each in reports)
    # The ranks of a node share its memory, cores and disk.
    by_kind: dict[tuple[str, int], list[PreflightReport]] = defaultdict(list)
    for report in reports:
        by_kind[report.device, num_ranks[report.node]].append(report)
    for spec in FIGURES:
        slower, num_compared = _slower_than_history(spec, reports, baselines)
        nodes = _nodes([by_rank[rank] for rank in slower])
        if len(nodes) > 1 and 2 * len(nodes) >= num_compared:
            text = f"{spec.label}: {_count_nodes(nodes)} are slower than in their earlier checks"
            hint = "the cause is probably shared: another image, setting or power limit"
            notes.append(_note("slower_nodes", (), text, hint))
        else:
            for rank, reason in slower.items():
                reasons[rank].append(reason)
        for peers in by_kind.values():
            speeds = _speeds(spec, peers)
            if len(speeds) == 2:
                notes += _compare_two(spec, speeds, by_rank, reasons)
            for rank, speed in speeds.items() if len(speeds) > 2 else ():
                others = [other for each, other in speeds.items() if each != rank]
                if _is_slow(speed, others, _ratio(spec, peers[0])):
                    reasons[rank].append(_slow_text(spec, speed, median(others), "the other ranks"))
    slow = [
        _failure(
            "slow_rank",
            (rank,),
            f"rank {rank} on {by_rank[rank].node} is slow: {'; '.join(reasons[rank])}",
            "check clocks, power and temperature, other processes and CPU limits on the node",
            nodes=(by_rank[rank].node,),
        )
        for rank in sorted(reasons)
    ]
    return [*slow, *(each for each in notes if not reasons.keys() & {*each.ranks})]


def _speeds(spec: FigureSpec, reports: Sequence[PreflightReport]) -> dict[int, float]:
    """Return a preflight's figure by rank: more is better, without ranks that lack it.

    A figure of the node has one entry per node, for its first rank: the lower median, as a cache
    makes some writes faster than the disk.
    """
    groups: dict[object, list[tuple[int, float]]] = defaultdict(list)
    num_ranks = Counter(each.node for each in reports)
    for report in reports:
        speed = _as_speed(spec, report.figures.get(spec.name))
        has_cores = report.limits.get("cores", 0) >= spec.num_cores * num_ranks[report.node]
        if speed is not None and has_cores:
            group = report.node if spec.is_of_node else report.rank
            groups[group].append((report.rank, speed))
    return {each[0][0]: median_low([speed for _, speed in each]) for each in groups.values()}


def _as_speed(spec: FigureSpec, value: float | None) -> float | None:
    """Return a preflight's figure so that more is better; None if it is missing or invalid."""
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return 1 / max(value, spec.least) if spec.is_time else value


def _ratio(spec: FigureSpec, report: PreflightReport) -> float:
    """Return the part of the usual speed below which a rank of a preflight is slow."""
    return spec.gpu_ratio if report.is_gpu else spec.cpu_ratio


def _is_slow(speed: float, others: Sequence[float], ratio: float) -> bool:
    """Return whether a preflight's rank is slow: by the ratio and by more than others' scatter.

    The reference excludes the rank itself: with three ranks it would be a third of it. Speeds
    scatter by factors, so their logarithms are compared: no speed is more than 100% below another,
    which a scatter of 25% would explain.
    """
    logarithms = [math.log(other) for other in others]
    middle = median(logarithms)
    deviation = _MAD_TO_DEVIATION * median(abs(each - middle) for each in logarithms)
    below = middle - math.log(speed)
    return below > -math.log(ratio) and below > NUM_DEVIATIONS * deviation


def _compare_two(
    spec: FigureSpec,
    speeds: Mapping[int, float],
    by_rank: Mapping[int, PreflightReport],
    reasons: dict[int, list[str]],
) -> Iterable[PreflightFinding]:
    """Compare the speeds of a preflight with only two ranks; yield a note if none can be blamed."""
    (slow, slow_speed), (fast, fast_speed) = sorted(speeds.items(), key=lambda each: each[1])
    bound = _ratio(spec, by_rank[slow])
    if slow_speed < min(TWO_RANKS_RATIO, bound) * fast_speed:
        reasons[slow].append(_slow_text(spec, slow_speed, fast_speed, f"rank {fast}"))
    elif slow_speed < bound * fast_speed:
        yield _note(
            "unequal_ranks",
            sorted(speeds),
            f"{spec.label}: {_figure(spec, slow_speed)} on rank {slow} of {by_rank[slow].node}, "
            f"{_figure(spec, fast_speed)} on rank {fast} of {by_rank[fast].node}; "
            "two ranks have no majority",
            "repeat it with a third node, or on each node separately",
        )


def _slower_than_history(
    spec: FigureSpec, reports: Sequence[PreflightReport], baselines: Mapping[str, Baseline]
) -> tuple[dict[int, str], int]:
    """Return why ranks are slower than in earlier preflights, and how many nodes were compared.

    Disks are not compared: the speed of a file server depends on other nodes and jobs.
    """
    slower, compared = {}, set()
    by_rank = {each.rank: each for each in reports}
    for rank, speed in _speeds(spec, reports).items() if not spec.is_of_node else ():
        report = by_rank[rank]
        baseline = baselines.get(report.node, _NO_BASELINE)
        stored = (_as_speed(spec, figures.get(spec.name)) for figures in baseline.figures)
        earlier = [each for each in stored if each is not None]
        if baseline.device != report.device or len(earlier) < MIN_HISTORY:
            continue
        compared.add(report.node)
        if _is_slow(speed, earlier, HISTORY_RATIO * _ratio(spec, report)):
            of_whom = f"{len(earlier)} earlier checks of this node"
            slower[rank] = _slow_text(spec, speed, median(earlier), of_whom)
    return slower, len(compared)


def _slow_text(spec: FigureSpec, speed: float, reference: float, of_whom: str) -> str:
    """Return a slow rank's speed as text, compared with other ranks or earlier preflights."""
    return (
        f"{spec.label} {_figure(spec, speed)}, {100 * speed / reference:.0f}% of the speed of "
        f"{of_whom} ({_figure(spec, reference)})"
    )


def _figure(spec: FigureSpec, speed: float) -> str:
    """Return a speed that a preflight measured as text with its unit."""
    if spec.is_time:
        is_least = 1 / speed <= spec.least
        return f"{'at most ' if is_least else ''}{humanize_seconds(1 / speed)}"
    return f"{speed:.3g} FLOP/s" if spec.unit == "FLOP/s" else f"{humanize_bytes(speed)}/s"


# ------------------------------------------------------------------------------------ slow links


def _slow_pairs(
    reports: Sequence[PreflightReport], slow_ranks: set[int]
) -> Iterable[PreflightFinding]:
    """Yield slow links, nodes or ranks; pairs of a rank that is slow anyway are explained by it."""
    by_rank = {each.rank: each for each in reports}
    inside: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    between: dict[tuple[int, int], float] = {}
    for report in reports:
        for pair in report.pairs:
            if pair.peer in by_rank and math.isfinite(pair.bytes_per_second):
                ends = (min(report.rank, pair.peer), max(report.rank, pair.peer))
                is_inside = by_rank[pair.peer].node == report.node
                speeds = inside[report.node] if is_inside else between
                # Both ends measure an exchange; a delay of one end makes its value lower.
                speeds[ends] = max(speeds.get(ends, 0.0), pair.bytes_per_second)
    ratio = GPU_PAIR_RATIO if any(each.is_gpu for each in reports) else CPU_PAIR_RATIO
    yield from _unequal_links(inside, ratio)
    # A slow rank explains its slow pairs.
    between = {pair: speed for pair, speed in between.items() if not slow_ranks & set(pair)}
    if len(between) < 2:  # one link has nothing to be compared with
        return
    racks = {each.node: each.rack for each in reports}
    findings = list(_slow_links(between, by_rank, ratio, racks)) if all(racks.values()) else []
    yield from findings or _slow_links(between, by_rank, ratio, {})


def _unequal_links(
    inside: Mapping[str, Mapping[tuple[int, int], float]], ratio: float
) -> Iterable[PreflightFinding]:
    """Yield a note: the links of healthy GPUs differ by NVLink bridges and PCIe switches."""
    unequal = {
        node: speeds
        for node, speeds in inside.items()
        if min(speeds.values()) < ratio * max(speeds.values())
    }
    if unequal:
        speeds = next(iter(unequal.values()))
        slow, fast = min(speeds, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
        text = (
            f"inside of {_count_nodes([*unequal])}: {humanize_bytes(speeds[slow])}/s between "
            f"{name_ranks(slow)}, {humanize_bytes(speeds[fast])}/s between {name_ranks(fast)}"
        )
        yield _note("unequal_links", (), text, "compare with the wiring: nvidia-smi topo -m")


def _slow_links(
    speeds: Mapping[tuple[int, int], float],
    by_rank: Mapping[int, PreflightReport],
    ratio: float,
    racks: Mapping[str, str],
) -> Iterable[PreflightFinding]:
    """Yield the slow nodes and the slow links between nodes, or a note if the links form groups.

    A node is slow if most of its links are, with at least two others; otherwise the link is. If
    the racks are unknown (empty), a single node in another rack has the same slow links as one
    with a faulty network card, so it is not named.
    """
    ends_of = {pair: tuple(sorted(by_rank[rank].node for rank in pair)) for pair in speeds}
    num_links = Counter(node for ends in {*ends_of.values()} for node in ends)
    # Compare only equal links: nodes of a rack share its uplink, and the ranks of a node its card,
    # so that a node with other numbers of ranks has other speeds.
    num_ranks = Counter(each.node for each in by_rank.values())
    classes: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for pair, ends in ends_of.items():
        if len({num_ranks[node] for node in ends}) == 1:
            places = sorted(racks.get(node, "") for node in ends)
            classes[str(num_ranks[ends[0]]), *places].append(pair)
    references: dict[tuple[str, ...], float] = {}
    slow_links: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for pairs in classes.values():
        reference = _link_speed(pairs, speeds, ends_of)
        for pair in sorted(pairs):
            references[ends_of[pair]] = reference
            if speeds[pair] < ratio * reference:
                slow_links[ends_of[pair]].append(pair)
    num_slow = Counter(node for ends in slow_links for node in ends)
    slow_nodes = {node for node, num in num_slow.items() if num > 1 and 2 * num > num_links[node]}
    single = {ends: pairs for ends, pairs in slow_links.items() if not slow_nodes & {*ends}}
    # Slow nodes with a fast link between them, and several slow links of a fast node: racks.
    fast_links = references.keys() - slow_links.keys()
    has_fast_link = any(slow_nodes.issuperset(ends) for ends in fast_links)
    most = max(Counter(node for ends in single for node in ends).values(), default=0)
    of_fast = [speed for pair, speed in speeds.items() if ends_of[pair] in fast_links]
    slowest = NEXT_LINK_RATIO * min(of_fast, default=0.0)
    is_close = any(speeds[pair] > slowest for pairs in single.values() for pair in pairs)
    if 2 * len(slow_nodes) >= len(num_links) or has_fast_link or most > 1 or is_close:
        text = (
            f"{len(slow_links)} links between nodes are slow, below "
            f"{humanize_bytes(ratio * max(references[ends] for ends in slow_links))}/s; they form "
            "groups, so no node is named"
        )
        hint = "nodes of one rack are often faster with each other than with another rack"
        yield _note("link_groups", (), text, hint)
        return
    for node in sorted(slow_nodes):
        of_node = [(ends, pair) for ends in slow_links if node in ends for pair in slow_links[ends]]
        ranks = sorted({r for _, pair in of_node for r in pair if by_rank[r].node == node})
        speed = median(speeds[pair] for _, pair in of_node)
        usual = median(references[ends] for ends, _ in of_node)
        text = (
            f"{name_ranks(ranks)} on {node}: exchanges with {num_slow[node]} others have "
            f"{humanize_bytes(speed)}/s; other pairs have {humanize_bytes(usual)}/s"
        )
        hint = "check the network card of the node: link speed, errors, PCIe width"
        if racks:
            yield _failure("slow_network", ranks, text, hint, nodes=(node,))
            continue
        text += "; it is unknown whether it is in another rack, or has a faulty card"
        finding = _failure if speed < LONE_RATIO * usual else _note
        yield finding("slow_network", ranks, text, f"{hint}; set VITALS_RACK on each node")
    for ends, pairs in single.items():
        speed = median(speeds[pair] for pair in pairs)
        text = (
            f"the link between {ends[0]} and {ends[1]} has {humanize_bytes(speed)}/s; other pairs "
            f"have {humanize_bytes(references[ends])}/s"
        )
        hint = "check the cable and the switch port between them; both are fast with others"
        yield _failure("slow_link", sorted({rank for pair in pairs for rank in pair}), text, hint)


def _link_speed(
    pairs: Sequence[tuple[int, int]],
    speeds: Mapping[tuple[int, int], float],
    ends_of: Mapping[tuple[int, int], tuple[str, ...]],
) -> float:
    """Return the usual speed of equal links in a preflight.

    One slow node of n slows 2 / n of the pairs, so it is the median of the fastest (n - 2) / n:
    the quantile 1/2 + 1/n. Two nodes have one link, and the median of its pairs.
    """
    num_nodes = len({node for pair in pairs for node in ends_of[pair]})
    values, last = sorted(speeds[pair] for pair in pairs), len(pairs) - 1
    return values[last // 2 if num_nodes == 2 else math.ceil((0.5 + 1 / num_nodes) * last)]


# ------------------------------------------------------------ disks, clocks, limits and versions


def _skipped_disks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield a note on ranks whose disk a preflight did not measure, because it is almost full."""
    skipped = [
        each
        for each in reports
        if each.stage > STAGES.index("disk")
        and "disk" not in each.errors
        and "disk_bytes_per_second" not in each.figures
    ]
    if skipped:
        text = f"{_ranks_on_nodes(skipped)} wrote nothing: the disk is almost full"
        yield _note("disk_full", _ranks(skipped), text, "free space in --dir")


def _skewed_clocks(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield the nodes of a preflight whose clocks differ from the others."""
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
        yield _failure(
            "clock_skew",
            (best[node].rank,),
            f"the clock of {node} differs from {'the others' if has_majority else 'another'} "
            f"by {humanize_seconds(abs(seconds))}, +/- {humanize_seconds(uncertainty)}"
            + ("" if has_majority else "; it is unknown which of them is wrong"),
            "check time synchronization: chronyc tracking",
            nodes=(node,) if has_majority else (),
        )


def _small_limits(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield a note on nodes with few open files or little shared memory for a training."""
    bounds = (
        ("open_files", MIN_OPEN_FILES, "open files", "raise it: ulimit -n 65536"),
        ("shared_bytes", MIN_SHARED_BYTES, "bytes of free shared memory",
         "docker run --shm-size=1g, or an emptyDir with medium Memory in Kubernetes"),
    )  # fmt: skip
    for name, least, label, hint in bounds:
        small = [each for each in reports if 0 <= each.limits.get(name, -1) < least]
        if small:
            value = min(each.limits[name] for each in small)
            text = f"{_ranks_on_nodes(small)}: {value:,} {label}; at least {least:,} are needed"
            # No node is named: the launcher and the image set limits.
            yield _failure("small_limit", _ranks(small), text, hint)
    for name in ("open_files", "locked_bytes"):
        values = {each.node: str(each.limits[name]) for each in reports if name in each.limits}
        yield from _differences("different_limits", name.replace("_", " "), values, is_note=True)


def _different_versions(reports: Sequence[PreflightReport]) -> Iterable[PreflightFinding]:
    """Yield the software versions in which the nodes of a preflight differ."""
    for name in sorted({name for each in reports for name in each.versions}):
        values = {each.node: each.versions.get(name, "missing") for each in reports}
        yield from _differences("different_versions", name, values, is_note=name in MAY_DIFFER)


def _differences(
    kind: str, name: str, values: Mapping[str, str], *, is_note: bool
) -> Iterable[PreflightFinding]:
    """Yield a finding if the values by node differ; a minority is at fault."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        nodes[value].append(node)
    if len(nodes) < 2:
        return
    groups = sorted(nodes.items(), key=lambda each: (-len(each[1]), each[0]))
    shown = ", ".join(
        f"{value} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for value, names in groups
    )
    text, hint = f"{name} differs: {shown}", "use the same image and settings on all nodes"
    if is_note:
        yield _note(kind, (), text, hint)
    else:
        has_majority = 2 * len(groups[0][1]) > len(values)
        minority = [node for _, names in groups[1:] for node in names]
        yield _failure(kind, (), text, hint, nodes=minority if has_majority else ())


def _ranks(reports: Iterable[PreflightReport]) -> list[int]:
    return [each.rank for each in reports]


def _nodes(reports: Sequence[PreflightReport]) -> tuple[str, ...]:
    """Return the nodes of a preflight's reports, each once."""
    return tuple(dict.fromkeys(each.node for each in reports))


def _count_nodes(nodes: Sequence[str]) -> str:
    """Name the first node of a preflight's finding, and how many more there are."""
    return nodes[0] + (f" and {len(nodes) - 1} more nodes" if len(nodes) > 1 else "")


def _ranks_on_nodes(reports: Sequence[PreflightReport]) -> str:
    """Name the ranks and nodes of a preflight's reports."""
    return f"{name_ranks(_ranks(reports))} on {_count_nodes(_nodes(reports))}"
