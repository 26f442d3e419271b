"""Deliveries over a store: what outlives a collector, and what people say meanwhile."""

from collections.abc import Sequence

import pytest

from tests.collector.alerting import Heard
from tests.collector.rows import RUN, Writer
from tests.support.receivers import ALERT
from trainvitals.errors import StorageError
from trainvitals.testing import ManualClock
from trainvitals.views import AckRequest, AlertView, SilenceRequest
from vitals_collector.alerts.deliveries import SqlDeliveryLedger
from vitals_collector.alerts.inbox import AlertOccurrence, CurrentRunState, list_alerts
from vitals_collector.alerts.notifiers import DELIVERED, DeliveryResult, Notifier, delivery_id
from vitals_collector.ingest.ingest import ingest
from vitals_collector.live.engine import AlertService, build_alert_service
from vitals_collector.storage.store import Store

LATER = DeliveryResult(recoverable=True, error="503")
NEVER = DeliveryResult(recoverable=False, error="404")


class Station:
    """A store with one run, and collectors that come and go over it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock = ManualClock()
        self.acting: AlertService
        ingest(store, Writer().steps([0]))

    def start(self, *receivers: Notifier, is_pager: bool = True) -> None:
        """Begin anew with nothing in memory, as after a kill."""
        self.store.after_ingest.clear()
        self.acting = build_alert_service(
            self.store, receivers, clock=self.clock, is_pager=lambda: is_pager
        )

    def page(self) -> str:
        occurrence = AlertOccurrence(RUN, self.clock.time_ns(), ALERT)
        self.acting.inbox.raise_alerts([occurrence], cursors={})
        return ALERT.fingerprint

    def resolve(self) -> None:
        now = CurrentRunState(
            run_id=RUN,
            state="finished",
            last_step=6,
            last_unhealthy_step=5,
            last_seen_unix_ns=self.clock.time_ns(),
            conditions=(),
        )
        self.acting.inbox.update([now])

    def run(self, seconds: float = 0.0) -> None:
        """Look and deliver for a while."""
        end = self.clock.monotonic_ns() + int(seconds * 1e9)
        while True:
            self.hand_out()
            self.acting.dispatcher.deliver_due()
            if self.clock.monotonic_ns() >= end:
                return
            self.clock.advance(5.0)

    def hand_out(self) -> None:
        engine = self.acting.engine
        if engine._epoch is None:
            engine._become_pager(1)
        engine._resend_undelivered()


@pytest.fixture
def station(store: Store) -> Station:
    return Station(store)


def test_what_one_receiver_has_not_had_survives_a_restart_and_the_other_hears_it_once(
    station: Station,
):
    good, away = Heard(name="good"), Heard(*[LATER] * 99, name="away")
    station.start(good, away)
    station.page()
    station.run()
    back = Heard(name="away")
    station.start(good, back)
    station.run()
    assert (["StateDamaged firing"], ["StateDamaged firing"]) == (good.words, back.words)
    station.start(good, back)
    station.run(120)
    assert 1 == len(good.words) == len(back.words)


def test_a_collector_that_takes_over_delivers_from_the_store_alone(station: Station):
    first, second = Heard(name="x"), Heard(name="x")
    station.start(first, is_pager=False)
    station.page()
    station.run()
    station.start(second)
    station.run()
    assert ([], ["StateDamaged firing"]) == (first.words, second.words)


def test_an_acknowledgement_at_another_collector_ends_the_tries(station: Station):
    away = Heard(*[LATER] * 3, name="away")
    station.start(away)
    fingerprint = station.page()
    station.run()
    mine = station.acting
    station.start(Heard(name="away"), is_pager=False)
    station.acting.inbox.acknowledge(fingerprint, AckRequest(by="alice"))
    station.acting = mine
    station.run(120)
    assert [] == away.words
    station.resolve()
    station.run(10)
    assert [] == away.words, "it never had what is over now"


def test_a_silence_by_matchers_ends_the_tries_until_it_is_over(station: Station):
    away = Heard(LATER, name="away")
    station.start(away)
    station.page()
    station.run()
    request = SilenceRequest(matchers=("severity=page",), by="bob", reason="drill", seconds=600)
    station.acting.inbox.silence(request)
    station.run(500)
    assert [] == away.words
    station.run(200)
    assert ["StateDamaged firing"] == away.words


def second_line(after: float = 900.0) -> Heard:
    heard = Heard(name="manager")
    heard.after_seconds = after
    return heard


def test_a_page_that_nobody_acknowledges_is_escalated_once_also_over_a_restart(station: Station):
    first, manager = Heard(name="first"), second_line()
    station.start(first, manager)
    station.page()
    station.run(600)
    assert (["StateDamaged firing"], []) == (first.words, manager.words)
    station.start(first, manager)
    station.run(400)
    assert ["StateDamaged firing"] == manager.words
    station.resolve()
    station.run(10)
    for heard in (first, manager):
        assert ["StateDamaged firing", "StateDamaged resolved"] == heard.words


@pytest.mark.parametrize("how", ["acknowledged", "resolved"])
def test_escalation_stops_when_somebody_acts(station: Station, how: str):
    first, manager = Heard(name="first"), second_line()
    station.start(first, manager)
    fingerprint = station.page()
    station.run(300)
    if how == "resolved":
        station.resolve()
    else:
        station.acting.inbox.acknowledge(fingerprint, AckRequest(by="alice"))
    station.run(1200)
    assert [] == manager.words


@pytest.mark.parametrize("hours", [-5, 5], ids=["behind", "ahead"])
def test_escalation_is_counted_by_the_collectors_clock_whatever_a_ranks_says(
    station: Station, hours: int
):
    manager = second_line()
    station.start(Heard(name="first"), manager)
    at = station.clock.time_ns() + hours * 3_600 * 10**9
    station.acting.inbox.raise_alerts([AlertOccurrence(RUN, at, ALERT)], cursors={})
    station.run(300)
    station.start(Heard(name="first"), manager)
    station.run(595)
    assert [] == manager.words
    station.run(65)
    assert ["StateDamaged firing"] == manager.words


def test_the_end_is_told_to_nobody_who_had_another_firing_but_not_this_one(station: Station):
    heard = Heard(name="heard")
    station.start(heard)
    station.page()
    station.run()
    station.resolve()
    station.run(60)
    request = SilenceRequest(matchers=("severity=page",), by="bob", reason="drill", seconds=600)
    station.acting.inbox.silence(request)
    station.page()
    station.run(590)
    station.clock.advance(20)  # the silence is over before anybody looks
    station.resolve()
    station.run(120)
    assert ["StateDamaged firing", "StateDamaged resolved"] == heard.words


def test_an_end_is_told_though_the_store_was_away_when_the_firing_was_delivered(
    station: Station, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise StorageError("the disk is full")

    heard = Heard(name="heard")
    station.start(heard)
    station.page()
    with monkeypatch.context() as patch:
        patch.setattr(SqlDeliveryLedger, "record", refuse)
        station.run()
    station.run(120)
    station.resolve()
    station.run()
    assert ["StateDamaged firing", "StateDamaged resolved"] == heard.words


# ---------------------------------------------------------------------- a receiver that refuses


def failing(station: Station) -> list[tuple[str, str]]:
    """Return what the list of alerts says of receivers: which, and its state."""
    views = list_alerts(station.store, now_unix_ns=station.clock.time_ns())
    return [(v.labels["receiver"], v.state) for v in views if v.name == "ReceiverFailing"]


def test_a_receiver_that_is_away_for_four_minutes_is_no_alert(station: Station):
    station.start(Heard(name="good"), Heard(*[LATER] * 8, name="away"))
    station.page()
    station.run(240)
    assert [] == failing(station)


def test_a_receiver_that_refuses_is_listed_until_it_takes_again_also_over_a_restart(
    station: Station,
):
    good, broken = Heard(name="good"), Heard(*[NEVER] * 99, name="broken")
    station.start(good, broken)
    station.page()
    station.run(400)
    assert [("broken", "firing")] == failing(station)
    assert ["StateDamaged firing", "ReceiverFailing firing"] == good.words
    station.start(good, broken)
    station.run(120)
    assert [("broken", "firing")] == failing(station)
    assert 2 == len(good.words), "nothing is told twice"
    broken.results.clear()
    station.run(120)
    assert [("broken", "resolved")] == failing(station)
    assert "ReceiverFailing resolved" == good.words[-1]
    assert ["StateDamaged firing"] == broken.words, "itself it is not told"


def test_a_refusing_receiver_that_is_configured_no_more_is_over(station: Station):
    good = Heard(name="good")
    station.start(good, Heard(*[NEVER] * 99, name="broken"))
    station.page()
    station.run(400)
    station.start(good)
    station.run(60)
    assert [("broken", "resolved")] == failing(station)
    assert 3 == len(good.words)


def test_a_refusing_receiver_is_silenced_as_any_other_alert(station: Station):
    good = Heard(name="good")
    station.start(good, Heard(*[NEVER] * 99, name="broken"))
    request = SilenceRequest(matchers=("receiver=broken",), by="bob", reason="moved", seconds=600)
    station.acting.inbox.silence(request)
    station.page()
    station.run(400)
    assert ["StateDamaged firing"] == good.words


class DiesAfterwards:
    """Takes the delivery, and the collector dies before it can note that."""

    name = "hook"
    reposts = takes_log = False

    def __init__(self) -> None:
        self.ids: list[str] = []

    def notify(self, alerts: Sequence[AlertView]) -> DeliveryResult:
        self.ids += [delivery_id(alert, self.name) for alert in alerts]
        if len(self.ids) == 1:
            raise KeyboardInterrupt
        return DELIVERED


def test_a_kill_between_a_delivery_and_its_record_repeats_it_with_the_same_id(station: Station):
    hook = DiesAfterwards()
    station.start(hook)
    station.page()
    with pytest.raises(KeyboardInterrupt):
        station.run()
    for _ in range(3):
        station.start(hook)
        station.run()
    assert (2, 1) == (len(hook.ids), len(set(hook.ids)))
