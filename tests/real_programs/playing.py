"""Plays a program of this folder: as it is, or with the lines that docs/guides/loops.md shows.

What goes wrong is put in from outside, so that no program knows of it: a backward whose loss is
multiplied, a sample that is NaN. So is what the reference leaves out: an update.
"""

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.house.pages import ROOT, block
from tests.real_programs.data import Images

FOLDER = Path(__file__).parent
PAGE = ROOT / "docs" / "guides" / "loops.md"
OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


@dataclass(frozen=True)
class Lines:
    """What the guide changes in a program: pairs of lines as they are and as they become."""

    hunks: tuple[tuple[str, str], ...]
    num_changed: int
    """Lines added and removed."""

    @property
    def take_the_clip(self) -> bool:
        """Whether Vitals clips in the program's place."""
        return any(re.search(r"max_norm=(?!math.inf)", after) for _, after in self.hunks)

    @classmethod
    def of(cls, name: str) -> "Lines":
        """Read a program's diff, whose hunks stand between lines of ``@@``."""
        hunks, num_changed = [], 0
        for hunk in re.split(r"^@@.*\n", block(PAGE, f"test: loop {name}").body, flags=re.M):
            lines = hunk.splitlines(keepends=True)
            assert all(line[0] in " +-\n" for line in lines), hunk
            before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
            after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
            hunks.append((before, after))
            num_changed += sum(line[0] in "+-" for line in lines)
        return cls(tuple(hunks), num_changed)

    def applied_to(self, source: str) -> str:
        """Return the source with every hunk applied, each at the one place that it fits."""
        for before, after in self.hunks:
            assert source.count(before) == 1, f"{source.count(before)} places for\n{before}"
            source = source.replace(before, after)
        return source


def play(
    name: str,
    *,
    watched: bool,
    bad: Mapping[int, float] | None = None,
    poisoned: frozenset[int] = frozenset(),
    left_out: frozenset[int] = frozenset(),
) -> dict[str, str]:
    """Run a program; return a digest of each thing with a state that it ends with, and of its log.

    Args:
        name: the program's file.
        watched: whether with the guide's lines.
        bad: by what the loss is multiplied, by index of the backward.
        poisoned: the images that are NaN.
        left_out: the updates that are not made, for the reference.
    """
    path = FOLDER / f"{name}.py"
    lines = Lines.of(name)
    source = lines.applied_to(path.read_text()) if watched else path.read_text()
    program: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as stack:
        stack.enter_context(_multiplied(bad or {}))
        stack.enter_context(_poisoned(poisoned))
        if not watched:
            stack.enter_context(_left_out(left_out, program))
            if lines.take_the_clip:
                stack.enter_context(_clip_as_ours(program))
        exec(compile(source, path, "exec"), program)
        left = {name: value for name, value in program.items() if name == "log" or _is_part(value)}
        left["random state"] = torch.get_rng_state()
    return {
        name: digest(value.state_dict() if _is_part(value) else value)
        for name, value in left.items()
    }


def _is_part(value: Any) -> bool:
    """Whether it is a part of the training that has a state."""
    ours = type(value).__module__.startswith("trainer_hooks")
    return hasattr(value, "state_dict") and not isinstance(value, type) and not ours


def digest(value: Any) -> str:
    """Return a word for a state: equal where every bit is."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return (tuple(value.shape), str(value.dtype), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


@contextmanager
def _multiplied(bad: Mapping[int, float]) -> Iterator[None]:
    real, count = torch.Tensor.backward, 0

    @functools.wraps(real)
    def backward(loss, *args, **kwargs):
        nonlocal count
        index, count = count, count + 1
        return real(loss * bad[index] if index in bad else loss, *args, **kwargs)

    torch.Tensor.backward = backward
    try:
        yield
    finally:
        torch.Tensor.backward = real


@contextmanager
def _poisoned(indices: frozenset[int]) -> Iterator[None]:
    Images.poisoned = indices
    try:
        yield
    finally:
        Images.poisoned = frozenset()


@contextmanager
def _left_out(updates: frozenset[int], program: Mapping[str, Any]) -> Iterator[None]:
    """Leave updates out, with what forward wrote since the one before: the buffers.

    Those that a scaler leaves out by itself as well: it lets what their forward wrote stand.
    """
    count, buffers = 0, []

    def own():
        return [*program["model"].buffers()] if "model" in program else []

    def put_back():
        for buffer, before in zip(own(), buffers, strict=bool(buffers)):
            buffer.copy_(before)

    def step_of(real):
        @functools.wraps(real)
        def step(optimizer, closure=None):
            nonlocal count, buffers
            index, count = count, count + 1
            if index in updates:
                return put_back()
            result = real(optimizer)
            buffers = [buffer.clone() for buffer in own()]
            return result

        return step

    def step_of_scaler(real):
        @functools.wraps(real)
        def step(scaler, optimizer):
            before, result = count, real(scaler, optimizer)
            if count == before:
                put_back()
            return result

        return step

    reals = {kind: kind.step for kind in (*OPTIMIZERS, torch.amp.GradScaler)}
    for kind, real in reals.items():
        kind.step = step_of_scaler(real) if kind is torch.amp.GradScaler else step_of(real)
    try:
        yield
    finally:
        for kind, real in reals.items():
            kind.step = real


@contextmanager
def _clip_as_ours(program: Mapping[str, Any]) -> Iterator[None]:
    """Let the plain program's clip round as ours, which is promised to differ in nothing else.

    The squares are added up in float64, and a fused optimizer divides by the norm.
    A program that keeps its own clip keeps it in both forms.
    """
    real = torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters, max_norm):
        grads = [param.grad for param in parameters if param.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in grads]).norm()
        divisor = torch.clamp((norm + 1e-6) / max_norm, min=1.0)
        optimizer = program.get("optimizer")
        if optimizer is not None and optimizer.defaults.get("fused"):
            torch._foreach_div_(grads, divisor.to(torch.float32))
        else:
            torch._foreach_mul_(grads, divisor.reciprocal().to(torch.float32))
        return norm

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    try:
        yield
    finally:
        torch.nn.utils.clip_grad_norm_ = real
