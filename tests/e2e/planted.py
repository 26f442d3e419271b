"""A server that another user plants: it answers anything, and writes down what it hears."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534
_SERVER = """
import os, socket, ssl, sys, threading
bound, heard, cert = int(sys.argv[1]), sys.argv[2], sys.argv[3]
listener = socket.socket(fileno=bound)
heard = open(heard, "ab", buffering=0)
context = None
if cert:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
listener.listen()
heard.write(b"listening\\n")
body = b'[{"durable_seq": 1000000000, "num_new": 1, "num_duplicate": 0}]'
answer = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body

def serve(connection):
    heard.write(b"connected\\n")
    try:
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        while data := connection.recv(65536):
            heard.write(data)
            connection.sendall(answer)
    except OSError:
        pass
    connection.close()

while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Planted:
    """What it heard. As root, the tests run it as another user."""

    def __init__(self, log: Path) -> None:
        self._log = log

    @property
    def heard(self) -> bytes:
        """Every byte that it was sent, decrypted where it speaks TLS."""
        return self._log.read_bytes().replace(b"listening\n", b"")

    @property
    def is_visited(self) -> bool:
        """Whether anybody connected."""
        return b"connected\n" in self.heard


@contextlib.contextmanager
def planted(listener: object, folder: Path, certificate: Path | None = None) -> Iterator[Planted]:
    """Serve a bound socket in a process of its own; with a certificate by TLS."""
    fd = listener.fileno()  # type: ignore[attr-defined]
    log = folder / f"planted-{time.monotonic_ns()}.log"
    log.touch()
    command = [sys.executable, "-c", _SERVER, str(fd), str(log), str(certificate or "")]
    process = subprocess.Popen(command, pass_fds=(fd,), env={"PATH": os.environ["PATH"]})
    try:
        while b"listening" not in log.read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        yield Planted(log)
    finally:
        process.kill()
        process.wait()
