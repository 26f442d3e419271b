"""How alarms are scored against what is known to have gone wrong.

Alarms that are close together are one episode: one page to the operator on call. An event is found
by an alarm between one record before its onset and its end or 20 records after its onset, whichever
is later, if the episode started at most 20 records before the event, or near another major one: an
alarm that is always on finds nothing. An episode that found nothing is a false alarm, unless it
started within 30 records after an event, 3 before, or during it; so alarms about minor events do
not count, neither for nor against. Plateaus are found only by alarms of that kind, which find
nothing else; and by reports of lost progress, which may be another event too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vitals_bench.detect.series import KINDS, Alarm, Event, Series

GAP = 20
"""Records between alarms up to which they are one episode, and that an event may be late in."""
BEFORE, AFTER = 3, 30
"""Records around an event in which an episode may begin without being false."""
SKIPS_PER = 20_000


@dataclass(frozen=True, slots=True)
class Hit:
    """A major event that was found."""

    event: Event
    delay: int
    """Records from its onset to the first alarm; 0 where that came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesScore:
    """What a rule's alarms over one log are worth."""

    name: str
    num_records: int
    is_clean: bool
    hits: tuple[Hit, ...]
    missed: tuple[Event, ...]
    false: tuple[int, ...]
    """Records at which false episodes began."""
    num_false_records: int
    """Records with an alarm outside every event and its margins: each would be a lost update."""


@dataclass(slots=True)
class _Episode:
    first: int
    last: int
    found_something: bool = False


def score(series: Series, alarms: Iterable[Alarm]) -> SeriesScore:
    """Score the alarms over one log."""
    usual = [event for event in series.events if event.kind != "plateau"]
    flat = [event for event in series.events if event.kind == "plateau"]
    ordered = sorted(set(alarms))
    plateaus = [alarm.row for alarm in ordered if _tells_plateau(alarm, flat)]
    others = sorted({alarm.row for alarm in ordered if not _tells_plateau(alarm, flat)})
    caught, missed, false = _score_usual(usual, others)
    for event in (event for event in flat if event.severity == "major"):
        inside = [row for row in plateaus if event.onset <= row <= event.end]
        if inside:
            caught.append(Hit(event, inside[0] - event.onset))
        else:
            missed.append(event)
    lonely = [row for row in plateaus if not is_near(row, flat)]
    false += [row for i, row in enumerate(lonely) if i == 0 or row - lonely[i - 1] > GAP]
    outside = {row for row in others if not is_near(row, usual)} | set(lonely)
    return SeriesScore(
        name=series.name,
        num_records=len(series),
        is_clean=series.is_clean,
        hits=tuple(caught),
        missed=tuple(missed),
        false=tuple(sorted(false)),
        num_false_records=len(outside),
    )


def _tells_plateau(alarm: Alarm, flat: Sequence[Event]) -> bool:
    if alarm.kind == "lost_progress":
        return any(event.onset <= alarm.row <= event.end for event in flat)
    return alarm.kind == "plateau"


def _score_usual(
    events: Sequence[Event], rows: Sequence[int]
) -> tuple[list[Hit], list[Event], list[int]]:
    """Return what was found, what was missed, and where false episodes began."""
    episodes: list[_Episode] = []
    of_row: dict[int, _Episode] = {}
    for row in rows:
        if not episodes or row - episodes[-1].last > GAP:
            episodes.append(_Episode(row, row))
        episodes[-1].last = row
        of_row[row] = episodes[-1]
    majors = [event for event in events if event.severity == "major"]
    caught, missed = [], []
    for event in majors:
        hits = [row for row in rows if _hits(row, of_row[row].first, event, majors)]
        for row in hits:
            of_row[row].found_something = True
        if hits:
            caught.append(Hit(event, max(0, hits[0] - event.onset)))
        else:
            missed.append(event)
    false = [
        episode.first
        for episode in episodes
        if not episode.found_something and not is_near(episode.first, events)
    ]
    return caught, missed, false


def _hits(row: int, began: int, event: Event, majors: Sequence[Event]) -> bool:
    if not event.onset - 1 <= row <= max(event.end, event.onset + GAP):
        return False
    if began >= event.onset - GAP:
        return True
    return any(
        other.onset - GAP <= began <= max(other.end + AFTER, other.onset + GAP) for other in majors
    )


def is_near(row: int, events: Iterable[Event]) -> bool:
    """Return whether a record is within an event or its margins, where no alarm is false."""
    return any(event.onset - BEFORE <= row <= event.end + AFTER for event in events)


@dataclass(slots=True)
class Total:
    """What a rule's alarms over many logs are worth."""

    scores: list[SeriesScore] = field(default_factory=list)

    @classmethod
    def of(cls, scores: Iterable[SeriesScore]) -> Total:
        """Return the total of these scores."""
        return cls(list(scores))

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return for each kind that occurred how many events were found, of how many."""
        caught = [hit.event.kind for score in self.scores for hit in score.hits]
        missed = [event.kind for score in self.scores for event in score.missed]
        counted = {
            kind: (caught.count(kind), caught.count(kind) + missed.count(kind)) for kind in KINDS
        }
        return {kind: pair for kind, pair in counted.items() if pair[1]}

    def _found(self) -> list[Hit]:
        """Return the findings that count in recall: a plateau is counted by its kind alone."""
        return [hit for score in self.scores for hit in score.hits if hit.event.kind != "plateau"]

    @property
    def num_events(self) -> int:
        """Major events, without plateaus."""
        missed = [e for score in self.scores for e in score.missed if e.kind != "plateau"]
        return len(self._found()) + len(missed)

    @property
    def num_records(self) -> int:
        """Records that were judged."""
        return sum(score.num_records for score in self.scores)

    @property
    def num_false(self) -> int:
        """False episodes."""
        return sum(len(score.false) for score in self.scores)

    @property
    def recall(self) -> float | None:
        """Share of the major events that was found; None where there was none."""
        return len(self._found()) / self.num_events if self.num_events else None

    @property
    def precision(self) -> float | None:
        """Found events divided by found events and false alarms; None without alarms."""
        num_told = len(self._found()) + self.num_false
        return len(self._found()) / num_told if num_told else None

    @property
    def f1(self) -> float:
        """Harmonic mean of recall and precision; 0 where there is none."""
        recall, precision = self.recall or 0.0, self.precision or 0.0
        return 2.0 * recall * precision / (recall + precision) if recall + precision else 0.0

    @property
    def false_per_10k(self) -> float:
        """False alarms in 10,000 records."""
        return 1e4 * self.num_false / max(1, self.num_records)

    @property
    def false_records_per_20k(self) -> float:
        """Records with an alarm outside every event, in 20,000: updates that a skip would cost."""
        outside = sum(score.num_false_records for score in self.scores)
        return SKIPS_PER * outside / max(1, self.num_records)

    @property
    def delay(self) -> float | None:
        """Median records from an onset to its first alarm."""
        delays = [hit.delay for hit in self._found()]
        return float(statistics.median(delays)) if delays else None

    @property
    def clean_paged(self) -> tuple[int, int]:
        """Logs without a major event in which there was a false alarm, of how many."""
        clean = [score for score in self.scores if score.is_clean]
        return sum(bool(score.false) for score in clean), len(clean)
