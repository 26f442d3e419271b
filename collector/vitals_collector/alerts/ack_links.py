"""Links in messages that lead to a page with an acknowledge button.

A link is signed, names one firing of one alert, and expires; after an acknowledgement, or when the
alert is resolved, it has no effect. The key is in the store, so that any collector on it can verify
links.
"""

import hashlib
import hmac
import secrets

from sqlalchemy import select

from trainvitals.clock import Clock
from trainvitals.errors import UsageError
from trainvitals.views import AckRequest, AlertView
from vitals_collector.alerts.inbox import Inbox, alert_from_row
from vitals_collector.storage.schema import alerts, engine_state
from vitals_collector.storage.store import UNKNOWN, Store, insert, load_state

PATH = "/ack/"
_KEY_NAME = "ack_key"
_VALID_SECONDS = 24 * 3600


class AckLinks:
    """Creates links and handles requests to them."""

    def __init__(self, store: Store, *, clock: Clock, collector_url: str = "") -> None:
        self._store = store
        self._clock = clock
        self._collector_url = collector_url
        self._key_bytes = b""

    def link_of(self, view: AlertView) -> str:
        """Return the link of a firing alert, or "" if it can have none."""
        if not self._collector_url or view.state != "firing" or not view.run_id:
            return ""
        expires = self._clock.time_ns() // 10**9 + _VALID_SECONDS
        payload = f"{view.fingerprint}-{view.started_unix_ns}-{expires}"
        return f"{self._collector_url}{PATH}{payload}-{self._sign(payload)}"

    def alert_of(self, token: str) -> AlertView:
        """Return the current state of a link's alert; changes nothing.

        Raises:
            UsageError: the link is invalid, expired, or of an earlier firing.
        """
        payload, _, signature = token.rpartition("-")
        if not hmac.compare_digest(signature.encode(), self._sign(payload).encode()):
            raise UsageError("this link is not valid", code=UNKNOWN)
        fingerprint, started, expires = payload.split("-")
        if self._clock.time_ns() // 10**9 >= int(expires):
            raise UsageError("this link has expired", hint="use `vitals alerts ack`")
        query = select(alerts).where(alerts.c.fingerprint == fingerprint)
        with self._store.read_transaction() as connection:
            row = connection.execute(query).first()
        if row is None or row.started_unix_ns != int(started):
            raise UsageError("this link belongs to an earlier firing of the alert", code=UNKNOWN)
        return alert_from_row(row).view

    def acknowledge(self, token: str, by: str, inbox: Inbox) -> AlertView:
        """Acknowledge the link's alert, unless it was acknowledged or is resolved.

        Raises:
            UsageError: as ``alert_of``, or ``by`` is not a name.
        """
        view = self.alert_of(token)
        if view.state != "firing" or view.acknowledged_by:
            return view
        request = AckRequest(by=by, reason="by the link in a message")
        return inbox.acknowledge(view.fingerprint, request)

    def _sign(self, payload: str) -> str:
        return hmac.new(self._key(), payload.encode(), hashlib.sha256).hexdigest()

    def _key(self) -> bytes:
        """Return the store's key that signs the links, created when it is first needed."""
        if not self._key_bytes:
            values = {
                "name": _KEY_NAME,
                "body": secrets.token_bytes(32),
                "updated_unix_ns": self._clock.time_ns(),
            }
            with self._store.write() as connection:
                statement = insert(connection, engine_state).values(values)
                connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
                stored = load_state(connection, _KEY_NAME)
                assert stored, "it was inserted, by this process or another"
                self._key_bytes = stored
        return self._key_bytes
