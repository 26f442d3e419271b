"""Changes of the optimizers' settings other than the learning rate, by plain comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

_NOT_SETTINGS = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr"})


class Change(NamedTuple):
    """One setting of one parameter group got another value."""

    group: int
    key: str
    before: object
    after: object
    times: int
    """Changes of this setting so far, this one included."""

    @property
    def is_told(self) -> bool:
        """Whether it is the 1st, 2nd, 4th, 8th...: a schedule may change one at every step."""
        return self.times & (self.times - 1) == 0

    def numbers(self) -> dict[str, float]:
        """Return the new value as scalars by name; what is no number is left out."""
        name = f"group{self.group}/{self.key}"
        if isinstance(self.after, tuple | list):
            parts = {f"{name}.{i}": value for i, value in enumerate(self.after)}
        else:
            parts = {name: self.after}
        return {n: float(v) for n, v in parts.items() if isinstance(v, int | float)}


class GroupSettings:
    """What the groups' settings were at the last look. Tensors are not read: that would wait."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._seen = [_plain(group) for group in self._groups]
        self._counts: Counter[tuple[int, str]] = Counter()

    def changes(self) -> list[Change]:
        """Return what has changed since the last look."""
        changes = []
        for index, (group, seen) in enumerate(zip(self._groups, self._seen, strict=True)):
            for key, before in seen.items():
                after = group.get(key)
                if after is before or not _is_plain(after) or after == before:
                    continue
                seen[key] = after
                self._counts[index, key] += 1
                changes.append(Change(index, key, before, after, self._counts[index, key]))
        return changes


def _plain(group: dict[str, Any]) -> dict[str, object]:
    return {k: v for k, v in group.items() if k not in _NOT_SETTINGS and _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, int | float | str)
