"""GPU samples through NVML. A machine without a GPU, a driver or the bindings is a normal case."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainvitals.catalog import GPU_METRICS
from trainvitals.rows import Value

COLUMNS = tuple(metric.column for metric in GPU_METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What one GPU said; a field it does not have is missing, not zero."""

    uuid: str
    values: dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """One round over all GPUs: samples, and which GPUs stopped or began again to answer."""

    samples: tuple[GpuSample, ...] = ()
    lost: tuple[str, ...] = ()
    back: tuple[str, ...] = ()


class GpuSampler:
    """Reads every GPU of the node.

    Args:
        nvml: a module like ``pynvml``, or None to import the real one.

    NVML is initialised at the first sample, not here; where that fails, ``absent`` says why and no
    further try is made: a driver does not appear under a running job.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] | None = None
        self._lost: set[str] = set()
        self.absent = ""
        self.unnamed: tuple[str, ...] = ()

    def sample(self) -> GpuReport:
        """Return one sample per GPU that answers."""
        if self.absent:
            return GpuReport()
        if self._handles is None:
            self._handles = self._open()
        samples, lost, back = [], [], []
        for uuid, handle in self._handles.items():
            values = self._read(handle)
            if values is None:
                if uuid not in self._lost:
                    lost.append(uuid)
                continue
            if uuid in self._lost:
                back.append(uuid)
            samples.append(GpuSample(uuid=uuid, values=values))
        self._lost = (self._lost | set(lost)) - set(back)
        return GpuReport(samples=tuple(samples), lost=tuple(lost), back=tuple(back))

    def close(self) -> None:
        """Let go of NVML."""
        if self._handles is not None and self._nvml is not None and not self.absent:
            self._handles = None
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self.absent = f"NVML did not shut down: {error}"

    def _open(self) -> dict[str, Any]:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self.absent = "the NVML bindings are not installed (pip install nvidia-ml-py)"
                return {}
            self._nvml = pynvml
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.absent = f"NVML is not available: {error}"
            return {}
        handles: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                handles[_text(nvml.nvmlDeviceGetUUID(handle))] = handle
            except nvml.NVMLError as error:
                # It fell off the bus before the agent came: without its UUID it has no source.
                self.unnamed += (f"GPU {index} does not give its UUID: {error}",)
        if not handles:
            self.absent = "NVML sees no GPU that answers"
        return handles

    def _read(self, handle: Any) -> dict[str, Value] | None:
        """Return the GPU's fields, or None where it answers none at all: it is lost."""
        values: dict[str, Value] = {}
        for columns, read in _readers(self._nvml):
            try:
                values.update(zip(columns, read(handle), strict=True))
            except (self._nvml.NVMLError, AttributeError):
                continue  # this GPU, driver or binding does not have the field: missing
        return values or None


_MAX_I8 = (1 << 63) - 1
"""NVML counts in unsigned 64 bits, rows in signed ones."""

Reader = tuple[tuple[str, ...], Callable[[Any], tuple[Value, ...]]]


def _readers(nvml: Any) -> tuple[Reader, ...]:
    """Return which NVML call gives which columns, in base units."""

    def memory(handle: Any) -> tuple[Value, ...]:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return float(info.used), float(info.total)

    def reasons(handle: Any) -> tuple[Value, ...]:
        call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = int((call or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))
        return (mask & _MAX_I8,)

    return (
        (
            ("utilization_ratio",),
            lambda h: (nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100.0,),
        ),
        (("memory_used_bytes", "memory_total_bytes"), memory),
        (
            ("temperature_celsius",),
            lambda h: (float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),),
        ),
        (("power_watts",), lambda h: (nvml.nvmlDeviceGetPowerUsage(h) / 1000.0,)),
        (("power_limit_watts",), lambda h: (nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000.0,)),
        (
            ("sm_clock_hertz",),
            lambda h: (nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6,),
        ),
        (("throttle_reasons",), reasons),
        (
            ("ecc_uncorrected_errors",),
            lambda h: (
                int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        h, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                ),
            ),
        ),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
