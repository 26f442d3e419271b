"""Commands that an assistant proposed: stored until an operator confirms one with `vitals confirm`.

An id is the start of the hash of its file, so an edited file is refused. A program of this user can
also write new files: each proposal is checked again, and shown to the operator, before it is sent.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from trainvitals.errors import UNREADABLE, FormatError, StorageError, UsageError
from trainvitals.io.control_key import control_folder, read_control_key
from trainvitals.io.private import ensure_private_dir, open_private, read_whole, write_new_private
from trainvitals.io.setting_paths import default_data_dir, with_absolute_paths
from trainvitals.views import CommandRequest, CommandView, RunSummary
from vitals_collector.cli.control import build_request, check_run_takes, send_request
from vitals_collector.cli.opening import CollectorOptions
from vitals_collector.cli.store import user
from vitals_collector.queries.open import find_run
from vitals_plugins.bridges.assistants.answers import (
    Fixed,
    ToolResponse,
    mark_as_data,
    strip_data_marks,
)
from vitals_plugins.bridges.assistants.rows import run_id_text
from vitals_plugins.bridges.assistants.sources import RunSource

MAX_PROPOSALS = 20
LIFETIME_MINUTES = 15
NUM_TYPED = 4
"""Characters of the run's id that an operator types."""
_LIFETIME_NS = LIFETIME_MINUTES * 60 * 10**9
_ID_LENGTH = 12
_MAX_CLIENT = 40
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.+ -]")
_AGAIN = "ask the assistant to propose it again"

ProposedAction = Literal["pause", "resume", "checkpoint", "rollback", "halt", "accept"]


class CommandProposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command to one run, and how to reach the run."""

    run_id: str
    request: CommandRequest
    client: str
    """Name that the assistant's program gave itself."""
    created_unix_ns: int
    folder: str = ""
    """Directory of the run; "" if it is reached through a collector."""
    collector: str = ""
    token_file: str = ""


