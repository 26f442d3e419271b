"""The way to the collector: one client an address and token, shared by all sessions."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

from trainvitals.clock import Clock, SystemClock
from trainvitals.errors import TransportError, UnauthorizedError, VitalsError
from trainvitals.io.client import CollectorClient
from trainvitals.io.server_identity import TlsTrust
from trainvitals.question import ROUTES, Question
from trainvitals.views import (
    Along,
    ConfigsQuestion,
    DifferenceQuestion,
    DifferenceReply,
    ForecastQuestion,
    ForecastView,
    GoodputQuestion,
    GoodputView,
    ManySeriesQuestion,
    RunDetail,
    RunSummary,
    RunVerdict,
    SeriesReply,
    SeriesRequest,
    VerdictQuestion,
)
from vitals_dashboard import placeholders
from vitals_dashboard.settings import load_settings

A = TypeVar("A")
TIMEOUT_SECONDS = 10.0
"""On a training node a collector may get little CPU time: slow is not down."""
POINTS = 1000
"""Points requested for a curve: about the width of a laptop's screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Collector of a page, and whether the page may also send commands."""

    client: CollectorClient
    control: CollectorClient | None
    """None: no control token was given, so the page is read-only."""
    keys: Path
    """The directory of ``control.key``, which signs commands."""
    clock: Clock
    of_folder: bool = False
    """Users' responses to alerts are stored in this dashboard's own temporary store."""


@st.cache_resource(max_entries=16, on_release=CollectorClient.close, show_spinner=False)
def _cached_client(url: str, token: str, _tls: TlsTrust, trusted: str) -> CollectorClient:
    """Return the collector client that the dashboard's sessions share."""
    return CollectorClient(url, token, tls=_tls, timeout=TIMEOUT_SECONDS)


def open_data_source() -> DataSource:
    """Return the collector that the dashboard's pages query; sends no query."""
    settings = load_settings(os.environ)
    collector = settings.collector()
    tokens = collector.tokens

    def client(token: str) -> CollectorClient:
        return _cached_client(collector.url, token, tokens.tls, repr(tokens.tls))

    return DataSource(
        client=client(tokens.read or tokens.control),
        control=client(tokens.control) if tokens.control else None,
        keys=Path(settings.token_file).parent,
        clock=SystemClock(),
        of_folder=settings.of_folder,
    )


def guarded(draw: Callable[[DataSource], None]) -> bool:
    """Draw a page, or a notice of its query's error; return whether drawing worked."""
    try:
        draw(open_data_source())
        return True
    except UnauthorizedError as error:
        placeholders.wrong_token(error)
    except TransportError as error:
        placeholders.collector_down(error)
    except VitalsError as error:
        placeholders.problem(error)
    return False


@contextmanager
def query_in_threads() -> Iterator[Callable[[Callable[[], A]], Future[A]]]:
    """Let a page query the collector in separate threads; errors are raised with the results."""
    context = partial(add_script_run_ctx, ctx=get_script_run_ctx())
    with ThreadPoolExecutor(3, initializer=context) as pool:
        yield pool.submit


@st.cache_data(max_entries=1000, ttl=3600, show_spinner=False)
def loss_curve(_client: CollectorClient, url: str, run_id: str, seen: object) -> SeriesReply:
    """Return a few points of a run's loss; queried again only if the run has reported since."""
    (reply,) = _client.ask(
        ManySeriesQuestion(run_id=run_id, series=(SeriesRequest(metric="steps.loss", points=60),))
    )
    return reply


@st.cache_data(max_entries=120, ttl=60, show_spinner=False, hash_funcs=dict.fromkeys(ROUTES, repr))
def _cached_response(
    _client: CollectorClient, url: str, question: Question[A], seen_unix_ns: tuple[int, ...]
) -> A:
    """Return a page's cached response; queried again if its runs reported, or after a minute."""
    return _client.ask(question)


