"""A collector behind its HTTP interface, in a thread of the test; a socket only if one is used."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from trainvitals.io.client import (
    CollectorAddress,
    CollectorClient,
    open_collector_client,
    read_tokens,
)
from trainvitals.io.server_identity import UNPROVEN
from vitals_collector.api.app import TOKENS_FILE, CollectorSettings, create_app
from vitals_collector.api.auth import PatientProtocol
from vitals_collector.api.certificate import load_or_create_certificate, write_client_trust
from vitals_collector.api.serve import ListenSettings, bind, url_of
from vitals_collector.storage.store import DATABASE_FILE, Store, open_store

ADDRESS = "http://127.0.0.1:1"
"""Base URL of requests that pass no socket."""


class Parts(httpx.AsyncByteStream):
    """A body that is sent in parts, without a length."""

    def __init__(self, parts: httpx.SyncByteStream) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


class InProcess(httpx.BaseTransport):
    """Calls an ASGI app that runs in the event loop of another thread."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response of the app."""
        if not isinstance(request.stream, httpx.AsyncByteStream):
            request.stream = Parts(request.stream)
        answer = asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
        status, headers, content = answer.result()
        return httpx.Response(status, headers=headers, content=content, request=request)

    async def _answer(self, request: httpx.Request) -> tuple[int, httpx.Headers, bytes]:
        response = await self._transport.handle_async_request(request)
        return response.status_code, response.headers, await response.aread()


class Served:
    """A running collector.

    ``client`` and ``request`` call the app in this process. ``url`` and ``plain`` are for what
    needs a socket: the first use binds a free port.

    Args:
        settings: of the collector.
        tls: whether the port speaks TLS.
        store: what it stores into; None: the database and lake in its data directory.
    """

    def __init__(
        self, settings: CollectorSettings, *, tls: bool = False, store: Store | None = None
    ) -> None:
        self.settings = settings
        self.app = create_app(settings, store=store)
        self.store: Store = self.app.state.store
        self._certificate = load_or_create_certificate(settings.data) if tls else None
        if self._certificate is not None:
            write_client_trust(settings.data / TOKENS_FILE, self._certificate)
        self.tokens = read_tokens(settings.data / TOKENS_FILE)
        self._loop = asyncio.new_event_loop()
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                self._started.set()
                await self._stop.wait()
                for server, task in self._servers:
                    server.should_exit = True
                    await task
        finally:
            self._started.set()

    def __enter__(self) -> "Served":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    @cached_property
    def plain(self) -> str:
        """URL of the port, by its scheme."""
        listen = ListenSettings(tls_cert=self._certificate)
        socket = bind(listen)
        config = uvicorn.Config(
            self.app,
            http=PatientProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_certfile=self._certificate,
        )
        server = uvicorn.Server(config)

        async def serve() -> None:
            task = asyncio.create_task(server.serve([socket]))
            self._servers.append((server, task))

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()
        return url_of(socket, listen)

    @property
    def url(self) -> str:
        """URL of the port, as clients are given it."""
        return self.plain if self._certificate else f"{UNPROVEN}{self.plain}"

    @contextlib.contextmanager
    def client(self, scope: str = "read") -> Iterator[CollectorClient]:
        """Give the client every program uses, with the token of that scope.

        It speaks to the port once there is one, which is how TLS is tested.
        """
        if "plain" in vars(self) or self._certificate is not None:
            address = CollectorAddress(url=self.url, tokens=self.tokens)
            with open_collector_client(address, scope, timeout=60.0) as client:
                yield client
            return
        with self.client_with(getattr(self.tokens, scope)) as client:
            yield client

    def client_with(self, token: str) -> CollectorClient:
        """Return a client with this token; the caller closes it."""
        return CollectorClient(f"{UNPROVEN}{ADDRESS}", token, transport=self.transport)

    @property
    def transport(self) -> InProcess:
        """What passes requests to the app."""
        return InProcess(self.app, self._loop)

    def request(self, method: str, path: str, scope: str = "read", **how: Any) -> httpx.Response:
        """Return the response to one request."""
        token = getattr(self.tokens, scope, "")
        given = {"Authorization": f"Bearer {token}"} if token else {}
        headers = given | how.pop("headers", {})
        with httpx.Client(transport=self.transport, base_url=ADDRESS) as client:
            return client.request(method, path, headers=headers, **how)


@contextlib.contextmanager
def served_in(data: Path, **settings: Any) -> Iterator[Served]:
    """Give a collector over a new store: SQLite in the data directory, the numbers in memory.

    To open a lake takes longer than most tests of the API.
    """
    data.mkdir(mode=0o700)
    file = data / DATABASE_FILE
    file.touch(0o600)
    file.write_bytes(_empty_database())
    settings = {"data": data, "commit_seconds": 0.0} | settings
    with Served(CollectorSettings(**settings), store=open_store(f"sqlite:///{file}")) as collector:
        yield collector


@cache
def _empty_database() -> bytes:
    """Return a SQLite file with all tables: to create them takes longer than to copy them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DATABASE_FILE
        open_store(f"sqlite:///{file}").close()
        return file.read_bytes()