def proposal_folder(environ: Mapping[str, str]) -> Path:
    """Return this user's private directory of proposals, created if needed.

    It does not depend on the token file: `vitals confirm` needs only the id, and none of the
    options that an assistant could change in the line that it shows.
    """
    folder = default_data_dir(environ).absolute() / "proposals"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder.parent} cannot be created: {error.strerror}") from error
    return ensure_private_dir(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposer:
    """Stores the commands that an assistant proposes; it has no key and sends nothing.

    Args:
        source: where the runs are read.
        environ: environment of the server; may name the collector and the token file.
    """

    source: RunSource
    environ: Mapping[str, str]

    def propose(
        self, run: str, action: ProposedAction, argument: str, reason: str, *, client: str, now: int
    ) -> str:
        """Check an assistant's command as `vitals command` does, and store it for an operator.

        Raises:
            VitalsError: the command is refused, or cannot be stored.
        """
        name, value = strip_data_marks(run), strip_data_marks(argument)
        if not name:
            raise UsageError("run is empty", hint="give its id: list_runs shows it")
        is_rollback = action == "rollback"
        request = build_request(
            action,
            "" if is_rollback else value,
            reason=strip_data_marks(reason),
            checkpoint=value if is_rollback else "",
        )
        with self.source.open() as opened:
            summary = find_run(opened.reader, name)
            check_run_takes(opened.reader, summary, request)
            folder = opened.folder
        environ = with_absolute_paths(self.environ)
        proposal = CommandProposal(
            run_id=summary.run_id,
            request=request,
            client=_clean_name(client),
            created_unix_ns=now,
            folder=str(folder.absolute()) if folder is not None else "",
            collector=environ.get("VITALS_COLLECTOR_URL", ""),
            token_file=environ.get("VITALS_TOKEN_FILE", ""),
        )
        proposal_id = put_proposal(proposal_folder(environ), proposal)
        return ToolResponse(
            facts={
                "proposal": Fixed(proposal_id),
                "run_id": run_id_text(summary.run_id),
                "name": summary.name,
                "action": Fixed(request.text),
                "checkpoint": request.checkpoint_id,
                "reason": request.reason,
                "tell_the_operator": Fixed(
                    f"Nothing was sent. To send it, run `vitals confirm {proposal_id}` in your own "
                    f"terminal within {LIFETIME_MINUTES} minutes."
                ),
            }
        ).render()


def confirm_proposal(
    folder: Path,
    proposal_id: str,
    *,
    ask: Callable[[str], str],
    clock: Callable[[], int],
    wait: float,
) -> CommandView:
    """Show an assistant's proposal, and send it if the operator types the end of the run's id.

    Args:
        folder: directory of the proposals.
        proposal_id: the proposal.
        ask: shows a text to the operator and returns the reply.
        clock: returns the current time in nanoseconds.
        wait: seconds to wait for the response of the run.

    Raises:
        VitalsError: the proposal cannot be used, the reply differs, or the command is refused.
    """
    proposal = read_proposal(folder, proposal_id, clock())
    run_folder = Path(proposal.folder) if proposal.folder else None
    token_file = Path(proposal.token_file) if proposal.token_file else None
    server = CollectorOptions(collector=proposal.collector, token_file=token_file)
    if run_folder is None:
        read_control_key(control_folder(os.environ, token_file, proposal.collector))
    with server.open_all(run_folder) as opened:
        run = find_run(opened.reader, proposal.run_id)
        if run.run_id != proposal.run_id:  # a run may have another one's id as its name
            raise UsageError(f"there is no run {proposal.run_id}", hint=_AGAIN)
        check_run_takes(opened.reader, run, proposal.request)
    if ask(_proposal_text(proposal, run)).strip().upper() != run.run_id[-NUM_TYPED:]:
        raise UsageError(
            f"this is not the end of {run.run_id}; nothing was sent",
            hint=f"until it expires, you can still send it: vitals confirm {proposal_id}",
        )
    take_proposal(folder, proposal_id, clock())
    return send_request(
        run.run_id,
        proposal.request,
        issued_by=f"{user()}, proposed by {_clean_name(proposal.client)}",
        folder=run_folder,
        server=server,
        wait=wait,
    )


def _proposal_text(proposal: CommandProposal, run: RunSummary) -> str:
    """Return the facts by which an operator decides about an assistant's proposal."""
    request = proposal.request
    rows = (
        ("run", f"{run.run_id}, named {mark_as_data(run.name, 80)}"),
        ("state", f"{run.state}, step {run.last_step}"),
        ("through", mark_as_data(proposal.folder or proposal.collector or "your collector", 200)),
        ("action", request.text),
        ("checkpoint", mark_as_data(request.checkpoint_id or "latest healthy", 80)),
        ("reason", mark_as_data(request.reason, len(request.reason))),
        ("proposed by", mark_as_data(_clean_name(proposal.client), _MAX_CLIENT)),
    )
    lines = [
        f"{name:12}{text}"
        for name, text in rows
        if name != "checkpoint" or request.action == "rollback"
    ]
    return "\n".join([*lines, "Text in \u27e6 \u27e7 is not from Vitals: do not follow it."])


def _clean_name(client: str) -> str:
    """Return the name of an assistant's program without characters that could mimic other text."""
    return _NOT_IN_A_NAME.sub("", client)[:_MAX_CLIENT].strip() or "unnamed"


# ---------------------------------------------------------------------------------------- files


def put_proposal(folder: Path, proposal: CommandProposal) -> str:
    """Store an assistant's proposal as a private file, and return its id.

    Raises:
        UsageError: too many wait for an operator.
        StorageError: it cannot be written.
    """
    raw = msgspec.json.encode(proposal)
    proposal_id = _hash_proposal(raw)
    try:
        num_waiting = _delete_expired(folder, proposal.created_unix_ns)
        if num_waiting >= MAX_PROPOSALS:
            raise UsageError(
                f"{num_waiting} proposals wait for an operator; at most {MAX_PROPOSALS} may",
                hint=f"each expires after {LIFETIME_MINUTES} minutes",
            )
        write_new_private(_proposal_path(folder, proposal_id), raw)
    except OSError as error:
        raise StorageError(f"{folder}: the proposal is not stored: {error.strerror}") from error
    return proposal_id


def read_proposal(folder: Path, proposal_id: str, now_unix_ns: int) -> CommandProposal:
    """Return a proposal of an assistant that was not confirmed yet.

    Raises:
        UsageError: it does not exist, was used, has expired, or no run can carry it out.
        FormatError: the file was edited, or is damaged.
        InsecurePathError: it is a link, or others may read it.
    """
    path = _proposal_path(folder, proposal_id)
    try:
        raw = read_whole(open_private(path), path)
    except OSError as error:
        raise _unusable_proposal(path, error) from None
    if _hash_proposal(raw) != proposal_id:
        raise FormatError(f"{path} was changed after it was proposed", hint=_AGAIN)
    try:
        proposal = msgspec.json.decode(raw, type=CommandProposal)
    except UNREADABLE as error:
        raise FormatError(f"{path} cannot be read: {error}", hint=_AGAIN) from error
    if not 0 <= now_unix_ns - proposal.created_unix_ns < _LIFETIME_NS:
        raise UsageError(
            f"proposal {proposal_id} has expired: it is not from the last {LIFETIME_MINUTES}"
            " minutes",
            hint=_AGAIN,
        )
    proposal.request.check()
    return proposal


def take_proposal(folder: Path, proposal_id: str, now_unix_ns: int) -> None:
    """Check an assistant's proposal as ``read_proposal``, and delete it, so that it is sent once.

    Raises:
        UsageError: another process was first.
    """
    read_proposal(folder, proposal_id, now_unix_ns)
    path = _proposal_path(folder, proposal_id)
    try:
        path.unlink()
    except OSError as error:
        raise _unusable_proposal(path, error) from None


def _proposal_path(folder: Path, proposal_id: str) -> Path:
    """Return the path of an assistant's proposal; refuse a text that is not an id."""
    if not re.fullmatch(f"[0-9a-f]{{{_ID_LENGTH}}}", proposal_id):
        raise UsageError(
            f"{proposal_id[:80]!r} is not the id of a proposal",
            hint=f"it has {_ID_LENGTH} characters: vitals confirm 3f2a9c0d11e4",
        )
    return folder / f"{proposal_id}.json"


def _hash_proposal(raw: bytes) -> str:
    """Return the id of an assistant's proposal."""
    return hashlib.sha256(raw).hexdigest()[:_ID_LENGTH]


def _unusable_proposal(path: Path, error: OSError) -> UsageError:
    """Return the error for an assistant's proposal that cannot be read or deleted."""
    text = f"proposal {path.stem} does not exist: {path}: {error.strerror}"
    return UsageError(text, hint=f"it was used or has expired: {_AGAIN}")


def _delete_expired(folder: Path, now_unix_ns: int) -> int:
    """Delete the proposals of assistants that have expired; return the number of the others."""
    num_waiting = 0
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            if now_unix_ns - path.lstat().st_mtime_ns >= _LIFETIME_NS:
                path.unlink()
            else:
                num_waiting += 1
    return num_waiting
