"""Rules on one series, and how long an alert of a person's own holds."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from trainvitals.alerting import alerts_for_finding
from trainvitals.detect.user_alerts import (
    MAX_NAMES,
    RENEW_STEPS,
    Rule,
    RuleCondition,
    RuleSet,
    UserAlerts,
    WatchedRule,
    load_rules,
    parse_condition,
    refuse_alert,
)
from trainvitals.errors import ConfigError, UsageError
from trainvitals.policy import load_judge_config
from trainvitals.records import Finding

NAN, INF = math.nan, math.inf

# ---------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss > 2", RuleCondition("last", "loss", 1, ">", 2.0)),
        ("last(loss) >= -1e3", RuleCondition("last", "loss", 1, ">=", -1000.0)),
        ("  mean( reward ,50 )>0.9 ", RuleCondition("mean", "reward", 50, ">", 0.9)),
        ("min(eval/loss, 1) < .5", RuleCondition("min", "eval/loss", 1, "<", 0.5)),
        ("max(steps.grad_norm, 1000) <= 1", RuleCondition("max", "grad_norm", 1000, "<=", 1.0)),
        ("rate(scalars.kl.mean, 2) > 0", RuleCondition("rate", "kl.mean", 2, ">", 0.0)),
        ("nonfinite(loss, 100) > 3", RuleCondition("nonfinite", "loss", 100, ">", 3.0)),
        ("max > 1", RuleCondition("last", "max", 1, ">", 1.0)),
    ],
)
def test_a_condition_is_a_function_of_one_series_against_a_number(text, expected):
    assert expected == parse_condition(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it must be FUNCTION"),
        ("loss", "it must be FUNCTION"),
        ("0.9 < reward", "it must be FUNCTION"),
        ("loss > grad_norm", "'grad_norm' must be a number"),
        ("loss > nan", "'nan' must be a number"),
        ("loss > inf", "'inf' must be a number"),
        ("loss == 1", "'==' must be one of >=, <=, >, <"),
        ("loss > 1 and reward < 2", "it must be FUNCTION"),
        ("mean(loss) > 1", "needs a window of 1 to 1000 values; it has none"),
        ("mean(loss, 0) > 1", "it is 0"),
        ("mean(loss, 1001) > 1", "it is 1001"),
        ("mean(loss, x) > 1", "it is x"),
        ("rate(loss, 1) > 1", "a window of 2 to 1000 values"),
        ("last(loss, 5) > 1", "takes no window"),
        ("avg(loss, 5) > 1", "'avg' must be one of last, mean"),
        ("gpu.temperature_celsius > 90", "is not of the training loop"),
        ("__import__('os').system('x') > 1", "it must be FUNCTION"),
    ],
)
def test_what_is_no_condition_says_what_was_expected(text, expected):
    with pytest.raises(ValueError) as caught:
        parse_condition(text)
    assert expected in str(caught.value)


# ------------------------------------------------------------------------------------- settings


def write(folder: Path, text: str) -> Path:
    path = folder / "vitals.toml"
    path.write_text(text)
    return path


GOOD = """
[ladder]
margin = 30

[[rules]]
name = "reward hacked"
when = "mean(reward, 50) > 0.9"
for = 20
level = "page"

