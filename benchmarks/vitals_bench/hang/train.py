"""A rank of a small training that hangs on order: `FOLDER/fault.json` says how, and on which rank.

A fault lasts until the benchmark writes into the pipe `FOLDER/release`; what must block really
does.
"""

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_hooks import watch
from vitals_bench.hang.stages import STEP_SECONDS, train_stages


class Faults:
    """Requests of the benchmark to this rank, and its acknowledgment."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._pipe = os.open(folder / "release", os.O_RDWR)
        self._asked: dict[str, object] = {}
        self._is_done = False

    def take(self, place: str) -> str:
        """Return the fault that this rank shall have here; "" where it has none."""
        if self._is_done:
            return ""
        if not self._asked:
            try:
                self._asked = json.loads((self._folder / "fault.json").read_text())
            except FileNotFoundError:
                return ""
        if self._asked["rank"] != self._rank or self._asked["place"] != place:
            return ""
        self._is_done = True
        (self._folder / "begun").write_text(str(time.time_ns()))
        return str(self._asked["name"])

    def block(self) -> None:
        """Wait, without a single instruction, until the benchmark says so."""
        os.read(self._pipe, 1)

    def hold_interpreter(self) -> None:
        """Wait in C code that keeps the interpreter to itself."""
        ctypes.PyDLL(None).read(self._pipe, ctypes.create_string_buffer(1), 1)

    def spin(self) -> None:
        """Compute in Python until the benchmark says stop, or wait forever."""
        os.set_blocking(self._pipe, False)
        number = 0
        while True:
            number += 1
            if number % 100_000 == 0:
                try:
                    os.read(self._pipe, 1)
                except BlockingIOError:  # not yet
                    continue
                return

    def deadlock(self) -> None:
        """Wait for a lock that another thread has."""
        lock = threading.Lock()
        lock.acquire()

        def release() -> None:
            self.block()
            lock.release()

        threading.Thread(target=release, daemon=True).start()
        lock.acquire()

    def compute(self, seconds: float) -> None:
        """Compute for so long, as an evaluation does."""
        until = time.monotonic() + seconds
        weights = torch.randn(64, 64)
        while time.monotonic() < until:
            weights = torch.tanh(weights @ weights)

    def save(self, seconds: float) -> None:
        """Write a file again and again for so long, as a slow save does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.save(torch.zeros(1 << 19), self._folder / "saved.pt")
            time.sleep(0.2)

    def do(self, name: str, seconds: float) -> None:
        """Have a fault."""
        actions: dict[str, Callable[[], Any]] = {
            "block": self.block,
            "hold": self.hold_interpreter,
            "spin": self.spin,
            "lock": self.deadlock,
            "die": lambda: os.kill(os.getpid(), 9),
            "evaluate": lambda: self.compute(seconds),
            "sleep": lambda: time.sleep(seconds),
            "save": lambda: self.save(seconds),
            "wrong": lambda: dist.broadcast(torch.ones(8), src=0),
            # Cycles of a kernel that does nothing, at the clock of a fast GPU.
            "kernel": lambda: torch.cuda._sleep(int(seconds * 2e9)),
        }
        actions[name]()


def main() -> None:
    """Train until the benchmark ends it."""
    folder, seconds, training = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    device = "cuda" if training == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    faults = Faults(folder, rank)

    def at(place: str) -> None:
        if name := faults.take(place):
            faults.do(name, seconds)

    if training == "pipeline":
        train_stages(at)

    def in_backward(_grad: torch.Tensor) -> None:
        at("backward")

    class Data:
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                at("loader")
                time.sleep(STEP_SECONDS / 2)
                yield torch.randn(8, 16, device=device)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at("forward")
            out: torch.Tensor = self.inner(x)
            if out.requires_grad:
                out.register_hook(in_backward)
            return out

    model = DistributedDataParallel(nn.Sequential(Layer(), nn.Linear(16, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with watch(model, optimizer, run="hang") as monitor:
        for batch in monitor.batches(Data()):
            loss = model(batch).square().mean()
            loss.backward()
            at("collective")
            monitor.step(loss)
            at("between")


if __name__ == "__main__":
    main()
