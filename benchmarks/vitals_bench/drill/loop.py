"""The loops that are drilled, and the expected result of each fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitals_plugins.lab.drill.faults import FAULTS

FOLDER = Path(__file__).parent / "loops"
ALL_FAULTS = tuple(FAULTS)
RESTART = ("killed_rank",)
_HEAL = 'mode="heal"'
_UNREPAIRED = dict.fromkeys(("nan_parameters", "bit_flip", "killed_rank", "forgotten_lr"), _HEAL)
"""What mode ``guard`` does not repair, and part of the line that would change it."""
_RESUMES = "from which the next start resumes"
_ATTACHED = {**_UNREPAIRED, "killed_rank": _RESUMES, "forgotten_lr": _RESUMES}
"""The same with ``attach``, and in adapters, which restore nothing."""
_SHARDED = {"bit_flip": "no other rank holds the same parameters"}
_STAGES = {**_SHARDED, "slow_rank": "not measured"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrilledLoop:
    """A program that is drilled in one mode."""

    name: str
    script: str
    mode: str
    arguments: tuple[str, ...] = ()
    unprotected: Mapping[str, str] = field(default_factory=dict)
    """Faults that the loop is not protected from, with a part of the reason or the hint."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Faults with a broken promise, with a part of the reason."""
    faults: tuple[str, ...] = ALL_FAULTS
    requires: str = ""
    """Package without which the loop is left out."""

    @property
    def title(self) -> str:
        """Name and mode, as in the tables."""
        return f"{self.name}, {self.mode}"

    def exit_code(self, faults: Iterable[str]) -> int:
        """Return the expected exit code of a drill of these faults."""
        return 1 if any(fault in self.broken for fault in faults) else 0

    def expected(self, fault: str) -> tuple[str, str]:
        """Return the expected result of a fault, and a text of its reason or hint."""
        if fault in self.broken:
            return "broken", self.broken[fault]
        if fault in self.unprotected:
            return "not protected", self.unprotected[fault]
        return "kept", ""


def _in_both_modes(name: str, script: str, **unprotected: str) -> tuple[DrilledLoop, DrilledLoop]:
    """Return a loop in mode ``guard`` and in mode ``heal``; ``unprotected`` is so in both."""
    return (
        DrilledLoop(
            name=name, script=script, mode="guard", unprotected={**_UNREPAIRED, **unprotected},
            arguments=("--mode", "guard"),
        ),
        DrilledLoop(
            name=name, script=script, mode="heal", unprotected=unprotected,
            arguments=("--mode", "heal"),
        ),
    )  # fmt: skip


def _broken(how: str, reason: str) -> DrilledLoop:
    """Return the loop whose restart breaks a promise."""
    return DrilledLoop(
        name=f"broken on purpose: {how}", script="broken", mode="heal",
        arguments=("--how", how), broken={"killed_rank": reason}, faults=RESTART,
    )  # fmt: skip


LOOPS = (
    *_in_both_modes("ImageNet example", "imagenet"),
    DrilledLoop(name="nanoGPT", script="nanogpt", mode="guard", unprotected=_ATTACHED),
    *_in_both_modes("torchtitan", "torchtitan", **_SHARDED),
    *_in_both_modes("GAN", "gan"),
    DrilledLoop(
        name="Hugging Face Trainer", script="hf_trainer", mode="guard", unprotected=_ATTACHED,
        requires="transformers",
    ),
    *_in_both_modes("pipeline, 1F1B", "pipeline", **_STAGES),
    DrilledLoop(
        name="not broken", script="broken", mode="heal", arguments=("--how", "none"),
        faults=RESTART,
    ),
    _broken("scheduler", "learning rate"),
    _broken("checkpoint", "did not continue from a checkpoint"),
    _broken("loader", "batches"),
)  # fmt: skip
"""All loops, in the order in which they are drilled."""
