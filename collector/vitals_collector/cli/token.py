"""`vitals token`: tokens to ingest, read and control, in addition to those of the token file.

Like `vitals store`, these commands open the collector's database directly: any user who can read
its data directory can use them. A collector applies changes within seconds.
"""

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from trainvitals.cli.groups import Commands, add_group
from trainvitals.cli.options import Form
from trainvitals.cli.output import Format, format_time, write_table
from trainvitals.errors import StorageError, UsageError
from trainvitals.identity import new_run_id
from trainvitals.io.private import replace_file
from trainvitals.io.rundir import is_run_id
from vitals_collector.cli.store import StoreChoice, data_dir, find_run, user

if TYPE_CHECKING:
    from vitals_collector.storage.store import Store

_DAY_NS = 86_400_000_000_000


class Scope(StrEnum):
    """Scope of a token."""

    INGEST = "ingest"
    READ = "read"
    CONTROL = "control"


TokenId = Annotated[str, typer.Argument(metavar="ID", help="The token's id.")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Write a token file (0600) for --token-file and VITALS_TOKEN_FILE, with the "
        "collector's certificate [default: print the secret, once]."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the ``vitals token`` commands."""
    commands: Commands = {
        "create": (create, "vitals token create ada --project llm --output ada.json"),
        "list": (list_tokens, "vitals token list"),
        "rotate": (rotate, "vitals token rotate 3f2a9c0d --output ada.json"),
        "revoke": (revoke, "vitals token revoke 3f2a9c0d"),
    }
    about = "Create, list, rotate and revoke tokens of users and jobs."
    add_group(app, "token", commands, about=about, example="vitals token list")


def create(
    *,
    owner: Annotated[str, typer.Argument(help="Owner of the token: a user, a team or a job.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Scope; repeatable [default: ingest].")
    ] = None,
    project: Annotated[str, typer.Option(help="For runs of this project only.")] = "",
    run: Annotated[
        str, typer.Option(help="For this run only: its id, even before it starts, or its name.")
    ] = "",
    days: Annotated[float, typer.Option(help="Days until it expires; 0: never.", min=0.0)] = 0.0,
    output: Output = None,
    choice: StoreChoice,
) -> None:
    """Create a token for a user or a job; its secret is shown or written once.

    A run belongs to the owner of the token that starts it: tokens of other owners cannot write to
    it, unless they are for its project. Control includes read.
    """
    from vitals_collector.storage import tokens

    scopes = tuple(dict.fromkeys(each.value for each in scope or (Scope.INGEST,)))
    now = time.time_ns()
    with choice.open(with_rows=False) as store:
        run_id = run if not run or is_run_id(run) else _run_of_name(store, run, owner)
        with store.write() as connection:
            token_id, secret = tokens.create(
                connection,
                owner=owner,
                scopes=scopes,
                project=project,
                run_id=run_id,
                expires_unix_ns=_expiry_unix_ns(days, now),
                by=user(),
                now_unix_ns=now,
            )
            if output is not None:
                _write_token_file(output, secret, scopes, data_dir(choice.data), is_new=True)
    _print_token(token_id, owner, secret, output)


def _run_of_name(store: "Store", name: str, owner: str) -> str:
    """Return the only run's id for `vitals token`; the error explains how to name a future run."""
    from vitals_collector.storage.store import UNKNOWN

    try:
        return find_run(store, name)
    except UsageError as error:
        fresh = new_run_id(time.time_ns())
        raise UsageError(
            f"--run {error.text}; one that has not begun is known by its id alone, as several may "
            "have one name",
            hint=f"choose its id: `vitals token create {owner} --run {fresh}`, and train with "
            f"VITALS_RUN_ID={fresh}; or limit the token by --project",
            code=UNKNOWN,
        ) from None


def list_tokens(*, choice: StoreChoice, form: Form = Format.TABLE) -> None:
    """List all tokens except the three of the token file, without secrets."""
    from vitals_collector.storage import tokens

    now = time.time_ns()
    with choice.open(with_rows=False) as store, store.read_transaction() as connection:
        listed = tokens.list_tokens(connection)
    header = ("id", "owner", "scopes", "runs", "created", "ends", "state")
    rows = [
        (
            row.token_id,
            row.owner,
            row.scopes,
            f"project {row.project}" if row.project else f"run {row.run_id}" if row.run_id else "",
            format_time(row.created_unix_ns),
            format_time(row.expires_unix_ns),
            tokens.state_of(row, now),
        )
        for row in listed
    ]
    write_table(header, rows, form)


def rotate(
    *,
    token: TokenId,
    overlap_hours: Annotated[
        float, typer.Option(help="Hours for which the previous secret still works.", min=0.0)
    ] = 1.0,
    days: Annotated[
        float | None,
        typer.Option(help="Days until it ends, 0 is never [default: as it was].", min=0.0),
    ] = None,
    output: Output = None,
    choice: StoreChoice,
) -> None:
    """Give a token a new secret; it keeps its identity and its runs.

    Agents read their token file again when its secret no longer works: write the new one to it.
    Pass --overlap-hours 0 if the previous secret has leaked.
    """
    from vitals_collector.storage import tokens

    now = time.time_ns()
    with choice.open(with_rows=False) as store, store.write() as connection:
        row, secret = tokens.rotate(
            connection,
            token,
            overlap_seconds=overlap_hours * 3600.0,
            expires_unix_ns=None if days is None else _expiry_unix_ns(days, now),
            by=user(),
            now_unix_ns=now,
        )
        if output is not None:
            _write_token_file(
                output, secret, row.scopes.split(), data_dir(choice.data), is_new=False
            )
    _print_token(token, row.owner, secret, output)


def revoke(*, token: TokenId, choice: StoreChoice) -> None:
    """Revoke a token permanently, within seconds; data written with it stays."""
    from vitals_collector.storage import tokens

    with choice.open(with_rows=False) as store, store.write() as connection:
        tokens.revoke(connection, token, by=user(), now_unix_ns=time.time_ns())
    sys.stderr.write(f"token {token} is revoked; collectors refuse it within seconds\n")


def _expiry_unix_ns(days: float, now_unix_ns: int) -> int:
    """Return when a token of `vitals token` expires; 0 for never."""
    return now_unix_ns + int(days * _DAY_NS) if days else 0


def _write_token_file(
    output: Path, secret: str, scopes: "list[str] | tuple[str, ...]", data: Path, *, is_new: bool
) -> None:
    """Write `vitals token`'s file for clients, only for this user; never overwrite one."""
    from trainvitals.io.client import CollectorTokens, read_tokens
    from vitals_collector.api.app import TOKENS_FILE

    tokens_file = data / TOKENS_FILE
    tls = read_tokens(tokens_file).tls if tokens_file.exists() else CollectorTokens().tls
    granted = {*scopes, "read"} if "control" in scopes else set(scopes)
    fields: dict[str, object] = dict.fromkeys(sorted(granted), secret)
    body = msgspec.json.encode({**fields, "tls": tls}) + b"\n"
    try:
        if is_new:
            os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        replace_file(output, body, mode=0o600)
    except FileExistsError as error:
        raise UsageError(
            f"{output} already exists", hint="give another name; `rotate` overwrites its file"
        ) from error
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror}") from error


def _print_token(token_id: str, owner: str, secret: str, output: Path | None) -> None:
    """Print a token of `vitals token` once, or the file that it is in."""
    if output is None:
        sys.stdout.write(f"{secret}\n")
        sys.stderr.write(f"token {token_id} of {owner}: this is the only time it is shown\n")
    else:
        sys.stderr.write(f"token {token_id} of {owner} is in {output}\n")
