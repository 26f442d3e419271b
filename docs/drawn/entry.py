"""What docs/DETECTORS.md says of a detector that the code itself does not."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from docs.drawn.svg import Panel
from trainvitals.detect.registry import DETECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One detector of the page."""

    name: str
    """As findings name it, in ``detector``."""
    title: str
    owner: Any
    """The class or function whose docstring says what it finds, and how."""
    needs: str
    """What it must see; else it abstains."""
    examples: Callable[[], list[Panel]]
    module: ModuleType | None = None
    """The module whose docstring has the principle; only the first of its detectors names it."""
    finds: str = ""
    """What it finds, where the docstring's first sentence does not say that."""
    more: str = ""
    """What the docstrings leave out."""
    good: str = ""
    """What it is good for; of those in every rank also in RL, for GANs, in curricula, and where the
    optimizer itself spikes."""
    bad: str = ""
    """What it is not good for, and what to do there."""
    config: type | None = None
    """Its settings, where they have no section."""
    notes: tuple[str, ...] = field(default=())
    """Names of constants of ``source`` whose text below them belongs here."""
    source: ModuleType | None = None

    @property
    def kinds(self) -> Mapping[str, str]:
        """Kinds of its findings, and their levels."""
        return DETECTORS[self.name].kinds

    @property
    def section(self) -> str:
        """Its section of docs/SETTINGS.md."""
        return DETECTORS[self.name].section


def rest_of(owner: Any) -> str:
    """Return the docstring after its first line."""
    return str(inspect.getdoc(owner)).partition("\n\n")[2]
