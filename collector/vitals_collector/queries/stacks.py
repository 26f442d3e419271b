"""Current position of each rank, from its stack: text, also without a store."""

from collections.abc import Sequence

from trainvitals.printable import printable
from trainvitals.views import StacksView

MAX_FRAMES = 12
"""Maximum number of frames shown per rank, the innermost first."""


def wait_stacks_text(stacks: Sequence[StacksView], step: int) -> str:
    """Explain a wait at a step by the calls in which each rank's main thread is."""
    newest = {view.rank: view for view in stacks if view.step == step and not view.command_number}
    parts = []
    for rank, view in sorted(newest.items()):
        parts.append(f"Rank {rank}{_last_collective_text(view)}:")
        parts += _truncate_calls(view.calls) or [f"  {view.detail}"]
    return "\n".join(map(printable, parts))


def _last_collective_text(view: StacksView) -> str:
    return f", last collective {view.collectives[-1]}" if view.collectives else ""


def _truncate_calls(calls: Sequence[str]) -> list[str]:
    """Shorten the calls of a rank in the explanation of a wait or hang."""
    more = len(calls) - MAX_FRAMES
    return [*calls[:MAX_FRAMES], *([f"  ... and {more} more calls"] if more > 0 else [])]


def grouped_stacks_text(stacks: Sequence[StacksView], world_size: int) -> str:
    """Explain where all ranks are: those at the same place together, the smallest group first.

    Ranks below ``world_size`` without stacks are listed as not responding.
    """
    groups: dict[tuple[str, ...], list[StacksView]] = {}
    mute: dict[str, list[int]] = {}
    for view in sorted(stacks, key=lambda view: view.rank):
        if calls := view.calls:
            groups.setdefault((*calls, *view.collectives[-1:]), []).append(view)
        else:
            mute.setdefault(view.detail, []).append(view.rank)
    if away := sorted(set(range(world_size)) - {view.rank for view in stacks}):
        mute.setdefault("no answer from its node's agent", []).extend(away)
    parts = [
        f"{capital(_rank_list_text(ranks))} did not answer: {why}" for why, ranks in mute.items()
    ]
    for same in sorted(groups.values(), key=lambda same: (len(same), same[0].rank)):
        steps = sorted({view.step for view in same})
        at = f"step {steps[0]}" + (f" to {steps[-1]}" if steps[1:] else "")
        in_call = _last_collective_text(same[0])
        parts.append(f"{capital(_rank_list_text([v.rank for v in same]))}, {at}{in_call}:")
        parts += _truncate_calls(same[0].calls)
    return "\n".join(map(printable, parts))


def _rank_list_text(ranks: Sequence[int]) -> str:
    """Name ranks in the explanation of stacks: ``rank 3``, or ``ranks 0 to 2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    ranges = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in spans]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(ranges)}"


def capital(text: str) -> str:
    """Return a sentence of a verdict or explanation with a capital letter."""
    return text[:1].upper() + text[1:]
