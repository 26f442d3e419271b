"""Custom alerts: rules over one series, and alerts that a training loop raises by name.

A rule is a condition on a series that a rank records::

    [[rules]]
    name = "reward hacked"
    when = "mean(reward, 50) > 0.9"
    for = 20
    level = "page"

Both end as findings of the kind ``user_alert`` whose cause is the alert's name: they are then
handled like the alerts of Vitals. Pure: reads no clock, and sees one value after the other.
"""

import difflib
import math
import operator
import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from trainvitals.detect.reporter import make_finding
from trainvitals.errors import ConfigError, UsageError
from trainvitals.records import Finding, Severity
from trainvitals.stateful import Stateful

KIND = "user_alert"
MAX_NAME = 80
"""Maximum characters of an alert's name."""
MAX_NAMES = 100
"""Maximum number of names that one rank may raise: each is a separate alert."""
MAX_MESSAGE = 300
"""Maximum characters of an alert's message."""
MAX_RULES = 64
MAX_WINDOW = 1_000
"""Maximum values in a rule's window: all are read again with each new one."""
MAX_FOR = 1_000_000
RENEW_STEPS = 50
"""Steps between two findings of an alert that holds: a point alert that is not renewed for 100
healthy steps is over, so that no end must be reported, not even by a process that was killed."""
_END_STEPS = 10
"""The same at its end: the end is reported, unless the alert flips frequently."""

SEVERITIES: tuple[str, ...] = get_args(Severity)
_WORDS_OF_LEVELS = "page: someone must act now; notify: without urgency; log: only stored"


# ------------------------------------------------------------------------------- the condition

FUNCTIONS: Mapping[str, str] = {
    "last": "the newest value",
    "mean": "the mean of the last WINDOW values",
    "min": "the smallest of the last WINDOW values",
    "max": "the largest of the last WINDOW values",
    "rate": "the change per step over the last WINDOW values",
    "nonfinite": "how many of the last WINDOW values are NaN or infinite",
}
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_WORDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
GRAMMAR = "FUNCTION(SERIES, WINDOW) OPERATOR NUMBER, or SERIES OPERATOR NUMBER"
_EXAMPLE = 'as in when = "mean(reward, 50) > 0.9" or when = "grad_norm > 100"'

_SERIES = r"[A-Za-z_][\w./-]*"
_CONDITION = re.compile(
    rf"\s*(?:(?P<function>[A-Za-z_]\w*)\s*\(\s*(?P<of>{_SERIES})\s*(?:,\s*(?P<window>[^\s),]+)\s*)?\)"
    rf"|(?P<series>{_SERIES}))\s*(?P<operator>[<>=!~]+)\s*(?P<limit>\S+)\s*",
    re.ASCII,
)


class RuleCondition(NamedTuple):
    """The parts of a rule's condition."""

    function: str
    series: str
    """A column of the steps, or a scalar of the loop."""
    window: int
    operator: str
    limit: float

    @property
    def measure(self) -> str:
        """Return the measure that a custom rule compares with its limit, as written."""
        if self.function == "last":
            return self.series
        return f"{self.function}({self.series}, {self.window})"


def parse_condition(text: str) -> RuleCondition:
    """Return the condition of a custom rule from its text.

    Raises:
        ValueError: it is not a condition; the message contains the expected form.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"it must be {GRAMMAR}")
    function = match["function"] or "last"
    if function not in FUNCTIONS:
        raise ValueError(f"{function!r} must be one of {', '.join(FUNCTIONS)}")
    if match["operator"] not in OPERATORS:
        raise ValueError(f"{match['operator']!r} must be one of {', '.join(OPERATORS)}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"{match['limit']!r} must be a number")
    series = (match["of"] or match["series"]).removeprefix("steps.").removeprefix("scalars.")
    if series.startswith(("gpu.", "node.", "process.", "layers.")):
        raise ValueError(
            f"{series!r} is not of the training loop: a series must be a column of the steps, such "
            "as loss, or a scalar that the loop records"
        )
    return RuleCondition(
        function, series, _parse_window(function, match["window"]), match["operator"], limit
    )


def _parse_window(function: str, text: str | None) -> int:
    """Return the window of a custom rule's function, as a number of values."""
    if function == "last":
        if text is not None:
            raise ValueError("last(...) takes no window")
        return 1
    least = 2 if function == "rate" else 1
    if text is None or not text.isdecimal() or not least <= int(text) <= MAX_WINDOW:
        shown = "it has none" if text is None else f"it is {text}"
        raise ValueError(
            f"{function}(...) needs a window of {least} to {MAX_WINDOW} values; {shown}"
        )
    return int(text)


