"""Another program on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class stranger:  # noqa: N801 - used as a function
    """Another program on this machine: a server on a port of its own, which notes what it is sent.

    Its page is the JavaScript of ``script``, whose answers it collects.
    """

    def __init__(self, script: str = "") -> None:
        self.seen: list[str] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(f"{self.path}\n{self.headers}")
                body = f"<!doctype html><title>stranger</title><script>{script}</script>".encode()
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> tuple[int, list[str]]:
        self._thread.start()
        return self._server.server_address[1], self.seen

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
