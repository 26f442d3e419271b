"""Finds runs by names and fields: ``gpt project:demo health:critical step>1000``. Pure."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from trainvitals.errors import UsageError
from trainvitals.views import Health, RunState, RunSummary

Config = Mapping[str, Any]
Configs = Mapping[str, Config]
"""By run."""

CONFIG = "config."
_TEXTS: dict[str, Callable[[RunSummary], str]] = {
    "name": lambda run: run.name,
    "project": lambda run: run.project,
    "user": lambda run: run.user,
    "id": lambda run: run.run_id,
    "mode": lambda run: run.mode,
    "tag": lambda run: " ".join(run.tags),
}
_CHOICES: dict[str, tuple[Callable[[RunSummary], str], tuple[str, ...]]] = {
    "state": (lambda run: run.state, get_args(RunState)),
    "health": (lambda run: run.health, get_args(Health)),
}
_NUMBERS: dict[str, Callable[[RunSummary], float | None]] = {
    "step": lambda run: run.last_step,
    "loss": lambda run: run.loss,
    "grad_norm": lambda run: run.grad_norm,
    "skips": lambda run: run.num_skips,
    "rollbacks": lambda run: run.num_rollbacks,
    "alerts": lambda run: run.num_firing_alerts,
    "ranks": lambda run: run.world_size,
}
FIELDS = (*_TEXTS, *_CHOICES, *_NUMBERS)
GROUPS = ("project", "tag", "user", "mode", "state", "health")
"""Keys to group runs by, in addition to ``config.KEY``."""
HELP = (
    "Words match name, project, user, tag and id. Fields: "
    + ", ".join(f"`{name}`" for name in FIELDS)
    + " and `config.KEY`, as in `project:demo user:ada health:critical step>1000 config.lr<=1e-3`."
    ' A value with spaces, or a word with a colon, goes in quotes: `name:"my run"`.'
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    ":": operator.eq,
}
_TERM = re.compile(r'(?:[^\s"]|"[^"]*")+')
_FIELD = re.compile(r"([A-Za-z_][\w./-]*?)(>=|<=|>|<|=|:)(.*)", re.DOTALL)

RunPredicate = Callable[[RunSummary, Config], bool]


@dataclass(frozen=True, slots=True)
class RunSearch:
    """A query: all tests must be true."""

    tests: tuple[RunPredicate, ...]
    needs_configs: bool
    """Whether a run's configuration matters."""

    def matches(self, run: RunSummary, config: Config) -> bool:
        """Return whether a run matches the text in the dashboard's search box."""
        return all(test(run, config) for test in self.tests)


def parse_run_search(text: str) -> RunSearch:
    """Parse what a user typed in the dashboard's search box for runs.

    Raises:
        UsageError: an unknown field, a value that it cannot have, or a quote without its end.
    """
    if text.count('"') % 2:
        raise UsageError(f"a quote has no end in {text!r}", hint='close it: name:"my run"')
    terms = _TERM.findall(text)
    fields = [_FIELD.fullmatch(term) for term in terms]
    return RunSearch(
        tests=tuple(
            _word_predicate(term) if field is None else _field_predicate(*field.groups())
            for term, field in zip(terms, fields, strict=True)
        ),
        needs_configs=any(field is not None and field[1].startswith(CONFIG) for field in fields),
    )


def _word_predicate(term: str) -> RunPredicate:
    """Return the test of a word in the dashboard's run search: it is in the name, tags etc."""
    needle = term.replace('"', "").casefold()

    def holds(run: RunSummary, _: Config) -> bool:
        haystack = " ".join((run.name, run.project, run.user, run.run_id, *run.tags))
        return needle in haystack.casefold()

    return holds


