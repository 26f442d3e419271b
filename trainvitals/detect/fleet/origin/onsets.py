"""Onset of an episode: its first step, and the series that was out first."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from trainvitals.detect.fleet.origin.reference import LAG

Subject = Literal[
    "lr", "config", "loader", "layer", "optimizer", "data", "loss", "rank", "losses", "gradients"
]
"""Subject of an onset: the learning rate, a setting, the loader, a layer, the state or the step of
the optimizer, the data, the loss itself, one rank's gradients. ``losses`` and ``gradients`` moved
but are not the cause, which could not be measured."""
INFERRED_WEIGHTS = "weights"
"""Series of an onset that was inferred: weights of one layer grew if the gradients of all other
layers did and its own did not, as the chain rule has it."""
DAMAGED_WEIGHT = "largest_weight"
"""Series of an onset whose layer has a weight above ``HUGE_WEIGHT``, read after bad steps."""
RESET_MOMENTS = "second_moments"
"""Series of an onset from a finding of ``optimizer_state``: second moments that were set to 0."""
_STATE_SERIES = frozenset(
    {
        "weight_written_ratio",
        "moment_written_ratio",
        INFERRED_WEIGHTS,
        DAMAGED_WEIGHT,
        RESET_MOMENTS,
    }
)
WINDOW = 40
"""Steps after which an ended onset no longer counts as the cause of a problem."""
_LONGEST = 100
"""Steps of an episode after which its values count as the new normal."""
_STILL = 10
"""Steps after which an ended episode is not the cause: clean steps follow it. Lasting changes, such
as a setting or written weights, count for ``WINDOW`` steps."""
_MOST_NEXT = 8


class Next(msgspec.Struct, frozen=True, array_like=True):
    """A series that followed an onset in its episode."""

    step: int
    subject: Subject
    where: str
    series: str


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of an episode, and the series that was out first."""

    attempt: int
    step: int
    last_step: int
    """The last step, so far, in which any series was out."""
    subject: Subject
    where: str = ""
    """A layer's name, or ``rank:3``; empty if all layers and ranks are concerned."""
    series: str
    """The column that was out."""
    value: float | None = None
    """None: non-finite."""
    usual: float | None = None
    sigmas: float | None = None
    """None: exact, without statistics."""
    is_old: bool = False
    """Whether it was out when observation started, so that the first change is unknown."""
    is_apart: bool = False
    """Whether it does not follow from the high loss in which it was found."""
    next: tuple[Next, ...] = ()

    @property
    def is_cause(self) -> bool:
        """Whether the onset identifies the problem's origin, not only a moved series."""
        return self.subject not in ("losses", "gradients")

    @property
    def is_of_speed(self) -> bool:
        """Return whether the first change concerns the speed of the run, not its numbers."""
        return self.subject == "loader"

    @property
    def is_of_setting(self) -> bool:
        """Return whether the first change was made by the loop, so that nothing else caused it."""
        return self.series == "learning_rate" or self.subject == "config"

    @property
    def is_lasting(self) -> bool:
        """Return whether the first change altered what later steps start from, such as weights."""
        is_frozen = self.value == 0.0 and self.sigmas is None
        return is_frozen or self.subject in ("lr", "config") or self.series in _STATE_SERIES

    @property
    def is_nonfinite(self) -> bool:
        """Return whether the first change is a number that turned NaN or infinite."""
        return self.value is None and not self.is_lasting


class SeriesOutlier(NamedTuple):
    """One series that is out in a step."""

    step: int
    order: float
    subject: Subject
    where: str
    series: str
    value: float | None = None
    usual: float | None = None
    sigmas: float | None = None
    is_apart: bool = False


