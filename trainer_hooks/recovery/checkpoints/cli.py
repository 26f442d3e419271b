"""``vitals checkpoints``: saved checkpoints of a run, their verification, and manual marks.

Only ``verify`` uses torch, and works without it: a login node without torch must still be able to
list, promote or quarantine a checkpoint.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer

from trainer_hooks.recovery.checkpoints import manifest as manifests
from trainer_hooks.recovery.checkpoints.find import RUNS, find_checkpoints, newest_of
from trainer_hooks.recovery.checkpoints.folder import CheckpointFolder
from trainer_hooks.recovery.checkpoints.index import IndexEntry
from trainer_hooks.recovery.checkpoints.manifest import Manifest
from trainvitals.cli.groups import Commands, add_group
from trainvitals.cli.options import Form, VitalsDir
from trainvitals.cli.output import Format, format_time, write_table
from trainvitals.errors import (
    CheckpointCorruptError,
    FormatError,
    InsecurePathError,
    UsageError,
    VitalsError,
)
from trainvitals.policy.state import CheckpointState
from trainvitals.views import CheckpointsQuestion, RunsQuestion

_Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR",
        help="Id, beginning of an id, name or folder of a run; or a folder of checkpoints.",
    ),
]
_Id = Annotated[str, typer.Argument(metavar="ID", help="As `vitals checkpoints list` shows it.")]
_LATER = "a running job of this run picks it up at its next start"


def register(app: typer.Typer) -> None:
    """Add the commands ``vitals checkpoints list``, ``verify`` and others."""
    arguments = "my-run step-00000120-1763712486000123"
    commands: Commands = {
        "list": (show, "vitals checkpoints list my-run --format json"),
        "verify": (verify, "vitals checkpoints verify my-run"),
        "promote": (promote, f"vitals checkpoints promote {arguments}"),
        "quarantine": (
            quarantine,
            f'vitals checkpoints quarantine {arguments} --reason "trained on bad data"',
        ),
    }
    about = "Show a run's checkpoints; verify, promote or quarantine one."
    add_group(app, "checkpoints", commands, about=about, example="vitals checkpoints list my-run")


def show(run: _Run, directory: VitalsDir = RUNS, form: Form = Format.TABLE) -> None:
    """List checkpoints with their status, including removed and quarantined ones.

    A run without a directory here is queried from the collector in VITALS_COLLECTOR_URL.
    """
    try:
        entries = find_checkpoints(run, directory).entries()
    except UsageError:
        if not os.environ.get("VITALS_COLLECTOR_URL"):
            raise
        entries = _known_to_collector(run)
    header = ("checkpoint", "step", "state", "bytes", "since", "run", "note")
    rows = [
        (
            entry.id,
            manifests.parse_id(entry.id)[0],
            entry.state,
            entry.num_bytes or None,
            format_time(entry.time_unix_ns),
            entry.run_id,
            _entry_note(entry),
        )
        for entry in entries
    ]
    write_table(header, rows, form, body=entries)


def verify(
    run: _Run,
    checkpoint: Annotated[
        str, typer.Argument(metavar="[ID]", help="Only this one [default: all].")
    ] = "",
    directory: VitalsDir = RUNS,
    form: Form = Format.TABLE,
) -> None:
    """Read checkpoints back: verify checksums and that all tensors are finite.

    Changes nothing: training quarantines a damaged one when it loads it, as `vitals checkpoints
    quarantine` does. Without torch, only checksums are verified.
    """
    checkpoints = find_checkpoints(run, directory)
    names = [entry.id for entry in checkpoints.entries() if entry.state in ("verified", "healthy")]
    if checkpoint:
        checkpoints.require(checkpoint)
        names = [checkpoint]
    results = [_verify_checkpoint(checkpoints.folder(name), name) for name in names]
    header = ("checkpoint", "checksums", "finite", "bytes", "note")
    rows = [(r.checkpoint, r.checksums, r.finite, r.num_bytes or None, r.note) for r in results]
    write_table(header, rows, form, body=results)
    if any(not result.is_sound for result in results):
        raise typer.Exit(1)


def promote(run: _Run, checkpoint: _Id, directory: VitalsDir = RUNS) -> None:
    """Verify a checkpoint and mark it healthy, so that a rollback may use it.

    Rotation keeps only the latest healthy one, so an older one may be removed later.
    """
    checkpoints = find_checkpoints(run, directory)
    entry = checkpoints.require(checkpoint)
    if entry.state == "healthy":
        typer.echo(f"{checkpoint} is already marked healthy")
        return
    checkpoints.folder(checkpoint).promote(checkpoint)
    typer.echo(f"{checkpoint} is now marked healthy; {_LATER}")


def quarantine(
    run: _Run,
    checkpoint: _Id,
    reason: Annotated[
        str, typer.Option(help="Reason, kept with the checkpoint.")
    ] = "quarantined by hand",
    directory: VitalsDir = RUNS,
) -> None:
    """Quarantine a checkpoint: it is never loaded and never deleted."""
    checkpoints = find_checkpoints(run, directory)
    checkpoints.require(checkpoint)
    checkpoints.folder(checkpoint).quarantine(checkpoint, reason)
    healthy = [entry.id for entry in checkpoints.entries() if entry.state == "healthy"]
    advice = f"the newest healthy one is {healthy[-1]}" if healthy else "no healthy one is left"
    typer.echo(f"{checkpoint} is quarantined in {checkpoints.path}; {advice}; {_LATER}")


def _known_to_collector(run: str) -> list[IndexEntry]:
    """Return the collector's entries for a run's checkpoints on disk."""
    from trainvitals.io.client import open_collector_client
    from trainvitals.io.lookup import choose_run, find_collector

    collector = find_collector()
    assert collector is not None, "the environment names one"
    with open_collector_client(collector) as client:
        run_id = choose_run(client.ask(RunsQuestion()), run).run_id
        return [
            IndexEntry(
                id=view.checkpoint_id,
                run_id=run_id,
                state=cast(CheckpointState, view.state),
                num_bytes=view.num_bytes,
                time_unix_ns=view.time_unix_ns,
                reason=view.detail,
            )
            for view in client.ask(CheckpointsQuestion(run_id=run_id))
            if view.where == "disk"
        ]


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of verifying one checkpoint."""

    checkpoint: str
    checksums: Literal["ok", "wrong", "unknown"]
    finite: Literal["ok", "wrong", "unknown"] = "unknown"
    num_bytes: int = 0
    note: str = ""

    @property
    def is_sound(self) -> bool:
        """Return whether the checkpoint has no fault; checks skipped without torch do not count."""
        return self.checksums == "ok" and self.finite != "wrong"


