"""Tries every device of this node: ``python -m trainer_hooks.burn_in SECONDS``.

``vitals doctor --burn-in`` runs it as a process of its own, so that whatever a broken device does
to it (a crash, a hang) is seen from outside. After each kernel it prints what is known so far as
one line of JSON: a list of the doctor's checks. It yields to all others: lowest priority, a quarter
of the free memory at most, and the first to be ended where memory runs out. The paths for CUDA
never ran on a GPU yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_hooks.recovery.memory import host_memory_left
from trainer_hooks.selftest import LARGEST, WrongAnswer, all_reduce, gemm, memory

MAX_BYTES = 4 << 30
"""Memory that is tried at most: of the host, and of each GPU."""
_BLOCK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # beyond the caches
_GEMM_SECONDS = 0.1
_GROUP_TIMEOUT = timedelta(seconds=60)


class Device:
    """A core or a GPU, the thread that is bound to it, and what was seen of it.

    Args:
        name: for people: ``cpu 3``, ``cuda:0``.
        device: torch's.
        core: the thread is bound to it; None for a GPU, and where threads cannot be bound.
        model: of a GPU, with its UUID.
        max_bytes: memory to try.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        max_bytes: int,
        core: int | None = None,
        model: str = "",
    ) -> None:
        self.name = name
        self.device = device
        self.failed = ""
        self._max_bytes = max_bytes
        self._core = core
        self._model = model
        self._blocks: list[torch.Tensor] = []
        self.rounds: Counter[str] = Counter()
        self._wrong: list[WrongAnswer] = []
        self.thread = ThreadPoolExecutor(1, initializer=self._bind)

    def _bind(self) -> None:
        torch.set_num_threads(1)
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # 0 is this thread, not the process
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def try_memory(self, visit: int) -> WrongAnswer | None:
        """Try a new block of memory until all that may be held is; then each in turn."""
        size = min(_BLOCK_BYTES[self.device.type], self._max_bytes)
        if not self._blocks or (len(self._blocks) + 1) * size <= self._max_bytes:
            self._blocks.append(torch.empty(size // 8, dtype=torch.int64, device=self.device))
            return memory(self._blocks[-1], visit)
        turn, index = divmod(visit, len(self._blocks))
        return memory(self._blocks[index], visit + turn)  # else a block had one pattern for good

    def note(self, kernel: str, wrong: WrongAnswer | None) -> None:
        """Count a round of a kernel."""
        self.rounds[kernel] += 1
        if wrong is not None:
            self._wrong.append(wrong)

    def check(self) -> dict[str, str]:
        """Return what is known so far, as one of the doctor's checks."""
        tried = ", ".join(f"{kernel} {count:,}x" for kernel, count in self.rounds.items())
        megabytes = sum(block.nbytes for block in self._blocks) >> 20
        parts = [self._model, f"{tried} ({megabytes:,} MiB held)"]
        if self._wrong:
            parts += [f"WRONG {len(self._wrong):,}x", f"first: {self._wrong[0]}"]
        parts.append(self.failed)
        if self._wrong or self.failed:
            status, hint = "fail", self._remedy()
        elif 0 in self.rounds.values():
            status, hint = "note", "0x was not tried: give it more seconds"
        else:
            status, hint = "ok", ""
        text = "; ".join(filter(None, parts))
        return {"name": self.name, "status": status, "text": text, "hint": hint}

    def _remedy(self) -> str:
        drain = f"drain node {socket.gethostname()}: train nothing on it until"
        kernels = {wrong.kernel.split()[0] for wrong in self._wrong}
        if self.device.type == "cuda":
            return f"{drain} this GPU is replaced; see `nvidia-smi -q -d ECC` and `dcgmi diag -r 3`"
        if kernels == {"memory"}:
            return f"{drain} its memory modules are tested; see `ras-mc-ctl --errors`"
        if kernels == {"all-reduce"}:
            return f"{drain} its memory and processor are tested (gemm and memory were right)"
        return f"{drain} the processor with {self.name} is replaced"


Kernel = Callable[[Device, int], WrongAnswer | None]
"""Runs on a device's own thread; gets the number of the round, which is the seed."""


def find_devices() -> list[Device]:
    """Return every GPU; without one, every core that this process may use."""
    if torch.cuda.is_available():
        gpus = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                Device(
                    f"cuda:{index}",
                    torch.device("cuda", index),
                    model=f"{properties.name} GPU-{getattr(properties, 'uuid', '?')}",
                    max_bytes=min(torch.cuda.mem_get_info(index)[0] // 4, MAX_BYTES),
                )
            )
        return gpus
    max_bytes = min((host_memory_left() or MAX_BYTES) // 4, MAX_BYTES)
    if not hasattr(os, "sched_getaffinity"):  # macOS binds no thread
        return [Device("cpu", torch.device("cpu"), max_bytes=max_bytes)]
    cores = sorted(os.sched_getaffinity(0))
    each = max_bytes // len(cores)
    return [Device(f"cpu {n}", torch.device("cpu"), core=n, max_bytes=each) for n in cores]


def kernels_for(devices: Sequence[Device]) -> dict[str, Kernel]:
    """Return what is tried on each device, by name."""
    kernels: dict[str, Kernel] = {}
    for dtype in LARGEST:
        is_on_gpu = devices[0].device.type == "cuda"
        if dtype is torch.bfloat16 and is_on_gpu and not torch.cuda.is_bf16_supported():
            continue

        def multiply(device: Device, seed: int, dtype: torch.dtype = dtype) -> WrongAnswer | None:
            return gemm(device.device, dtype, seed, seconds=_GEMM_SECONDS)

        kernels[f"gemm {str(dtype).removeprefix('torch.')}"] = multiply
    kernels["memory"] = Device.try_memory
    if len(devices) > 1:
        kernels["all-reduce"] = reducing(devices)
    return kernels


def reducing(devices: Sequence[Device]) -> Kernel:
    """Return a kernel that sums over devices: all GPUs by NCCL, or pairs of cores by gloo.

    Each rank is a device's thread. Groups are made here and belong to no job: no default group, no
    port but the ones that gloo takes on the loopback interface.
    """
    if devices[0].device.type == "cuda":
        teams, backend = [list(devices)], dist.ProcessGroupNCCL
    else:
        teams = [list(devices[first : first + 2]) for first in range(0, len(devices), 2)]
        if len(teams[-1]) == 1:  # an odd one joins the last pair
            alone = teams.pop()
            teams[-1] += alone
        backend = dist.ProcessGroupGloo
    ranks = {}
    for team in teams:
        store = dist.HashStore()
        joining = [
            device.thread.submit(backend, store, rank, len(team), _GROUP_TIMEOUT)
            for rank, device in enumerate(team)
        ]
        for rank, (device, group) in enumerate(zip(team, joining, strict=True)):
            ranks[device] = (rank, len(team), group.result())

    def reduce(device: Device, seed: int) -> WrongAnswer | None:
        rank, world_size, group = ranks[device]
        return all_reduce(
            rank,
            world_size,
            device.device,
            seed,
            reduce=lambda tensor: group.allreduce([tensor]).wait(),
        )

    return reduce


def try_devices(
    devices: Sequence[Device], kernels: dict[str, Kernel], *, seconds: float
) -> Iterator[list[dict[str, str]]]:
    """Run the kernels in turn, each on all devices at once; yield after each what is known so far.

    Ends when the time is up; what runs then is waited for. A device on which a kernel raises is
    tried no more (after a fault of a GPU every call to it raises), nor are sums over all of them.
    """
    for device in devices:
        device.rounds.update(dict.fromkeys(kernels, 0))
    yield [device.check() for device in devices]
    deadline = time.monotonic() + seconds
    seed = 0
    while time.monotonic() < deadline and not all(device.failed for device in devices):
        for name, kernel in kernels.items():
            if name == "all-reduce" and any(device.failed for device in devices):
                continue
            trying = [(d, d.thread.submit(kernel, d, seed)) for d in devices if not d.failed]
            for device, answer in trying:
                try:
                    device.note(name, answer.result())
                except RuntimeError as error:  # torch's for all faults of a device; told, not lost
                    device.failed = f"{name} failed: {str(error).splitlines()[0]}"
            yield [device.check() for device in devices]
            if time.monotonic() >= deadline:
                break
        seed += 1


def main(seconds: float) -> None:
    """Try all devices, and print what is known after each kernel."""
    os.nice(19)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
    devices = find_devices()
    for checks in try_devices(devices, kernels_for(devices), seconds=seconds):
        print(json.dumps(checks), flush=True)  # noqa: T201 - the parent reads it
    os._exit(0)  # a thread that hangs in a device must not keep it alive


if __name__ == "__main__":
    main(float(sys.argv[1]))
