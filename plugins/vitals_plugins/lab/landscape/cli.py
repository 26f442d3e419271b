"""``vitals landscape``: the loss around a checkpoint, or on the line to another one; offline."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.find import RUNS, find_checkpoints
from trainvitals.cli.options import VitalsDir
from trainvitals.cli.output import Format, write_json, write_rows
from trainvitals.errors import FormatError, MissingDependencyError, StorageError, UsageError
from trainvitals.io.private import replace_file
from trainvitals.jsonable import to_json
from trainvitals.printable import name_type
from vitals_plugins.lab.entry import CONTRACT, EntryResult, run_entry_function
from vitals_plugins.lab.landscape.picture import draw_landscape
from vitals_plugins.lab.landscape.words import (
    landscape_sentences,
    line_facts,
    middle_lines,
    num_nonfinite,
    path_facts,
    path_sentences,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitals_plugins.lab.landscape.surface import Losses

_MOST_POINTS = 101
_WITH_LOADER = CONTRACT.replace("(model, loss_of)", "(model, loss_of, loader)") + (
    "; loader is anything that gives batches"
)


def register(app: typer.Typer) -> None:
    """Add the ``landscape`` command."""
    app.command(epilog="Example: vitals landscape my-run --step 5000 --entry train.py:build")(
        landscape
    )


def landscape(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR|FILE",
            help="A run (id or its beginning, name, folder), a folder of checkpoints, or a file "
            "with a state dict.",
        ),
    ],
    entry: Annotated[
        str,
        typer.Option(
            metavar="FILE:FUNCTION",
            help="Function that returns (model, loss_of, loader): train.py:build, or "
            "package.module:build.",
        ),
    ],
    step: Annotated[
        int,
        typer.Option(
            min=-1, show_default="the latest", help="The run's latest checkpoint up to this step."
        ),
    ] = -1,
    to: Annotated[
        str,
        typer.Option(
            metavar="STEP|FILE",
            help="Use the straight line to this checkpoint instead: a step of the same run, or a "
            "file with a state dict.",
        ),
    ] = "",
    dimensions: Annotated[
        int, typer.Option(min=1, max=2, help="1: along one random direction; 2: a plane of two.")
    ] = 1,
    radius: Annotated[
        float, typer.Option(help="Distance; at 1 each filter has moved by its own length.")
    ] = 1.0,
    points: Annotated[
        int, typer.Option(show_default="41, or 21 on a plane", help="Along each direction; odd.")
    ] = 0,
    batches: Annotated[
        int, typer.Option(min=1, help="Number of batches: the first ones of the loader.")
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of directions, loader and dropout.")] = 0,
    mode: Annotated[
        str, typer.Option(help="eval, or train: dropout on, BatchNorm by the batch.")
    ] = "eval",
    within: Annotated[float, typer.Option(help="Share of the loss that defines the width.")] = 0.1,
    output: Annotated[
        Path, typer.Option(help="Writes OUTPUT.json, all losses, and OUTPUT.svg, the picture.")
    ] = Path("landscape"),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files whose content differs.")
    ] = False,
    directory: VitalsDir = RUNS,
    form: Annotated[
        Format, typer.Option("--format", help="table: sentences; json; csv: each point.")
    ] = Format.TABLE,
) -> None:
    """Show how the loss changes around a checkpoint: how sharp it is, how wide, whether a minimum.

    Moves the weights along random directions with filters as long as the model's own (Li et al.,
    2018; biases and norms stay), or to another checkpoint, and computes the loss of the same few
    batches. The checkpoint is only read.
    """
    places = _point_positions(dimensions, radius, points, is_path=bool(to))
    if mode not in ("eval", "train"):
        raise UsageError(f"--mode is {mode!r}; it must be eval or train")
    if not (math.isfinite(within) and within > 0):
        raise UsageError(f"--within is {within:g}; it must be a share above 0, such as 0.1")
    files = [output.with_name(f"{output.name}.{kind}") for kind in ("json", "svg")]
    scene = _Scene(checkpoint, entry, step, to, directory)
    begin, end, num_batches, losses = _measure_losses(
        scene, places, dimensions=dimensions, batches=batches, seed=seed, mode=mode
    )
    sentences = list(
        path_sentences(places, losses) if to else landscape_sentences(places, losses, within)
    )
    how = f"mean of {num_batches} batch{'es' if num_batches > 1 else ''} in {mode} mode"
    body = {
        "checkpoint": begin,
        **({"to": end} if to else {"seed": seed, "within": within}),
        "mode": mode,
        "batches": num_batches,
        "places": places,
        "losses": losses,
        "nonfinite": num_nonfinite(losses),
        **_surface_facts(places, losses, within, is_path=bool(to)),
    }
    title = f"Loss from {begin} to {end}" if to else f"Loss around {begin}"
    along = "way to it" if to else "filter-normalized random direction"
    along += "s: first to the right, second up" if len(losses) > 1 else ""
    drawn = draw_landscape(
        places, losses, title=title, along=along, lines=[f"Loss: {how}.", *sentences]
    )
    raw = msgspec.json.format(to_json(body), indent=2) + b"\n"
    for path, content in zip(files, (raw, drawn.encode()), strict=True):
        _write_output(path, content, force=force)
    if form is Format.JSON:
        write_json(body)
    elif form is Format.CSV:
        write_rows(("along", "up", "loss"), _point_rows(places, losses), form)
    else:
        typer.echo(f"{title}: {how}.")
        for sentence in sentences:
            typer.echo(sentence)
        typer.echo(f"Written: {files[0]}, {files[1]}")


class _Scene(NamedTuple):
    """Checkpoints, model and data: see ``landscape``."""

    checkpoint: str
    entry: str
    step: int
    to: str
    directory: Path


def _measure_losses(
    scene: _Scene, places: Sequence[float], *, dimensions: int, batches: int, seed: int, mode: str
) -> tuple[str, str, int, Losses]:
    """Return the start, end, number of batches, and losses of a loss landscape."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "a loss landscape needs torch", hint="pip install 'trainvitals[torch]'"
        ) from None
    from vitals_plugins.lab.landscape.surface import copy_model_tensors as values_of
    from vitals_plugins.lab.landscape.surface import (
        direction_to_weights,
        losses_along,
        open_loss_surface,
        random_directions,
    )

    checkpoint, entry, step, to, directory = scene
    torch.manual_seed(seed)
    built = run_entry_function(entry)
    measured_batches = _load_first_batches(built, batches, entry, seed)
    end = ""
    if to:
        end = _load_end(to, checkpoint, directory, built.model)
        other = values_of(built.model)
    begin = _load_checkpoint(checkpoint, step, directory, built.model)
    directions = (
        [direction_to_weights(built.model, other)]
        if to
        else random_directions(built.model, dimensions, seed)
    )
    num_points = len(places) ** len(directions)
    with (
        open_loss_surface(
            built.model,
            built.loss_of,
            measured_batches,
            mode=mode,  # type: ignore[arg-type]
            seed=seed,
        ) as around,
        typer.progressbar(
            length=num_points, label="losses", file=sys.stderr, hidden=not sys.stderr.isatty()
        ) as bar,
    ):
        losses = losses_along(around, directions, places, lambda: bar.update(1))
    return begin, end, len(measured_batches), losses


