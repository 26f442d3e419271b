"""``vitals repro``: replays a bad step, and finds its cause.

Only the replay needs torch: without it, this still lists the steps that can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainvitals.cli.options import LocalRun, ReportFormat, VitalsDir
from trainvitals.cli.output import write_json
from trainvitals.cli.resume import find_matching_runs
from trainvitals.errors import MissingDependencyError, UsageError
from trainvitals.io.capsules import CapsuleFile, find_capsules
from trainvitals.io.rundir import RunDir
from trainvitals.printable import printable
from vitals_plugins.lab.entry import CONTRACT, run_entry_function

if TYPE_CHECKING:
    from trainer_hooks.repro.capsule import Capsule
    from vitals_plugins.lab.repro.verdict import ReplayVerdict


def register(app: typer.Typer) -> None:
    """Add the ``repro`` command."""
    app.command(epilog="Example: vitals repro my-run 540 --entry train.py:build")(repro)


def repro(
    run: LocalRun,
    step: Annotated[int, typer.Argument(help="The bad step.")],
    entry: Annotated[
        str,
        typer.Option(
            metavar="FILE:FUNCTION",
            help="Function that returns (model, loss_of), and a loader where batches were not "
            "kept: train.py:build, or package.module:build.",
        ),
    ],
    rank: Annotated[
        int, typer.Option(min=-1, show_default="the lowest rank that kept it", help="Whose step.")
    ] = -1,
    directory: VitalsDir = Path("vitals_runs"),
    form: Annotated[
        ReportFormat, typer.Option("--format", help="How to write the verdict.")
    ] = "table",
) -> None:
    """Re-run a bad step in this process, and name the cause.

    Requires a run that kept its bad steps: monitor.batches(loader, keep_batches=True). Loads the
    nearest checkpoint, re-runs the batch with its RNG state and precision, and names the first
    module and operator with a non-finite result. The verdict is data, arithmetic, optimizer state,
    hardware or not reproduced; it is stored next to the capsule.
    """
    run_dir, file = _find_capsule(run, step, rank, directory)
    try:
        import torch  # noqa: F401 - asked for before the user's file, which imports it as well
    except ImportError:
        raise MissingDependencyError(
            "playing a step needs torch", hint="pip install 'trainvitals[torch]'"
        ) from None
    from trainer_hooks.repro.capsule import read
    from vitals_plugins.lab.repro.verdict import PlayError, judge, write_verdict
    from vitals_plugins.lab.repro.weights import load_step_weights

    capsule = read(file)
    built = run_entry_function(entry)
    batches = capsule.batches or _load_batches(capsule, built.loader)
    weights = load_step_weights(capsule, run_dir, built.model)
    try:
        verdict = judge(capsule, built.model, built.loss_of, weights, batches)
    except PlayError as error:
        raise UsageError(
            f"{entry}: loss_of raised {error}",
            hint="it gets the batch as the loader gave it; " + CONTRACT,
        ) from None
    kept_in = write_verdict(verdict, file.path)
    if form == "json":
        write_json(verdict)
    else:
        typer.echo("\n".join(_verdict_lines(verdict, capsule, kept_in)))


def _verdict_lines(verdict: ReplayVerdict, capsule: Capsule, kept_in: Path) -> list[str]:
    """Return the lines that `vitals repro` prints: the capsule's step, its cause, and details."""
    lines = [f"Step {capsule.step} on rank {capsule.rank}: {capsule.facts['reason']}"]
    lines.append(verdict.sentence)
    lines += [f"  {detail}" for detail in verdict.details]
    return [*map(printable, lines), f"Verdict saved in {kept_in}"]


# ------------------------------------------------------------------------------ what is played


def _find_capsule(run: str, step: int, rank: int, vitals_dir: Path) -> tuple[RunDir, CapsuleFile]:
    """Return the run and the file of the step's latest capsule.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    fitting = find_matching_runs(run, vitals_dir)
    with_capsules = [(each, find_capsules(each.path)) for each in fitting]
    with_capsules = [pair for pair in with_capsules if pair[1]]
    if not with_capsules:
        raise UsageError(
            f"{fitting[-1].path} has no capsules, so none of its steps can be reproduced",
            hint="a run keeps its bad steps with monitor.batches(loader, keep_batches=True), on "
            "the node where they ran",
        )
    if len(with_capsules) > 1:
        ids = ", ".join(each.run_id for each, _ in with_capsules[-3:])
        raise UsageError(f"{len(with_capsules)} matching runs have capsules: {ids}",
                         hint="give the id of one")  # fmt: skip
    run_dir, capsules = with_capsules[0]
    of_step = [each for each in capsules if each.step == step and rank in (-1, each.rank)]
    if not of_step:
        steps = sorted({each.step for each in capsules if rank in (-1, each.rank)})
        of_rank = "" if rank < 0 else f" of rank {rank}"
        raise UsageError(
            f"step {step}{of_rank} of {run_dir.run_id} has no capsule",
            hint=f"steps{of_rank} with one: {', '.join(map(str, steps[-16:])) or 'none'}; in a row "
            "of bad steps the first has one",
        )
    newest = max(each.attempt for each in of_step)
    return run_dir, min(each for each in of_step if each.attempt == newest)


def _load_batches(capsule: Capsule, loader: Any) -> Sequence[Any]:
    """Return a bad step's batches to replay, from the loader's dataset by their samples' ids.

    Raises:
        UsageError: there is no loader, or it does not provide it.
    """
    from torch.utils.data import DataLoader

    why = capsule.facts.get("why_no_batch", "no batch was kept")
    if not isinstance(loader, DataLoader) or not capsule.sample_ids:
        lacks = "nor are the indices of its samples known" if not capsule.sample_ids else (
            "and the entry returned no DataLoader to take its samples from"
        )  # fmt: skip
        raise UsageError(
            f"the capsule holds no batch ({why}), {lacks}",
            hint="return (model, loss_of, loader) with the DataLoader of the run",
        )
    try:
        samples = [loader.dataset[index] for index in capsule.sample_ids]
    except Exception as error:
        raise UsageError(
            f"the loader's dataset has no such samples: {type(error).__name__}: {error}",
            hint="the loader must be over the dataset that the run trained on",
        ) from error
    sizes = capsule.facts.get("batch_sizes") or [len(samples)]
    batches, first = [], 0
    for size in sizes:
        batches.append(loader.collate_fn(samples[first : first + size]))
        first += size
    return batches
