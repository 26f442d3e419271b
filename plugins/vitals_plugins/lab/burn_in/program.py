"""Tests every device of this node: ``python -m vitals_plugins.lab.burn_in.program SECONDS``.

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
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer_hooks.recovery.memory import host_memory_left
from vitals_plugins.lab.selftest import LARGEST, WrongAnswer, all_reduce, gemm, memory

MAX_BYTES = 4 << 30
"""Maximum memory to test: of the host, and of each GPU."""
BLOCK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # beyond the caches
_GEMM_SECONDS = 0.1
_GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(eq=False)
class BurnInDevice:
    """A core or a GPU, its thread, and results."""

    name: str
    """Displayed name: ``cpu 3``, ``cuda:0``."""
    device: torch.device
    max_bytes: int
    """Memory to test."""
    core: int | None = None
    """Core of the thread; None for a GPU, or if the system does not support binding."""
    model: str = ""
    failed: str = ""
    rounds: Counter[str] = field(default_factory=Counter)
    wrong: list[WrongAnswer] = field(default_factory=list)
    blocks: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, initializer=self._bind_thread)

    def _bind_thread(self) -> None:
        """Bind the burn-in's thread to its core, or to its GPU."""
        torch.set_num_threads(1)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})  # 0 is this thread, not the process
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def try_memory(self, visit: int) -> WrongAnswer | None:
        """Test a new memory block until the allowed amount is allocated, then each in turn."""
        size = min(BLOCK_BYTES[self.device.type], self.max_bytes)
        if not self.blocks or (len(self.blocks) + 1) * size <= self.max_bytes:
            self.blocks.append(torch.empty(size // 8, dtype=torch.int64, device=self.device))
            return memory(self.blocks[-1], visit)
        turn, index = divmod(visit, len(self.blocks))
        # otherwise a block would always have one pattern
        return memory(self.blocks[index], visit + turn)

    def check(self) -> dict[str, str]:
        """Return the burn-in's current results for this device, as one of the doctor's checks."""
        tried = ", ".join(f"{kernel} {count:,}x" for kernel, count in self.rounds.items())
        megabytes = sum(block.nbytes for block in self.blocks) >> 20
        parts = [self.model, f"{tried} ({megabytes:,} MiB held)", self.failed]
        status, hint = "ok", ""
        if self.wrong:
            parts += [f"WRONG {len(self.wrong):,}x", f"first: {self.wrong[0]}"]
            status, hint = "fail", self._remedy()
        elif self.failed:
            status = "fail"
            hint = "see dmesg; try again while nothing else runs here; if it comes back, drain it"
        elif 0 in self.rounds.values():
            status, hint = "note", "0x was not tried: give it more seconds"
        text = "; ".join(filter(None, parts))
        return {"name": self.name, "status": status, "text": text, "hint": hint}

    def _remedy(self) -> str:
        """Return the recommended action for a device that computed wrongly."""
        kernels = {wrong.kernel.split()[0] for wrong in self.wrong}
        part = f"the processor with {self.name} is replaced"
        if self.device.type == "cuda":
            part = f"{self.name} is replaced; see `nvidia-smi -q -d ECC` and `dcgmi diag -r 3`"
        elif kernels == {"memory"}:
            part = "its memory modules are tested; see `ras-mc-ctl --errors`"
        elif kernels == {"all-reduce"}:
            part = "its memory and processor are tested (gemm and memory were right)"
        return f"drain node {socket.gethostname()}: train nothing on it until {part}"


Kernel = Callable[[BurnInDevice, int], WrongAnswer | None]
"""Runs on a device's own thread; gets the number of the round, which is the seed."""


def find_devices() -> list[BurnInDevice]:
    """Return every GPU to burn in; without one, every core that this process may use."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        model = f"{properties.name} GPU-{getattr(properties, 'uuid', '?')}"
        max_bytes = min(torch.cuda.mem_get_info(index)[0] // 4, MAX_BYTES)
        gpus.append(
            BurnInDevice(f"cuda:{index}", torch.device("cuda", index), max_bytes, model=model)
        )
    if gpus:
        return gpus
    free_bytes = host_memory_left()
    max_bytes = min((MAX_BYTES if free_bytes is None else free_bytes) // 4, MAX_BYTES)
    if not hasattr(os, "sched_getaffinity"):  # macOS binds no thread
        return [BurnInDevice("cpu", torch.device("cpu"), max_bytes)]
    cores = sorted(os.sched_getaffinity(0))
    each = max(max_bytes // len(cores), 1 << 20)
    return [BurnInDevice(f"cpu {core}", torch.device("cpu"), each, core) for core in cores]


def kernels_for(devices: Sequence[BurnInDevice]) -> dict[str, Kernel]:
    """Return the burn-in's kernels for the devices, by name."""
    kernels: dict[str, Kernel] = {}
    is_on_gpu = devices[0].device.type == "cuda"
    for dtype in LARGEST:
        if dtype is torch.bfloat16 and is_on_gpu and not torch.cuda.is_bf16_supported():
            continue

        def multiply(
            device: BurnInDevice, seed: int, dtype: torch.dtype = dtype
        ) -> WrongAnswer | None:
            return gemm(device.device, dtype, seed, seconds=_GEMM_SECONDS)

        kernels[f"gemm {str(dtype).removeprefix('torch.')}"] = multiply
    kernels["memory"] = BurnInDevice.try_memory
    if len(devices) > 1 and dist.is_available():
        kernels["all-reduce"] = all_reduce_kernel(devices)
    return kernels


def all_reduce_kernel(devices: Sequence[BurnInDevice]) -> Kernel:
    """Return a kernel that sums over tested devices: all GPUs by NCCL, or core pairs by gloo.

    Each rank is a device's thread. The groups are private: no default group, no rendezvous.
    """
    teams, backend = [list(devices)], "ProcessGroupNCCL"
    if devices[0].device.type != "cuda":
        firsts = range(0, len(devices) - 1, 2)  # an odd one joins the last pair
        teams, backend = [list(devices[first : first + 2]) for first in firsts], "ProcessGroupGloo"
        teams[-1] = list(devices[firsts[-1] :])
    joining = {}
    for team in teams:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch lists it nowhere
        for rank, device in enumerate(team):
            joining[device] = (store, rank, len(team), _GROUP_TIMEOUT)
    groups: dict[BurnInDevice, Any] = {}

    def reduce(device: BurnInDevice, seed: int) -> WrongAnswer | None:
        if device not in groups:
            groups[device] = getattr(dist, backend)(*joining[device])
        _, rank, world_size, _ = joining[device]
        allreduce = groups[device].allreduce
        return all_reduce(
            rank, world_size, device.device, seed, reduce=lambda total: allreduce(total).wait()
        )

    return reduce


def try_devices(
    devices: Sequence[BurnInDevice], kernels: dict[str, Kernel], *, seconds: float
) -> Iterator[list[dict[str, str]]]:
    """Burn in: run the kernels in turn, on all devices at once; yield the results after each.

    Ends after the given time, with the running kernels. A device on which a kernel raises is not
    tested any more (after a GPU fault every call to it raises), nor are sums over all devices.
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
                    wrong = answer.result()
                # torch's error for all faults of a device; reported, not lost
                except RuntimeError as error:
                    device.failed = f"{name} failed: {str(error).splitlines()[0]}"
                    continue
                device.rounds[name] += 1
                device.wrong += [wrong] if wrong else []
            yield [device.check() for device in devices]
            if time.monotonic() >= deadline:
                break
        seed += 1


def main(seconds: float) -> None:
    """Test all devices for the burn-in, and print the results after each kernel."""
    os.nice(19)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
    devices = find_devices()
    for checks in try_devices(devices, kernels_for(devices), seconds=seconds):
        print(json.dumps(checks), flush=True)  # noqa: T201 - the parent reads it
    os._exit(0)  # a thread that hangs in a device must not keep the process alive


if __name__ == "__main__":
    main(float(sys.argv[1]))
