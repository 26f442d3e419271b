"""Measurements of one rank, as it prints them. Needs no torch."""

from __future__ import annotations

import msgspec

MARK = b"vitals-preflight "
"""Precedes the JSON of a report in a line of the launcher's output."""

STAGES = (
    *("start", "loader", "gemm", "memory", "disk"),
    *("join", "clock", "all-reduce", "pairs", "loader again"),
)
"""Measurements in order. From ``join`` on, ranks wait for each other."""
DONE = len(STAGES)
NUM_LOCAL = STAGES.index("join")


NUM_WORKERS = 2
"""Worker processes of the loader."""


class FigureSpec(msgspec.Struct, frozen=True):
    """One measured quantity, and the values that count as slow."""

    name: str
    label: str
    unit: str
    cpu_ratio: float
    """Slow below this part of the median of the other ranks, if the device is a CPU."""
    gpu_ratio: float
    """The same if the device is a GPU."""
    is_time: bool = False
    """Whether a smaller value is better."""
    least: float = 0.0
    """Shorter times are equally good: they slow no training."""
    num_cores: int = 0
    """Cores per rank that it needs. On a node with fewer, it is not compared: there the scheduler
    decides, and gives a loader a fifth of the pace of an equal one."""
    is_of_node: bool = False
    """Whether the ranks of a node share it: they are compared by their lower median, as one."""


# GPUs of one model differ by a few percent in clock and power, and a GPU belongs to one job: 0.85
# is outside of that. Ranks on CPUs share cores and caches with other processes: half of them can
# lose a third of their speed for seconds. Disk and loader depend on shared file systems and cores
# in both cases, where a factor of 2 is usual; a sync of 4 KiB varies still more, by a factor of 300
# between a disk that is idle and one that just wrote as fast as it may.
FIGURES = (
    FigureSpec("gemm_flops_per_second", "matrix product", "FLOP/s", cpu_ratio=0.6, gpu_ratio=0.85),
    FigureSpec("memory_bytes_per_second", "memory copy", "B/s", cpu_ratio=0.6, gpu_ratio=0.85),
    FigureSpec(
        "loader_bytes_per_second",
        "loader",
        "B/s",
        cpu_ratio=0.4,
        gpu_ratio=0.4,
        num_cores=1 + NUM_WORKERS,
    ),
    FigureSpec(
        "disk_bytes_per_second",
        "checkpoint write",
        "B/s",
        cpu_ratio=0.4,
        gpu_ratio=0.4,
        is_of_node=True,
    ),
    FigureSpec(
        "fsync_seconds",
        "fsync",
        "s",
        cpu_ratio=0.2,
        gpu_ratio=0.2,
        is_time=True,
        least=0.02,
        is_of_node=True,
    ),
)


class PairTime(msgspec.Struct, frozen=True, array_like=True):
    """Speed of one exchange with one other rank."""

    peer: int
    bytes_per_second: float


class ClockOffset(msgspec.Struct, frozen=True, array_like=True):
    """Difference of this rank's clock from that of rank 0, and the error of the estimate."""

    seconds: float
    uncertainty: float


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank measured so far."""

    rank: int
    world_size: int
    node: str
    device: str
    """Model of the GPU, or of the processor; only ranks of one device are compared."""
    is_gpu: bool = False
    rack: str = ""
    """Place of the node in the network; empty if unknown."""
    check_id: str = ""
    """Id of this preflight, the same on all ranks; empty before they have joined."""
    stage: int = 0
    """Index of the running stage in ``STAGES``; ``DONE`` after the last."""
    figures: dict[str, float] = {}
    versions: dict[str, str] = {}
    limits: dict[str, int] = {}
    """Open files, locked memory, free shared memory and cores; -1 is unlimited."""
    offset: ClockOffset | None = None
    ring_bytes_per_second: float | None = None
    pairs: tuple[PairTime, ...] = ()
    wrong: tuple[str, ...] = ()
    """Computations with a wrong result."""
    errors: dict[str, str] = {}
    """Stage: first line of its error."""
    timed_out: bool = False
    """Whether the rank ended at its deadline, or got an error of a collective then."""

    @property
    def is_final(self) -> bool:
        """Return whether no later report of this rank can follow."""
        has_left = any(stage in STAGES[NUM_LOCAL:] for stage in self.errors)
        return self.stage == DONE or self.timed_out or has_left


def report_lines(report: PreflightReport, *, has_facts: bool) -> bytes:
    """Return a preflight report as it is printed: facts of the node have a separate line.

    Slurm cuts output after 1,024 bytes, and mixes the parts of several ranks.
    """
    facts = PreflightReport(
        rank=report.rank,
        world_size=report.world_size,
        node=report.node,
        device=report.device,
        is_gpu=report.is_gpu,
        rack=report.rack,
        versions=report.versions,
        limits=report.limits,
    )
    results = msgspec.structs.replace(report, rack="", versions={}, limits={})
    lines = (facts, results) if has_facts else (results,)
    return b"".join(MARK + msgspec.json.encode(line) + b"\n" for line in lines)


def merge_reports(earlier: PreflightReport, report: PreflightReport) -> PreflightReport:
    """Return the later of two reports of a rank, with the facts of either."""
    is_later = earlier.stage < DONE and report.stage >= earlier.stage
    later, other = (report, earlier) if is_later else (earlier, report)
    return msgspec.structs.replace(
        later,
        rack=later.rack or other.rack,
        versions=later.versions or other.versions,
        limits=later.limits or other.limits,
    )


def round_figure(value: float) -> float:
    """Return a measurement with four significant digits, which keep a preflight report short."""
    return float(f"{value:.4g}")


def clock_offset(sent: float, received: float, replied: float, returned: float) -> ClockOffset:
    """Return a rank's clock offset from another one, by the formula of NTP (RFC 5905, 8).

    The error is at most half of the time that the messages took.

    Args:
        sent: when the request left, by this clock.
        received: when the request arrived, by the other clock.
        replied: when the response left, by the other clock.
        returned: when the response arrived, by this clock.
    """
    travel = max(0.0, (returned - sent) - (replied - received))
    return ClockOffset(((sent - received) + (returned - replied)) / 2, travel / 2)


def pair_of(rank: int, world_size: int, turn: int) -> int | None:
    """Return the rank to measure the link to in a round-robin turn; None if the rank pauses.

    The circle method: in ``num_turns(world_size)`` turns each rank meets each other rank once.
    """
    size = world_size + world_size % 2
    last = size - 1
    if rank == last:
        # It meets the rank that would meet itself: 2 * r = turn modulo ``last``.
        partner = turn * (size // 2) % last
    else:
        partner = (turn - rank) % last
        partner = last if partner == rank else partner
    return partner if partner < world_size else None


def num_turns(world_size: int) -> int:
    """Return the number of turns in which a preflight pairs every rank with every other."""
    return 0 if world_size < 2 else world_size - 1 + world_size % 2
