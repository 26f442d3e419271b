import math
from dataclasses import dataclass

import msgspec

from trainvitals.jsonable import from_json, jsonable, to_json
from trainvitals.records import Decision
from trainvitals.views import DecisionView

DECISION = Decision(
    ledger_seq=1, action="skip_step", step=4, decided_at_step=5, attempt=1,
    reason="loss is nan", rule="skip", cause="data", value=math.nan, limit=2.0,
    evidence={"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "limit": 2.0},
)  # fmt: skip


def test_numbers_that_are_not_finite_travel_as_words_and_come_back_as_numbers():
    view = DecisionView(run_id="nan", time_unix_ns=3, decision=DECISION)
    raw = to_json((view, view))
    said = msgspec.json.decode(raw)[1]["decision"]
    assert ("nan", 2.0) == (said["value"], said["limit"])
    assert {"loss": "nan", "grad_norm": "inf", "low": "-inf", "limit": 2.0} == said["evidence"]
    back = from_json(raw, tuple[DecisionView, ...])
    assert repr((view, view)) == repr(back), "a text that reads nan stays a text"


def test_what_was_not_measured_stays_null_and_a_finite_body_is_not_copied():
    quiet = msgspec.structs.replace(DECISION, value=None, evidence={"loss": 1.0})
    assert jsonable(quiet) is quiet
    assert None is from_json(to_json(quiet), Decision).value


@dataclass(frozen=True, slots=True)
class Facts:
    decision: Decision
    losses: tuple[float, ...]


def test_a_number_that_is_not_finite_is_a_word_inside_a_dataclass_as_well():
    (facts,) = msgspec.json.decode(to_json((Facts(DECISION, (1.0,)),)))
    assert ("nan", "inf") == (
        facts["decision"]["value"],
        facts["decision"]["evidence"]["grad_norm"],
    )
    assert [1.0] == facts["losses"]
