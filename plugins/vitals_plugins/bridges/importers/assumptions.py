"""Describes a log before it is judged: what was read, and what had to be assumed."""

from dataclasses import dataclass

from trainvitals.judged_log import (
    CHECKPOINT_EVERY,
    LAG,
    Cadence,
    find_overflow_records,
    measure_log_cadence,
)
from trainvitals.policy import JudgeConfig, Mode
from vitals_plugins.bridges.importers.columns import ImportedLog

_BLOCK = 32
"""Steps of one of the blocks that ``[drift] warm_up`` counts."""
_KINDS = {
    "minimize": "to fall",
    "rl": "reinforcement learning's, which may rise",
    "adversarial": "adversarial, which may rise",
}
"""Descriptions of losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Properties of the training loop that a log does not contain."""

    mode: Mode
    config: JudgeConfig
    clips: bool
    expected: tuple[int, ...]


def assumptions(history: ImportedLog, assumed: Assumed) -> list[str]:
    """Describe missing data, assumptions, and anomalies of an imported log."""
    cadence = measure_log_cadence(history.steps)
    return [
        *_judging_assumptions(assumed, cadence),
        *_short_log_notes(assumed.config, len(history.steps)),
        *_cadence_notes(cadence, len(history.steps)),
        *_overflows(len(find_overflow_records(history.steps))),
    ]


def about(history: ImportedLog) -> str:
    """Describe an imported log: its format, steps, and the role of each column."""
    first, last = history.steps[0].step, history.steps[-1].step
    columns = ", ".join(f"{role} = {name}" for role, name in history.columns.items())
    columns += "".join(
        f", {column}" if column == name else f", {name} = {column}"
        for column, name in history.scalars.items()
    )
    return (
        f"{history.source}: {history.form}, {_format_records(len(history.steps))}, steps "
        f"{first} to {last}; "
        f"{columns}"
    )


def _judging_assumptions(assumed: Assumed, cadence: Cadence) -> list[str]:
    """Describe how an imported log is judged: missing data and assumptions."""
    unit = "records" if cadence.counts_records else "steps"
    text = f"judged as in {assumed.mode} with a readback lag of {LAG} step, as live"
    if assumed.mode != "guard":
        text += f", and with a healthy checkpoint assumed every {CHECKPOINT_EVERY} {unit}"
    kind = assumed.config.loss_kind
    text += (
        f"; the loop is assumed {'' if assumed.clips else 'not '}to clip, and its loss is "
        f"{_KINDS[kind]}; a log cannot answer the probe, so rollbacks that need it are not "
        "replayed, and the log continues unchanged whatever Vitals would have done"
    )
    if assumed.expected:
        steps = ", ".join(map(str, sorted(assumed.expected)))
        text += f"; planned changes are assumed to be announced before steps {steps}"
    if not cadence.counts_records:
        return [text]
    usual = " or ".join(str(gap) for gap in cadence.gaps) or "many"
    coarse = (
        f"logged every {usual} steps: windows, budgets and step counts in reasons count records"
    )
    return [text, coarse]


def unavailable_checks(config: JudgeConfig, num_records: int) -> list[str]:
    """Return the checks for which an imported log is too short, each with the required length."""
    needs = (
        ("spikes", config.detect.loss.warm_up),
        ("steps to be skipped, unless they are not finite", config.outlier.warm_up),
        ("a loss that never falls", config.detect.progress.learn_steps),
        ("a slow rise", config.detect.drift.warm_up * _BLOCK),
    )
    has = f"has {num_records}"
    return [f"{what} (needs {num} records, {has})" for what, num in needs if num_records < num]


def _short_log_notes(config: JudgeConfig, num_records: int) -> list[str]:
    """Return a note on an imported log that is too short for all checks."""
    spikes, outliers = config.detect.loss.warm_up, config.outlier.warm_up
    if num_records >= outliers:
        return []
    return [
        f"a short log: spikes are judged once {spikes} clean records are known, steps to be "
        f"skipped once {outliers} are, unless they are not finite"
    ]


def _cadence_notes(cadence: Cadence, num_records: int) -> list[str]:
    """Return notes on the steps of an imported log: backwards, repeated, or out of order."""
    notes = []
    if 2 * len(cadence.restarts) > num_records:
        notes.append(
            "nearly all steps go backwards: if the newest record comes first, reverse the log"
        )
    elif cadence.restarts:
        notes.append(
            f"the steps go back {_format_times(len(cadence.restarts))}: each is treated as a "
            f"resumed run, "
            "with the detectors as they were at that step"
        )
    if cadence.num_repeated:
        notes.append(f"{_format_records(cadence.num_repeated)} of the step before: judged too")
    if cadence.num_out_of_order:
        notes.append(
            f"{_format_records(cadence.num_out_of_order)} out of order: judged in the log's order"
        )
    return notes


def _overflows(num: int) -> list[str]:
    """Describe the rows of an imported log that were taken for skips of a loss scaler."""
    if not num:
        return []
    return [
        f"{_format_times(num)} the gradient norm is non-finite while the loss is finite, and "
        f"finite again "
        "soon after: treated as overflows of a loss scaler, which skips them itself"
    ]


def _format_records(records: int) -> str:
    """Return a number of records as text, for notes on an imported log."""
    return f"{records} record" + ("" if records == 1 else "s")


def _format_times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"
