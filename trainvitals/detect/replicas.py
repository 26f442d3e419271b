"""Which of several replicas is wrong: by a vote of the ranks, or by a replay. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

EVERY = 50
"""Steps in which each replicated parameter is compared once; optimizer state in ten times that."""
_CLEARLY = 2.0
"""Of two ranks, the wrong one must be this much further from what a replay came to."""


class Vote(NamedTuple):
    """What the words of the ranks say."""

    apart: tuple[int, ...] = ()
    """Ranks whose word is not that of most of their group; of a tie, all but the lowest's side."""
    suspects: tuple[int, ...] = ()
    """The ranks that may be wrong: those apart, and where no majority decides all of the group."""

    @property
    def rank(self) -> int:
        """The one rank that is wrong; -1 where it is none, several, or not known."""
        return self.suspects[0] if len(self.suspects) == 1 else -1


def vote(words: Sequence[object], groups: Sequence[Sequence[int]]) -> Vote:
    """Return who differs from the others.

    Args:
        words: of each rank, what its replicas are compared by; one that is false says nothing.
        groups: ranks that must have the same word.
    """
    apart: list[int] = []
    suspects: list[int] = []
    for group in groups:
        given = [(rank, words[rank]) for rank in group if words[rank]]
        counts = Counter(word for _, word in given)
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]  # of a tie, what the lowest rank has
        minority = [rank for rank, word in given if word != usual]
        apart += minority
        suspects += minority if 2 * most > len(given) else [rank for rank, _ in given]
    return Vote(tuple(sorted(apart)), tuple(sorted(suspects)))


def minority(words: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose word is not that of most; () where all that gave one agree.

    Of two halves, the one with the lowest rank is taken to be right. 0 is no word.
    """
    return vote(words, [range(len(words))]).apart


def further(distances: Mapping[int, float]) -> int:
    """Return the rank that is clearly further than all others from a replay; -1: none is."""
    if len(distances) < 2:
        return -1
    (second, _), (first, rank) = sorted((d, r) for r, d in distances.items())[-2:]
    return rank if first > _CLEARLY * second else -1


def shown(ranks: Sequence[int]) -> str:
    """Return ranks in words, eight at most.

    >>> shown((1,)), shown((0, 2))
    ('rank 1', 'ranks 0, 2')
    """
    number = "rank" if len(ranks) == 1 else "ranks"
    return f"{number} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
