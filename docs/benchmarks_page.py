"""The page benchmarks.md: the figures of figures.md that answer a user's questions."""

from typing import NamedTuple

from vitals_bench.page import HEADING, PROCESSOR


class Figure(NamedTuple):
    """One row of figures.md."""

    bench: str
    processor: str
    what: str
    ours: str
    peer: str
    theirs: str
    ratio: str
    spread: str
    goal: str
    met: str


class Choice(NamedTuple):
    """Which rows a line of the page shows."""

    bench: str
    starts: str
    """Beginning of ``Figure.what``."""
    label: str
    peer: str = ""
    """Beginning of ``Figure.peer``, if several rows differ only in it."""


QUESTIONS: dict[str, tuple[str, tuple[Choice, ...]]] = {
    "What does it cost my training step?": (
        "Vitals replaces the clip: norm, verdict, clip and row take one pass over the gradients.\n"
        "Each step also takes up to a millisecond of Python, which matters for steps of a few\n"
        "milliseconds.",
        (
            Choice(
                "guard",
                "a whole step of 10.1M parameters and 2,048 tokens, watched",
                "whole step of a GPT, 10.1M parameters, 2,048 tokens",
            ),
            Choice(
                "guard",
                "the same with a fused AdamW, 50.8M parameters",
                "norms, clip, verdict, row and fused AdamW, 50.8M parameters",
            ),
            Choice(
                "guard",
                "FSDP2 on 2 ranks, added to a fused step",
                "added to an FSDP2 step on 2 ranks, 50.8M parameters",
            ),
            Choice(
                "guard", "fused AdamW: a guarded step", "update by fused AdamW, 10.1M parameters"
            ),
            Choice("guard", "fused AdamW: a skipped step", "the same update, skipped"),
            Choice(
                "guard",
                "CPU time of our own calls in a step",
                "CPU time of Vitals in the whole step",
            ),
            Choice(
                "guard",
                "host reads of device values",
                "times that the host waits for a GPU per step, fused optimizer",
            ),
        ),
    ),
    "How does that compare with a logger?": (
        "",
        (
            Choice(
                "guard",
                "saying a step, and keeping it",
                "store the numbers of a step: CPU of all threads",
                "wandb.log",
            ),
            Choice(
                "guard",
                "saying a step, and keeping it",
                "store the numbers of a step: CPU of all threads",
                "12 SummaryWriter",
            ),
            Choice(
                "guard",
                "saying a step, and keeping it",
                "store the numbers of a step: CPU of all threads",
                "mlflow",
            ),
            Choice("guard", "rows lost to SIGKILL", "rows lost to SIGKILL, of 1,500"),
        ),
    ),
    "What do snapshots and rollbacks take?": (
        "",
        (
            Choice(
                "checkpoint",
                "a snapshot in memory, checked, 609 MB of state",
                "snapshot in memory, 609 MB",
            ),
            Choice("checkpoint", "a restore from memory", "restore from memory, 609 MB"),
            Choice(
                "checkpoint",
                "from NaN to the next step, from memory",
                "from NaN parameters to the next step, from memory, 121 MB",
            ),
            Choice(
                "checkpoint",
                "from NaN to the next step, from disk",
                "from NaN parameters to the next step, from disk, 121 MB",
            ),
            Choice(
                "checkpoint",
                "a step while a checkpoint is written: median",
                "step while a checkpoint is written, 121 MB",
            ),
        ),
    ),
    "What do the agent and the collector need?": (
        "",
        (
            Choice(
                "agent",
                "agent: 8 ranks, 8 GPUs, shipping to a collector",
                "CPU of an agent with 8 ranks and 8 GPUs",
            ),
            Choice(
                "agent",
                "one agent of 50 jobs on a node: memory",
                "memory of an agent, 50 jobs on a node",
            ),
            Choice(
                "ingest",
                "CPU of the collector, 4,096 ranks",
                "CPU of a collector, 4,096 ranks, one step per second",
            ),
            Choice(
                "ingest", "memory of a collector while nothing comes", "memory of an idle collector"
            ),
            Choice("ingest", "CPU of a collector while nothing comes", "CPU of an idle collector"),
            Choice(
                "ingest",
                "from a rank's write to an answer with its row, p99, 4,096 ranks",
                "from a row to a query that returns it, p99, 4,096 ranks",
            ),
            Choice(
                "ingest",
                "from a decision's write to its webhook, p99, 4,096 ranks",
                "from a decision to its webhook, p99, 4,096 ranks",
            ),
            Choice("ingest", "rows lost, 4,096 ranks", "rows lost, 4,096 ranks"),
            Choice("ingest", "bytes of a float32 value, merged", "disk space of a float32 value"),
        ),
    ),
    "How fast are answers about a long run?": (
        "A run of a million steps with 50 metrics.",
        (
            Choice("query", "overview of 2,000 points", "a metric as 2,000 points"),
            Choice(
                "query",
                "ten queries of a post-mortem together",
                "ten queries of a post-mortem, 64 ranks",
            ),
            Choice(
                "query",
                "of 80 planted one-step spikes",
                "one-step spikes missing in these points, of 80",
            ),
            Choice("query", "one step of 4,096 ranks, merged", "one step of 4,096 ranks"),
            Choice(
                "dashboard",
                "page of a run of 1,000,000 steps, 9 charts painted",
                "run page with 9 charts in a browser",
            ),
        ),
    ),
    "Who is named, and how soon?": (
        "",
        (
            Choice("hang", "culprit right", "hangs with the right rank named (1: all)"),
            Choice("hang", "shown within (median)", "hang shown after, median"),
            Choice(
                "hang",
                "stopped, blocked, dead: paged within",
                "stopped, blocked or dead rank paged after, at most",
            ),
            Choice("hang", "paged: nothing at all, an hour", "pages in a healthy hour"),
            Choice(
                "straggler",
                "rank right, told within 40 steps",
                "stragglers with the right rank named within 40 steps (1: all)",
            ),
            Choice("straggler", "told on clean steps", "stragglers named in healthy steps"),
        ),
    ),
}