# ------------------------------------------------------------------------------------- settings


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of the settings file: an alert that holds while a condition on one series does."""

    name: str
    """The alert's name; it must be unique."""
    when: str
    """The condition."""
    for_steps: int = msgspec.field(default=0, name="for")
    """Consecutive steps the condition must hold before the alert fires."""
    level: Severity = "notify"
    """Severity: `page`, `notify` or `log`."""

    def __post_init__(self) -> None:
        """Refuse an invalid rule.

        Raises:
            ConfigError: with the rule, the key, its value and the expectation.
        """
        what = f"rule {self.name!r}"
        if wrong := alert_name_error(self.name):
            raise ConfigError(f"{what}: {wrong}")
        if not isinstance(self.when, str):
            raise ConfigError(f"{what}: when is {self.when!r}; it must be text", hint=_EXAMPLE)
        try:
            parse_condition(self.when)
        except ValueError as error:
            raise ConfigError(f"{what}: when is {self.when!r}; {error}", hint=_EXAMPLE) from None
        is_number = isinstance(self.for_steps, int) and not isinstance(self.for_steps, bool)
        if not is_number or not 0 <= self.for_steps <= MAX_FOR:
            raise ConfigError(
                f"{what}: for is {self.for_steps!r}; it must be a whole number of steps, 0 to "
                f"{MAX_FOR}"
            )
        if wrong := alert_level_error(self.level):
            raise ConfigError(f"{what}: {wrong}", hint=_WORDS_OF_LEVELS)


def alert_name_error(name: object) -> str:
    """Return why the name of a custom rule or alert is invalid; empty if it is valid."""
    if isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) <= MAX_NAME:
        return ""
    shown = repr(name) if len(repr(name)) <= MAX_NAME else f"{repr(name)[:40]}..."
    return f"the name is {shown}; it must be text of 1 to {MAX_NAME} printable characters"


def alert_level_error(level: object) -> str:
    """Return why the level of a custom rule or alert is invalid; empty if it is valid."""
    return "" if level in SEVERITIES else f"level is {level!r}; it must be page, notify or log"


def refuse_alert(name: object, level: object) -> None:
    """Refuse an invalid custom alert, which the training loop raises by name.

    Raises:
        UsageError: its name or its level is invalid.
    """
    if error := alert_name_error(name):
        hint = "name it in a few words; what changes belongs in message= or value="
        raise UsageError(f"monitor.alert(): {error}", hint=hint)
    if error := alert_level_error(level):
        raise UsageError(f"monitor.alert({name!r}): {error}", hint=_WORDS_OF_LEVELS)


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Return the custom rules of a settings file, which is valid TOML.

    Raises:
        ConfigError: one of them is invalid; the message identifies it.
    """
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    for key in tree:
        if key != "rules" and difflib.get_close_matches(key, ["rules"], cutoff=0.8):
            raise ConfigError(f"[[{key}]] ({path}): there is no such table", hint="it is [[rules]]")
    tables = tree.get("rules", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"rules in {path} is {tables!r}; each rule must be a table [[rules]]")
    if len(tables) > MAX_RULES:
        raise ConfigError(f"{path} has {len(tables)} rules; at most {MAX_RULES} are allowed")
    rules: list[Rule] = []
    for number, table in enumerate(tables, start=1):
        try:
            rules.append(_parse_rule(table, number))
        except ConfigError as error:
            raise ConfigError(f"{error.text} ({path})", hint=error.hint) from error
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"rule {name!r}: {names.count(name)} rules have that name ({path})",
                hint="give each rule a name of its own",
            )
    return tuple(rules)


_KEYS = ("name", "when", "for", "level")


def _parse_rule(table: Mapping[str, Any], number: int) -> Rule:
    """Return a custom rule from its table in the settings file, or refuse it."""
    what = f"rule {table.get('name', f'number {number}')!r}"
    for key in table:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"a rule has: {', '.join(_KEYS)}"
            raise ConfigError(f"{what}: there is no key {key!r}", hint=hint)
    for key in ("name", "when"):
        if key not in table:
            raise ConfigError(f"{what} has no {key}", hint=_EXAMPLE)
    values = {"for_steps" if key == "for" else key: value for key, value in table.items()}
    return Rule(**values)


# -------------------------------------------------------------------------------------- judging


class WatchedRule(Stateful):
    """One rule over the values of its series. ``update`` returns whether it holds.

    A NaN or infinite value is left out, except by ``nonfinite``, and the previous result stays:
    unknown is not over. A rule judges once its window is full; ``nonfinite`` judges from the first
    value on.
    """

    STATE = ("_values", "_steps", "_since", "holds")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.condition = parse_condition(rule.when)
        self._measure = _MEASURES[self.condition.function]
        self._compare = OPERATORS[self.condition.operator]
        self.reset()

    def reset(self) -> None:
        """Discard every value of the custom rule's series."""
        self._values: deque[float] = deque(maxlen=self.condition.window)
        self._steps: deque[int] = deque(maxlen=self.condition.window)
        self._since = -1
        """First step at which the condition is true; -1 if it is not."""
        self.holds = False
        self.value = math.nan
        """The latest measure."""

    def update(self, step: int, value: float) -> bool:
        """Add one value of the series; return whether the custom rule holds.

        Args:
            step: step of the value; steps never decrease.
            value: any number.
        """
        is_finite = math.isfinite(value)
        if self.condition.function == "nonfinite":
            self._values.append(0.0 if is_finite else 1.0)
        elif not is_finite:
            return self.holds
        else:
            self._values.append(value)
            if self.condition.function == "rate":
                self._steps.append(step)
            if len(self._values) < self.condition.window:
                return self.holds
        self.value = self._measure(self._values, self._steps)
        if not self._compare(self.value, self.condition.limit):
            self._since, self.holds = -1, False
            return False
        if self._since < 0:
            self._since = step
        self.holds = step - self._since >= self.rule.for_steps
        return self.holds

    def finding(self, step: int, rank: int) -> Finding:
        """Return the finding about a custom rule that holds."""
        condition = self.condition
        since = f" since step {self._since}" if self._since < step else ""
        reason = (
            f"{self.rule.name}: {condition.measure} is {self.value:.4g}, "
            f"{_WORDS[condition.operator]} {condition.limit:g}{since}"
        )
        return make_finding(
            "rule", step, reason, kind=KIND, rank=rank, value=self.value, limit=condition.limit,
            onset_step=self._since, cause=self.rule.name, severity=self.rule.level,
        )  # fmt: skip


