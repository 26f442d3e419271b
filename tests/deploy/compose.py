"""deploy/compose/compose.yaml, read; and its services as plain processes of this machine.

There is no container engine where the tests run. So each service's own command line, environment,
secrets and mounted files are taken from the file, only with the ports and paths of this machine in
them, and are given to the program that its image would have run.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.lab import Lab, free_port, until

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
CONTAINER = DEPLOY / "container"
PORTS = {
    5432: "PostgreSQL",
    9000: "S3",
    8765: "collector",
    9090: "Prometheus",
    9093: "Alertmanager",
}
WEBHOOKS = 9095
"""The port of both receivers in alertmanager.yml, which everybody replaces by their own."""
_OF_NOBODY = {"user": "nobody", "group": "nogroup"}
READ_ONLY = (
    *("unshare", "--mount", "sh", "-c"),
    'mount --bind /tmp /tmp && mount -o remount,bind,ro / && exec "$@"',
    "sh",
)
"""Before a command: all but /tmp, where a test has its folder, is read-only to it."""


def read(path: Path = COMPOSE, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the file with its variables filled in, as compose does."""
    given = environ or {}
    text = re.sub(
        r"(?<!\$)\$\{(\w+):-([^}]*)\}", lambda m: given.get(m[1]) or m[2], path.read_text()
    )
    return yaml.safe_load(text.replace("$$", "$"))


def words(command: str | Sequence[str]) -> list[str]:
    """Return a command of the file as a list."""
    return command.split() if isinstance(command, str) else list(command)


