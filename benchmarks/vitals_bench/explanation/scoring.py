"""The scoring rule: right, wrong or silent in step, rank, cause and first mover. Pure.

The rule is fixed; a change of it starts a new column of results.

- **Incident.** The one whose first step is nearest to the fault, among those whose first step is at
  most 60 steps after the fault and whose last step is not before it. If there is none, all four
  are silent.
- **Step.** Right if the incident's first step is off by at most the tolerance of the kind (1 step;
  `v_zero` 2, `loader_stall` 3, `slow_rank` 10). Otherwise wrong.
- **Cause.** Right if the cause in the incident's id is one of the kind's. Silent if it is empty or
  "Not recorded". Otherwise wrong.
- **Rank.** The ranks that the first sentence of the cause names. On one rank: right unless another
  rank is named. On several: right if exactly the faulty rank is named, or if no rank is named and
  all ranks have the fault; silent if one rank has it and none is named; otherwise wrong.
- **First mover.** "Moved first: ..." of the verdict, and of `why` for the incident's first step. A
  sentence is right if it names the origin (layer, rank, data, learning rate, loader, loss) and a
  step within the tolerance. "No precursor", none, and "Not enough was measured" are silent. If one
  of the two is wrong, the score is wrong; else if one is right, it is right. Silence is right for
  kinds whose cause is its own origin (`loss_overflow`, `loader_stall`) or that have none
  (`slow_rank`, `crash`).
- **Incident as a whole.** Wrong if any of the four is wrong; right if all are right; silent
  otherwise.
- **End**, which is scored apart: wrong if a fault that lasts to the end of the run is shown as
  "Resolved", or if a fault that ended is shown as open in a finished run.
- **Invented.** Incidents whose last step is before the first fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from vitals_bench.explanation.kinds import KINDS, Kind, Truth
from vitals_bench.explanation.statements import Statement

Mark = Literal["right", "wrong", "silent"]
FIELDS = ("step", "rank", "cause", "mover")
_REACH = 60
_MOVED = re.compile(r"Moved first: (?P<what>.*?)(?: Then: |$)", re.DOTALL)
_STEP = re.compile(r"at step ([\d,]+)")
_RANKS = re.compile(r"\b[Rr]anks? ([\d, and]*\d)")


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one fault."""

    step: Mark
    rank: Mark
    cause: Mark
    mover: Mark
    end: Mark

    @property
    def whole(self) -> Mark:
        """The score of the incident as a whole."""
        marks = [self.step, self.rank, self.cause, self.mover]
        if "wrong" in marks:
            return "wrong"
        return "right" if set(marks) == {"right"} else "silent"


SILENT = Score(step="silent", rank="silent", cause="silent", mover="silent", end="silent")


def score(truth: Truth, statements: Sequence[Statement], *, ranks: int) -> Score:
    """Return the score of a fault by the rule above."""
    statement = incident_of(truth, statements)
    if statement is None:
        return SILENT
    kind = KINDS[truth.kind]
    off = abs(statement.onset - truth.step)
    return Score(
        step="right" if off <= kind.tolerance else "wrong",
        rank=_rank(truth, statement, ranks),
        cause=_cause(kind, statement),
        mover=_mover(truth, kind, statement),
        end=_end(kind, statement),
    )


def incident_of(truth: Truth, statements: Sequence[Statement]) -> Statement | None:
    """Return the incident in which a user would look for the fault."""
    near = [each for each in statements if each.onset <= truth.step + _REACH]
    near = [each for each in near if each.last >= truth.step - 1]
    return min(near, key=lambda each: abs(each.onset - truth.step), default=None)


def num_invented(truths: Sequence[Truth], statements: Sequence[Statement]) -> int:
    """Return the number of incidents before the first fault: all, if there is no fault."""
    first = min((truth.step for truth in truths), default=2**62)
    return sum(statement.last < first - 1 for statement in statements)


def _cause(kind: Kind, statement: Statement) -> Mark:
    if not statement.cause or statement.sentence.startswith("Not recorded"):
        return "silent"
    return "right" if statement.cause in kind.causes else "wrong"


def _rank(truth: Truth, statement: Statement, ranks: int) -> Mark:
    sentence = re.split(r"Then: |Moved first: |No precursor", statement.sentence)[0]
    named = {int(n) for text in _RANKS.findall(sentence) for n in re.findall(r"\d+", text)}
    if ranks == 1:
        return "right" if named <= {0} else "wrong"
    if truth.rank < 0:
        return "right" if not named or named == set(range(ranks)) else "wrong"
    if not named:
        return "silent"
    return "right" if named == {truth.rank} else "wrong"


def _mover(truth: Truth, kind: Kind, statement: Statement) -> Mark:
    marks = {_of_sentence(truth, kind, text) for text in (statement.sentence, statement.why)}
    if "wrong" in marks:
        return "wrong"
    if "right" in marks or kind.is_own_origin or not kind.origin:
        return "right"
    return "silent"


def _of_sentence(truth: Truth, kind: Kind, text: str) -> Mark:
    match = _MOVED.search(text)
    if match is None or "Not enough was measured" in match["what"]:
        return "silent"
    what = match["what"]
    expected = {
        "layer": (f"layer `{truth.layer}`",),
        "rank": (f"rank {truth.rank}",),
        "data": ("loss of all ranks", "data: ", "data of "),
        "lr": ("learning rate",),
        "loader": ("data wait",),
        "loss": ("loss",),
        "": (),
    }[kind.origin]
    steps = [int(number.replace(",", "")) for number in _STEP.findall(what)]
    is_near = bool(steps) and abs(steps[0] - truth.step) <= kind.tolerance
    return "right" if is_near and any(words in what for words in expected) else "wrong"


def _end(kind: Kind, statement: Statement) -> Mark:
    if kind.is_lasting:
        return "wrong" if "Resolved" in statement.state else "right"
    return "wrong" if "Open:" in statement.state else "right"


__all__ = ["FIELDS", "SILENT", "Mark", "Score", "incident_of", "num_invented", "score"]
