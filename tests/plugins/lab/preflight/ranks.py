"""Reports of healthy ranks, to which a test adds one fault."""

import random
from collections import Counter

import msgspec

from vitals_plugins.lab.preflight.report import (
    DONE,
    ClockOffset,
    PairTime,
    PreflightReport,
    num_turns,
    pair_of,
)

SPEEDS = {
    "gemm_flops_per_second": 1e10,
    "memory_bytes_per_second": 1e9,
    "loader_bytes_per_second": 1e8,
    "disk_bytes_per_second": 5e7,
    "fsync_seconds": 0.005,
}
LINK = 5e8


def healthy(num: int, *, per_node: int = 1, seed: int = 0, noise: float = 0.1, gpu: bool = False):
    """Return the reports of ranks with this relative scatter."""
    rng = random.Random(seed)

    def vary(value: float) -> float:
        return value * rng.uniform(1 - noise, 1 + noise)

    return [
        PreflightReport(
            rank=rank,
            world_size=num,
            node=f"n{rank // per_node}",
            device="H100" if gpu else "Xeon",
            is_gpu=gpu,
            check_id="c1",
            stage=DONE,
            figures={name: vary(value) for name, value in SPEEDS.items()},
            versions={"torch": "2.13.0", "kernel": "6.1"},
            limits={"open_files": 65536, "locked_bytes": -1, "shared_bytes": 1 << 30, "cores": 64},
            offset=ClockOffset(rng.uniform(-0.002, 0.002), 0.001),
            ring_bytes_per_second=vary(LINK),
            pairs=tuple(
                PairTime(peer, vary(LINK))
                for turn in range(num_turns(num))
                if (peer := pair_of(rank, num, turn)) is not None
            ),
        )
        for rank in range(num)
    ]


def change(reports, rank: int, **fields):
    """Return the reports with other fields of one rank."""
    return [msgspec.structs.replace(r, **fields) if r.rank == rank else r for r in reports]


def scale(reports, rank: int, factor: float, *names: str):
    """Return the reports with one rank's figures scaled."""
    (report,) = [each for each in reports if each.rank == rank]
    names = names or tuple(SPEEDS)
    scaled = {name: report.figures[name] * factor for name in names}
    return change(reports, rank, figures={**report.figures, **scaled})


def slow_pairs(reports, is_slow, factor: float = 0.2):
    """Return the reports with slower exchanges of the chosen pairs."""
    return [
        msgspec.structs.replace(
            report,
            pairs=tuple(
                PairTime(
                    pair.peer,
                    pair.bytes_per_second * (factor if is_slow(report.rank, pair.peer) else 1),
                )
                for pair in report.pairs
            ),
        )
        for report in reports
    ]


def racked(reports, *racks: str):
    """Return the reports with the racks of their nodes, in order; one rack is that of all."""
    nodes = list(dict.fromkeys(each.node for each in reports))
    of_node = dict(zip(nodes, racks if len(racks) > 1 else racks * len(nodes), strict=True))
    return [msgspec.structs.replace(each, rack=of_node[each.node]) for each in reports]


def on_shared_cards(sizes, *, card: float, uplink: float = 0.0, lone: int = 0, **options):
    """Return reports of nodes with these numbers of ranks, all of which share a network card.

    Args:
        sizes: ranks by node.
        card: speed of a card, relative to the most that a pair of ranks exchanges.
        uplink: of the rack of the last nodes, shared by their ranks; 0 without racks.
        lone: nodes in that rack.
        **options: of ``healthy``.
    """
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    reports = healthy(len(nodes), **options)
    speeds = [{} for _ in nodes]
    for turn in range(min(num_turns(len(nodes)), 16)):
        partners = [(rank, pair_of(rank, len(nodes), turn)) for rank in range(len(nodes))]
        pairs = [(a, b) for a, b in partners if b is not None and a < b]
        shared = {pair: _shared_parts(nodes, pair, len(sizes) - lone) for pair in pairs}
        num_users = Counter(part for parts in shared.values() for part in parts)
        for (a, b), parts in shared.items():
            shares = [(uplink if part == "uplink" else card) / num_users[part] for part in parts]
            speeds[a][b] = speeds[b][a] = min([1.0, *shares])
    return [
        msgspec.structs.replace(
            report,
            node=f"n{nodes[report.rank]}",
            pairs=tuple(
                PairTime(peer, LINK * factor) for peer, factor in speeds[report.rank].items()
            ),
        )
        for report in reports
    ]


def _shared_parts(nodes, pair, first_lone: int) -> list[str]:
    a, b = (nodes[rank] for rank in pair)
    if a == b:
        return []
    is_up = (a < first_lone) != (b < first_lone)
    return [f"card {a}", f"card {b}", *(["uplink"] if is_up else [])]