HEAD = """\
# Benchmarks

{notice}

What Vitals costs, and how fast it answers. The lines are selected from [all figures](figures.md),
which have conditions, goals and further comparisons. *Ratio* is our figure divided by the other one
of the same run: both take turns, step by step. *Spread* is the noise of the other figure in these
turns; a difference below it means nothing. Figures of different processors cannot be compared.

The [GPU part](figures.md#gpu) says whether anything was measured on a GPU.
"""

TAIL = """\
## Missed goals

A goal that is missed is no error of the benchmark. {missed} of {total} goals are missed:

{lines}

## Measure it yourself

| Question | Command, in a clone |
|---|---|
| all, except what is below | `make bench` |
| a training step | `python -m vitals_bench guard` |
| agent and others | `python -m vitals_bench agent` (`ingest`, `query`, `dashboard`) |
| hangs and stragglers | `make bench-hang` |
| trainings with faults, corruption | `make bench-judgement`, `make bench-corruption` |
| forecast, post-training | `make bench-forecast`, `make bench-posttraining` |
| drill and preflight | `make bench-drill` |
| a GPU | `make gpu-check` ([run on CUDA](RUN_ON_CUDA.md)) |

Then `make docs` writes this page. Other loggers need `.venv/bin/pip install --group bench`.
"""


def read_figures(text: str) -> list[Figure]:
    """Return the rows of all tables that compare one figure with another."""
    figures: list[Figure] = []
    bench = processor = ""
    for line in text.splitlines():
        if line.startswith(HEADING):
            bench, processor = line.removeprefix(HEADING), ""
        elif line.startswith(PROCESSOR):
            processor = line.removeprefix(PROCESSOR)
        elif processor and line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if len(cells) == 9 and cells[0] != "what":
                figures.append(Figure(bench, processor, *cells[:8]))
    return figures


def page(notice: str, text: str) -> str:
    """Return the page.

    Args:
        notice: of a generated file.
        text: of figures.md.

    Raises:
        ValueError: a choice has no row: the benchmark or its row has another name.
    """
    figures = read_figures(text)
    parts = [HEAD.format(notice=notice)]
    for question, (words, choices) in QUESTIONS.items():
        rows = [row for choice in choices for row in _rows(figures, choice)]
        body = "\n".join([*([words, ""] if words else []), _COLUMNS, *rows])
        parts.append(f"## {question}\n\n{body}\n")
    goals = [figure for figure in figures if figure.goal]
    missed = [figure for figure in goals if figure.met == "MISSED"]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for figure in missed:
        key = figure.bench, figure.what, _short(figure.processor)
        against = f" ({figure.peer})" if figure.peer else ""
        value = figure.ratio or figure.ours
        groups.setdefault(key, []).append(f"{value}, goal {figure.goal}{against}")
    lines = [
        f"- {bench}: {what}: {'; '.join(values)} ({processor})"
        for (bench, what, processor), values in groups.items()
    ]
    parts.append(TAIL.format(missed=len(missed), total=len(goals), lines="\n".join(lines)))
    return "\n".join(parts)


_COLUMNS = (
    "| | Vitals | compared with | | ratio | spread | processor |\n|---|---|---|---|---|---|---|"
)


def _rows(figures: list[Figure], choice: Choice) -> list[str]:
    """Return a choice's first measured row of each processor."""
    chosen: dict[str, Figure] = {}
    for figure in figures:
        is_chosen = figure.what.startswith(choice.starts) and figure.peer.startswith(choice.peer)
        is_measured = figure.ours != "-" and not (choice.peer and figure.theirs == "-")
        if figure.bench == choice.bench and is_chosen and is_measured:
            chosen.setdefault(figure.processor, figure)
    if not chosen:
        raise ValueError(
            f"figures.md has no row of {choice.bench} that starts with {choice.starts!r}"
        )
    return [
        f"| {choice.label} | {figure.ours} | {figure.peer} | {figure.theirs.strip('-')} | "
        f"{figure.ratio} | {figure.spread} | {_short(figure.processor)} |"
        for figure in chosen.values()
    ]


def _short(processor: str) -> str:
    return processor.replace("(R)", "").replace(" Processor", "")
