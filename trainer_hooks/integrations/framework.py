"""Common parts of the adapters: options, version checks, replaced attributes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from trainer_hooks.measures.settings import SignalSettings
from trainvitals.detect.outliers import LossKind
from trainvitals.detect.posttraining.names import OnCollapse, Task
from trainvitals.errors import MissingDependencyError
from trainvitals.records import OnHang

if TYPE_CHECKING:
    from trainer_hooks._attach import Attached


class Options(TypedDict, total=False):
    """Options that every adapter passes to ``trainer_hooks.attach``, which documents them."""

    run: str | None
    mode: Literal["off", "observe", "guard", "heal"]
    schedulers: Any | Sequence[Any] | None
    dir: str | Path | None
    tokens_per_step: int | None
    config: Mapping[str, object] | None
    tags: Sequence[str]
    state: Mapping[str, Any] | None
    signals: SignalSettings | None
    loss_kind: LossKind | None
    task: Task | None
    on_collapse: OnCollapse
    on_hang: OnHang


def is_off(options: Options) -> bool:
    """Return whether an adapter's options turn Vitals off, so that nothing is refused either.

    From ``VITALS_MODE`` or ``mode``; ``attach`` checks that all ranks have the same setting.
    """
    return "off" in (os.environ.get("VITALS_MODE"), options.get("mode"))


def require_version(distribution: str, oldest: str, *, extra: str) -> None:
    """Refuse a framework that is missing, or older than the versions tested with the adapter.

    ``extra`` is the extra of ``trainvitals`` that installs it.

    Raises:
        MissingDependencyError: install or upgrade the framework.
    """
    hint = f"pip install 'trainvitals[{extra}]'"
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        raise MissingDependencyError(f"{distribution} is not installed", hint=hint) from None
    if _parse_version(installed) < _parse_version(oldest):
        raise MissingDependencyError(
            f"{distribution} is {installed}; at least {oldest} is needed", hint=hint
        )


def replace_while_attached(attached: Attached, owner: Any, name: str, ours: Any) -> None:
    """Set an attribute on a framework's object itself until the adapter's guard closes.

    If other code has replaced it since, it is not restored.
    """
    before = vars(owner).get(name)

    def put_back() -> None:
        if vars(owner).get(name) is ours:
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)

    setattr(owner, name, ours)
    attached.when_closed(put_back)


def _parse_version(text: str) -> tuple[int, ...]:
    """Return a framework's version as numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