[[rules]]
name = "loss is high"
when = "loss > 10"
"""


def test_rules_stand_in_the_settings_file_beside_the_sections(tmp_path):
    config = load_judge_config({"VITALS_CONFIG": str(write(tmp_path, GOOD))})
    first, second = config.rules
    assert ("reward hacked", 20, "page") == (first.name, first.for_steps, first.level)
    assert ("loss is high", 0, "notify") == (second.name, second.for_steps, second.level)
    assert 30 == config.ladder.margin
    assert () == load_judge_config({}).rules


def test_the_rules_of_the_guide_are_rules(tmp_path):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "alerts.md"
    text = guide.read_text().partition("<!-- test: rules -->\n```toml\n")[2].partition("```")[0]
    rules = load_rules(write(tmp_path, text))
    assert ["reward hacked", "loss is NaN too often"] == [rule.name for rule in rules]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('when = "loss > 1"', "rule 'number 1' has no name"),
        ('name = "a"', "rule 'a' has no when"),
        ('name = ""\nwhen = "loss > 1"', "the name is ''; it must be text of 1 to 80"),
        ('name = "a\\nb"\nwhen = "loss > 1"', "printable"),
        (f'name = "{"x" * 81}"\nwhen = "loss > 1"', "1 to 80"),
        ("name = 3\nwhen = 'loss > 1'", "the name is 3"),
        ('name = "a"\nwhen = 3', "rule 'a': when is 3; it must be text"),
        ('name = "a"\nwhen = "loss"', "rule 'a': when is 'loss'; it must be FUNCTION"),
        ('name = "a"\nwhen = "loss > 1"\nfor = -1', "rule 'a': for is -1; it must be a whole"),
        ('name = "a"\nwhen = "loss > 1"\nfor = "20s"', "for is '20s'"),
        ('name = "a"\nwhen = "loss > 1"\nfor = true', "for is True"),
        ('name = "a"\nwhen = "loss > 1"\nlevel = "warning"', "rule 'a': level is 'warning'; it"),
        ('name = "a"\nwhen = "loss > 1"\nlevel = ["page"]', "rule 'a': level is ['page']"),
        ('name = "a"\nwhen = "loss > 1"\nfro = 2', "rule 'a': there is no key 'fro'"),
        ('name = "a"\nwhen = "loss > 1"\n[[rules]]\nname="a"\nwhen="loss > 2"', "2 rules have"),
    ],
)
def test_a_wrong_rule_stops_the_start_and_is_named(tmp_path, table, expected):
    path = write(tmp_path, f"[[rules]]\n{table}\n")
    with pytest.raises(ConfigError) as caught:
        load_judge_config({"VITALS_CONFIG": str(path)})
    assert expected in caught.value.text
    assert str(path) in caught.value.text


def test_a_table_of_almost_that_name_is_not_passed_over(tmp_path):
    with pytest.raises(ConfigError, match="there is no such table"):
        load_rules(write(tmp_path, '[[rule]]\nname = "a"\nwhen = "loss > 1"\n'))
    with pytest.raises(ConfigError, match="each rule must be a table"):
        load_rules(write(tmp_path, '[rules]\nname = "a"\n'))


# -------------------------------------------------------------------------------------- judging


def holds(when: str, values, *, hold: int = 0, steps=None) -> list[bool]:
    watched = WatchedRule(Rule(name="a", when=when, for_steps=hold))
    steps = range(len(values)) if steps is None else steps
    return [watched.update(step, value) for step, value in zip(steps, values, strict=True)]


@pytest.mark.parametrize(
    ("when", "values", "expected"),
    [
        ("x > 1", [1, 2, 1, 2], "0101"),
        ("x >= 1", [1, 2, 0, 2], "1101"),
        ("x < 1", [1, 0, 1], "010"),
        ("x <= 1", [1, 2], "10"),
        ("mean(x, 3) > 1", [9, 9, 0, 0, 0], "00110"),
        ("min(x, 2) > 1", [2, 2, 0, 2, 2], "01001"),
        ("max(x, 2) > 1", [2, 0, 0, 2], "0101"),
        ("rate(x, 2) > 1", [0, 2, 3, 9], "0101"),
        ("nonfinite(x, 3) >= 2", [NAN, 1, INF, 1, 1], "00100"),
    ],
)
def test_a_rule_judges_once_its_window_is_full(when, values, expected):
    assert expected == "".join(str(int(h)) for h in holds(when, values))


def test_a_rate_is_per_step_and_not_per_value():
    assert [False, True] == holds("rate(x, 2) > 0.1", [0.0, 2.0], steps=[0, 10])
    assert [False, False] == holds("rate(x, 2) > 0.1", [0.0, 2.0], steps=[7, 7])


@pytest.mark.parametrize("lost", [NAN, INF, -INF])
@pytest.mark.parametrize("when", ["x > 1", "max(x, 1) > 1", "mean(x, 1) > 1"])
def test_a_value_that_is_not_finite_is_left_out_and_changes_nothing(when, lost):
    assert [True, True, False, False] == holds(when, [2.0, lost, 0.0, lost])


def test_a_condition_must_hold_for_so_many_steps_without_a_break():
    assert "000111" == "".join(str(int(h)) for h in holds("x > 1", [2] * 6, hold=3))
    assert "0000" == "".join(str(int(h)) for h in holds("x > 1", [2, 2, 0, 2], hold=2))
    # Steps and not values: one that is recorded at every tenth step alone holds all the same.
    assert [False, False, True] == holds("x > 1", [2, 2, 2], hold=20, steps=[0, 10, 20])


numbers = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30)


@settings(max_examples=examples(200))
@given(
    before=numbers,
    after=numbers,
    when=st.sampled_from(
        ["x > 1", "mean(x, 5) > 0", "rate(x, 3) < 0", "nonfinite(x, 4) > 1", "max(x, 7) > 9"]
    ),
    hold=st.integers(0, 4),
)
def test_windows_go_back_with_a_state_that_is_restored(before, after, when, hold):
    rules = [Rule(name="a", when=when, for_steps=hold)]
    kept, restored = RuleSet(rules), RuleSet(rules)
    ((one,),) = kept.by_series.values()
    for step, value in enumerate(before):
        one.update(step, value)
    state = json.loads(json.dumps(kept.state_dict(), allow_nan=False))
    ((other,),) = restored.by_series.values()
    for step, value in enumerate(reversed(after)):  # the branch that is left
        other.update(step, value)
    other.reset()
    restored.load_state_dict(state)
    for step, value in enumerate(after, start=len(before)):
        assert one.update(step, value) == other.update(step, value)
    assert kept.state_dict() == restored.state_dict()


def test_a_state_of_before_a_rule_was_changed_is_not_taken_for_its_own():
    old = RuleSet([Rule(name="a", when="nonfinite(x, 5) > 1")])
    old.by_series["x"][0].update(0, NAN)
    new = RuleSet([Rule(name="a", when="mean(x, 1) > 0.5")])
    new.load_state_dict(old.state_dict())
    assert not new.by_series["x"][0].update(1, 0.1)


# -------------------------------------------------------------------------------- while it holds


def finding(name="a", step=0, severity="notify") -> Finding:
    return Finding(
        kind="user_alert", level="advisory", step=step, detector="loop", reason=name, cause=name,
        onset_step=step, severity=severity,
    )  # fmt: skip


def steps_told(alerts: UserAlerts, conditions) -> list[int]:
    told = []
    for step, is_true in conditions:
        said = alerts.record_breach(finding(step=step), holds=True) if is_true else alerts.end("a")
        told += [f.step for f in (said, *alerts.due(step)) if f is not None]
    return told


def test_what_holds_is_told_at_its_beginning_and_renewed_before_it_would_resolve():
    told = steps_told(UserAlerts(), [(step, True) for step in range(3 * RENEW_STEPS)])
    assert [0, RENEW_STEPS, 2 * RENEW_STEPS] == told


def test_what_is_said_now_and_then_holds_until_it_is_said_to_be_over():
    alerts = UserAlerts()
    alerts.record_breach(finding(step=0), holds=True)
    renewed = [f.step for step in range(1, 201) for f in alerts.due(step)]
    assert [50, 100, 150, 200] == renewed
    alerts.end("a")
    assert [] == [f for step in range(201, 500) for f in alerts.due(step)]


def test_the_end_is_told_where_it_was():
    assert [0, 29] == steps_told(UserAlerts(), [(step, step < 30) for step in range(100)])


def test_what_comes_and_goes_all_the_time_is_no_flood():
    told = steps_told(UserAlerts(), [(step, step % 2 == 0) for step in range(1_000)])
    assert len(told) <= 1_000 / 10 + 1


def test_an_event_ends_by_itself():
    alerts = UserAlerts()
    assert alerts.record_breach(finding(step=5), holds=False) is not None
    assert [] == [f for step in range(6, 500) for f in alerts.due(step)]


def test_the_onset_is_where_it_began_to_hold():
    alerts = UserAlerts()
    alerts.record_breach(finding(step=7), holds=True)
    alerts.record_breach(finding(step=20), holds=True)
    (renewed,) = alerts.due(80)
    assert (7, 80) == (renewed.onset_step, renewed.step)


def test_a_branch_that_was_left_is_forgotten():
    alerts = UserAlerts()
    assert alerts.record_breach(finding(step=40), holds=True) is not None
    alerts.roll_back(30)
    assert [] == list(alerts.due(200))
    assert alerts.record_breach(finding(step=41), holds=True) is not None


def test_names_are_bounded_and_the_first_level_of_a_name_stays():
    alerts = UserAlerts()
    for i in range(MAX_NAMES):
        alerts.record_breach(finding(f"a {i}"), holds=True)
    with pytest.raises(UsageError, match="at most 100 alert names") as caught:
        alerts.record_breach(finding("one more"), holds=True)
    assert "message=" in (caught.value.hint or "")
    said = alerts.record_breach(finding("a 0", step=100, severity="page"), holds=True)
    assert said is not None
    assert "notify" == said.severity


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (3, "notify"),
        ("", "notify"),
        ("x" * 81, "notify"),
        ("a\n", "notify"),
        ("a", "info"),
        ("a", 3),
    ],
)
def test_an_alert_that_cannot_be_raised_is_refused(name, level):
    with pytest.raises(UsageError, match=r"monitor.alert\("):
        refuse_alert(name, level)
    refuse_alert("a", "page")


@pytest.mark.parametrize("severity", ["page", "notify", "log"])
def test_a_finding_becomes_an_alert_of_its_level(severity):
    (alert,) = alerts_for_finding(finding("mine", 3, severity), run_id="run", loss_kind="rl")
    assert ("UserAlert", severity, True) == (alert.name, alert.severity, alert.point)
    assert {"run": "run", "cause": "mine"} == alert.labels
