"""A Grafana of a few endpoints, so that the wrapper is tested over real HTTP.

No Grafana server could be run where these tests are written: Debian has none. The bodies and the
status codes are those of Grafana's HTTP API documentation.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_test"


class FakeGrafana:
    """What the server holds, what it was asked, and the answer it shall give instead."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.datasources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.broken: tuple[int, bytes] | None = None
        self.url = ""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, object]:
        """Return the status and the body of the answer."""
        if path == "/api/health":
            return 200, {"database": "ok", "version": "11.2.0"}
        if path == "/api/dashboards/db" and method == "POST":
            uid = body["dashboard"]["uid"]
            if body["folderUid"] not in self.folders:
                return 400, {"message": "folder not found"}
            if uid in self.dashboards and not body["overwrite"]:
                return 412, {"message": "version mismatch", "status": "version-mismatch"}
            self.dashboards[uid] = body
            return 200, {"id": 1, "uid": uid, "url": f"/d/{uid}/vitals", "status": "success"}
        for prefix, store in (
            ("/api/folders", self.folders),
            ("/api/datasources/uid", self.datasources),
        ):
            if path == prefix.removesuffix("/uid") and method == "POST":
                store[body["uid"]] = body
                return 200, body
            uid = path.removeprefix(f"{prefix}/")
            if path.startswith(prefix) and uid in store:
                store[uid] = body if method == "PUT" else store[uid]
                return 200, store[uid]
        return 404, {"message": "not found"}


@contextmanager
def serve() -> Iterator[FakeGrafana]:
    """Serve a fake Grafana on a free port of loopback."""
    state = FakeGrafana()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(size)
            state.requests.append((self.command, self.path))
            if state.broken is not None:
                status, body = state.broken
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, body = 401, b'{"message": "invalid API key"}'
            else:
                sent = json.loads(raw) if raw and raw != b"null" else {}
                status, reply = state.answer(self.command, self.path, sent)
                body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - the server asks for these names

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
