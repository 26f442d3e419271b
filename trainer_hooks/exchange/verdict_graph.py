"""The verdict on a GPU as one launch: a CUDA graph of its small kernels.

The verdict and the divisor of the clip are thirty kernels of a few numbers each. Launching a kernel
takes the training thread longer than the kernel takes the GPU, so a small model would wait for
them. A graph launches all of them at once, and gives the same bits because it runs the same kernels
on the same memory.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.exchange.reduce_vector import (
    ReduceVector,
    Verdict,
    judge_on_device,
)
from trainer_hooks.failopen import FaultCounter
from trainvitals.auto_clip import MaxNorm

_NUM_DIRECT = 3
"""Steps of a kind that are judged without a graph: the first one sends constants to the device."""
_MAX_GRAPHS = 8
"""Graphs of one run, each of an optimizer's turn and a ``max_norm``."""


class ClippedVerdict(NamedTuple):
    """A step's verdict, and the divisor that clips its gradients."""

    verdict: Verdict
    divisor: Tensor | None
    """None without a clip."""


def judge_and_clip(packer: ReduceVector, row: Tensor, max_norm: MaxNorm | None) -> ClippedVerdict:
    """Return the verdict on the reduced vector and the divisor of the clip; never waits."""
    verdict = judge_on_device(packer.layout, packer.pack, row)
    if max_norm is None:
        return ClippedVerdict(verdict, None)
    assert isinstance(verdict.grad_norm, Tensor), "judged on the device"
    return ClippedVerdict(verdict, packer.clip_divisor(verdict.grad_norm, max_norm))


class _Graph(NamedTuple):
    """A captured verdict. Its tensors are valid until the next replay, in the stream's order."""

    graph: torch.cuda.CUDAGraph
    row: Tensor
    """Input of the verdict, and at its end the row of the next one."""
    judged: ClippedVerdict

    def replay(self, row: Tensor) -> ClippedVerdict:
        """Judge the vector."""
        if row is not self.row:
            self.row.copy_(row)
        self.graph.replay()
        return self.judged


class VerdictGraphs:
    """Judges the steps of one vector: on a GPU by a graph, once a step's kind is known."""

    def __init__(self, packer: ReduceVector, faults: FaultCounter) -> None:
        self._packer = packer
        self._faults = faults
        self._graphs: dict[tuple[int, MaxNorm | None], _Graph] = {}
        self._num_direct: Counter[tuple[int, MaxNorm | None]] = Counter()
        self._captures = packer.pack.is_cuda
        """False on the CPU, and after a capture failed."""

    @property
    def num_captured(self) -> int:
        """Number of graphs that judge steps."""
        return len(self._graphs)

    def judge(self, row: Tensor, turn: int, max_norm: MaxNorm | None) -> ClippedVerdict:
        """Return the verdict on the vector and the divisor of the clip; never waits.

        Args:
            row: that of the previous verdict of the same turn.
            turn: number of the optimizers' turn, each of which has its own row.
            max_norm: the norm to clip to; None without a clip.
        """
        kind = turn, max_norm
        graph = self._graphs.get(kind)
        if graph is not None:
            return graph.replay(row)
        if self._captures and self._num_direct[kind] >= _NUM_DIRECT:
            if (captured := self._capture(max_norm)) is not None:
                self._graphs[kind] = captured
                return captured.replay(row)
            self._captures = False
        if self._captures:
            self._num_direct[kind] += 1
            self._captures = len(self._graphs) < _MAX_GRAPHS
        return judge_and_clip(self._packer, row, max_norm)

    def _capture(self, max_norm: MaxNorm | None) -> _Graph | None:
        """Capture the verdict; None if the device cannot. Captured kernels do not run."""
        packer = self._packer
        row = torch.zeros((), dtype=torch.float64, device=packer.pack.device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(packer.pack.device)
        with self._faults.fail_open("verdict_graph"):
            with torch.no_grad(), torch.cuda.stream(stream):
                # Other threads may call CUDA meanwhile, such as a loader's or NCCL's watchdog.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    judged = judge_and_clip(packer, row, max_norm)
                    assert isinstance(judged.verdict.row, Tensor), "judged on the device"
                    row.copy_(judged.verdict.row)
                finally:
                    graph.capture_end()
            return _Graph(graph, row, judged._replace(verdict=judged.verdict._replace(row=row)))
        return None