class Stack:
    """The services of the file, each started once what it depends on is well.

    What is not what the file says: ``bucket`` and the health of ``s3`` (a moto server stands in for
    MinIO, and MinIO's client for itself), the setting up of the database, which the image of
    PostgreSQL does before it starts, and Grafana, where there is none.
    """

    def __init__(self, lab: Lab, webhook_port: int) -> None:
        self.lab = lab
        self.file = read()
        self.services: dict[str, Any] = self.file["services"]
        self.ports = {port: free_port() for port in PORTS} | {WEBHOOKS: webhook_port}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.not_started: dict[str, str] = {}
        self.compose = lab.folder / "compose"
        shutil.copytree(COMPOSE.parent, self.compose)
        subprocess.run(["sh", self.compose / "secrets.sh"], check=True)
        # Of another user, who cannot enter a test's own folder.
        self.database = Path(tempfile.mkdtemp(prefix="vitals-stack-"))

    def close(self) -> None:
        """Remove what lies outside of the test's folder, after the lab has ended everything."""
        shutil.rmtree(self.database, ignore_errors=True)

    def url(self, port: int) -> str:
        """Return where the service of a port is."""
        return f"{'https' if port == 8765 else 'http'}://127.0.0.1:{self.ports[port]}"

    def volume(self, name: str) -> Path:
        """Return the folder of a named volume."""
        return self.database if name == "postgres" else self.lab.folder / "volumes" / name

    def up(self) -> None:
        """Start everything in the order of ``depends_on``."""
        waiting = dict(self.services)
        while waiting:
            ready = [name for name in waiting if not set(waiting) & set(self._needs(name))]
            for name in ready:
                self.start(name)
                del waiting[name]

    def start(self, name: str) -> None:
        """Start a service, and wait until it is well, or has done what it is for."""
        service = self.services[name]
        image = service["image"].rpartition(":")[0]
        command = words(service.get("command", ()))
        if "entrypoint" in service:
            command = [*words(service["entrypoint"]), *command]
        else:
            program = IMAGES[image](self)
            if program is None:
                self.not_started[name] = f"no program of {image} on this machine"
                return
            command = [*program, *command] if image not in STAND_INS else program
        if name == "bucket":
            command = ["curl", "--fail", "--silent", "-X", "PUT", "http://s3:9000/vitals"]
        process = self._run(name, command)
        if self._ends(name):
            assert 0 == process.wait(60), self.lab.log(name).read_text()
            return
        self.running[name] = process
        until(lambda: self.is_healthy(name) or process.poll() is not None, f"{name} is healthy")
        assert process.poll() is None, self.lab.log(name).read_text()

    def is_healthy(self, name: str) -> bool:
        """Return what the service's own check says."""
        service = self.services[name]
        if name == "s3":
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.ports[9000]), 1).close()
                return True
            return False
        first, *check = service["healthcheck"]["test"]
        assert "CMD" == first
        return 0 == self._run(f"{name}-check", check, of=name).wait(30)

    def _needs(self, name: str) -> Mapping[str, Any]:
        return self.services[name].get("depends_on", {})

    def _ends(self, name: str) -> bool:
        conditions = [self._needs(other).get(name, {}) for other in self.services]
        return {"condition": "service_completed_successfully"} in conditions

    def _run(self, name: str, command: Sequence[str], of: str = "") -> subprocess.Popen[bytes]:
        service = self.services[of or name]
        here = self._here(of or name)
        mark, _, value = self.lab.mark.partition("=")
        # As a container: nothing of the developer's environment, and no home.
        environ = {
            "PATH": f"{CONTAINER}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", os.pathsep.join(sys.path)),
            "HOME": "/nonexistent",
            "PGPORT": str(self.ports[5432]),
            mark: value,
        } | {key: here(str(text)) for key, text in service.get("environment", {}).items()}
        first: tuple[str, ...] = ()
        own: dict[str, str] = {}
        if os.geteuid() == 0 and service["image"].startswith("postgres"):
            own = _OF_NOBODY  # it refuses to run as root
        elif os.geteuid() == 0 and service.get("read_only"):
            first = READ_ONLY
        with self.lab.log(name).open("ab") as output:
            process = subprocess.Popen(
                [*first, *map(here, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd="/",
                start_new_session=True,
                **own,
            )
        self.lab.processes.append(process)
        return process

    def _here(self, name: str) -> Callable[[str], str]:
        """Return what puts this machine's ports, folders and files into a text of the service."""
        paths = {"/run/secrets": str(self.compose / "secrets")}
        for volume in self.services[name].get("volumes", ()):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                paths[target] = str(self._mounted(name, COMPOSE.parent / source))
            else:
                folder = self.volume(source)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                paths[target] = str(folder)

        def here(text: str) -> str:
            for target, path in paths.items():
                text = re.sub(rf"(?<![\w.]){re.escape(target)}(?=[/\s]|$)", path, text)
            return self._with_ports(text)

        return here

    def _with_ports(self, text: str) -> str:
        """Return a text in which each HOST:PORT is where that service is here."""
        ports = "|".join(map(str, self.ports))
        return re.sub(
            rf"(?<![\w.-])[\w.-]*:({ports})\b",
            lambda found: f"127.0.0.1:{self.ports[int(found[1])]}",
            text,
        )

    def _mounted(self, name: str, source: Path) -> Path:
        """Return a file that is mounted, with this machine's ports in it."""
        copied = self.lab.folder / "mounted" / name / source.name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(self._with_ports(source.read_text()))
        return copied


# -------------------------------------------------- what an image runs, by programs of this machine


def _postgres(stack: Stack) -> list[str]:
    """Set the database up as its image does, and return its server."""
    programs = Path(os.path.realpath(shutil.which("postgres") or "")).parent
    data = stack.database / "data"
    own = _OF_NOBODY if os.geteuid() == 0 else {}
    if own:
        shutil.chown(stack.database, *own.values())
    environ = stack.services["postgres"]["environment"]
    secret = stack.compose / "secrets" / "postgres_password"
    if not data.exists():
        password = stack.database / "password"
        password.write_text(secret.read_text())
        password.chmod(0o644)
        made = [
            *(str(programs / "initdb"), "--pgdata", str(data), "--auth-host=scram-sha-256"),
            *("--auth-local=trust", "--username", environ["POSTGRES_USER"]),
            *("--pwfile", str(password), "--encoding=UTF8"),
        ]
        subprocess.run(made, check=True, capture_output=True, cwd="/", **own)
        single = [str(programs / "postgres"), "--single", "-D", str(data), "postgres"]
        create = f"CREATE DATABASE {environ['POSTGRES_DB']}\n"
        subprocess.run(
            single, input=create.encode(), check=True, capture_output=True, cwd="/", **own
        )
    return [
        *(str(programs / "postgres"), "-D", str(data), "-k", str(stack.database)),
        *("-c", "listen_addresses=127.0.0.1"),
    ]


def _program(*names: str) -> Callable[[Stack], list[str] | None]:
    def find(_stack: Stack) -> list[str] | None:
        return next(([name] for name in names if shutil.which(name)), None)

    return find


def _moto(stack: Stack) -> list[str]:
    """Return a server that speaks S3's interface, and keeps what it is given in memory."""
    host, port = "127.0.0.1", str(stack.ports[9000])
    return [sys.executable, "-m", "moto.server", "-H", host, "-p", port]


IMAGES: Mapping[str, Callable[[Stack], list[str] | None]] = {
    "postgres": _postgres,
    "minio/minio": _moto,
    "vitals": lambda _stack: ["sh", str(CONTAINER / "vitals-entrypoint")],
    "prom/prometheus": _program("prometheus"),
    "prom/alertmanager": _program("alertmanager", "prometheus-alertmanager"),
    "grafana/grafana": _program("grafana-server"),
}
STAND_INS = frozenset({"minio/minio"})
"""Programs that do not take the command line of the image."""


@contextlib.contextmanager
def started(lab: Lab, webhook_port: int) -> Iterator[Stack]:
    """Start everything that compose would start."""
    pytest.importorskip("moto.server")
    stack = Stack(lab, webhook_port)
    try:
        stack.up()
        yield stack
    finally:
        lab.close()
        stack.close()
