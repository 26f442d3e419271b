"""Roles of a log's columns: names written by loggers, and valid cells."""

import contextlib
import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from trainvitals.detect.posttraining.names import known_names
from trainvitals.errors import FormatError, UsageError
from trainvitals.judged_log import LoggedStep

T = TypeVar("T")
Role = Literal[
    "step", "loss", "grad_norm", "lr", "loss_scale", "step_seconds", "tokens_per_second",
    "data_seconds", "time", "evaluation_seconds",
]  # fmt: skip

KNOWN: dict[Role, tuple[str, ...]] = {
    "step": (
        "global_step", "train_global_step", "trainer_global_step", "step", "steps", "iteration",
        "iterations", "iter", "it", "train_step", "training_step", "current_steps", "num_updates",
        "update",
    ),
    "loss": (
        "loss", "train_loss", "training_loss", "loss_train", "train_loss_step", "lm_loss",
        "train_lm_loss", "lm_loss_training_lm_loss", "train_ce_loss", "train_crossentropyloss",
        "loss_train_total", "loss_metrics_global_avg_loss",
    ),
    "grad_norm": (
        "grad_norm", "gradient_norm", "gradnorm", "train_grad_norm", "train_gradient_norm",
        "global_grad_norm", "total_grad_norm", "optim_total_grad_norm", "grad_norm_total",
        "gradient_norm_global", "l2_norm_grad_global", "grad_norm_grad_norm", "gnorm",
        "actor_grad_norm",
    ),
    "lr": (
        "lr", "learning_rate", "train_lr", "train_learning_rate", "optim_learning_rate_group0",
        "lr_group0", "optim_lr", "actor_lr",
    ),
    "loss_scale": ("loss_scale", "train_loss_scale", "grad_scale", "scaler_scale", "amp_scale"),
    "step_seconds": (
        "step_seconds", "step_duration_seconds", "step_time", "train_step_time", "step_time_s",
        "seconds_per_step", "sec_per_step", "iteration_time", "time_per_step",
        "time_metrics_end_to_end_s",
    ),
    "tokens_per_second": (
        "tokens_per_second", "train_tokens_per_second", "tokens_per_sec", "tok_per_sec",
        "throughput_tps", "throughput_device_tokens_per_second", "tps",
    ),
    "data_seconds": (
        "data_seconds", "data_wait_seconds", "data_time", "train_data_time", "data_loading_time",
        "dataloader_time", "time_metrics_data_loading_s",
    ),
    "time": ("timestamp", "wall_time", "walltime", "unix_time", "time_unix", "datetime", "time"),
    "evaluation_seconds": ("eval_runtime", "evaluation_seconds", "eval_seconds"),
}  # fmt: skip
"""Names by role, in lower case, with ``_`` for every run of characters that are not letters or
digits. The first one that a log has is used."""

_USUAL = frozenset(name for names in KNOWN.values() for name in names)

MISSING = frozenset({"", "none", "null", "na", "n/a", "-", "--"})
"""Texts for "not measured", which is not NaN."""

LARGEST_STEP = 1 << 53
_EARLIEST, _LATEST = 1e8, 1e10
"""Range of a time in seconds: 1973 to 2286."""
_SHOWN_CHARACTERS = 2_000
"""Characters of the names that a hint lists. Names are complete, so that one can be copied."""
_ASKED = tuple(role for role in KNOWN if role not in ("time", "evaluation_seconds"))
"""Roles whose cells must be numeric. An invalid time is ignored."""


