"""Ranks on several nodes that make no progress: who is waited for shows only where all are seen.

Each node's agent says every two seconds what its ranks do, as long as nothing moves there; a job on
one node its agent judges itself (``trainvitals.detect.hang``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, func, select

from trainvitals.detect.hang import HangFollower
from trainvitals.errors import UNREADABLE
from trainvitals.records import Finding, HangLimits, RanksStill
from vitals_collector.storage.schema import events

FORGET_NS = 8_000_000_000
"""A node that said nothing for longer than that may move again, or be gone."""
_decode = msgspec.msgpack.Decoder(RanksStill).decode


class _Word(NamedTuple):
    seq: int
    came_ns: int
    event: RanksStill


@dataclass(slots=True)
class StillNodes:
    """What the agents of one run last said of ranks that stand still."""

    _words: dict[str, _Word] = field(default_factory=dict)
    """By incarnation of an agent."""
    _follower: HangFollower = field(default_factory=HangFollower)

    def read(self, connection: Connection, run_id: str, now_ns: int) -> None:
        """Take in what came since the last look."""
        mine = (events.c.run_id == run_id, events.c.kind == RanksStill.__name__)
        last = select(events.c.incarnation, func.max(events.c.seq)).where(*mine)
        for incarnation, seq in connection.execute(last.group_by(events.c.incarnation)).all():
            before = self._words.get(incarnation)
            if before is not None and before.seq >= seq:
                continue
            query = select(events.c.body).where(
                *mine, events.c.incarnation == incarnation, events.c.seq == seq
            )
            try:
                event = _decode(connection.execute(query).scalar() or b"")
            except UNREADABLE:
                continue  # a newer agent's: it judges its own node, at least
            self._words[incarnation] = _Word(seq, now_ns, event)

    def look(self, now_ns: int) -> tuple[Finding, ...]:
        """Return what is to be told now; ``now_ns`` is of the clock of ``read``."""
        present = [word for word in self._words.values() if now_ns - word.came_ns <= FORGET_NS]
        present = [word for word in present if word.event.ranks]
        if not present and self._follower.verdict is None:
            return ()
        # As they were told, and not for longer: a node that says nothing more may move again.
        ranks = {rank.rank: rank for word in present for rank in word.event.ranks}
        world_size = max((word.event.world_size for word in present), default=1)
        limits = _longest(word.event.limits for word in present)
        return self._follower.look(list(ranks.values()), world_size=world_size, limits=limits)


def _longest(limits: Iterable[HangLimits]) -> HangLimits | None:
    """Return for each phase the longest of the nodes' limits."""
    every = list(limits)
    if not every:
        return None
    return HangLimits(
        show={phase: max(of.show.get(phase, 0.0) for of in every) for phase in every[0].show},
        page={phase: max(of.page.get(phase, 0.0) for of in every) for phase in every[0].page},
        computing=max(of.computing for of in every),
    )
