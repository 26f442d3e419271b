"""Tokens of users and jobs, in addition to the three of the token file.

A token has scopes and an owner, and may be limited to one project or run. Writers that it creates
belong to it: no other token may write to them. Tokens are in the database, so all collectors on it
use them, and changes take effect within seconds.
"""

import hashlib
import logging
import secrets
import threading
from collections.abc import Collection, Iterable
from typing import NamedTuple, get_args

from sqlalchemy import Connection, Row, insert, select, update

from trainvitals.clock import Clock
from trainvitals.errors import StorageError, UnauthorizedError, UsageError
from trainvitals.identity import check_run_id
from trainvitals.question import TokenScope
from vitals_collector.storage.schema import runs, tokens
from vitals_collector.storage.store import UNKNOWN, Store, write_audit

PREFIX = "vitals_"
"""Prefix of each secret, by which secret scanners recognize it."""
ENDED = "V414"
"""Error code: the token has expired or was revoked."""
LIMITED = "V413"
"""Error code: the token is limited to a project or run, and this is beyond it."""
LOOK_SECONDS = 2.0
_MAX_NAME = 100
_LOG = logging.getLogger("vitals.collector.tokens")


class Principal(NamedTuple):
    """Identity behind a request's token. Without scopes it may do nothing."""

    scopes: frozenset[TokenScope] = frozenset()
    name: str = ""
    """For the audit: the token's owner and id, or which of the token file's three it is."""
    token_id: str = ""
    """"": one of the token file's, which are for all runs."""
    owner: str = ""
    project: str = ""
    """The only project whose runs it is for; "" is no limit."""
    run_id: str = ""
    """The only run it is for; "" does not limit it."""
    writes_all: bool = False
    """Whether it may write to other tokens' writers: only the import of directories may."""
    writer_key_hash: str = ""
    """SHA-256 of the key that its batches were sent with; "" without one."""

    @property
    def is_limited(self) -> bool:
        """Return whether the token in the database is only for one project or run."""
        return bool(self.project or self.run_id)

    def with_writer_key(self, key: bytes) -> "Principal":
        """Return the token's identity as the sender of batches with this key."""
        return self._replace(writer_key_hash=hashlib.sha256(key).hexdigest())

    def may_write(self, run_id: str, owner: str, project: str) -> bool:
        """Return whether the token may write to a run that is in the database."""
        if self.writes_all:
            return True
        if self.run_id:
            return run_id == self.run_id
        return project == self.project if self.project else owner == self.owner

    def reach(self, connection: Connection, scope: TokenScope) -> frozenset[str] | None:
        """Query the runs for which the token may be used with the scope; None: all."""
        if self.run_id:
            return frozenset((self.run_id,))
        if self.project:
            is_its = runs.c.project == self.project
        elif self.token_id and scope == "ingest":
            is_its = runs.c.owner == self.owner
        else:
            return None
        return frozenset(connection.execute(select(runs.c.run_id).where(is_its)).scalars())


OWN = Principal(frozenset(("ingest",)), "ingest", writes_all=True)
"""The identity that imports directories."""