class OnsetEpisode:
    """The current episode: its onset, and the time since any series was out."""

    def __init__(self) -> None:
        self.onset: Onset | None = None
        self._order = math.inf
        self._quiet = self._long = 0

    @property
    def is_quiet(self) -> bool:
        """Return whether values enter the reference: nothing has changed, or for too long."""
        return self.onset is None or self._long >= _LONGEST

    def advance(self, attempt: int, out: Sequence[SeriesOutlier], *, is_old: bool) -> bool:
        """Add a step to the episode; return whether its first change is a different one."""
        self._long += 1
        if not out:
            self._quiet += 1
            if self.onset is not None and self._quiet >= LAG:
                self.onset = None
            return False
        self._quiet = 0
        first = min(out, key=lambda each: (each.step, each.order))
        now = max(each.step for each in out)
        onset = self.onset
        if onset is None or attempt != onset.attempt:
            self._long, self._order = 0, first.order
            self.onset = build_onset(attempt, first, out, now, is_old=is_old)
            return True
        turned = [
            each
            for each in out
            if each.order == 0 or each.is_apart or not (each.value or each.sigmas)
        ]
        if turned and not onset.is_nonfinite and not onset.is_lasting:
            # A NaN or a gradient of exactly 0 does not follow from a series that was only high, a
            # setting from nothing: each has its own origin.
            first = min(turned, key=lambda each: (each.step, each.order))
            self._long, self._order = 0, first.order
            self.onset = build_onset(attempt, first, out, now, is_old=is_old)
            return True
        if (first.step, first.order) < (onset.step, self._order):
            self._order = first.order  # an update is only known with the next step's row
            self.onset = msgspec.structs.replace(
                build_onset(attempt, first, out, now, is_old=onset.is_old),
                next=merge_following_series(onset, out),
            )
            return True
        self.onset = msgspec.structs.replace(
            onset, last_step=now, next=merge_following_series(onset, out)
        )
        return True


def build_onset(
    attempt: int, first: SeriesOutlier, out: Sequence[SeriesOutlier], now: int, *, is_old: bool
) -> Onset:
    """Return the first change of an episode that starts with this series."""
    return Onset(
        attempt=attempt,
        step=first.step,
        last_step=now,
        subject=first.subject,
        where=first.where,
        series=first.series,
        value=first.value,
        usual=first.usual,
        sigmas=None if first.sigmas is None else float(first.sigmas),
        is_old=is_old,
        is_apart=first.is_apart,
        next=tuple(_to_following_series(each) for each in out if each is not first)[:_MOST_NEXT],
    )


def _to_following_series(each: SeriesOutlier) -> Next:
    """Return a series that left its range after the first change."""
    return Next(each.step, each.subject, each.where, each.series)


def merge_following_series(onset: Onset, out: Sequence[SeriesOutlier]) -> tuple[Next, ...]:
    """Return the series that followed the first change, each once, at its first step."""
    followed = {(each.subject, each.where, each.series): each for each in onset.next}
    onset_key = (onset.subject, onset.where, onset.series)
    for each in out:
        key = (each.subject, each.where, each.series)
        if key != onset_key:
            followed.setdefault(key, _to_following_series(each))
    return tuple(sorted(followed.values(), key=lambda each: each.step)[:_MOST_NEXT])


def find_origin_onset(
    onsets: Iterable[Onset],
    *,
    attempt: int,
    step: int,
    is_of_speed: bool | None = None,
    is_of_setting: bool = False,
    planned: Sequence[tuple[int, int]] = (),
) -> Onset | None:
    """Return the first change before, or at, a problematic step; None if there is no precursor.

    Args:
        onsets: onsets of the run.
        attempt: attempt of the problem.
        step: step at which the problem was found.
        is_of_speed: whether the problem concerns speed; None: either.
        is_of_setting: whether the problem is a changed setting: only that can be its origin.
        planned: first step and number of steps of changes that the run announced: onsets there are
            intended.
    """
    near = [
        onset
        for onset in onsets
        if onset.attempt == attempt
        and onset.step <= step
        and onset.last_step > step - (WINDOW if onset.is_lasting else _STILL)
        and onset.step > step - _LONGEST
        and not any(first <= onset.step < first + num for first, num in planned)
        and (is_of_speed is None or onset.is_of_speed == is_of_speed)
        and (onset.is_of_setting or not is_of_setting)
    ]
    # A number that is NaN at the step outranks every earlier series that was only high. A layer
    # that learns no more since this step outranks them too.
    turned = [onset for onset in near if onset.is_nonfinite and onset.last_step >= step]
    # A second problem outranks the high loss before it.
    lasting = [each for each in near if each.is_lasting or (each.is_apart and each.step == step)]
    is_strong = bool(turned) or any(onset.step == step for onset in lasting)
    first = min(turned + lasting if is_strong else near, key=lambda onset: onset.step, default=None)
    return None if first is None or first.is_old else first
