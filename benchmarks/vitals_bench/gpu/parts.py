"""Registry of the parts of the GPU check, and the loops that several parts train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Facts = dict[str, Any]
"""Figures of a part by name. They are stored even if the part fails."""

GROUP_SECONDS: Mapping[str, int] = {
    "check": 120,
    "tests": 40,
    "speed": 190,
    "agent": 70,
    "suite": 140,
}
"""Limit of each group on a machine with a GPU, in the order in which they run."""

MAX_SECONDS = 560
"""Limit of all groups: a GPU is often lent for ten minutes."""


class SkipPartError(Exception):
    """The part cannot run on this machine; the message is the reason."""


class Part(NamedTuple):
    """One check or measurement. A failed assertion is its failure."""

    run: Callable[[Facts], None]
    group: str
    seconds: int
    """Usual duration on a GPU; the part is ended after three times as long, plus 30 seconds."""
    num_gpus: int
    """Number of GPUs that it needs; 0: it also runs on the CPU."""
    is_alone: bool
    """Whether no other part may run at the same time."""

    @property
    def limit_seconds(self) -> float:
        """Time after which the part is ended."""
        return 3.0 * self.seconds + 30.0


_registered: dict[str, Part] = {}


def part(
    group: str, seconds: int, *, num_gpus: int = 0, is_alone: bool = False
) -> Callable[[Callable[[Facts], None]], Callable[[Facts], None]]:
    """Register a function as a part under its name."""

    def register(run: Callable[[Facts], None]) -> Callable[[Facts], None]:
        _registered[run.__name__] = Part(run, group, seconds, num_gpus, is_alone)
        return run

    return register


def load_parts() -> dict[str, Part]:
    """Import all modules with parts; return the parts by name, in the order of the groups.

    Within a group, the most important part comes first.
    """
    from vitals_bench.gpu import agent, checks, several, speed, suites

    assert all((checks, several, suites, speed, agent))
    groups = list(GROUP_SECONDS)
    return dict(sorted(_registered.items(), key=lambda item: groups.index(item[1].group)))
