"""Which checkpoint a rollback goes to."""

from __future__ import annotations

from collections.abc import Sequence

from trainvitals.policy.state import FOREVER, NEWEST, CheckpointRef, Proposal


def newest_healthy(checkpoints: Sequence[CheckpointRef]) -> CheckpointRef | None:
    """Return the newest healthy checkpoint; None where there is none."""
    usable = _healthy(checkpoints, FOREVER)
    return usable[-1] if usable else None


def choose_checkpoint(
    checkpoints: Sequence[CheckpointRef], onset: int, margin: int, below: int | None
) -> tuple[CheckpointRef | None, str]:
    """Return the newest healthy checkpoint that lies far enough back, and the choice in words.

    For a second try (``below`` is where the last one went) an older one; where none is, the oldest
    that qualifies once more.
    """
    latest = max(0, onset - margin)
    usable = _healthy(checkpoints, latest)
    if not usable:
        return None, (
            f"none of {len(checkpoints)} checkpoints is healthy and at or before step {latest} "
            f"({margin} steps before the onset at {onset})"
        )
    older = [ref for ref in usable if below is None or ref.step < below]
    target = older[-1] if older else usable[0]
    words = f"back to {target.id}, before step {target.step}"
    if below is not None:
        words += ", older than the last try" if older else ", as no older one is left"
    return target, words


def commanded_checkpoint(
    command: Proposal, checkpoints: Sequence[CheckpointRef]
) -> CheckpointRef | None:
    """Return the healthy checkpoint a command names, by id, by step, or the newest."""
    if command.checkpoint_id:
        return newest_healthy([ref for ref in checkpoints if ref.id == command.checkpoint_id])
    if command.argument == NEWEST:
        return newest_healthy(checkpoints)
    return newest_healthy([ref for ref in checkpoints if ref.step == command.argument])


def _healthy(checkpoints: Sequence[CheckpointRef], at_most: float) -> list[CheckpointRef]:
    """Return the healthy ones, oldest first; ties by place, then id, never by the list's order."""
    return sorted(
        (ref for ref in checkpoints if ref.state == "healthy" and ref.step <= at_most),
        key=lambda ref: (ref.step, ref.where == "memory", ref.id),
    )