_SCALARS = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in known_names()}
"""Names of post-training scalars by their normalized form: exports replace characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChoice:
    """Columns set by options. None: found by the usual names."""

    step: str | None = None
    loss: str | None = None
    grad_norm: str | None = None
    lr: str | None = None
    loss_scale: str | None = None
    step_seconds: str | None = None
    tokens_per_second: str | None = None
    data_seconds: str | None = None
    time: str | None = None
    evaluation_seconds: str | None = None
    task: str | None = None
    """Kind of a post-training run, whose scalars are read too."""
    scalars: Mapping[str, str] = field(default_factory=dict)
    """Column of a post-training scalar, by its name in Vitals' table."""

    def named(self) -> list[str]:
        """Return the column options that were given for importing a log."""
        return [_option_name(role) for role in KNOWN if getattr(self, role) is not None]

    def may_match(self, name: str) -> bool:
        """Return whether a log's column may be one of those; others are not stored."""
        names = tuple(getattr(self, role) for role in KNOWN)
        plain_name = normalize_column_name(name)
        if self.task is not None and (
            plain_name.removeprefix("train_") in _SCALARS or name in self.scalars.values()
        ):
            return True
        return plain_name in _USUAL or any(
            plain_name == normalize_column_name(given_name)
            for given_name in names
            if given_name is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLog:
    """A log as it was read."""

    source: str
    """The file, or the directory."""
    form: str
    """Name of the log format."""
    steps: list[LoggedStep]
    columns: Mapping[Role, str]
    """Column of each role; a role that the log does not have is absent."""
    scalars: Mapping[str, str] = field(default_factory=dict)
    """Names of post-training scalars by column."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader, one sentence each."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """Seconds of evaluations before the step at this index of ``steps``, or after the last."""
    total_seconds: float | None = None
    """Seconds of the whole training, if the log has them but no times of steps."""


def choose_columns(
    names: Sequence[str], column_options: ColumnChoice, source: str
) -> dict[Role, str]:
    """Return which column of an imported log has which role.

    Raises:
        UsageError: there is no step, neither a loss nor a gradient norm, or a name fits several.
    """
    chosen_columns: dict[Role, str] = {}
    for role, usual_names in KNOWN.items():
        requested = getattr(column_options, role)
        name = _match_column(names, role, requested, source) if requested is not None else None
        name = name or _find_usual_column(names, role, usual_names, source)
        if name is not None:
            chosen_columns[role] = name
    if "step" not in chosen_columns:
        raise _missing_column_error("step", KNOWN["step"], names, source)
    if (
        "loss" not in chosen_columns
        and "grad_norm" not in chosen_columns
        and not find_scalars(names, column_options, source)
    ):
        both = KNOWN["loss"][:4] + KNOWN["grad_norm"][:3]
        raise _missing_column_error("loss", both, names, source, what="loss or gradient norm")
    return chosen_columns


def find_scalars(names: Iterable[str], column_options: ColumnChoice, source: str) -> dict[str, str]:
    """Return the post-training scalars of an imported log: Vitals' name by column.

    Without a kind of run there are none: ``kl`` and ``entropy`` also occur in other training.

    Raises:
        UsageError: an option names a column that the log does not have.
    """
    if column_options.task is None:
        return {}
    columns = list(names)
    scalar_of: dict[str, str] = {}
    for column in columns:
        name = _SCALARS.get(normalize_column_name(column).removeprefix("train_"))
        if name is not None and name not in scalar_of.values():
            scalar_of[column] = name
    for name, column in column_options.scalars.items():
        if column not in columns:
            raise UsageError(
                f"{source}: --scalar {name}={column}: there is no such column",
                hint=f"it has: {_format_names(columns)}",
            )
        scalar_of = {column: name} | {
            key: other for key, other in scalar_of.items() if other != name
        }
    return scalar_of


def has_role(column: str) -> bool:
    """Return whether an imported log's column has a usual name of a role, such as the loss."""
    return normalize_column_name(column) in _USUAL


def is_scalar(column: str) -> bool:
    """Return whether an imported log's column has the name of a post-training scalar."""
    return normalize_column_name(column).removeprefix("train_") in _SCALARS


def _match_column(names: Sequence[str], role: Role, requested: str, source: str) -> str:
    """Return the log's column that an option names; an unknown or ambiguous name is an error."""
    matches = [name for name in names if name == requested]
    matches = matches or [
        name for name in names if normalize_column_name(name) == normalize_column_name(requested)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise _ambiguous_column_error(role, matches, source)
    near = difflib.get_close_matches(requested, names, n=1)
    raise UsageError(
        f"{source}: {_option_name(role)} is {requested!r}; there is no such column",
        hint=f"did you mean {near[0]!r}?" if near else f"it has: {_format_names(names)}",
    )


def _find_usual_column(
    names: Sequence[str], role: Role, usual_names: Sequence[str], source: str
) -> str | None:
    """Return the log's column with a role's usual name; None without one."""
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(normalize_column_name(name), []).append(name)
    for usual in usual_names:
        matches = by_plain.get(usual, [])
        if len(matches) > 1 and role in _ASKED:  # either of two times is right
            raise _ambiguous_column_error(role, matches, source)
        if matches:
            return matches[0]
    return None


def _ambiguous_column_error(role: Role, matches: Sequence[str], source: str) -> UsageError:
    """Return the error that several columns of a log may have a role."""
    return UsageError(
        f"{source}: {len(matches)} columns may be the {role}: {_format_names(matches)}",
        hint=f"choose one with {_option_name(role)} NAME, or rename the columns",
    )


def _missing_column_error(
    role: Role, looked_for: Sequence[str], names: Sequence[str], source: str, *, what: str = ""
) -> UsageError:
    """Return the error that no column of a log has a role."""
    # Likely names come first.
    usual_names = (
        ("step", "iter", "update", "epoch") if role == "step" else ("loss", "grad", "norm")
    )
    listed = sorted(names, key=lambda name: not any(word in name.lower() for word in usual_names))
    return UsageError(
        f"{source}: no column is the {what or role}; looked for {', '.join(looked_for)}",
        hint=f"choose one with {_option_name(role)} NAME; it has: {_format_names(listed)}",
    )


def _format_names(names: Iterable[str]) -> str:
    """Return the column names of a log as text for an error, cut to a length."""
    every = [repr(name) for name in names]
    shown: list[str] = []
    for name in every:
        if shown and sum(map(len, shown)) + len(name) > _SHOWN_CHARACTERS:
            break
        shown.append(name)
    more = f" and {len(every) - len(shown)} more" if len(every) > len(shown) else ""
    return (", ".join(shown) or "nothing") + more


def _option_name(role: Role) -> str:
    """Return the command-line option that names a log's column of a role."""
    return "--" + role.replace("_", "-")


@lru_cache(maxsize=4096)
def normalize_column_name(name: str) -> str:
    """Return a log column's name in lower case, with ``_`` instead of other characters."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


# ------------------------------------------------------------------------------------- values


def parse_number(value: object) -> float | None:
    """Parse the number in a log's cell; None if nothing was measured.

    Raises:
        ValueError: the value is not a number.
    """
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            if value.strip().lower() in MISSING:
                return None
            raise
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # more than a float holds: infinite for every purpose here
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{value!r} is not a number")


def parse_step(value: object) -> int | None:
    """Parse the step in a log's cell; None if it is not one.

    Raises:
        ValueError: the value is not a whole number.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        step = value
    else:
        cell_number = parse_number(value)
        if cell_number is None or math.isnan(cell_number):
            return None
        if not math.isfinite(cell_number) or cell_number != int(cell_number):
            raise ValueError(f"{value!r} is not a whole number")
        step = int(cell_number)
    if abs(step) > LARGEST_STEP:
        raise ValueError("it is beyond every step")
    return step


def parse_time(value: object) -> float | None:
    """Return the time in a log's cell, in seconds since 1970; None if it is not one.

    Logs write seconds, milliseconds, microseconds or nanoseconds, or a date as ISO 8601 has it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    except ValueError:
        try:
            date = datetime.fromisoformat(str(value).strip())
        except ValueError:
            return None
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    for scale in (1.0, 1e3, 1e6, 1e9):
        if _EARLIEST <= seconds / scale < _LATEST:
            return seconds / scale
    return None


_NUMBERS: dict[Role, str] = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "step_seconds": "step time",
    "tokens_per_second": "tokens per second",
    "data_seconds": "wait for data",
}
"""Names in error messages of the numbers of a ``LoggedStep``, in its order."""


class ImportedRows:
    """Collects records, counts invalid rows, and names cells that are not numbers."""

    def __init__(
        self,
        source: Path,
        where: str,
        columns: Mapping[Role, str],
        scalars: Mapping[str, str] | None = None,
    ) -> None:
        self._source, self._where, self._columns = str(source), where, columns
        self._scalars = scalars or {}
        """Names of post-training scalars by column."""
        self._steps: list[LoggedStep] = []
        self._evaluations: dict[int, float] = {}
        """Seconds by the index of the next step: they follow the step at which they are logged."""
        self._dropped: Counter[str] = Counter()

    def add_named(self, row: int, cells: Mapping[str, object]) -> None:
        """Add the record that a row of cells by column name holds; see ``add``."""
        scalars = {name: cells.get(column) for column, name in self._scalars.items()}
        self.add(row, {role: cells.get(name) for role, name in self._columns.items()}, scalars)

    def add(
        self,
        row: int,
        cells: Mapping[Role, object],
        scalars: Mapping[str, object] | None = None,
    ) -> None:
        """Add one record, in the order of the imported log; skip one without values.

        Args:
            row: its position in the log.
            cells: cells by role.
            scalars: cells of post-training scalars, by name.

        Raises:
            FormatError: a cell is not a number.
        """
        self._add_step(row, cells, _parse_scalars(scalars or {}))
        with contextlib.suppress(ValueError):
            evaluated = parse_number(cells.get("evaluation_seconds"))
            if evaluated is not None and 0 < evaluated < math.inf:
                index = len(self._steps)
                self._evaluations[index] = self._evaluations.get(index, 0.0) + evaluated

    def _add_step(
        self, row: int, cells: Mapping[Role, object], scalars: Mapping[str, float]
    ) -> None:
        numbers: list[float | None] = []
        for role, name in _NUMBERS.items():
            numbers.append(self._parse(row, name, cells.get(role), parse_number))
            if role == "grad_norm" and numbers == [None, None] and not scalars:
                return  # nothing to judge
        step = self._parse(row, "step", cells.get("step"), parse_step)
        if step is None:
            self.skip_row("without a step")
            return
        last = self._steps[-1] if self._steps else None
        if scalars and numbers[:2] == [None, None] and last is not None and last.step == step:
            # An evaluation is logged in a record of its own.
            self._steps[-1] = last._replace(scalars={**(last.scalars or {}), **scalars})
            return
        numbers.append(parse_time(cells.get("time")))
        self._steps.append(LoggedStep._make((row, step, *numbers, scalars or None)))

    def _parse(self, row: int, name: str, value: object, parse: Callable[[object], T]) -> T:
        try:
            return parse(value)
        except ValueError as error:
            text = repr(value)
            text = text if len(text) <= 40 else f"{text[:37]}..."
            options = ", ".join(map(_option_name, _ASKED))
            raise FormatError(
                f"{self._source}: {self._where} {row}: the {name} is {text}; it must be a "
                f"{'whole number' if name == 'step' else 'number'}",
                hint=f"correct the log, or name another column: {options}",
            ) from error

    def skip_row(self, why: str) -> None:
        """Count an invalid row of the imported log."""
        self._dropped[why] += 1

    def to_log(
        self, form: str, notes: Sequence[str] = (), *, total_seconds: float | None = None
    ) -> ImportedLog:
        """Return the log, with one note per reason for which rows were skipped."""
        skipped = [f"skipped rows {why}: {times:,}" for why, times in self._dropped.items()]
        return ImportedLog(
            source=self._source,
            form=form,
            steps=self._steps,
            columns=self._columns,
            scalars=self._scalars,
            notes=[*skipped, *notes],
            evaluations=self._evaluations,
            total_seconds=total_seconds,
        )


def _parse_scalars(cells: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers among the cells of post-training scalars; others are not measured."""
    numbers: dict[str, float] = {}
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):
            number = parse_number(cell)
            if number is not None:
                numbers[name] = number
    return numbers
