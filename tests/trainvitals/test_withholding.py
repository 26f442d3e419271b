"""Which outliers are withheld, by the device's rule and the ladder together, and within what."""

from trainvitals.detect.outliers import Limits
from trainvitals.policy import LadderConfig, LadderState, decide
from trainvitals.policy.state import DeviceRule, is_outlier, limits_in_force, withholding
from trainvitals.records import Decision, Finding, StepRecord

USUAL = Limits(loss=6.0)
CONFIG = LadderConfig()


class Loop:
    """Steps whose losses are given, judged as a rank judges them; never a probe."""

    def __init__(self, *, clips: bool) -> None:
        self.clips, self.step = clips, 0
        self.state, self.device = LadderState(), DeviceRule()
        self.withheld: list[int] = []
        self.decisions: list[Decision] = []
        self.told: list[str] = []

    def feed(self, *losses: float) -> "Loop":
        for loss in losses:
            words = withholding(self.state, CONFIG, clips=self.clips)
            limits = limits_in_force(USUAL, self.state, CONFIG)
            given = StepRecord(step=self.step, attempt=1, loss=loss, clips=self.clips)
            record, self.device = self.device.judge(given, limits, words, acts=True)
            self._decide(record)
            self.step += 1
        return self

    def _decide(self, record: StepRecord) -> None:
        spike = Finding(
            kind="spike",
            level="actionable",
            step=record.step,
            detector="outlier",
            reason="loss is high",
        )
        verdict = decide(
            self.state,
            [spike] if is_outlier(record) else [],
            record=record,
            decided_at_step=record.step,
            usual=USUAL,
        )
        self.state = verdict.state
        self.told += [finding.kind for finding in verdict.findings]
        self.withheld += [record.step] if record.withheld else []
        self.decisions += [] if verdict.decision is None else [verdict.decision]

    def rules(self) -> dict[str, int]:
        """Return the last step that each rule decided."""
        return {decision.rule: decision.step for decision in self.decisions}


def test_the_first_in_a_row_is_left_to_the_clip_and_its_followers_are_withheld() -> None:
    loop = Loop(clips=True).feed(2.0, 9.0, 2.0, 9.0, 9.0, 9.0, 2.0)
    assert [4, 5] == loop.withheld
    assert [4, 5] == [decision.step for decision in loop.decisions]


def test_after_32_in_a_row_their_level_is_accepted_and_nothing_up_to_it_is_withheld_again() -> None:
    loop = Loop(clips=True).feed(2.0, *[9.0] * 60, 2.0, *[9.0] * 5)
    assert list(range(2, 34)) == loop.withheld
    assert 34 == loop.rules()["level_accepted"]


def test_what_is_above_an_accepted_level_is_an_outlier_as_ever() -> None:
    loop = Loop(clips=True).feed(2.0, *[9.0] * 40, 2.0)
    before = len(loop.withheld)
    assert before == len(loop.feed(9.0, 9.0, 2.0).withheld)
    loop.feed(*[2.0] * 1000)  # the window of those that were withheld is over
    assert before + 1 == len(loop.feed(12.0, 12.0).withheld)


def test_a_non_finite_step_within_a_row_neither_counts_nor_ends_it() -> None:
    rule, words = DeviceRule(in_row=True), withholding(LadderState(), CONFIG, clips=True)
    nan = StepRecord(step=1, attempt=1, loss=float("nan"), clips=True)
    record, after = rule.judge(nan, USUAL, words, acts=True)
    assert (False, True, True) == (record.withheld, record.skipped, after.in_row)


def test_without_a_clip_the_first_is_withheld_too_but_four_times_in_1000_steps_at_most() -> None:
    loop = Loop(clips=False).feed(2.0, *[9.0, 2.0] * 50)
    assert [1, 3, 5, 7] == loop.withheld
    loop.feed(*[2.0] * 1000).feed(9.0)
    assert 5 == len(loop.withheld)


def test_followers_are_withheld_without_a_clip_when_no_first_is_any_more() -> None:
    loop = Loop(clips=False).feed(2.0, *[9.0, 2.0] * 10, 9.0, 9.0)
    assert [1, 3, 5, 7, 22] == loop.withheld


def test_without_a_clip_short_groups_that_come_again_are_a_level_that_passes() -> None:
    loop = Loop(clips=False).feed(*([9.0] + [2.0] * 19) * 10)
    assert [0, 20, 40, 60] == loop.withheld
    assert 100 == loop.rules()["recurring_level"]
    assert 1 == [decision.rule for decision in loop.decisions].count("recurring_level")


def test_with_a_clip_there_is_no_such_level() -> None:
    loop = Loop(clips=True).feed(*([9.0, 9.0] + [2.0] * 18) * 10)
    assert [20 * i + 1 for i in range(10)] == loop.withheld
    assert "recurring_level" not in loop.rules()


def test_never_more_than_32_in_1000_steps_are_withheld_and_that_is_told_once() -> None:
    loop = Loop(clips=True).feed(*[9.0, 9.0, 2.0] * 60)
    assert [3 * i + 1 for i in range(32)] == loop.withheld
    assert 1 == loop.told.count("withholding_spent")
