"""What a node's samples show of its GPUs: throttling, memory errors, Xids, and GPUs that vanish.

These detectors use a GPU's own samples only; they do not know which rank runs on it, so findings
name the node and the GPU. ``ecc_corrected_errors`` and ``last_xid`` are judged if the agent sends
them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings
from trainvitals.detect.fleet.base import ConditionEpisode, NodeSample, NodeWatcher, Value, number
from trainvitals.records import Finding
from trainvitals.stateful import StatefulRow, state_table
from trainvitals.units import humanize, humanize_count

MOST_GPUS = 65536
"""Maximum GPUs followed; further GPUs are not judged."""

POWER_CAP, HARDWARE_SLOWDOWN, SOFTWARE_HEAT, HARDWARE_HEAT, POWER_BRAKE = 4, 8, 32, 64, 128
"""Bits of ``throttle_reasons``, as nvml.h defines them (nvmlClocksEventReason...)."""

FATAL_XIDS: dict[int, str] = {
    46: "the GPU stopped processing",
    48: "a double-bit memory error",
    62: "its microcontroller halted",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not respond",
    120: "an error of its system processor",
    140: "an unrecovered memory error",
    143: "it could not be initialized",
}
"""Xids for which NVIDIA's catalog asks for a reset, restart or check of the GPU; the training
program is not the cause."""

XIDS: dict[int, str] = {
    13: "an exception in a kernel",
    31: "a page fault, mostly an illegal access of the program",
    43: "the program's work was stopped after its own fault",
    45: "work was cleaned up after an earlier error",
    63: "a memory row is marked for remapping at the next reset",
    94: "a contained memory error: the program must be started again",
}
"""Xids that a program can cause, or survive, according to the same catalog."""


class ThrottleConfig(Settings, frozen=True, kw_only=True):
    """When slowed clocks are reported."""

    section = "throttle"

    samples: AtLeastOne = 3
    """Samples in a row with slowed clocks."""
    cap_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.7
    """A power cap alone is normal under load. It is reported if the clock falls below this share of
    the GPU's highest. Our own choice."""
    cap_samples: AtLeastOne = 10
    """Samples in a row of that."""
    clear_after: AtLeastOne = 30
    """Samples without it, after which it can be reported again."""


class _Clocks(StatefulRow):
    """State of one GPU's clocks."""

    STATE = ("hot", "capped", "highest", "slowed", "cap")

    def __init__(self, clear_after: int) -> None:
        self.hot = self.capped = 0
        self.highest = 0.0
        self.slowed, self.cap = ConditionEpisode(clear_after), ConditionEpisode(clear_after)


class GpuThrottleWatcher(NodeWatcher):
    """Finds GPUs that are throttled by heat or the power supply, and power caps that cost speed."""

    name = "gpu_throttle"
    STATE = (state_table("_gpus", lambda self: self._new_gpu_state(), num_keys=2),)

    def __init__(self, config: ThrottleConfig | None = None) -> None:
        self._config = config or ThrottleConfig()
        self._gpus: dict[tuple[str, str], _Clocks] = {}

    def _new_gpu_state(self) -> _Clocks:
        """Return the empty state of a GPU's clocks, before its first sample."""
        return _Clocks(self._config.clear_after)

    def update(self, sample: NodeSample) -> tuple[Finding, ...]:
        """Judge the clocks of the GPUs in a node's sample; samples come in order."""
        findings: list[Finding] = []
        for uuid, columns in sample.gpus.items():
            mask = columns.get("throttle_reasons")
            if not isinstance(mask, int) or mask < 0:
                continue
            clocks = _get_gpu_state(self._gpus, (sample.node, uuid), self._new_gpu_state)
            if clocks is not None and (reason := self._slowed(clocks, mask, columns)):
                text = f"{_format_gpu(sample, uuid)} {reason}{_format_clock_numbers(columns)}"
                is_cap = mask & POWER_CAP and not mask & _SLOWED
                cause = "gpu_power_cap" if is_cap else _throttle_cause(mask)
                clock = number(columns.get("sm_clock_hertz"))
                findings += self._report(sample.step, text, cause=cause, value=clock)
        return tuple(findings)

    def now(self, uuid: str) -> str:
        """Return the reason for a GPU's currently slow clocks as text; "" if there is none."""
        for (_, known), clocks in self._gpus.items():
            if known == uuid:
                if clocks.hot >= self._config.samples:
                    return "is throttled for heat or power"
                if clocks.capped >= self._config.cap_samples:
                    return _CAPPED
        return ""

    def _slowed(self, clocks: _Clocks, mask: int, columns: Mapping[str, Value]) -> str:
        """Add a sample of a GPU's clocks; return the finding's text, or nothing."""
        config = self._config
        clock = number(columns.get("sm_clock_hertz"))
        if clock is not None and clock > clocks.highest:
            clocks.highest = clock
        clocks.hot = min(clocks.hot + 1, config.samples) if mask & _SLOWED else 0
        is_low = clock is not None and clock < config.cap_ratio * clocks.highest
        is_capped = bool(mask & POWER_CAP) and is_low and not mask & _SLOWED
        clocks.capped = min(clocks.capped + 1, config.cap_samples) if is_capped else 0
        begins_hot = clocks.slowed.begins(clocks.hot >= config.samples)
        begins_cap = clocks.cap.begins(clocks.capped >= config.cap_samples)
        if begins_hot:
            return _WORDS[_throttle_cause(mask)]
        return _CAPPED if begins_cap else ""


