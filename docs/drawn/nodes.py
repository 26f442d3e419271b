"""Examples of the detectors for a node's samples: its GPUs."""

from collections.abc import Callable, Mapping, Sequence

from docs.drawn.entry import Entry
from docs.drawn.runs import SECOND, sampled
from docs.drawn.svg import Panel
from trainvitals.detect.fleet import node
from trainvitals.detect.fleet.base import NodeSample, Value
from trainvitals.detect.fleet.node import HARDWARE_HEAT, POWER_CAP, GpuErrorConfig, ThrottleConfig

GHZ = 1e9
APART_SECONDS = 10


def samples(rows: Sequence[Mapping[str, Mapping[str, Value]]]) -> list[NodeSample]:
    """Return samples of one node, from its GPUs' columns; ``step`` is the number of the sample."""
    return [
        NodeSample(node="node-7", time_unix_ns=i * APART_SECONDS * SECOND, step=i, gpus=gpus)
        for i, gpus in enumerate(rows)
    ]


def of_gpu(gpu: str, column: str, unit: float = 1.0) -> Callable[[NodeSample], float | None]:
    """Return a function that reads a column of a GPU, with a gap if it did not respond."""

    def read(sample: NodeSample) -> float | None:
        value = sample.gpus.get(gpu, {}).get(column)
        return None if value is None else value / unit

    return read


def gpu_throttle() -> list[Panel]:
    """Heat; a power cap under full load."""
    hot = [
        {"3": _clock(1.98, 68, 0) if i < 50 else _clock(1.2, 89, HARDWARE_HEAT)} for i in range(90)
    ]
    capped = [{"3": _clock(1.98 if i < 10 else 1.7, 66, POWER_CAP)} for i in range(90)]
    low = f"limit of a cap: {ThrottleConfig().cap_ratio:g} of the highest"
    clock = {"SM clock": of_gpu("3", "sm_clock_hertz", GHZ)}
    return [
        sampled("the driver slows clocks for heat", samples(hot), "gpu_throttle", lines=clock,
                y_label="GHz"),
        sampled("silent: a power cap under full load", samples(capped), y_label="GHz",
                lines={**clock, low: lambda _: ThrottleConfig().cap_ratio * 1.98}),
    ]  # fmt: skip


def _clock(ghz: float, celsius: int, reasons: int) -> dict[str, Value]:
    return {
        "sm_clock_hertz": ghz * GHZ,
        "temperature_celsius": celsius,
        "throttle_reasons": reasons,
    }


def gpu_error() -> list[Panel]:
    """Corrected errors by the hundred, and a fatal Xid; a GPU with earlier errors."""
    failing = [_errors(max(0, i - 30) * 5, 79 if i >= 75 else 0) for i in range(90)]
    past = [_errors(4000 + i // 20, 31) for i in range(90)]
    corrected = {"corrected errors": of_gpu("3", "ecc_corrected_errors")}
    most = GpuErrorConfig().corrected
    return [
        sampled("a memory that fails, then a fatal Xid", samples(failing), "gpu_error",
                lines={**corrected, "limit within an hour": lambda _: float(most)},
                y_label="errors"),
        sampled("silent: thousands from before, and an old Xid", samples(past), lines=corrected,
                y_label="errors"),
    ]  # fmt: skip


def _errors(corrected: int, xid: int) -> dict[str, dict[str, Value]]:
    return {"3": {"ecc_corrected_errors": corrected, "last_xid": xid}}


def gpu_lost() -> list[Panel]:
    """A GPU that no longer responds; one that misses two samples."""
    lost = [_power(i, lost=i >= 50) for i in range(90)]
    short = [_power(i, lost=i in (50, 51)) for i in range(90)]
    lines = {"GPU 3": of_gpu("3", "power_watts"), "GPU 4": of_gpu("4", "power_watts")}
    return [
        sampled("GPU 3 no longer responds", samples(lost), "gpu_lost", lines=lines, y_label="W"),
        sampled("silent: two samples without it", samples(short), lines=lines, y_label="W"),
    ]


def _power(number: int, *, lost: bool) -> dict[str, dict[str, Value]]:
    swing = 12 * (number % 7)
    gpus: dict[str, dict[str, Value]] = {"4": {"power_watts": 560 + swing}}
    return gpus if lost else {**gpus, "3": {"power_watts": 600 + swing}}


ENTRIES = (
    Entry(
        name="gpu_throttle",
        title="GPU throttling",
        owner=node.GpuThrottleWatcher,
        needs="`throttle_reasons` of the GPU; for a power cap `sm_clock_hertz` too.",
        examples=gpu_throttle,
        module=node,
        config=node.ThrottleConfig,
    ),
    Entry(
        name="gpu_error",
        title="GPU memory errors and Xids",
        owner=node.GpuErrorWatcher,
        needs="`ecc_uncorrected_errors`, `ecc_corrected_errors`, `last_xid`: each by itself, "
        "compared with the sample before.",
        examples=gpu_error,
        notes=("FATAL_XIDS",),
        source=node,
        config=node.GpuErrorConfig,
    ),
    Entry(
        name="gpu_lost",
        title="Lost GPU",
        owner=node.GpuLostWatcher,
        needs="An earlier sample in which the GPU responded.",
        examples=gpu_lost,
        config=node.GpuLostConfig,
    ),
)
"""The detectors that are drawn here."""
