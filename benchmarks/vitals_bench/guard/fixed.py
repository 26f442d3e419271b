"""The fixed cost of a step: updates of few small tensors, and whole steps of milliseconds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import trainer_hooks
from trainer_hooks.monitor import Monitor
from trainvitals import CheckpointSettings
from vitals_bench.measure import Call, interleave, medians, spread
from vitals_bench.rows import Row, at_most, ratio_at_most
from vitals_bench.training import Loop, own_place, size_of, tokens

_CALLS = "clip_grad_norm_, fused AdamW, zero_grad"
_MAX_NORM = 1.0
_LIMITS_US = {10: 250.0, 150: 300.0}
"""Numbers of tensors, and the time that a step may add to the training thread."""


class _Updates:
    """An update without forward and backward, of gradients and losses as a healthy run has them."""

    def __init__(self, num_tensors: int, **options: Any) -> None:
        """``options``: those of ``watch``; none: the bare calls."""
        torch.manual_seed(0)
        shapes = [(64, 64), (64,)] * (num_tensors // 2)
        self._params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self._grads = [torch.randn_like(param) for param in self._params]
        self._optimizer = torch.optim.AdamW(self._params, lr=1e-6, fused=True)
        self._random, self._level, self._loss = random.Random(0), 3.0, torch.zeros(())
        self._monitor: Monitor | None = None
        if options:
            self._monitor = trainer_hooks.watch(self._params, self._optimizer, **options)

    def backward(self) -> None:
        """Set the gradients and the loss of the next step: both vary, and the loss falls."""
        self._level = 1.0 + 0.9998 * (self._level - 1.0)
        self._loss = torch.tensor(self._level + self._random.gauss(0.0, 0.05))
        size = 1e-4 * self._random.lognormvariate(0.0, 0.2)
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad * size

    def step(self) -> None:
        """Clip and update, guarded or not."""
        if self._monitor is not None:
            self._monitor.step(self._loss, max_norm=_MAX_NORM)
            return
        nn.utils.clip_grad_norm_(self._params, _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Close the monitor."""
        if self._monitor is not None:
            self._monitor.close()


class _Policy:
    """A small policy gradient step, as RL loops take them: a few milliseconds in all."""

    def __init__(self, *, is_watched: bool) -> None:
        torch.manual_seed(0)
        widths = (64, 256, 256, 8)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self._model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._seen, self._actions = torch.randn(512, 64), torch.randint(0, 8, (512, 1))
        self._advantages = torch.randn(512)
        self._monitor: Monitor | None = None
        if is_watched:
            self._monitor = trainer_hooks.watch(self._model, self._optimizer, loss_kind="rl")

    def step(self) -> None:
        """Take the step, guarded or not."""
        log_probs = self._model(self._seen).log_softmax(-1).gather(1, self._actions)
        loss = -(log_probs[:, 0] * self._advantages).mean()
        loss.backward()
        if self._monitor is not None:
            self._monitor.step(loss, max_norm=_MAX_NORM)
            return
        nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Close the monitor."""
        if self._monitor is not None:
            self._monitor.close()


def measure_fixed(*, quick: bool) -> Iterator[Row]:
    """Yield what a step adds to the training thread, and the time of whole small steps."""
    for num_tensors in _LIMITS_US:
        yield from _added(num_tensors, rounds=20 if quick else 1500)
    yield from _whole(rounds=6 if quick else 100)


def _added(num_tensors: int, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        place = stack.enter_context(own_place())
        heals = {"mode": "heal", "checkpoints": CheckpointSettings(directory=place / "kept")}
        arms = {
            "bare": _Updates(num_tensors),
            "again": _Updates(num_tensors),
            "guard": _Updates(num_tensors, mode="guard"),
            "observe": _Updates(num_tensors, mode="observe"),
            "heal": _Updates(num_tensors, **heals),
        }
        for arm in arms.values():
            stack.callback(arm.close)

        def backwards() -> None:
            for arm in arms.values():
                arm.backward()

        times = interleave(
            {name: arm.step for name, arm in arms.items()},
            rounds=rounds,
            warm_up=50,
            between=backwards,
            clock_ns=time.thread_time_ns,
        )
    median_us = medians(times, scale=1e6)
    noise = spread(median_us["again"], median_us["bare"])
    for mode in ("guard", "observe", "heal"):
        yield Row(
            name=f"added to the training thread per step, {num_tensors} tensors, {mode}",
            ours=median_us[mode] - median_us["bare"],
            unit="us",
            goal=at_most(_LIMITS_US[num_tensors]) if mode != "heal" else None,
            note=f"{median_us[mode]:.0f} us instead of {median_us['bare']:.0f} us for {_CALLS};"
            f" the bare calls against themselves: {100 * noise:.0f} %",
        )
    yield Row(
        name=f"a step between snapshots, {num_tensors} tensors, heal",
        ours=median_us["heal"],
        unit="us",
        peer="guard",
        theirs=median_us["guard"],
        goal=ratio_at_most(1.02),
        spread=noise,
        note="CPU of the training thread",
    )


def _whole(rounds: int) -> Iterator[Row]:
    batch = tokens(4)
    with ExitStack() as stack:
        stack.enter_context(own_place())
        loops = {name: Loop(1, batch) for name in ("bare", "again")}
        policies = {name: _Policy(is_watched=name == "ours") for name in ("bare", "again", "ours")}
        ours = Loop(1, batch)
        monitor = stack.enter_context(trainer_hooks.watch(ours.model, ours.optimizer))
        stack.callback(policies["ours"].close)
        gpts: dict[str, Call] = {name: loop.step for name, loop in loops.items()}
        gpts["ours"] = lambda: monitor.step(ours.backward(), max_norm=_MAX_NORM)
        steps: dict[str, Call] = {name: policy.step for name, policy in policies.items()}
        for name, arms, factor, limit in (
            (f"a whole step of a GPT, {size_of(ours.model)}, 4 x 128 tokens", gpts, 1, 1.02),
            ("a whole step of policy gradients, 85K parameters", steps, 10, 1.12),
        ):
            median_ms = medians(interleave(arms, rounds=factor * rounds, warm_up=20), scale=1e3)
            yield Row(
                name=name,
                ours=median_ms["ours"],
                unit="ms",
                peer=_CALLS,
                theirs=median_ms["bare"],
                goal=ratio_at_most(limit),
                spread=spread(median_ms["again"], median_ms["bare"]),
            )
