"""What the adapters share: their options, and what is said where a framework is missing or old."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from trainer_hooks.measures.settings import SignalSettings
from trainvitals.detect.outliers import LossKind
from trainvitals.errors import MissingDependencyError
from trainvitals.records import OnHang

if TYPE_CHECKING:
    from trainer_hooks._attach import Attached


class Options(TypedDict, total=False):
    """What every adapter passes on to ``trainer_hooks.attach``; described there."""

    run: str | None
    mode: Literal["off", "observe", "guard"]
    dir: str | Path | None
    tokens_per_step: int | None
    config: Mapping[str, object] | None
    tags: Sequence[str]
    state: Mapping[str, Any] | None
    signals: SignalSettings | None
    loss_kind: LossKind
    on_hang: OnHang


def is_off(options: Options) -> bool:
    """Return whether nothing is to be guarded, and so nothing to be refused.

    The environment or the code says so; ``attach`` makes sure that all ranks were told the same.
    """
    return "off" in (os.environ.get("VITALS_MODE"), options.get("mode"))


def require(distribution: str, oldest: str, *, extra: str) -> None:
    """Refuse a framework that is not installed, or older than what the adapter was tested with.

    Args:
        distribution: its name in the package index.
        oldest: the oldest version that the conformance suite was run with.
        extra: the extra of ``trainvitals`` that installs it.

    Raises:
        MissingDependencyError: install or upgrade it.
    """
    hint = f"pip install 'trainvitals[{extra}]'"
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        raise MissingDependencyError(f"{distribution} is not installed", hint=hint) from None
    if _numbers(installed) < _numbers(oldest):
        raise MissingDependencyError(
            f"{distribution} is {installed}; at least {oldest} is needed", hint=hint
        )


def replace(attached: Attached, owner: Any, name: str, ours: Any) -> None:
    """Set an attribute on the object itself, until the guard closes.

    Where somebody has put another in its place since, that one stays.
    """
    before = vars(owner).get(name)

    def put_back() -> None:
        if vars(owner).get(name) is ours:
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)

    setattr(owner, name, ours)
    attached.when_closed(put_back)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
