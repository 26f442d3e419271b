"""Reads what trainings print: nanoGPT, Megatron-LM, DeepSpeed, fairseq, PyTorch's examples, others.

A format is detected by how a line names its step. The other values are found by their usual names,
so a format needs one row here. The first format that two lines of the head match is used.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainvitals.errors import FormatError
from vitals_plugins.bridges.importers.columns import (
    ColumnChoice,
    ImportedLog,
    ImportedRows,
    choose_columns,
    find_scalars,
    has_role,
    is_scalar,
)
from vitals_plugins.bridges.importers.files import lines_of, open_text, translate_read_errors

_NUMBER = r"([-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|[Nn][Aa][Nn]|[Ii]nf(?:inity)?))"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class _Form(NamedTuple):
    """A program's format of a step: groups ``step``, or ``epoch``, ``batch`` and ``batches``."""

    name: str
    line: re.Pattern[str]


_BATCH = r"\[?\s*(?P<batch>\d+)\s*/\s*(?P<batches>\d+)"
FORMS = (
    _Form("Megatron-LM's output", re.compile(r"\biteration\s+(?P<step>\d+)\s*/\s*\d+\s*\|")),
    _Form("nanoGPT's output", re.compile(r"^iter (?P<step>\d+): loss ")),
    _Form("DeepSpeed's output", re.compile(r"\bsteps: (?P<step>\d+) loss: ")),
    _Form("fairseq's output", re.compile(r"\bnum_updates(?:=|\": \"?)(?P<step>\d+)\b")),
    _Form("PyTorch's ImageNet output", re.compile(r"\bEpoch:? ?\[(?P<epoch>\d+)\]\s*" + _BATCH)),
    _Form("OpenMMLab's output", re.compile(r"\bEpoch\(train\)\s*\[(?P<epoch>\d+)\]" + _BATCH)),
    _Form("OpenMMLab's output", re.compile(r"\bIter(?:\(train\))?\s*\[\s*(?P<step>\d+)/\d+\]")),
    _Form("timm's output", re.compile(r"\bTrain:\s+(?P<epoch>\d+)\s+" + _BATCH)),
    _Form("PyTorch's MNIST output", re.compile(r"\bTrain Epoch: (?P<epoch>\d+) " + _BATCH)),
    _Form(
        "PyTorch's word_language_model output",
        re.compile(r"\| epoch\s+(?P<epoch>\d+) \|\s*(?P<batch>\d+)/\s*(?P<batches>\d+) batches"),
    ),
    _Form("Trainer's output", re.compile(r"^\s*(?P<record>\{'(?:loss|train_loss|eps)': .*\})\s*$")),
    _Form(
        "MiniMind's output",
        re.compile(
            r"\bEpoch:\[(?P<epoch>\d+)/\d+\]\((?P<batch>\d+)/(?P<batches>\d+)\),? (?P<pairs>.*)$"
        ),
    ),
    _Form("verl's output", re.compile(r"\bstep:(?P<step>\d+) - (?P<pairs>[\w/]+:.*)$")),
    _Form(
        "a text log",
        re.compile(
            r"\b(?:global[ _]step|train[ _]step|step|steps|iteration|iter)\b\W{0,3}(?P<step>\d+)\b"
            r".*\bloss\b",
            re.IGNORECASE,
        ),
    ),
)
_FIELDS: dict[str, tuple[tuple[str, float], ...]] = {
    "loss": (
        (r"(?<![\w.])(?:lm[ _]loss|train[ _]loss|loss)(?: train)?[\"']?\s*[:=]?\s*[\"']?", 1.0),
    ),
    "grad_norm": ((r"(?:grad(?:ient)?[ _]?norm|gnorm)[\"']?\s*[:=]?\s*[\"']?", 1.0),),
    "lr": ((r"(?<!\w)(?:learning[ _]rate|lr)[\"']?\s*[:=]?\s*[\"']?\[?", 1.0),),
    "loss_scale": ((r"(?:loss|grad)[ _]scale[\"']?\s*[:=]?\s*[\"']?", 1.0),),
    "step_seconds": (
        (r"elapsed time per iteration \(ms\):\s*", 1e-3),
        (r"\bms/batch\s+", 1e-3),
        (r"\biter time \(s\):\s*", 1.0),
        (r"(?<!\w)time:?\s+(?=[\d.]+ ?ms\b)", 1e-3),
        (r"(?<!\w)time:?\s+(?=[\d.]+(?:[ ,(]|$))", 1.0),
    ),
    "tokens_per_second": ((r"(?<!\w)(?:tps|tokens/s(?:ec)?)\s*[:=]?\s*", 1.0),),
}
_PATTERNS = {
    role: tuple((re.compile(words + _NUMBER, re.IGNORECASE), scale) for words, scale in found)
    for role, found in _FIELDS.items()
}
_PAIR = re.compile(r"'?([\w./]+)'?: ?'?" + _NUMBER + r"(?![\w.])")
"""A name and its number, as Trainer, verl and MiniMind print them."""
_NUMPY = re.compile(r"\bnp\.(?:float|int)\d+\(([^()]*)\)")
"""A number as NumPy 2 prints it."""
_OTHERS = (
    (re.compile(r"\[Rank 0\] step=\d+, skipped="), "DeepSpeed's own lines, which have no loss"),
    (re.compile(r"\d(?:it/s|s/it)\b"), "a progress bar, which names no step of the training"),
)
"""Known formats that cannot be read."""
MIN_LINES = 2