class KnownTokens:
    """The database's tokens as they were seconds ago, for each request. Thread-safe.

    If the database cannot be read, the cached ones stay: nothing else can be read either.
    """

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._by_hash: dict[str, tuple[Row[tuple[object, ...]], int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._reload_periodically, name="vitals-tokens")
        self.reload()

    def reload(self) -> None:
        """Reload the tokens from the SQL database."""
        known = {}
        with self._store.read_transaction() as connection:
            for row in connection.execute(select(tokens)):
                if row.previous_hash:
                    known[row.previous_hash] = row, row.previous_ends_unix_ns
                known[row.hash] = row, 0
        self._by_hash = known

    def find(self, secret: str) -> Principal:
        """Return the identity of a token in the database by its secret; unknown: no scopes.

        Raises:
            UnauthorizedError: the token has expired or was revoked.
        """
        # Looked up by its hash: the duration reveals nothing about any secret.
        row, until = self._by_hash.get(_hash(secret), (None, 0))
        if row is None:
            return Principal()
        now = self._clock.time_ns()
        state = state_of(row, now)
        if state == "active" and until and now >= until:
            state = "rotated"
        if state != "active":
            raise UnauthorizedError(
                f"token {row.token_id} of {row.owner} is {state}",
                hint="the operator of the collector creates another one: `vitals token create`"
                if state == "revoked"
                else "use its new secret, or ask the operator of the collector for one: "
                f"`vitals token rotate {row.token_id}`",
                code=ENDED,
            )
        return Principal(
            scopes=_parse_scopes(row.scopes),
            name=f"{row.owner}'s {row.token_id}",
            token_id=row.token_id,
            owner=row.owner,
            project=row.project,
            run_id=row.run_id,
        )

    def start(self) -> None:
        """Start the thread that follows changes of tokens in the SQL database."""
        self._thread.start()

    def close(self) -> None:
        """Stop following changes of tokens in the SQL database."""
        self._stop.set()
        self._thread.join()

    def _reload_periodically(self) -> None:
        """Reload the tokens from the SQL database every few seconds, in a thread."""
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.reload()
            except StorageError as error:
                self._store.counters.fail("tokens")
                _LOG.warning("tokens_not_read: %s", error.text)


# -------------------------------------------------------------------------------- administration


def create(
    connection: Connection,
    *,
    owner: str,
    scopes: Collection[str],
    project: str = "",
    run_id: str = "",
    expires_unix_ns: int = 0,
    by: str,
    now_unix_ns: int,
) -> tuple[str, str]:
    """Store a new token; return its id, and the secret, which is stored only as a hash.

    Raises:
        UsageError: no or a wrong owner, scope or limit.
    """
    for what, text, least in (("owner", owner, 1), ("project", project, 0)):
        if not least <= len(text) <= _MAX_NAME or not text.isprintable():
            raise UsageError(
                f"the {what} is {text[:40]!r}; it must have {least} to {_MAX_NAME} printable "
                "characters"
            )
    offered = get_args(TokenScope)
    if not scopes or not set(scopes) <= set(offered):
        raise UsageError(f"scopes are {', '.join(scopes)}; known are {', '.join(offered)}")
    if project and run_id:
        raise UsageError("a token is limited to a project or to a run, not to both")
    if run_id:
        check_run_id(run_id)
    token_id, secret = secrets.token_hex(4), _new_secret()
    values = {
        "token_id": token_id,
        "hash": _hash(secret),
        "owner": owner,
        "scopes": " ".join(name for name in offered if name in scopes),
        "project": project,
        "run_id": run_id,
        "created_unix_ns": now_unix_ns,
        "expires_unix_ns": expires_unix_ns,
    }
    connection.execute(insert(tokens).values(values))
    detail = f"{owner}: {values['scopes']}"
    write_audit(connection, now_unix_ns, by, "create token", f"token/{token_id}", detail)
    return token_id, secret


def rotate(
    connection: Connection,
    token_id: str,
    *,
    overlap_seconds: float,
    expires_unix_ns: int | None = None,
    by: str,
    now_unix_ns: int,
) -> tuple[Row[tuple[object, ...]], str]:
    """Store a new secret for a token; return its row and the secret. It keeps its writers.

    The previous secret stays valid for ``overlap_seconds``. ``expires_unix_ns``: None keeps the
    time of expiry.

    Raises:
        UsageError: there is no such token, it was revoked, or it would have expired already.
    """
    row, secret = _token_row(connection, token_id), _new_secret()
    if row.revoked_unix_ns:
        raise UsageError(
            f"token {token_id} was revoked; it does not come back",
            hint="`vitals token create` makes another one",
        )
    expires = row.expires_unix_ns if expires_unix_ns is None else expires_unix_ns
    if 0 < expires <= now_unix_ns:
        raise UsageError(
            f"token {token_id} has expired", hint="give --days, for how long it is to be good"
        )
    values = {
        "hash": _hash(secret),
        "previous_hash": row.hash,
        "previous_ends_unix_ns": now_unix_ns + int(overlap_seconds * 1e9),
        "expires_unix_ns": expires,
    }
    connection.execute(update(tokens).where(tokens.c.token_id == token_id).values(values))
    write_audit(connection, now_unix_ns, by, "rotate token", f"token/{token_id}", row.owner)
    return row, secret


def revoke(connection: Connection, token_id: str, *, by: str, now_unix_ns: int) -> None:
    """Mark a token in the database as revoked; its writers stay its own.

    Raises:
        UsageError: there is no such token.
    """
    row = _token_row(connection, token_id)
    if row.revoked_unix_ns:
        return
    is_it = tokens.c.token_id == token_id
    connection.execute(update(tokens).where(is_it).values(revoked_unix_ns=now_unix_ns))
    write_audit(connection, now_unix_ns, by, "revoke token", f"token/{token_id}", row.owner)


def list_tokens(connection: Connection) -> Iterable[Row[tuple[object, ...]]]:
    """Query all tokens in the database, the oldest first; secrets only as their hash."""
    order = (tokens.c.created_unix_ns, tokens.c.token_id)
    return connection.execute(select(tokens).order_by(*order)).all()


def state_of(row: Row[tuple[object, ...]], now_unix_ns: int) -> str:
    """Return whether a row of the table of tokens is active, expired or revoked."""
    if row.revoked_unix_ns:
        return "revoked"
    return "expired" if 0 < row.expires_unix_ns <= now_unix_ns else "active"


def _token_row(connection: Connection, token_id: str) -> Row[tuple[object, ...]]:
    """Query the row of a token, or raise an error if the database has none."""
    row = connection.execute(select(tokens).where(tokens.c.token_id == token_id)).first()
    if row is None:
        raise UsageError(
            f"there is no token {token_id[:40]!r}",
            hint="`vitals token list` shows their ids",
            code=UNKNOWN,
        )
    return row


def _parse_scopes(scopes: str) -> frozenset[TokenScope]:
    """Convert the scopes in a token's row to a set; control includes read."""
    scope_names = scopes.split()
    named = {scope for scope in get_args(TokenScope) if scope in scope_names}
    return frozenset(named | {"read"} if "control" in named else named)


def _new_secret() -> str:
    """Create the random secret of a new token; the database gets only its hash."""
    return PREFIX + secrets.token_urlsafe(32)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