def _point_positions(dimensions: int, radius: float, points: int, *, is_path: bool) -> list[float]:
    """Return the positions along a landscape's direction; 0, the checkpoint, is among them.

    Raises:
        UsageError: the radius or number of points is invalid.
    """
    if is_path and dimensions != 1:
        raise UsageError("--to is a line: it has one dimension", hint="leave --dimensions out")
    if not (math.isfinite(radius) and radius > 0):
        raise UsageError(f"--radius is {radius:g}; it must be above 0, such as 1")
    num = points or (41 if dimensions == 1 else 21)
    if not 3 <= num <= _MOST_POINTS or num % 2 == 0:
        raise UsageError(
            f"--points is {points}; it must be odd, so that the checkpoint is one of them, and "
            f"from 3 to {_MOST_POINTS}"
        )
    half = num // 2
    if is_path:
        return [i / (num - 1) for i in range(num)]
    return [radius * (i - half) / half for i in range(num)]


def _surface_facts(
    places: Sequence[float], losses: Losses, within: float, *, is_path: bool
) -> dict[str, Any]:
    """Return the facts of a loss landscape for JSON: of its path, or of each direction."""
    if is_path:
        return {"path": path_facts(places, losses[0])._asdict()}
    facts = [line_facts(places, line, within) for line in middle_lines(losses)]
    return {"directions": [None if each is None else each._asdict() for each in facts]}


def _point_rows(places: Sequence[float], losses: Losses) -> list[tuple[float, float, float]]:
    """Return a row for each point of a loss landscape: its positions and loss."""
    ups = places if len(losses) > 1 else (0.0,)
    return [
        (along, up, loss)
        for up, row in zip(ups, losses, strict=True)
        for along, loss in zip(places, row, strict=True)
    ]


