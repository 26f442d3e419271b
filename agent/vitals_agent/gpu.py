"""GPU samples through NVML. A machine without a GPU, a driver or the bindings is a normal case."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainvitals.clock import Clock, SystemClock
from trainvitals.records import Note
from trainvitals.rows import Value
from trainvitals.units import humanize_count
from vitals_agent.nvml_fields import read_gpu, read_instance
from vitals_agent.sources import MeasurementTime

ROUNDS_BETWEEN_LOOKS = 30
"""Rounds between searches for MIG instances, which may change while the driver runs."""

MAX_XIDS_PER_ROUND = 64
"""Maximum per GPU; the rest waits in the driver for the next round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """Values of one GPU or MIG instance; an unsupported field is missing, not zero."""

    uuid: str
    values: dict[str, Value]


@dataclass(slots=True, kw_only=True)
class GpuReport:
    """One round over all GPUs: samples, and changes since the last round."""

    taken: MeasurementTime | None = None
    samples: list[GpuSample] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """GPUs that no longer respond."""
    back: list[str] = field(default_factory=list)
    """GPUs that respond again."""
    xids: list[tuple[str, int]] = field(default_factory=list)
    """Every reported error, in order: if there are two in a round, the row has the last."""


@dataclass(slots=True)
class _GpuDevice:
    """An opened GPU or MIG instance: NVML handle, Xid events, state."""

    handle: Any
    parent: str = ""
    """For a MIG instance, the GPU it belongs to."""
    events: Any = None
    last_xid: int | None = None
    lost: bool = False