def _mean(values: Sequence[float], _steps: Sequence[int]) -> float:
    """Return the mean of a series' window, for the custom rules' function ``mean``."""
    return sum(values) / len(values)


def _change_per_step(values: Sequence[float], steps: Sequence[int]) -> float:
    """Return a series' change per step, for the custom rules' function ``rate``."""
    # Values of one step, such as micro-batches, have no rate; NaN is above and below nothing.
    steps_between = steps[-1] - steps[0]
    return (values[-1] - values[0]) / steps_between if steps_between > 0 else math.nan


_MEASURES: Mapping[str, Callable[[deque[float], deque[int]], float]] = {
    "last": lambda values, _: values[-1],
    "mean": _mean,
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "rate": _change_per_step,
    "nonfinite": lambda values, _: sum(values),
}


class RuleSet(Stateful):
    """All rules of a run in one rank. Its state goes into snapshots, so windows go back with it."""

    STATE = ("_watched",)

    def __init__(self, rules: Sequence[Rule]) -> None:
        # By the condition too: a state from before a change of the file belongs to another rule.
        self._watched = {f"{rule.name}: {rule.when}": WatchedRule(rule) for rule in rules}
        self.by_series: dict[str, list[WatchedRule]] = {}
        for watched in self._watched.values():
            self.by_series.setdefault(watched.condition.series, []).append(watched)


# -------------------------------------------------------------------------------- while it holds


class UserAlerts:
    """Active custom alerts of one rank, and the times at which findings are due.

    An alert that holds is reported at its start and every ``RENEW_STEPS`` steps. The first level
    of a name stays its level.
    """

    def __init__(self) -> None:
        self._levels: dict[str, Severity] = {}
        self._told: dict[str, int] = {}
        self.held: dict[str, Finding] = {}
        """By name, the latest finding of each alert that holds."""

    def record_breach(self, finding: Finding, *, holds: bool) -> Finding | None:
        """Record that a custom alert's condition is true; return the finding to report, if any.

        Args:
            finding: with the step and the alert's name as its cause.
            holds: whether it is true until ``end``; otherwise it is an event of that step only.

        Raises:
            UsageError: the rank has raised the maximum number of names.
        """
        name = finding.cause
        if name not in self._levels and len(self._levels) >= MAX_NAMES:
            raise UsageError(
                f"alert {name!r} was not raised: a run can have at most {MAX_NAMES} alert names",
                hint="put what changes into message= or value=, not into the name",
            )
        finding = replace(
            finding, severity=self._levels.setdefault(name, finding.severity or "notify")
        )
        if holds:
            earlier = self.held.get(name)
            if earlier is not None:
                finding = replace(finding, onset_step=earlier.onset_step)
            self.held[name] = finding
        return finding if self._is_due(name, finding.step) else None

    def end(self, name: str) -> Finding | None:
        """Record that a custom alert's condition ended; return its unreported finding."""
        last = self.held.pop(name, None)
        return last if last is not None and self._is_due(name, last.step, _END_STEPS) else None

    def due(self, step: int) -> Iterator[Finding]:
        """Yield findings of custom alerts that still hold and need another report."""
        for name, finding in list(self.held.items()):
            if self._is_due(name, step):
                renewed = self.held[name] = replace(finding, step=step)
                yield renewed

    def _is_due(self, name: str, step: int, pause: int = RENEW_STEPS) -> bool:
        """Return whether a custom alert may be reported again; record the report."""
        reported_step = self._told.get(name)
        # Rows come back a step or two later than the loop's own scalars and calls.
        if reported_step is not None and abs(step - reported_step) < pause:
            return False
        self._told[name] = step
        return True

    def roll_back(self, step: int) -> None:
        """Discard custom alerts of ``step`` and later ones: the run continues from there."""
        self.held.clear()
        self._told = {
            name: reported_step
            for name, reported_step in self._told.items()
            if reported_step < step
        }