def _verify_checkpoint(folder: CheckpointFolder, name: str) -> VerifyResult:
    """Read a checkpoint back; return the result for its checksums and finite values."""
    path, notes = folder.path, [_refusal_reason(folder, name)]
    try:
        content = manifests.check(path / name)
    except CheckpointCorruptError as error:
        return VerifyResult(checkpoint=name, checksums="wrong", note=error.text)
    except (VitalsError, OSError) as error:  # newer, or not readable by us: it may be intact
        return VerifyResult(checkpoint=name, checksums="unknown", note=_error_text(error))
    finite: Literal["ok", "wrong", "unknown"] = "ok"
    try:
        wrong = _nonfinite(path / name, content)
        if wrong:
            finite = "wrong"
            notes.append(f"not finite: {newest_of(wrong)}")
    except ModuleNotFoundError as error:
        finite = "unknown"
        notes.append(f"tensors were not checked: {error.name} is not installed")
    except VitalsError as error:
        finite = "wrong"
        notes.append(error.text)
    return VerifyResult(
        checkpoint=name,
        checksums="ok",
        finite=finite,
        num_bytes=content.num_bytes,
        note="; ".join(filter(None, notes)),
    )


def _refusal_reason(folder: CheckpointFolder, name: str) -> str:
    """Return why this user's training would refuse the checkpoint, even if intact."""
    try:
        folder.proven(folder.path / name, manifests.read)
    except (InsecurePathError, OSError) as error:
        return _error_text(error)
    except FormatError:
        return ""  # damaged or newer: reported by the code that reads it
    return ""


def _error_text(error: Exception) -> str:
    """Return an error as the note on a verified checkpoint."""
    if not isinstance(error, VitalsError):
        return str(error)
    return f"{error.text}; {error.hint}" if error.hint else error.text


def _nonfinite(folder: Path, content: Manifest) -> list[str]:
    """Return the names of a checkpoint's tensors with NaN or Inf that had none at the start."""
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from trainer_hooks.recovery.checkpoints import payload
    from trainer_hooks.tensors.optimizer_state import nonfinite_count

    exempt = set(content.may_be_nonfinite)
    wrong: dict[str, None] = {}

    def show(index: MetadataIndex, tensor: Tensor) -> None:
        key = index.fqn
        plain = key.split(".", 2)[2] if key.startswith("rank.") else key
        if plain not in exempt and nonfinite_count([tensor], tensor.device).item():
            wrong[key] = None

    payload.scan(folder, show)
    return list(wrong)


def _entry_note(entry: IndexEntry) -> str:
    """Return the note on a checkpoint in ``vitals checkpoints list``."""
    notes = [entry.reason] if entry.reason else []
    if entry.best is not None and math.isfinite(entry.best.value):
        notes.insert(0, f"best {entry.best.metric} {entry.best.value:.6g}")
    return "; ".join(notes)
