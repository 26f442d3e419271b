"""Puts the collector together: store, ingest, queries, folders, and what acts on them.

``create_app`` opens everything that can fail before a port is bound, so that a locked database or a
missing directory is an error on the terminal and not in a log. The app closes it when it ends.
"""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trainvitals import __version__
from trainvitals.clock import Clock, SystemClock
from trainvitals.errors import UnauthorizedError, UsageError, VitalsError
from trainvitals.io.control_key import make_control_key
from trainvitals.plugins import load_plugin
from trainvitals.views import Problem
from trainvitals.wire import IngestReply
from vitals_collector.alerts.ack_links import AckLinks
from vitals_collector.alerts.receivers import NotifierSettings
from vitals_collector.alerts.worker import build_notifiers
from vitals_collector.api import auth
from vitals_collector.api.ack_page import ack_router
from vitals_collector.api.control import control_router
from vitals_collector.api.discovery import discovery_router
from vitals_collector.api.exposition import StoreCollector, metrics_router
from vitals_collector.api.health import HealthCheck
from vitals_collector.api.ingest_route import COMMIT_SECONDS, IngestApp
from vitals_collector.api.questions import (
    add_openapi_document,
    openapi_request_body,
    openapi_responses,
    question_router,
)
from vitals_collector.cluster.leases import UPKEEP, Lease
from vitals_collector.cluster.owners import RunOwners
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.live.engine import AlertService, EngineConfig, build_alert_service
from vitals_collector.numbers.lake import Lake
from vitals_collector.queries.goodput import GoodputReader
from vitals_collector.queries.query import Query
from vitals_collector.retention.maintenance import LakeMaintenance
from vitals_collector.retention.settings import VolumeSettings
from vitals_collector.storage.store import Store, ensure_data_dir, open_data_store
from vitals_collector.storage.tokens import KnownTokens

TOKENS_FILE = "tokens.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """Settings of a collector."""

    data: Path
    """Its own directory, 0700: database, tokens, URL file."""
    database: str = ""
    """SQLAlchemy URL; "" is an SQLite file in ``data``."""
    lake: str = ""
    """Location of the rows, a directory or ``s3://BUCKET/PREFIX``; "" is in ``data``. All
    collectors on one PostgreSQL share it."""
    folders: tuple[Path, ...] = ()
    """Folders with run directories that are read as well."""
    folder_interval_seconds: float = 0.5
    """Interval of polling them."""
    bound: str = "127.0.0.1"
    """The address it listens on."""
    hosts: tuple[str, ...] = ()
    """Its other host names, for the ``Host`` check."""
    origins: tuple[str, ...] = ()
    """Foreign origins whose pages may call it."""
    notifiers: NotifierSettings = field(default_factory=NotifierSettings)
    """Destinations of alerts, and of run metrics."""
    lost_after_seconds: float = 60.0
    """A run that is silent for longer, and its agent too, is lost."""
    url: str = ""
    """This collector's URL for agents, if another one owns their run."""
    commit_seconds: float = COMMIT_SECONDS
    """From one commit of rows to the next; events and full commits do not wait."""
    volumes: VolumeSettings = field(default_factory=VolumeSettings)
    """Limits of the data kept per run."""
    gpu_hour_price: float = 0.0
    """Price of a GPU hour: lost work is also shown as money. 0: only in GPU-hours."""


def create_app(
    settings: CollectorSettings,
    *,
    clock: Clock | None = None,
    host_port: str = "",
    store: Store | None = None,
) -> FastAPI:
    """Return the collector's app, its store open and migrated; the app's shutdown closes it.

    ``host_port`` is the result of ``serve.lock_data_dir``, while its lock is held. ``store`` is an
    open store to use instead of the one in ``settings.data``.

    Raises:
        UsageError: a directory or URL is invalid.
        StorageError: data directory, tokens or database cannot be used.
    """
    clock = clock or SystemClock()
    ensure_data_dir(settings.data)
    tokens = auth.load_or_create_tokens(settings.data / TOKENS_FILE)
    make_control_key(settings.data)
    if store is None:
        store = open_data_store(settings.data, settings.database, lake=settings.lake)
    try:
        return _build_app(settings, store, tokens, clock, host_port)
    except BaseException:
        store.close()
        raise


