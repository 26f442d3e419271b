"""What a run is doing, from what was last heard of its sources: pure, ``now`` is handed in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainvitals.views import Health, RunState

_FINAL: tuple[RunState, ...] = ("halted", "failed", "interrupted", "finished")
"""How a run can end by its own word, the one that explains most first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a silent run counts as lost."""

    now_unix_ns: int
    up_since_unix_ns: int = 0
    """When this collector started: silence while it was away says nothing."""
    lost_after_seconds: float = 60.0
    """Neither a rank's row nor its agent's for longer than this: the run is lost."""
    is_reading_in: bool = False
    """A folder is being read for the first time: its runs' last words may be yet to come."""


class SourceState(NamedTuple):
    """What is known of one incarnation of a source."""

    source: str
    started_unix_ns: int
    last_seen_unix_ns: int
    last_received_unix_ns: int
    alive: int
    ended_state: str
    world_size: int = 0


def run_state(sources: Sequence[SourceState], when: Liveness) -> RunState:
    """Return the run's state from the newest incarnation of each source.

    A run that said goodbye is what it said. One whose agents say that all its processes are gone is
    lost at once: an agent says so after the last row of the rank. A silent one is lost only when
    its agents are silent as well: a rank in a long evaluation is silent and fine.
    """
    newest = _newest(sources)
    head = newest.get("rank:0")
    ranks = [source for source in newest.values() if _is_rank_of(source, head)]
    agents = [source for name, source in newest.items() if not name.startswith("rank:")]
    ended = {source.ended_state for source in ranks} & set(_FINAL)
    if head is not None and head.ended_state:
        final_state: RunState = next((state for state in _FINAL if state in ended), "finished")
        # A launcher that loses one rank interrupts the others: theirs is not the story.
        return "failed" if final_state == "interrupted" and _lost_one_first(ranks) else final_state
    if when.is_reading_in and not any(source.last_received_unix_ns for source in newest.values()):
        return "running"
    is_gone = bool(ranks) and all(source.alive == 0 or source.ended_state for source in ranks)
    if is_gone or all(_is_silent(source, when) for source in (*ranks, *agents)):
        # Where rank 0 was killed before it could speak, another rank may have said why.
        return "failed" if "failed" in ended else "lost"
    return "running"


def _lost_one_first(ranks: Sequence[SourceState]) -> bool:
    """Return whether a rank was gone, without a word, before the first of the others was ended.

    One that outlives the launcher's grace is killed after it: that is no fault.
    """
    goodbyes = [source.last_seen_unix_ns for source in ranks if source.ended_state]
    lost = [
        source.last_seen_unix_ns for source in ranks if source.alive == 0 and not source.ended_state
    ]
    return bool(goodbyes) and bool(lost) and min(lost) < min(goodbyes)


def health(
    state: RunState,
    *,
    has_steps: bool,
    recent_action: bool,
    lr_factor: float,
    firing_pages: int,
    ended_in_trouble: bool = False,
    is_broken: bool = False,
) -> Health:
    """Return the one word a list of runs shows beside the state.

    A run that ended while its last steps were being skipped is not healthy for having ended; nor is
    a broken one, whose last loss is not finite: critical, unless it is being acted on.
    """
    if state in ("halted", "failed", "lost") or firing_pages:
        return "critical"
    if not has_steps:
        return "unknown"
    is_acted_on = ended_in_trouble or (state == "running" and recent_action)
    if is_broken and not is_acted_on:
        return "critical"
    return "acting" if is_acted_on or (state == "running" and lr_factor < 1) else "healthy"


def _newest(sources: Iterable[SourceState]) -> dict[str, SourceState]:
    newest: dict[str, SourceState] = {}
    for source in sorted(sources, key=lambda source: source.started_unix_ns):
        newest[source.source] = source
    return newest


def _is_rank_of(source: SourceState, head: SourceState | None) -> bool:
    """Return whether this is a rank of the present world, not one a smaller relaunch left over."""
    kind, _, number = source.source.partition(":")
    if kind != "rank":
        return False
    return head is None or head.world_size < 1 or int(number) < head.world_size


def _is_silent(source: SourceState, when: Liveness) -> bool:
    # The sender's clock may be wrong and a spool may be late: what this collector's own clock said
    # at the last arrival counts, where rows arrive at all and are not read from a folder.
    heard = source.last_seen_unix_ns
    if source.last_received_unix_ns:
        heard = max(source.last_received_unix_ns, when.up_since_unix_ns)
    return when.now_unix_ns - heard > when.lost_after_seconds * 1e9


__all__ = ["Liveness", "SourceState", "health", "run_state"]