def _write_output(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file of a loss landscape, unless it exists with other content."""
    try:
        if path.is_file() and not force and path.read_bytes() != content:
            raise UsageError(
                f"{path} exists and its content differs",
                hint="write to another file with --output, or overwrite it with --force",
            )
        replace_file(path, content)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="choose a name in an existing folder that you may write to: --output",
        ) from error


# ------------------------------------------------------------------------- batches and weights


def _load_first_batches(built: EntryResult, num: int, entry: str, seed: int) -> list[Any]:
    """Return the loader's first batches, on which a loss landscape is measured.

    Raises:
        UsageError: there is no loader, or it is empty.
    """
    import torch

    if built.loader is None:
        raise UsageError(f"{entry} returned no loader to take batches from", hint=_WITH_LOADER)
    torch.manual_seed(seed)  # a loader that shuffles returns the same ones
    try:
        first_batches = list(itertools.islice(iter(built.loader), num))
    except Exception as error:
        raise UsageError(
            f"{entry}: the loader raised {type(error).__name__}: {error}"[:500], hint=_WITH_LOADER
        ) from error
    if not first_batches:
        raise UsageError(f"{entry}: the loader gave no batch", hint=_WITH_LOADER)
    return first_batches


def _load_checkpoint(checkpoint: str, step: int, directory: Path, model: nn.Module) -> str:
    """Load the checkpoint at a loss landscape's center into the model; return its name.

    Raises:
        UsageError: it does not exist, or belongs to another model.
        VitalsError: it is damaged, or not to be trusted.
    """
    path = Path(checkpoint).expanduser()
    if path.is_file():
        if step >= 0:
            raise UsageError(f"--step needs a run, and {checkpoint} is a file")
        _load_file(path, model)
        return path.name
    from vitals_plugins.lab.repro.weights import read_into

    found = find_checkpoints(checkpoint, directory)
    entries = [entry for entry in found.entries() if entry.state in ("verified", "healthy")]
    places = {entry.id: manifests.parse_id(entry.id) for entry in entries}
    fitting = [name for name, (at, _) in places.items() if step < 0 or at <= step]
    if not fitting:
        steps = ", ".join(str(at) for at, _ in sorted(places.values())[:8])
        raise UsageError(
            f"{found.path} holds no checkpoint up to step {step}"
            if places
            else f"{found.path} holds no checkpoint that can be loaded",
            hint=f"it has steps {steps}" if places else "`vitals checkpoints list RUN` shows why",
        )
    name = max(fitting, key=lambda each: places[each])
    found.folder(name).check(name)
    read_into(model, found.path / name)
    return f"step {places[name][0]:,} of {found.run_id or found.path.name}"


def _load_end(to: str, checkpoint: str, directory: Path, model: nn.Module) -> str:
    """Load the other end of a loss landscape's path into the model; return its name."""
    if to.isdecimal() and not Path(to).is_file():
        if Path(checkpoint).expanduser().is_file():
            raise UsageError(
                f"--to is step {to}, and {checkpoint} is a file", hint="give a file to --to as well"
            )
        return _load_checkpoint(checkpoint, int(to), directory, model)
    path = Path(to).expanduser()
    if not path.is_file():
        raise UsageError(
            f"--to is {to!r}, which is neither a step nor a file", hint="--to 5000, or --to best.pt"
        )
    return _load_checkpoint(to, -1, directory, model)


def _load_file(path: Path, model: nn.Module) -> None:
    """Load a state dict for a loss landscape; nothing in the file is run.

    Raises:
        FormatError: it is not a checkpoint.
        UsageError: it belongs to another model.
    """
    state = _state_in(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise UsageError(
            f"{path} belongs to another model: {text}"[:500],
            hint="the entry must build the model whose state dict was saved",
        ) from error


def _state_in(path: Path) -> dict[str, Tensor]:
    """Read the state dict of a loss landscape's checkpoint file."""
    import torch
    from torch import Tensor

    from trainer_hooks.tensors.gradients import clean_name

    try:
        if path.suffix == ".safetensors":
            content: Any = importlib.import_module("safetensors.torch").load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise MissingDependencyError(
            f"{path} needs the package safetensors", hint="pip install safetensors"
        ) from None
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise FormatError(
            f"{path} cannot be read as a state dict: {type(error).__name__}: {text}"[:400],
            hint="a file of torch.save(model.state_dict(), FILE); nothing in it is run",
        ) from error
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    is_state = isinstance(content, Mapping) and any(isinstance(v, Tensor) for v in content.values())
    if not is_state:
        raise FormatError(
            f"{path} holds no state dict, but {name_type(content)}",
            hint="save one: torch.save(model.state_dict(), FILE)",
        )
    return {clean_name(str(name)).removeprefix("module."): part for name, part in content.items()}