def _build_app(
    settings: CollectorSettings,
    store: Store,
    tokens: auth.ServerTokens,
    clock: Clock,
    host_port: str,
) -> FastAPI:
    """Return the app over an open store, with its parts not started."""
    folder = FolderIngest(store, settings.folders)
    links = AckLinks(store, clock=clock, collector_url=settings.notifiers.links.collector_url)
    acting = _build_alert_engine(store, settings, clock, links, host_port)
    lease = Lease(store, UPKEEP, clock=clock, is_shared=_is_shared(store), process_place=host_port)
    ingest_app = IngestApp(store, clock=clock, commit_seconds=settings.commit_seconds)
    query = _build_query(store, settings, clock)
    reader = GoodputReader(store, query.goodput)
    query.read_goodput_soon = reader.read_soon
    make_exporter = partial(
        StoreCollector, store, acting=acting, liveness=query.liveness, goodput=reader
    )
    owners = _run_owner_managers(store, settings, clock, host_port)
    known_tokens = KnownTokens(store, clock=clock)
    # Active parts stop while the runs are still owned, so that their pending work is stored.
    parts: list[_BackgroundService] = [known_tokens, *owners, acting, ingest_app, lease]
    parts += [*_maintenance_jobs(store, settings, clock, lease), reader]
    if settings.notifiers.remote_write:
        writer = load_plugin("remote-write")(
            settings.notifiers.remote_write,
            make_exporter(),
            store.counters,
            clock=clock,
            leads=lambda: acting.lease.epoch() is not None,
        )
        parts.append(writer)
    app = auth.GatedApi(
        title="Vitals collector",
        version=__version__,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(store, folder, parts, settings),
    )
    app.state.store, app.state.query, app.state.acting = store, query, acting
    app.state.ingest, app.state.known_tokens = ingest_app, known_tokens
    _add_routers(
        app,
        question_router(),
        control_router(
            store, acting.inbox, clock=clock, keys=settings.data, folders=settings.folders
        ),
        metrics_router(make_exporter()),
        discovery_router(store, liveness=query.liveness),
        _ingest_router(store, ingest_app),
        _otlp_router(store, ingest_app, clock),
        ack_router(links, acting.inbox),
    )
    _add_error_handlers(app, store)
    add_openapi_document(app)
    app.gate = auth.AuthMiddleware(
        app.handle_authenticated,
        ingest=ingest_app,
        tokens=tokens,
        find=known_tokens.find,
        bound=settings.bound,
        hosts=settings.hosts,
        origins=settings.origins,
        count=store.counters.refuse,
    )
    return app


class _BackgroundService(Protocol):
    """A part that works in its own threads, next to the requests."""

    def start(self) -> None:
        """Start the service's threads when the HTTP server starts."""

    def close(self) -> None:
        """Stop when the HTTP server stops, after finishing the current work."""


def _run_owner_managers(
    store: Store, settings: CollectorSettings, clock: Clock, host_port: str
) -> list[RunOwners]:
    """Return the server's manager of run owners; none if there can be no other collector."""
    if not _is_shared(store):
        return []
    owners = RunOwners(store, clock=clock, url=settings.url, process_place=host_port)
    store.claims = owners
    return [owners]


def _maintenance_jobs(
    store: Store, settings: CollectorSettings, clock: Clock, lease: Lease
) -> list[LakeMaintenance]:
    """Return what maintains the server's lake; rows in memory need no maintenance."""
    if not isinstance(store.numbers, Lake):
        return []
    upkeep = LakeMaintenance(
        store,
        settings.volumes,
        clock=clock,
        lost_after_seconds=settings.lost_after_seconds,
        is_mine=lease.is_held,
    )
    return [upkeep]


def _build_alert_engine(
    store: Store, settings: CollectorSettings, clock: Clock, links: AckLinks, host_port: str
) -> AlertService:
    """Build the service that raises and delivers alerts in the HTTP server's process."""
    return build_alert_service(
        store,
        build_notifiers(settings.notifiers, ack_link=links.link_of),
        clock=clock,
        config=EngineConfig(lost_after_seconds=settings.lost_after_seconds),
        up_since_unix_ns=clock.time_ns(),
        is_shared=_is_shared(store),
        host_port=host_port,
    )


