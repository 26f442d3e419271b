"""Plays GPUs back from a recording, as the ``pynvml`` module would: for tests and benchmarks.

Structs, constants and errors are pynvml's own; a test holds the functions' signatures to its too.
A recording is JSON::

    {"about": "...",
     "gpus": [{"uuid": "GPU-...", "calls": {FUNCTION: ANSWER}, "fields": {ID: ANSWER},
               "instances": [{"uuid": "MIG-...", "calls": {...}}]}],
     "rounds": {"3": {"GPU-...": {"calls": {...}, "fields": {...}, "xids": [79]}}}}

An answer is a number, the fields of a struct, or ``{"error": CODE}``, as nvml.h numbers them;
``init`` may be such an error. Calls
that take a kind (a clock, a direction) have one answer for each: ``FUNCTION:KIND``. A field's id
may carry a scope: ``138:4294967295``. ``rounds`` change what is answered from then on.
"""

import copy
import json
from pathlib import Path
from typing import Any

Answer = Any


class ReplayedNvml:
    """A replacement of ``pynvml`` that replays a recording; ``next_round`` advances it."""

    def __init__(self, recording: dict[str, Any]) -> None:
        import pynvml

        self._real = pynvml
        self._gpus = [_Gpu(each) for each in copy.deepcopy(recording["gpus"])]
        self._init = recording.get("init", {})
        self._rounds = recording.get("rounds", {})
        self._round = 0
        self.num_inits = 0
        self.num_shutdowns = 0
        self.num_calls = 0
        self._apply()

    @classmethod
    def read(cls, path: Path) -> "ReplayedNvml":
        """Return the GPUs of a recording in a file."""
        return cls(json.loads(path.read_text()))

    def __getattr__(self, name: str) -> Any:
        """Give pynvml's own constant, struct or error; functions that are not played are absent."""
        if name.startswith("nvml") and callable(getattr(self._real, name, None)):
            raise AttributeError(f"{name} is not in this recording")
        return getattr(self._real, name)

    def next_round(self) -> None:
        """Advance to the next round of the recording."""
        self._round += 1
        self._apply()

    def change(self, uuid: str, change: dict[str, Any]) -> None:
        """Let a GPU answer otherwise from now on; None takes an answer back."""
        gpu = next(each for each in self._gpus if each.uuid == uuid)
        gpu.calls = _without_none({**gpu.calls, **change.get("calls", {})})
        gpu.fields = _without_none({**gpu.fields, **change.get("fields", {})})
        gpu.xids += change.get("xids", [])
        if "instances" in change:
            gpu.instances = [_Gpu(each) for each in change["instances"]]

    def _apply(self) -> None:
        for uuid, change in self._rounds.get(str(self._round), {}).items():
            self.change(uuid, change)

    # ------------------------------------------------------------------------------- pynvml's

    def nvmlInit(self) -> None:  # noqa: N802 - all these names are NVML's own
        """Begin."""
        self.num_inits += 1
        if "error" in self._init:
            raise self._real.NVMLError(self._init["error"])

    def nvmlShutdown(self) -> None:  # noqa: N802
        """End."""
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return how many GPUs there are."""
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> "_Gpu":  # noqa: N802
        """Return the handle of one GPU."""
        self._answer(self._gpus[index], "nvmlDeviceGetHandleByIndex", 0)
        return self._gpus[index]

    def nvmlDeviceGetUUID(self, handle: "_Gpu") -> str:  # noqa: N802
        """Return a GPU's UUID."""
        self._answer(handle, "nvmlDeviceGetUUID", 0)
        return handle.uuid

    def nvmlDeviceGetUtilizationRates(self, handle: "_Gpu") -> Any:  # noqa: N802
        """Return percent of kernels and of memory."""
        answer = self._answer(handle, "nvmlDeviceGetUtilizationRates")
        return self._real.c_nvmlUtilization_t(**answer)

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, handle: "_Gpu", version: int | None = None
    ) -> Any:
        """Return bytes of memory."""
        answer = self._answer(handle, f"nvmlDeviceGetMemoryInfo{'_v2' if version else ''}")
        kind = self._real.c_nvmlMemory_v2_t if version else self._real.c_nvmlMemory_t
        return kind(**answer)

    def nvmlDeviceGetTemperature(self, handle: "_Gpu", sensor: int) -> int:  # noqa: N802
        """Return degrees Celsius."""
        return int(self._answer(handle, f"nvmlDeviceGetTemperature:{sensor}"))

    def nvmlDeviceGetPowerUsage(self, handle: "_Gpu") -> int:  # noqa: N802
        """Return milliwatts."""
        return int(self._answer(handle, "nvmlDeviceGetPowerUsage"))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: "_Gpu") -> int:  # noqa: N802
        """Return milliwatts."""
        return int(self._answer(handle, "nvmlDeviceGetEnforcedPowerLimit"))

    def nvmlDeviceGetClockInfo(self, handle: "_Gpu", type: int) -> int:  # noqa: N802
        """Return megahertz."""
        return int(self._answer(handle, f"nvmlDeviceGetClockInfo:{type}"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: "_Gpu") -> int:  # noqa: N802
        """Return a mask."""
        return int(self._answer(handle, "nvmlDeviceGetCurrentClocksEventReasons"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: "_Gpu") -> int:  # noqa: N802
        """Return a mask."""
        return int(self._answer(handle, "nvmlDeviceGetCurrentClocksThrottleReasons"))

    def nvmlDeviceGetPcieThroughput(self, device: "_Gpu", counter: int) -> int:  # noqa: N802
        """Return kilobytes a second."""
        return int(self._answer(device, f"nvmlDeviceGetPcieThroughput:{counter}"))

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self,
        handle: "_Gpu",
        fieldIds: "list[Any]",  # noqa: N803
    ) -> Any:
        """Return one value, or one error, for each field."""
        self._answer(handle, "nvmlDeviceGetFieldValues", 0)
        values = (self._real.c_nvmlFieldValue_t * len(fieldIds))()
        for value, asked in zip(values, fieldIds, strict=True):
            field, scope = asked if isinstance(asked, tuple) else (asked, 0)
            key = f"{field}:{scope}" if isinstance(asked, tuple) else str(field)
            value.fieldId, value.scopeId = field, scope
            answer = handle.fields.get(key, {"error": self._real.NVML_ERROR_NOT_SUPPORTED})
            if isinstance(answer, dict):
                value.nvmlReturn = answer["error"]
            else:
                value.valueType = self._real.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = answer
        return values

    def nvmlDeviceGetMigMode(self, device: "_Gpu") -> list[int]:  # noqa: N802
        """Return the present and the pending mode."""
        return list(self._answer(device, "nvmlDeviceGetMigMode"))

    def nvmlDeviceGetMaxMigDeviceCount(self, device: "_Gpu") -> int:  # noqa: N802
        """Return how many instances there may be."""
        return int(self._answer(device, "nvmlDeviceGetMaxMigDeviceCount"))

    def nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802
        self, device: "_Gpu", index: int
    ) -> "_Gpu":
        """Return the handle of one instance."""
        if index >= len(device.instances):
            raise self._real.NVMLError(self._real.NVML_ERROR_NOT_FOUND)
        return device.instances[index]

    def nvmlEventSetCreate(self) -> "_Events":  # noqa: N802
        """Return an empty set."""
        return _Events()

    def nvmlDeviceRegisterEvents(  # noqa: N802
        self,
        handle: "_Gpu",
        eventTypes: int,  # noqa: N803
        eventSet: "_Events",  # noqa: N803
    ) -> None:
        """Have a GPU's events come into the set."""
        self._answer(handle, "nvmlDeviceRegisterEvents", 0)
        eventSet.gpus.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: "_Events", timeoutms: int) -> Any:  # noqa: N802, N803
        """Return the next event; it never waits."""
        self.num_calls += 1
        for gpu in eventSet.gpus:
            if gpu.xids:
                kind = self._real.nvmlEventTypeXidCriticalError
                return self._real.c_nvmlEventData_t(eventType=kind, eventData=gpu.xids.pop(0))
        raise self._real.NVMLError(self._real.NVML_ERROR_TIMEOUT)

    def nvmlEventSetFree(self, eventSet: "_Events") -> None:  # noqa: N802, N803
        """Let go of the set."""
        eventSet.gpus.clear()

    def _answer(self, gpu: "_Gpu", call: str, default: Answer = None) -> Answer:
        self.num_calls += 1
        missing = {"error": self._real.NVML_ERROR_NOT_SUPPORTED} if default is None else default
        answer = gpu.calls.get("*", gpu.calls.get(call, missing))
        if isinstance(answer, dict) and "error" in answer:
            raise self._real.NVMLError(answer["error"])
        return answer


def _without_none(answers: dict[str, Answer]) -> dict[str, Answer]:
    return {name: answer for name, answer in answers.items() if answer is not None}


class _Gpu:
    """A handle: what one GPU or instance answers now. ``*`` among its calls answers them all."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.uuid: str = recorded["uuid"]
        self.calls: dict[str, Answer] = recorded.get("calls", {})
        self.fields: dict[str, Answer] = recorded.get("fields", {})
        self.instances = [_Gpu(each) for each in recorded.get("instances", [])]
        self.xids: list[int] = []


class _Events:
    """A set of events."""

    def __init__(self) -> None:
        self.gpus: list[_Gpu] = []
