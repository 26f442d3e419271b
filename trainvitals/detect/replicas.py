"""The wrong one of several replicas: found by a vote of the ranks, or by a replay. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

EVERY = 50
"""Steps in which each replicated parameter is compared once; optimizer state in ten times that."""
_CLEARLY = 2.0
"""With two ranks, the wrong one must differ this many times more from the result of a replay."""


class FingerprintVote(NamedTuple):
    """Result of comparing the ranks' fingerprints."""

    apart: tuple[int, ...] = ()
    """Ranks that differ from the majority of their group; in a tie, from the lowest rank's side."""
    suspects: tuple[int, ...] = ()
    """Ranks that may be wrong: those apart, or the complete group without a majority."""

    @property
    def rank(self) -> int:
        """Return the one rank whose replica is wrong; -1 if none, several or unknown."""
        return self.suspects[0] if len(self.suspects) == 1 else -1


def vote_on_fingerprints(
    fingerprints: Sequence[object], groups: Sequence[Sequence[int]]
) -> FingerprintVote:
    """Detect wrong replicas: return the ranks whose fingerprints differ from the others'.

    Args:
        fingerprints: each rank's fingerprint of its replicas; a false value is ignored.
        groups: ranks that must have equal fingerprints.
    """
    apart: list[int] = []
    suspects: list[int] = []
    for group in groups:
        reported = [(rank, fingerprints[rank]) for rank in group if fingerprints[rank]]
        counts = Counter(word for _, word in reported)
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]  # in a tie, the value of the lowest rank
        minority = [rank for rank, word in reported if word != usual]
        apart += minority
        suspects += minority if 2 * most > len(reported) else [rank for rank, _ in reported]
    return FingerprintVote(tuple(sorted(apart)), tuple(sorted(suspects)))


def minority(fingerprints: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose replicas differ from the majority's; () if all fingerprints agree.

    With two equal halves, the half with the lowest rank counts as correct. 0 is ignored.
    """
    return vote_on_fingerprints(fingerprints, [range(len(fingerprints))]).apart


def find_farthest_rank(distances: Mapping[int, float]) -> int:
    """Detect the rank whose replica is clearly furthest from a replay; -1: no rank."""
    if len(distances) < 2:
        return -1
    (second, _), (first, rank) = sorted((d, r) for r, d in distances.items())[-2:]
    return rank if first > _CLEARLY * second else -1


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks with wrong replicas as text, at most eight.

    >>> format_ranks((1,)), format_ranks((0, 2))
    ('rank 1', 'ranks 0, 2')
    """
    number = "rank" if len(ranks) == 1 else "ranks"
    return f"{number} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