class GpuSampler:
    """Reads every GPU of the node, and every MIG instance of those that are divided.

    ``nvml`` is a module like ``pynvml``; None imports the real one.

    NVML is initialized at the first sample, not here. If that fails, ``absent`` contains the reason
    and there is no further attempt: a driver does not appear under a running job. Any call may take
    seconds, or never return if a GPU is broken: ``asking`` identifies the GPU being queried.
    """

    def __init__(self, nvml: Any = None, *, clock: Clock | None = None) -> None:
        self._nvml = nvml
        self._clock = clock or SystemClock()
        self._devices: dict[str, _GpuDevice] | None = None
        self._round = 0
        self.absent = ""
        self.asking = ""
        self.notes: tuple[Note, ...] = ()
        """Notes to report once in each run."""

    def sample(self) -> GpuReport:
        """Sample every GPU of the node that responds."""
        if self.absent:
            return GpuReport()
        if self._devices is None:
            self._devices = self._open_devices()
        elif self._round % ROUNDS_BETWEEN_LOOKS == 0:
            self._add_instances(self._devices)
        self._round += 1
        report = GpuReport(taken=MeasurementTime(self._clock.time_ns(), self._clock.monotonic_ns()))
        for uuid, device in list(self._devices.items()):
            self.asking = uuid
            values = self._sample_device(uuid, device, report)
            if values is not None:
                report.samples.append(GpuSample(uuid=uuid, values=values))
            elif device.parent:
                del self._devices[uuid]  # the instance was removed; a lost GPU reports an error
                self._round = 0
        self.asking = ""
        return report

    def _sample_device(
        self, uuid: str, device: _GpuDevice, report: GpuReport
    ) -> dict[str, Value] | None:
        """Sample one GPU or MIG instance, and record whether it was lost or is back."""
        if device.parent:
            return read_instance(self._nvml, device.handle)
        codes = list(self._new_xids(device))
        report.xids += [(uuid, code) for code in codes]
        values = read_gpu(self._nvml, device.handle)
        is_lost = values is None
        if is_lost != device.lost:
            (report.lost if is_lost else report.back).append(uuid)
            device.lost = is_lost
        if device.last_xid is not None and (codes or not is_lost):
            values = {**(values or {}), "last_xid": device.last_xid}
        return values

    def close(self) -> None:
        """Shut NVML down at the end of the agent."""
        if self._devices is not None and not self.absent:
            devices, self._devices = self._devices, None
            try:
                for device in devices.values():
                    if device.events is not None:
                        self._nvml.nvmlEventSetFree(device.events)
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                self.absent = f"NVML did not shut down: {error}"

    # --------------------------------------------------------------------------- finding GPUs

    def _open_devices(self) -> dict[str, _GpuDevice]:
        """Initialize NVML, and open every GPU of the node that can be sampled."""
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                self._note_no_gpus("the NVML bindings are not installed (pip install nvidia-ml-py)")
                return {}
            self._nvml = pynvml
        nvml = self._nvml
        devices: dict[str, _GpuDevice] = {}
        try:
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                self._add_device(devices, index)
        except nvml.NVMLError as error:
            self._note_no_gpus(f"NVML is not available: {error}")
            return {}
        if not devices:
            self._note_no_gpus("NVML sees no GPU that responds")
            return {}
        self._add_instances(devices)
        return devices

    def _note_no_gpus(self, why: str) -> None:
        self.absent = why
        self.notes = (*self.notes, Note(code="no_gpu", text=f"no GPU samples: {why}"))

    def _add_device(self, devices: dict[str, _GpuDevice], index: int) -> None:
        """Open the GPU with this number; report a GPU without UUID."""
        nvml = self._nvml
        self.asking = f"number {index}"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _decode_text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            # It failed before the agent started: without its UUID it has no source.
            text = f"GPU {index} does not give its UUID: {error}"
            self.notes = (*self.notes, Note(code="gpu_lost", text=text, severity="error"))
            return
        devices[uuid] = _GpuDevice(handle, events=self._listen(handle))

    def _add_instances(self, devices: dict[str, _GpuDevice]) -> None:
        """Add the GPUs' current MIG instances to those that the agent samples."""
        nvml = self._nvml
        for parent in [uuid for uuid, device in devices.items() if not device.parent]:
            instances = []
            for handle in self._mig_handles(devices[parent].handle):
                try:
                    uuid = _decode_text(nvml.nvmlDeviceGetUUID(handle))
                except nvml.NVMLError:
                    continue  # removed between the two calls
                instances.append(uuid)
                devices.setdefault(uuid, _GpuDevice(handle, parent=parent))
            if instances:
                num = humanize_count(len(instances), "instance")
                begin = f"GPU {parent} is divided by MIG into "
                text = (
                    f"{begin}{num}: for them only the memory is known, for the GPU everything "
                    "except utilization"
                )
                others = (note for note in self.notes if not note.text.startswith(begin))
                self.notes = (*others, Note(code="gpu_mig", text=text))

    def _mig_handles(self, handle: Any) -> Iterator[Any]:
        """Yield the NVML handles of a sampled GPU's MIG instances."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            num_places = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except (nvml.NVMLError, AttributeError):
            return  # a GPU, driver or binding without MIG
        for index in range(num_places):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError:
                continue  # no instance with this index

    # --------------------------------------------------------------------------------- errors

    def _listen(self, handle: Any) -> Any:
        """Register for a GPU's Xid errors in NVML; None if the GPU reports none."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                nvml.nvmlEventSetFree(events)
                return None
        except (nvml.NVMLError, AttributeError):
            return None  # no such events on this GPU, driver or binding: ``last_xid`` is missing
        return events

    def _new_xids(self, device: _GpuDevice) -> Iterator[int]:
        """Yield the Xid errors that a GPU reported since the agent's last sample."""
        for _ in range(MAX_XIDS_PER_ROUND if device.events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(device.events, 0)
            except self._nvml.NVMLError:
                return  # NVMLError_Timeout: nothing more came
            device.last_xid = int(event.eventData)
            yield device.last_xid


def _decode_text(value: str | bytes) -> str:
    """Return a string from NVML, which may come as bytes, as text."""
    return value.decode() if isinstance(value, bytes) else value
