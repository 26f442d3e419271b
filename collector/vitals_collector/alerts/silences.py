"""Silences: of one alert by fingerprint, or of all that match; each has an end.

A matcher is about ``name``, ``run``, ``severity`` or a label: equal, or by a pattern.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select, update

from trainvitals.errors import UsageError
from trainvitals.views import AckRequest, AlertView, SilenceView
from vitals_collector.storage.schema import silences
from vitals_collector.storage.store import UNKNOWN

_MAX_MATCHERS = 20
_SLOW = re.compile(r"\)[*+{]|\\[0-9]")
"""Parts of a pattern that may take exponential time: a repeated group, or a backreference."""
_REPEATED = re.compile(r"[*+?{(]")
"""Parts that may match in several ways, each doubling the time: a group may have alternatives."""
_MOST_REPEATED = 4
_MAX_LENGTH = 200


class SilenceMatcher(msgspec.Struct, frozen=True):
    """One condition that an alert fits or not."""

    field: str
    pattern: re.Pattern[str]

    def fits(self, view: AlertView) -> bool:
        """Return whether an alert's whole value matches; a user alert has two names."""
        if self.field == "name":
            values = {view.name, view.title}
        elif self.field in ("run", "severity"):
            values = {view.run_id if self.field == "run" else view.severity}
        else:
            values = {view.labels.get(self.field, "")}
        return any(self.pattern.fullmatch(value) for value in values)


def parse_matchers(arguments: Sequence[str]) -> tuple[SilenceMatcher, ...]:
    """Return a silence's matchers of ``FIELD=VALUE`` and ``FIELD=~PATTERN``.

    Raises:
        UsageError: there is none, or one is invalid.
    """
    if not 0 < len(arguments) <= _MAX_MATCHERS:
        raise UsageError(f"{len(arguments)} matchers were given; give 1 to {_MAX_MATCHERS}")
    return tuple(_parse_matcher(word) for word in arguments)


def _parse_matcher(word: str) -> SilenceMatcher:
    """Return the matcher of a silence's term; an error if it is invalid or could be slow."""
    field, equals, value = word.partition("=")
    if not equals or not field.isidentifier() or len(word) > _MAX_LENGTH or not word.isprintable():
        raise UsageError(
            f"matcher {word[:80]!r} is not FIELD=VALUE or FIELD=~PATTERN",
            hint="for example severity=notify, name=~Gpu.* or node=gpu-17",
        )
    text = value.removeprefix("~")
    is_pattern = value.startswith("~")
    if is_pattern and (_SLOW.search(text) or len(_REPEATED.findall(text)) > _MOST_REPEATED):
        raise UsageError(
            f"matcher {word[:80]!r} repeats a group, or too much: matching could take too long",
            hint=f"give alternatives (a|b) and at most {_MOST_REPEATED} of * + ? {{ (",
        )
    try:
        return _compile_matcher(word)
    except re.error as error:
        raise UsageError(f"matcher {word[:80]!r} has no valid pattern: {error}") from error


def _compile_matcher(word: str) -> SilenceMatcher:
    """Return the matcher of a silence's stored term, which was validated when received."""
    field, _, value = word.partition("=")
    is_pattern = value.startswith("~")
    return SilenceMatcher(field, re.compile(value[1:] if is_pattern else re.escape(value)))


class ActiveSilences:
    """The silences that are active at one time."""

    def __init__(self, rows: Iterable[Row[Any]]) -> None:
        self._by_fingerprint: dict[str, Row[Any]] = {}
        self._by_matchers: list[tuple[tuple[SilenceMatcher, ...], Row[Any]]] = []
        for row in rows:
            if row.fingerprint:
                self._by_fingerprint[row.fingerprint] = row
            else:
                matchers = msgspec.json.decode(row.matchers, type=tuple[str, ...])
                self._by_matchers.append((tuple(map(_compile_matcher, matchers)), row))

    def silence_of(self, view: AlertView) -> Row[Any] | None:
        """Return the active silence of an alert that ends last, or None."""
        rows = [row for matchers, row in self._by_matchers if all(m.fits(view) for m in matchers)]
        if (silence_id := self._by_fingerprint.get(view.fingerprint)) is not None:
            rows.append(silence_id)
        return max(rows, key=lambda row: int(row.ends_unix_ns), default=None)


def load_active_silences(connection: Connection, now: int) -> ActiveSilences:
    """Return the silences in force."""
    query = (
        select(silences)
        .where(silences.c.starts_unix_ns <= now, silences.c.ends_unix_ns > now)
        .order_by(silences.c.ends_unix_ns)
    )
    return ActiveSilences(connection.execute(query))


def add_silence(
    connection: Connection,
    request: AckRequest,
    *,
    starts: int,
    fingerprint: str = "",
    matchers: str = "",
) -> int:
    """Store a silence from then on and return its number; earlier ones stay as they are."""
    values = {
        "fingerprint": fingerprint,
        "matchers": matchers,
        "created_by": request.by,
        "reason": request.reason,
        "starts_unix_ns": starts,
        "ends_unix_ns": starts + int(request.silence_seconds * 1e9),
    }
    statement = silences.insert().values(values).returning(silences.c.id)
    return int(connection.execute(statement).scalar_one())


def load_open_silences(
    connection: Connection, open_alerts: Sequence[AlertView], now: int
) -> tuple[SilenceView, ...]:
    """Return the silences that are not over; the one that ends first is first."""
    query = select(silences).where(silences.c.ends_unix_ns > now)
    rows = connection.execute(query.order_by(silences.c.ends_unix_ns, silences.c.id)).all()
    return tuple(
        _silence_view(
            row, sum(ActiveSilences([row]).silence_of(view) is not None for view in open_alerts)
        )
        if row.starts_unix_ns <= now
        else _silence_view(row, 0)
        for row in rows
    )


def end_silence(connection: Connection, silence_id: int, now: int) -> SilenceView:
    """End an active or future silence.

    Raises:
        UsageError: there is no such silence, or it has ended.
    """
    is_it = (silences.c.id == silence_id) & (silences.c.ends_unix_ns > now)
    statement = update(silences).where(is_it).values(ends_unix_ns=now).returning(silences)
    row = connection.execute(statement).first()
    if row is None:
        raise unknown_silence(silence_id)
    return _silence_view(row, 0)


def unknown_silence(silence_id: int) -> UsageError:
    """Return the error for a silence that is unknown or has ended."""
    return UsageError(
        f"there is no silence {silence_id} that still holds",
        hint="`vitals alerts silences` shows their numbers",
        code=UNKNOWN,
    )


def names_run(matchers: Sequence[str], reach: Collection[str]) -> bool:
    """Return whether a silence's matchers fit no alerts but those of one of these runs."""
    return any(word.removeprefix("run=") in reach for word in matchers if word.startswith("run="))


def _silence_view(row: Row[Any], num_firing: int) -> SilenceView:
    """Return a stored silence for clients, with how many alerts it silences now."""
    return SilenceView(
        id=row.id,
        matchers=msgspec.json.decode(row.matchers or "[]", type=tuple[str, ...]),
        fingerprint=row.fingerprint,
        by=row.created_by,
        reason=row.reason,
        starts_unix_ns=row.starts_unix_ns,
        ends_unix_ns=row.ends_unix_ns,
        num_firing=num_firing,
    )