_CAPPED = "runs far below its usual clock because of its power limit"
THROTTLES: dict[int, str] = {
    HARDWARE_SLOWDOWN: "hardware slowdown",
    SOFTWARE_HEAT: "heat (driver)",
    HARDWARE_HEAT: "heat (hardware)",
    POWER_BRAKE: "power brake",
}
"""Reasons that slow clocks down against the program's wish; a power cap is normal under load."""
_SLOWED = sum(THROTTLES)
_WORDS = {
    "gpu_thermal": "is throttled for heat",
    "gpu_power_brake": "is throttled by the power supply",
    "gpu_slowdown": "is throttled by its hardware (heat or power)",
}


def _throttle_cause(mask: int) -> str:
    """Return the finding's cause for a GPU's throttle reasons."""
    if mask & (SOFTWARE_HEAT | HARDWARE_HEAT):
        return "gpu_thermal"
    return "gpu_power_brake" if mask & POWER_BRAKE else "gpu_slowdown"


def _format_clock_numbers(columns: Mapping[str, Value]) -> str:
    """Return the known numbers about a GPU's slow clocks as text."""
    parts = []
    for column, unit in (
        ("temperature_celsius", "celsius"),
        ("power_watts", "watts"),
        ("sm_clock_hertz", "hertz"),
    ):
        value = number(columns.get(column))
        if value is not None:
            parts.append(humanize(value, unit).replace("\N{DEGREE SIGN}", ""))
    return f" ({', '.join(parts)})" if parts else ""


class GpuErrorConfig(Settings, frozen=True, kw_only=True):
    """Which errors are reported. Uncorrected memory errors and Xids always are."""

    section = "gpu_errors"

    corrected: AtLeastOne = 100
    """Corrected memory errors within ``corrected_seconds`` that are reported. Our own choice:
    single ones are normal, and the driver remaps rows by itself."""
    corrected_seconds: Annotated[float, Meta(ge=1.0, le=1e9)] = 3600.0
    """The time for these."""
    clear_after: AtLeastOne = 100
    """Samples without a new error, after which one can be reported again."""


class _Errors(StatefulRow):
    """State of one GPU's errors; -1 for a counter that was not seen yet."""

    STATE = ("uncorrected", "corrected", "since_ns", "xid", "ecc", "many")

    def __init__(self, clear_after: int) -> None:
        self.uncorrected = self.corrected = self.xid = -1
        self.since_ns = 0
        self.ecc, self.many = ConditionEpisode(clear_after), ConditionEpisode(clear_after)


