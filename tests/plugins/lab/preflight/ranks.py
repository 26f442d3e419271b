"""Reports of healthy ranks, to which a test adds one fault."""

import random

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
            limits={"open_files": 65536, "locked_bytes": -1, "shared_bytes": 1 << 30},
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