def _field_predicate(name: str, sign: str, quoted: str) -> RunPredicate:
    """Return the test of FIELD:VALUE in the dashboard's run search."""
    value = quoted.replace('"', "")
    if not value:
        raise UsageError(f"{name}{sign} has no value", hint=f"give one, such as {name}{sign}1")
    if name.startswith(CONFIG):
        return _config_predicate(name.removeprefix(CONFIG), sign, value)
    name = name.casefold()
    if name in _NUMBERS:
        return _number_predicate(name, sign, value)
    if name not in _TEXTS and name not in _CHOICES:
        close = difflib.get_close_matches(name, FIELDS, n=1)
        raise UsageError(
            f"there is no field {name!r}",
            hint=(f"did you mean {close[0]}? " if close else "")
            + f"Fields are {', '.join(FIELDS)} and config.KEY; a word with a {sign} in it goes in"
            " quotes",
        )
    if sign not in (":", "="):
        raise UsageError(
            f"{name} is a text; it cannot be {sign} something", hint=f"write {name}:{value}"
        )
    if name in _CHOICES:
        read, choices = _CHOICES[name]
        if value not in choices:
            raise UsageError(f"{name} is never {value!r}", hint=f"it is {', '.join(choices)}")
        return lambda run, _: read(run) == value
    text, needle = _TEXTS[name], value.casefold()
    return lambda run, _: needle in text(run).casefold()


def _number_predicate(name: str, sign: str, value: str) -> RunPredicate:
    """Return the test of a number in the dashboard's run search, such as step>1000."""
    limit = _parse_number(value)
    if limit is None:
        raise UsageError(f"{name} is compared with {value!r}, which is not a number",
                         hint=f"such as {name}{sign}1000")  # fmt: skip
    read, compare = _NUMBERS[name], _COMPARE[sign]

    def holds(run: RunSummary, _: Config) -> bool:
        number = read(run)
        if number is None:
            return False
        if math.isnan(limit):
            return math.isnan(number)
        return compare(number, limit)

    return holds


def _config_predicate(key: str, sign: str, value: str) -> RunPredicate:
    """Return the test of config.KEY that a user typed in the dashboard's run search."""
    limit = _parse_number(value)

    def holds(_: RunSummary, config: Config) -> bool:
        if key not in config:
            return False
        configured = config[key]
        if (
            isinstance(configured, int | float)
            and not isinstance(configured, bool)
            and limit is not None
        ):
            return _COMPARE[sign](configured, limit)
        return sign in (":", "=") and value.casefold() in str(configured).casefold()

    return holds


def _parse_number(text: str) -> float | None:
    """Return the number in a term of the dashboard's run search; None if it has none."""
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return None


# ------------------------------------------------------------------------------------- groups


def check_group(by: str) -> str:
    """Check the key by which a dashboard user groups runs, and return it; empty: no groups.

    Raises:
        UsageError: runs cannot be grouped by that.
    """
    if by and by not in GROUPS and not (by.startswith(CONFIG) and by != CONFIG):
        raise UsageError(
            f"runs cannot be grouped by {by!r}",
            hint=f"group by {', '.join(GROUPS)} or config.KEY, such as config.lr",
        )
    return by


def grouped(
    runs: Sequence[RunSummary], by: str, configs: Configs
) -> list[tuple[str, list[RunSummary]]]:
    """Group the runs that the dashboard lists; one with several tags is in each group."""
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        for value in _group_values(run, by, configs.get(run.run_id, {})):
            groups.setdefault(value, []).append(run)
    return sorted(groups.items(), key=lambda item: (not item[0], item[0].casefold()))


def _group_values(run: RunSummary, by: str, config: Config) -> Sequence[str]:
    """Return the values by which the dashboard groups a run: tags, a config key, or a field."""
    if by == "tag":
        return run.tags or ("",)
    if by.startswith(CONFIG):
        configured = config.get(by.removeprefix(CONFIG))
        return ("" if configured is None else str(configured),)
    read = _TEXTS[by] if by in _TEXTS else _CHOICES[by][0]
    return (read(run),)
