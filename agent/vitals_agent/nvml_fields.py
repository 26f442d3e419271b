"""NVML calls for the columns of a GPU's row, in base units.

A value that the GPU, the driver or the bindings do not provide is missing, never zero.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainvitals.rows import Value

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that is summed over all NVLinks of the GPU (nvml.h: UINT_MAX)."""

_MAX_I8 = (1 << 63) - 1
"""NVML counts in unsigned 64 bits, rows in signed ones."""

_SUCCESS = 0
_UNSIGNED_BITS = {1: 32, 2: 64, 3: 64, 6: 16}
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of ``nvmlValue_t`` by ``nvmlValueType_t``, in its order."""


class NvmlField(NamedTuple):
    """A column from ``nvmlDeviceGetFieldValues``, which returns all of them in one call."""

    column: str
    name: str
    """The field's name in nvml.h."""
    factor: float | None = None
    """Factor to base units; None for a count."""
    scope: int | None = None


FIELDS: tuple[NvmlField, ...] = (
    NvmlField("memory_temperature_celsius", "NVML_FI_DEV_MEMORY_TEMP", 1.0),
    NvmlField("energy_joules", "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3),
    NvmlField("ecc_corrected_errors", "NVML_FI_DEV_ECC_SBE_VOL_TOTAL"),
    NvmlField("ecc_uncorrected_errors", "NVML_FI_DEV_ECC_DBE_VOL_TOTAL"),
    NvmlField("remapped_rows_corrected", "NVML_FI_DEV_REMAPPED_COR"),
    NvmlField("remapped_rows_uncorrected", "NVML_FI_DEV_REMAPPED_UNC"),
    NvmlField("row_remap_pending", "NVML_FI_DEV_REMAPPED_PENDING"),
    NvmlField("row_remap_failed", "NVML_FI_DEV_REMAPPED_FAILURE"),
    NvmlField("pcie_replays", "NVML_FI_DEV_PCIE_REPLAY_COUNTER"),
    NvmlField("nvlink_receive_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 1024.0, ALL_LINKS),
    NvmlField("nvlink_transmit_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 1024.0, ALL_LINKS),
    NvmlField("nvlink_crc_errors", "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
    NvmlField("nvlink_replay_errors", "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    NvmlField("nvlink_recovery_errors", "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
)

_Reader = Callable[[Any, Any], Mapping[str, Value]]


def read_gpu(nvml: Any, handle: Any) -> dict[str, Value] | None:
    """Sample the columns of a whole GPU through NVML; None if it is lost."""
    return _read_columns(nvml, handle, _GPU_READERS)


def read_instance(nvml: Any, handle: Any) -> dict[str, Value] | None:
    """Sample a MIG instance of a GPU: memory only; other values exist for whole GPUs."""
    return _read_columns(nvml, handle, (_memory,))


def _read_columns(nvml: Any, handle: Any, readers: tuple[_Reader, ...]) -> dict[str, Value] | None:
    """Sample the columns that a GPU or MIG instance supports; None if it has none or is lost."""
    values: dict[str, Value] = {}
    lost = _lost_errors(nvml)
    for reader in readers:
        try:
            values.update(reader(nvml, handle))
        except lost:
            return None  # each further call may take seconds, and says the same
        except (nvml.NVMLError, AttributeError):
            continue  # not supported by this GPU, driver or binding: missing
    return values or None


def _lost_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions with which NVML reports a lost GPU."""
    names = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
    return tuple(getattr(nvml, name) for name in names if hasattr(nvml, name))


def _utilization(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample how busy a GPU and its memory are, as ratios."""
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {
        "utilization_ratio": rates.gpu / 100.0,
        "memory_utilization_ratio": rates.memory / 100.0,
    }


def _memory(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample the used, total and reserved memory of a GPU or MIG instance."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError_FunctionNotFound:  # before driver 510, used includes reserved memory
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_used_bytes": float(info.used), "memory_total_bytes": float(info.total)}
    return {
        "memory_used_bytes": float(info.used),
        "memory_total_bytes": float(info.total),
        "memory_reserved_bytes": float(info.reserved),
    }


def _temperature(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample the temperature of one of the node's GPUs."""
    value = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return {"temperature_celsius": float(value)}


def _power(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample the power that a GPU draws."""
    return {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0}


def _power_limit(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Return the power limit in force of a sampled GPU."""
    return {"power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0}


def _sm_clock(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample the clock rate of a GPU's multiprocessors."""
    return {"sm_clock_hertz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6}


def _memory_clock(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample the clock rate of a GPU's memory."""
    return {"memory_clock_hertz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6}


def _throttle_reasons(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Return the reasons why a sampled GPU lowers its clock, as bits."""
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # earlier name of the function
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle_reasons": int(mask) & _MAX_I8}


def _pcie_receive(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample how many bytes per second a GPU receives over PCIe."""
    value = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"pcie_receive_bytes_per_second": value * 1000.0}


def _pcie_transmit(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample how many bytes per second a GPU sends over PCIe."""
    value = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    return {"pcie_transmit_bytes_per_second": value * 1000.0}


def _field_values(nvml: Any, handle: Any) -> Mapping[str, Value]:
    """Sample a GPU's energy, ECC, row-remapping and NVLink counters in one call."""
    fields = [field for field in FIELDS if hasattr(nvml, field.name)]
    field_ids = [
        getattr(nvml, f.name) if f.scope is None else (getattr(nvml, f.name), f.scope)
        for f in fields
    ]
    values: dict[str, Value] = {}
    for field, answer in zip(fields, nvml.nvmlDeviceGetFieldValues(handle, field_ids), strict=True):
        value = _decode_field_value(answer)
        if value is None:
            continue
        if field.factor is not None:
            values[field.column] = float(value) * field.factor
        else:
            values[field.column] = min(int(value), _MAX_I8)
    return values


def _decode_field_value(answer: Any) -> float | int | None:
    """Return the number in NVML's response for one field of a GPU; None if it has none."""
    kind = answer.valueType
    if answer.nvmlReturn != _SUCCESS or not 0 <= kind < len(_MEMBERS):
        return None
    value: float | int = getattr(answer.value, _MEMBERS[kind])
    bits = _UNSIGNED_BITS.get(kind)
    # All ones is NVML_VALUE_NOT_AVAILABLE, whatever the return code says.
    return None if bits is not None and value == (1 << bits) - 1 else value


_GPU_READERS: tuple[_Reader, ...] = (
    _utilization,
    _memory,
    _temperature,
    _power,
    _power_limit,
    _sm_clock,
    _memory_clock,
    _throttle_reasons,
    _field_values,
    _pcie_receive,
    _pcie_transmit,
)
"""PCIe comes last: each of its calls measures for 20 milliseconds."""