class GpuErrorWatcher(NodeWatcher):
    """Finds memory errors and Xids as they happen, not those from before the first sample."""

    name = "gpu_error"
    STATE = (state_table("_gpus", lambda self: self._new_gpu_state(), num_keys=2),)

    def __init__(self, config: GpuErrorConfig | None = None) -> None:
        self._config = config or GpuErrorConfig()
        self._gpus: dict[tuple[str, str], _Errors] = {}

    def _new_gpu_state(self) -> _Errors:
        """Return the empty state of a GPU's errors, before its first sample."""
        return _Errors(self._config.clear_after)

    def update(self, sample: NodeSample) -> tuple[Finding, ...]:
        """Judge memory errors and Xids of the GPUs in a node's sample; samples come in order."""
        findings: list[Finding] = []
        for uuid, columns in sample.gpus.items():
            gpu_errors = _get_gpu_state(self._gpus, (sample.node, uuid), self._new_gpu_state)
            if gpu_errors is None:
                continue
            if (count := _count(columns.get("ecc_uncorrected_errors"))) >= 0:
                findings += self._uncorrected_findings(sample, uuid, gpu_errors, count)
            if (count := _count(columns.get("ecc_corrected_errors"))) >= 0:
                findings += self._corrected_findings(sample, uuid, gpu_errors, count)
            code = _count(columns.get("last_xid"))
            if code >= 0:
                findings += self._xid_findings(sample, uuid, gpu_errors, code)
            elif gpu_errors.xid < 0:
                gpu_errors.xid = 0  # the GPU responds without a code: later codes are new
        return tuple(findings)

    def _uncorrected_findings(
        self, sample: NodeSample, uuid: str, gpu_errors: _Errors, count: int
    ) -> tuple[Finding, ...]:
        """Report the new uncorrected memory errors of a GPU, once per episode."""
        new = count - gpu_errors.uncorrected if gpu_errors.uncorrected >= 0 else 0
        gpu_errors.uncorrected = count
        if not gpu_errors.ecc.begins(new > 0):
            return ()
        errors = humanize_count(new, "uncorrected memory error")
        text = f"{_format_gpu(sample, uuid)} had {errors}: its data was lost"
        return self._report(sample.step, text, kind="gpu_ecc", cause="ecc_uncorrected", value=new)

    def _corrected_findings(
        self, sample: NodeSample, uuid: str, gpu_errors: _Errors, count: int
    ) -> tuple[Finding, ...]:
        """Count a GPU's corrected memory errors in time windows, and report many of them."""
        config, now = self._config, sample.time_unix_ns
        is_old = not 0 <= now - gpu_errors.since_ns <= config.corrected_seconds * 1e9
        if gpu_errors.corrected < 0 or count < gpu_errors.corrected or is_old:
            gpu_errors.corrected, gpu_errors.since_ns = count, now
        new = count - gpu_errors.corrected
        if not gpu_errors.many.begins(new >= config.corrected):
            return ()
        seconds = humanize(config.corrected_seconds, "seconds")
        text = f"{_format_gpu(sample, uuid)} had {new} corrected memory errors in {seconds}"
        return self._report(
            sample.step, text, kind="gpu_ecc", cause="ecc_corrected", value=new,
            limit=config.corrected,
        )  # fmt: skip

    def _xid_findings(
        self, sample: NodeSample, uuid: str, gpu_errors: _Errors, code: int
    ) -> tuple[Finding, ...]:
        """Report a GPU's Xid when it appears: the driver keeps showing the last one."""
        before, gpu_errors.xid = gpu_errors.xid, code
        if before < 0 or code in (0, before):
            return ()
        is_fatal = code in FATAL_XIDS
        meaning = FATAL_XIDS.get(code) or XIDS.get(code) or "see NVIDIA's catalogue"
        text = f"{_format_gpu(sample, uuid)} reported Xid {code}: {meaning}"
        if is_fatal:
            text += "; reset the GPU or drain the node"
        cause = "xid_fatal" if is_fatal else "xid"
        return self._report(sample.step, text, kind="gpu_xid", cause=cause, value=code)


class GpuLostConfig(Settings, frozen=True, kw_only=True):
    """When a GPU counts as gone."""

    section = "gpu_lost"

    samples: AtLeastOne = 3
    """Samples in a row without it, while other GPUs of the node respond."""
    all_samples: AtLeastOne = 10
    """The same if no GPU of the node responds, which may be a fault of the sampler."""


class GpuLostWatcher(NodeWatcher):
    """Finds GPUs that stopped responding, most likely because they fell off the bus.

    An agent sends no columns for a GPU that does not respond. A GPU that comes back can be reported
    again.
    """

    name = "gpu_lost"
    STATE = ("_missing",)

    def __init__(self, config: GpuLostConfig | None = None) -> None:
        self._config = config or GpuLostConfig()
        self._missing: dict[str, dict[str, int]] = {}

    def update(self, sample: NodeSample) -> tuple[Finding, ...]:
        """Judge which GPUs of a node's sample no longer respond; samples come in order."""
        missing = self._missing.setdefault(sample.node, {})
        answering = {
            uuid
            for uuid, columns in sample.gpus.items()
            if any(number(value) is not None for value in columns.values())
        }
        limit = self._config.samples if answering else self._config.all_samples
        lost = []
        for uuid in [uuid for uuid in missing if uuid not in answering]:
            was = missing[uuid]
            if was >= 0:  # -1 once reported
                missing[uuid] = -1 if was + 1 >= limit else was + 1
                if missing[uuid] < 0:
                    lost.append(uuid)
        for uuid in sorted(answering):
            if len(missing) < MOST_GPUS:
                missing[uuid] = 0
        if not lost:
            return ()
        if not answering and len(lost) > 1:
            text = f"all {len(lost)} GPUs of node {sample.node} stopped responding"
            return self._report(sample.step, text, value=float(len(lost)))
        findings: list[Finding] = []
        for uuid in lost:
            text = f"{_format_gpu(sample, uuid)} stopped responding: it may have fallen off the bus"
            findings += self._report(sample.step, text)
        return tuple(findings)


def _get_gpu_state(gpus: dict[tuple[str, str], Any], key: tuple[str, str], make: Any) -> Any:
    """Return the state of a GPU, created if it is new; None if there are too many."""
    known = gpus.get(key)
    if known is None and len(gpus) < MOST_GPUS:
        gpus[key] = known = make()
    return known


def _count(value: Value) -> int:
    """Return the value of a GPU's error counter; -1 if there is none."""
    return value if isinstance(value, int) and value >= 0 else -1


def _format_gpu(sample: NodeSample, uuid: str) -> str:
    """Return a GPU and its node as text for a finding."""
    return f"GPU {uuid} of node {sample.node}"