def identify_format(begin: str) -> _Form | None:
    """Return the format of a text log, by the file's first lines; None: it is unknown."""
    lines = list(_clean_lines(begin.splitlines()))
    for form in FORMS:
        matches = (line for line in lines if form.line.search(line))
        cells = (_parse_line(line) | _parse_named(form, line) for line in matches)
        if (
            sum(any(name == "loss" or is_scalar(name) for name in row) for row in cells)
            >= MIN_LINES
        ):
            return form
    return None


def read_text_log(path: Path, form: _Form, column_options: ColumnChoice) -> ImportedLog:
    """Read the log that a training printed; its rows are the lines that report a step.

    Raises:
        UsageError: no line has a loss or a gradient norm, or a named column is missing.
    """
    records: list[tuple[int, dict[str, object]]] = []
    first_epoch: int | None = None
    with translate_read_errors(path), open_text(path) as file:
        for row, line in enumerate(_clean_lines(lines_of(path, file))):
            match = form.line.search(line)
            if match is None or _is_evaluation(line):
                continue
            parts = match.groupdict()
            if parts.get("epoch") is not None:
                epoch, batches = int(parts["epoch"]), int(parts["batches"])
                first_epoch = epoch if first_epoch is None else first_epoch
                step = max(0, epoch - min(1, first_epoch)) * batches + int(parts["batch"])
            else:
                step = len(records) + 1 if "record" in parts else int(parts["step"])
            records.append((row, {**_parse_named(form, line), "step": step, **_parse_line(line)}))
    names = list(dict.fromkeys(name for _, cells in records for name in cells))
    columns = choose_columns(names, column_options, str(path))
    rows = ImportedRows(path, "line", columns, find_scalars(names, column_options, str(path)))
    for row, cells in records:
        rows.add_named(row, cells)
    notes = []
    if "record" in form.line.groupindex:
        notes.append(
            "its lines have no step, so they are numbered; trainer_state.json in a checkpoint has "
            "the steps"
        )
    return rows.to_log(form.name, notes)


def unknown_text(path: Path, begin: str) -> FormatError:
    """Return the message for a text that is neither a CSV file nor a log of a known form."""
    what = next((name for pattern, name in _OTHERS if pattern.search(begin)), "")
    known = ", ".join(dict.fromkeys(form.name for form in FORMS[:-1]))
    return FormatError(
        f"{path} is text, but {'is ' + what if what else 'no line names a step and a loss'}; known "
        f"are {known}, and lines such as 'step 10: loss 2.5'",
        hint="write a CSV file whose first line is step,loss and whose others are numbers",
    )


def _clean_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield a text log's lines without colors; a progress bar writes many on one."""
    for line in lines:
        for part in line.rstrip("\n").split("\r"):
            yield _NUMPY.sub(r"\1", _COLOR.sub("", part))


def _is_evaluation(line: str) -> bool:
    return bool(re.search(r"\b(?:valid|val|eval|test)\b|\bvalid_|\beval_", line.lower()[:160]))


def _parse_line(line: str) -> dict[str, object]:
    """Return the values of a text log's line, by role."""
    cells: dict[str, object] = {}
    for role, patterns in _PATTERNS.items():
        for pattern, scale in patterns:
            match = pattern.search(line)
            if match is not None:
                value = float(match[1].replace(",", ""))
                cells[role] = value if scale == 1.0 else value * scale
                break
    return cells


def _parse_named(form: _Form, line: str) -> dict[str, object]:
    """Return the numbers without a role in a text log's line, by name, if its form has names."""
    match = form.line.search(line)
    groups = match.groupdict() if match is not None else {}
    text = groups.get("record") or groups.get("pairs") or ""
    return {
        name: float(value.replace(",", ""))
        for name, value in _PAIR.findall(text)
        if not has_role(name)
    }