@st.cache_data(max_entries=1000, ttl=60, show_spinner=False)
def _cached_verdict(_client: CollectorClient, url: str, run_id: str, changed: object) -> RunVerdict:
    """Return the verdict on a run from the dashboard's cache, until ``changed`` differs."""
    return _client.ask(VerdictQuestion(run_id=run_id))


def verdict_of(source: DataSource, run: RunSummary, *, is_exact: bool = False) -> RunVerdict:
    """Return the verdict on a run for a page, from the cache if possible.

    Queried again after an event or note in the run, or after a minute; ``is_exact``: whenever the
    run has reported, so that its steps match the page.
    """
    changed = (*event_cache_key(run), run.last_seen_unix_ns if is_exact else 0)
    return _cached_verdict(source.client, source.client.url, run.run_id, changed)


def event_cache_key(run: RunSummary) -> tuple[object, ...]:
    """Return the fields of a run whose change makes pages query or draw again."""
    return (
        run.state, run.health, run.num_attempts, run.num_skips, run.num_rollbacks,
        run.num_firing_alerts, run.last_decision, run.missing,
    )  # fmt: skip


@st.cache_data(max_entries=16, ttl=60, show_spinner=False)
def configs_of(_client: CollectorClient, url: str, num_runs: int) -> dict[str, dict[str, Any]]:
    """Return every run's configuration from the dashboard's cache of at most a minute."""
    return _client.ask(ConfigsQuestion())


def last_value(reply: SeriesReply | None) -> float | None:
    """Return the latest value of a series for a page, NaN and Inf unchanged; None without one."""
    if reply is None:
        return None
    points = zip(reply.step, reply.value, strict=True)
    last = next((point for point in reversed([*points]) if point[1] is not None), (-1, None))
    if reply.nonfinite and reply.nonfinite[-1].step > last[0]:
        return float(reply.nonfinite[-1].kind)
    return last[1]


def query_differences(
    source: DataSource, details: Sequence[RunDetail], metric: str, along: Along
) -> list[DifferenceReply]:
    """Query for a page how much each other run's metric differs from that of the first."""
    client = source.client
    first, *others = [detail.summary for detail in details]
    return [
        _cached_response(
            client,
            client.url,
            DifferenceQuestion(
                run_id=first.run_id, other=other.run_id, metric=metric, along=along, points=POINTS
            ),
            (first.last_seen_unix_ns, other.last_seen_unix_ns),
        )
        for other in others
    ]


def goodput_of(source: DataSource, run: RunSummary) -> GoodputView:
    """Return where a run's time went, from the dashboard's cache of at most a minute."""
    question = GoodputQuestion(run_id=run.run_id)
    return _cached_response(source.client, source.client.url, question, (hash(run.state),))


def forecast_of(source: DataSource, run: RunSummary, other: str = "") -> ForecastView:
    """Return the forecast of a run, from the dashboard's cache of at most a minute."""
    question = ForecastQuestion(run_id=run.run_id, other=other)
    changed = hash((run.state, run.last_step < 0))
    return _cached_response(source.client, source.client.url, question, (changed,))


def series_of(
    source: DataSource, detail: RunDetail, requests: Sequence[SeriesRequest]
) -> list[SeriesReply | None]:
    """Query the current series of a run for a page; None for a series without points.

    One request for all: the round trip dominates the cost of a refresh.
    """
    valid_requests = tuple(
        dict.fromkeys(request for request in requests if request.metric in detail.metrics)
    )
    line, client = detail.summary, source.client
    by_request: dict[SeriesRequest, SeriesReply] = {}
    if valid_requests:
        question = ManySeriesQuestion(run_id=line.run_id, series=valid_requests)
        replies = _cached_response(client, client.url, question, (line.last_seen_unix_ns,))
        by_request = dict(zip(valid_requests, replies, strict=True))
    drawn = {
        request: reply for request, reply in by_request.items() if reply.step or reply.nonfinite
    }
    return [drawn.get(request) for request in requests]
