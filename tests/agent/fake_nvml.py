"""A stand-in for the ``pynvml`` module: as many GPUs as a test wants, each as odd as it wants."""

from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 - NVML's own name
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818
    pass


@dataclass
class FakeGpu:
    uuid: str
    absent: set[str] = field(default_factory=set)
    lost: bool = False
    power_milliwatts: int = 300_000
    throttle_mask: int = 4


class FakeNvml:
    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, *gpus: FakeGpu, driver: bool = True) -> None:
        self.gpus = gpus
        self.driver = driver
        self.num_inits = 0
        self.num_shutdowns = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_inits += 1
        if not self.driver:
            raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        gpu = self.gpus[index]
        if gpu.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return gpu

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def _ask(self, gpu: FakeGpu, what: str) -> None:
        if gpu.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        if what in gpu.absent:
            raise NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._ask(gpu, "utilization")
        return SimpleNamespace(gpu=73, memory=20)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._ask(gpu, "memory")
        return SimpleNamespace(used=10 << 30, total=80 << 30, free=70 << 30)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        self._ask(gpu, "temperature")
        return 61

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._ask(gpu, "power")
        return gpu.power_milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._ask(gpu, "power_limit")
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:  # noqa: N802
        self._ask(gpu, "clock")
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        self._ask(gpu, "throttle")
        return gpu.throttle_mask

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:  # noqa: N802
        self._ask(gpu, "ecc")
        return 2
