"""Records in SQL which receiver got which state of an alert, for later collectors."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace
from sqlalchemy import select

from trainvitals.clock import Clock
from trainvitals.views import AlertView
from vitals_collector.alerts.notifiers import delivery_id
from vitals_collector.alerts.silences import load_active_silences
from vitals_collector.storage.schema import alerts, deliveries
from vitals_collector.storage.store import Store, upsert


class DeliveryCheck(NamedTuple):
    """Due alerts that still have to be delivered."""

    due: frozenset[str]
    """Fingerprints to deliver now."""
    had: frozenset[str]
    """Fingerprints of those that the receiver has had, or does not need."""


class SqlDeliveryLedger:
    """Records deliveries in a store: any collector on it continues where another one stopped."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def check(
        self, receiver: str, checked_alerts: Sequence[AlertView], *, reposts: bool
    ) -> DeliveryCheck:
        """Return which of the alerts the receiver still needs.

        Not if it was delivered already, was acknowledged or silenced, or has changed; nor the end
        of a firing that was never delivered there. A receiver with reposts needs all firing alerts.
        """
        prints = [view.fingerprint for view in checked_alerts]
        with self._store.read_transaction() as connection:
            rows = connection.execute(select(alerts).where(alerts.c.fingerprint.in_(prints)))
            present = {row.fingerprint: row for row in rows}
            query = select(deliveries.c.fingerprint, deliveries.c.delivery_id).where(
                deliveries.c.receiver == receiver, deliveries.c.fingerprint.in_(prints)
            )
            had_ids = {row.fingerprint: row.delivery_id for row in connection.execute(query)}
            quiet = load_active_silences(connection, self._clock.time_ns())
        due: set[str] = set()
        had: set[str] = set()
        for view in checked_alerts:
            row, last = present.get(view.fingerprint), had_ids.get(view.fingerprint)
            if row is None or row.state != view.state or quiet.silence_of(view) is not None:
                continue  # its current state is delivered separately
            # A receiver that never got this firing, such as during a silence, need not get its end.
            as_fired = delivery_id(replace(view, state="firing"), receiver)
            is_needless = view.state == "resolved" and last != as_fired
            if not reposts and (is_needless or last == delivery_id(view, receiver)):
                had.add(view.fingerprint)
            elif reposts or view.state != "firing" or not row.acknowledged_by:
                due.add(view.fingerprint)
        return DeliveryCheck(frozenset(due), frozenset(had))

    def record(self, receiver: str, delivered: Sequence[AlertView]) -> None:
        """Note, durably, that the receiver has had the alerts' states."""
        now = self._clock.time_ns()
        with self._store.write() as connection:
            for view in delivered:
                row = {
                    "fingerprint": view.fingerprint,
                    "receiver": receiver,
                    "run_id": view.run_id or None,
                    "delivery_id": delivery_id(view, receiver),
                    "delivered_unix_ns": now,
                }
                upsert(connection, deliveries, row)

    def heard_by(self, alert: AlertView) -> frozenset[str]:
        """Return the receivers that have had the alert's state."""
        query = select(deliveries.c.receiver, deliveries.c.delivery_id).where(
            deliveries.c.fingerprint == alert.fingerprint
        )
        with self._store.read_transaction() as connection:
            rows = connection.execute(query).all()
        return frozenset(
            r.receiver for r in rows if r.delivery_id == delivery_id(alert, r.receiver)
        )