def _is_shared(store: Store) -> bool:
    """Return whether other collectors may serve the store as well."""
    return store.engine.dialect.name == "postgresql"


def _build_query(store: Store, settings: CollectorSettings, clock: Clock) -> Query:
    """Build the ``Query`` of the HTTP API; rows can arrive from now on."""
    return Query(
        store,
        clock=clock,
        lost_after_seconds=settings.lost_after_seconds,
        up_since_unix_ns=clock.time_ns(),
        volumes=settings.volumes,
        gpu_hour_price=settings.gpu_hour_price,
        folders=settings.folders,
    )


def _add_routers(app: FastAPI, *routers: APIRouter) -> None:
    """Add routes to the app as they are: ``include_router`` builds each again, at first request."""
    app.router.routes.extend(route for router in routers for route in router.routes)


def _lifespan(
    store: Store,
    folder: FolderIngest,
    parts: Sequence[_BackgroundService],
    settings: CollectorSettings,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the HTTP app's lifespan: it starts and stops the background services."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        stop = threading.Event()
        follower = threading.Thread(
            target=folder.follow,
            args=(stop,),
            kwargs={"interval_seconds": settings.folder_interval_seconds},
            name="vitals-folder",
        )
        if settings.folders:
            follower.start()
        for part in parts:
            part.start()
        try:
            yield
        finally:
            stop.set()
            if settings.folders:
                await run_in_threadpool(follower.join)
            for part in reversed(parts):
                await run_in_threadpool(part.close)
            store.close()

    return lifespan


def _ingest_router(store: Store, ingest_app: IngestApp) -> APIRouter:
    """Return the routes ``/v1/ingest`` and ``/healthz``."""
    router = APIRouter()

    @router.post(
        "/v1/ingest",
        tags=["ingest"],
        dependencies=[Depends(auth.require("ingest"))],
        responses=openapi_responses(list[IngestReply]),
        openapi_extra=openapi_request_body(bytes, "application/octet-stream"),
    )
    async def ingest_batches(request: Request) -> Response:
        """Store batches (``trainvitals.wire``), one after the other; durable when this returns 200.

        One reply for each batch. If all are refused, the response is that error; otherwise each
        reply has its own. A body has at most 16 MiB. 503 and 507 include when to retry
        (``Retry-After``).
        """
        # IngestApp serves this path before it gets here; this documents it.
        return await ingest_app.ingest_body(await request.body(), auth.principal_of(request))

    health = HealthCheck(store)

    @router.get("/healthz", tags=["health"], responses=openapi_responses(dict[str, str]))
    async def healthz() -> Response:
        """Report that the store responds, or why it stores nothing (503). Needs no token."""
        status = await health.status()
        return auth.json_response({"status": status or "ok"}, 503 if status else 200)

    return router


def _otlp_router(store: Store, ingest_app: IngestApp, clock: Clock) -> APIRouter:
    """Return the plugin's HTTP route for OTLP, or one that responds that it is not installed."""
    try:
        return cast(APIRouter, load_plugin("otlp")(store, ingest_app, clock=clock))
    except UsageError as error:
        router, missing = APIRouter(), error

    @router.post(
        auth.OTLP_PATH,
        tags=["ingest"],
        dependencies=[Depends(auth.require("ingest"))],
        responses=openapi_responses(dict[str, str]),
    )
    def refuse_metrics() -> Response:
        """Respond that this installation does not store OpenTelemetry metrics."""
        raise missing

    return router


def _add_error_handlers(app: FastAPI, store: Store) -> None:
    """Let the HTTP server return every error as a Problem: ours, FastAPI's, unexpected ones."""

    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, VitalsError)
        if isinstance(error, UnauthorizedError):
            store.counters.refuse(error.code)
        return auth.problem_response(error)

    async def wrong_request(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        explanation = "; ".join(
            f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()
        )
        return auth.problem_response(UsageError(explanation))

    async def no_route(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return auth.json_response(Problem(code="V100", text=str(error.detail)), error.status_code)

    async def unexpected(request: Request, error: Exception) -> Response:
        return auth.unexpected_error_response(request.url.path, error)

    app.add_exception_handler(VitalsError, ours)
    app.add_exception_handler(RequestValidationError, wrong_request)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(Exception, unexpected)
