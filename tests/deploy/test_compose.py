"""What the container, compose and Kubernetes files say is true of Vitals, and holds together."""

import json
import re
import shlex
import ssl
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import COMPOSE, CONTAINER, DEPLOY, read
from tests.support.deploy import ROOT, run, settings_of_vitals
from trainvitals import __version__
from trainvitals.cli.main import main
from vitals_collector.api.certificate import load_or_create_certificate

CHART = DEPLOY / "helm" / "vitals"
OURS = ("collector", "prometheus-config")
OF_LIBPQ_AND_AWS = {
    *("PGPASSWORD", "AWS_ENDPOINT_URL_S3", "AWS_REGION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
}
SERVICES: dict[str, dict[str, Any]] = read()["services"]
DOCKERFILE = (CONTAINER / "Dockerfile").read_text()


class TestCompose:
    @pytest.mark.parametrize("name", SERVICES)
    def test_a_service_may_write_nowhere_but_where_it_must_and_gains_no_rights(self, name):
        service = SERVICES[name]
        assert service["read_only"] is True
        assert ["ALL"] == service["cap_drop"]
        assert ["no-new-privileges:true"] == service["security_opt"]
        assert "privileged" not in service
        assert "cap_add" not in service

    @pytest.mark.parametrize("name", SERVICES)
    def test_an_image_is_one_version_by_name(self, name):
        tag = SERVICES[name]["image"].partition(":")[2]
        assert re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag), tag

    @pytest.mark.parametrize("name", SERVICES)
    def test_what_a_service_names_is_there(self, name):
        service, file = SERVICES[name], read()
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert set(service.get("secrets", ())) <= set(file["secrets"])
        assert set(service["networks"]) <= set(file["networks"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).is_file()
            else:
                assert source in file["volumes"]

    @pytest.mark.parametrize("name", SERVICES)
    def test_no_secret_stands_in_the_file_and_each_that_is_named_is_mounted(self, name):
        service = SERVICES[name]
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN", key):
                assert key.endswith("_FILE"), f"{key} has a value in the file"
                assert value.removeprefix("/run/secrets/") in service["secrets"]

    @pytest.mark.parametrize("name", SERVICES)
    def test_what_others_wait_for_says_whether_it_is_well(self, name):
        waited = [
            s["depends_on"][name] for s in SERVICES.values() if name in s.get("depends_on", {})
        ]
        if {"condition": "service_healthy"} in waited:
            assert SERVICES[name]["healthcheck"]["test"]

    def test_ports_are_open_on_this_machine_alone(self):
        ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
        assert 4 == len(ports)
        assert [] == [port for port in ports if not port.startswith("127.0.0.1:")]

    def test_the_secrets_are_made_once_and_differ(self, tmp_path):
        script = tmp_path / "secrets.sh"
        script.write_bytes((COMPOSE.parent / "secrets.sh").read_bytes())
        made = []
        for _ in range(2):
            subprocess.run(["sh", script], check=True)
            made.append({path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()})
        assert made[0] == made[1]
        assert set(read()["secrets"]) == set(made[0])
        assert 3 == len(set(made[0].values()))
        assert {48} == set(map(len, made[0].values()))
        assert 0o700 == (tmp_path / "secrets").stat().st_mode & 0o777

    @pytest.mark.parametrize("name", OURS)
    def test_every_variable_for_vitals_is_one_that_is_read(self, name):
        given = {key.removesuffix("_FILE") for key in SERVICES[name].get("environment", {})}
        assert given <= settings_of_vitals() | OF_LIBPQ_AND_AWS | {"HEALTH_URL"}

    def test_a_command_for_vitals_is_one_that_it_knows(self, capsys):
        lines = [SERVICES["collector"]["command"]]
        script = SERVICES["prometheus-config"]["command"][0].replace("\\\n", " ")
        lines.append(shlex.split(script.split("&&")[0]))
        for line in lines:
            line = line[1:] if line[0] == "vitals" else line
            with pytest.raises(SystemExit):
                main([*line[: 1 + (line[0] == "deploy")], "--help"])
            known = capsys.readouterr().out
            for word in line:
                assert not word.startswith("--") or f"{word} " in known, word

    @pytest.mark.servers("docker-compose")
    def test_compose_itself_reads_it_as_the_tests_do(self):
        checked = run("docker-compose", "--file", COMPOSE, "config", "--format", "json")
        assert (0, "") == (checked.returncode, checked.stderr)
        theirs = json.loads(checked.stdout.replace("$$", "$"))["services"]
        assert theirs.keys() == SERVICES.keys()
        for name, ours in SERVICES.items():
            read_by_compose = theirs[name]
            for key in ("image", "command", "entrypoint", "environment", "read_only", "tmpfs"):
                assert ours.get(key) == read_by_compose.get(key), (name, key)
            health, conditions = ours.get("healthcheck", {}), read_by_compose.get("depends_on", {})
            assert health.get("test") == read_by_compose.get("healthcheck", {}).get("test")
            assert ours.get("depends_on", {}) == {
                other: {"condition": each["condition"]} for other, each in conditions.items()
            }
            targets = [volume.split(":")[1] for volume in ours.get("volumes", ())]
            assert targets == [each["target"] for each in read_by_compose.get("volumes", ())]


class TestContainer:
    def test_versions_are_those_of_the_package(self):
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        assert {__version__} == {chart["version"], chart["appVersion"]}
        written = [
            *DEPLOY.rglob("*.yaml"),
            CONTAINER / "Dockerfile",
            ROOT / "docs/guides/deploy.md",
        ]
        tags = {
            (path.name, tag)
            for path in written
            for tag in re.findall(r"(?<!/)\bvitals(?:-dashboard)?:(\d\S*)", path.read_text())
        }
        assert {__version__} == {tag for _, tag in tags}
        assert {"compose.yaml", "torchrun.yaml", "Dockerfile", "deploy.md"} == {n for n, _ in tags}

    def test_the_last_stage_has_no_tools_and_another_user(self):
        *_, last = DOCKERFILE.split("\nFROM ")
        assert "apt-get" not in DOCKERFILE
        assert not re.search(r"^RUN .*pip.* install", last, re.M)
        assert "USER 10001:10001" in last
        assert 2 == len(re.findall(r"^FROM \S+:\d+\.\d+\.\d+-\S+", DOCKERFILE, re.M))

    def test_the_extras_are_those_of_the_package(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = re.search(r"EXTRAS=(\S+)$", DOCKERFILE, re.M)[1].split(",")
        assert set(asked) <= set(extras["optional-dependencies"])

    def test_what_is_copied_is_there(self):
        ignored = (CONTAINER / "Dockerfile.dockerignore").read_text().splitlines()
        kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
        assert all((ROOT / name).exists() for name in kept - {"plugins"})  # it can be removed
        built = tomllib.loads((ROOT / "pyproject.toml").read_text())
        packages = built["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        needed = {*packages, *re.findall(r"^COPY (deploy\S+/)", DOCKERFILE, re.M)}
        assert all(kept & {name.rstrip("/"), name.partition("/")[0]} for name in needed)
        links = (ROOT / "deploy" / "vitals_deploy" / "templates").iterdir()
        targets = {path.resolve().relative_to(ROOT) for path in links}
        assert all(kept & {str(path), str(path.parent)} for path in targets)
        secret = "deploy/compose/secrets/s3_secret_key"
        assert not [name for name in kept if secret.startswith(f"{name}/")]

    def test_secrets_come_from_files(self, tmp_path):
        (tmp_path / "vitals").write_text('#!/bin/sh\necho "$@"; env\n')
        (tmp_path / "vitals").chmod(0o755)
        (tmp_path / "secret").write_text("it's $HOME\n")
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PGPASSWORD_FILE": str(tmp_path / "secret")}
        start = ["sh", CONTAINER / "vitals-entrypoint", "collector", "--data", "a b"]
        done = subprocess.run(start, env=environ, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert "collector --data a b" == lines[0]
        assert "PGPASSWORD=it's $HOME" in lines
        assert not [line for line in lines if line.startswith("PGPASSWORD_FILE")]

    def test_a_secret_that_is_not_mounted_is_an_error_and_nothing_starts(self, tmp_path):
        environ = {"PATH": "/usr/bin:/bin", "PGPASSWORD_FILE": str(tmp_path / "none")}
        start = ["sh", CONTAINER / "vitals-entrypoint", "collector"]
        done = subprocess.run(start, env=environ, capture_output=True, text=True, check=False)
        assert 0 != done.returncode
        assert "none" in done.stderr

    def test_a_secret_that_is_empty_is_an_error_and_nothing_starts(self, tmp_path):
        (tmp_path / "secret").write_text("\n")
        environ = {
            "PATH": "/usr/bin:/bin",
            "VITALS_COLLECTOR_DATABASE_FILE": str(tmp_path / "secret"),
        }
        start = ["sh", CONTAINER / "vitals-entrypoint", "collector"]
        done = subprocess.run(start, env=environ, capture_output=True, text=True, check=False)
        assert 1 == done.returncode
        assert (
            f"VITALS_COLLECTOR_DATABASE_FILE is {tmp_path / 'secret'}, which is empty"
            in done.stderr
        )

    @pytest.mark.parametrize("status", [200, 503])
    def test_healthy_is_who_says_so_whatever_its_certificate(self, status, tmp_path):
        class Server(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(load_or_create_certificate(tmp_path))
        with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            environ = {
                "HEALTH_URL": f"https://127.0.0.1:{server.server_port}/healthz",
                "https_proxy": "http://127.0.0.1:1",
            }
            ask = [sys.executable, CONTAINER / "vitals-healthy"]
            code = subprocess.run(ask, env=environ, capture_output=True, check=False).returncode
            server.shutdown()
        assert (200 == status) == (0 == code)

    @pytest.mark.servers("hadolint")
    def test_the_file_has_no_pitfall_that_is_known(self):
        checked = run("hadolint", CONTAINER / "Dockerfile")
        assert 0 == checked.returncode, checked.stdout

    @pytest.mark.servers("shellcheck")
    @pytest.mark.parametrize(
        "path",
        [CONTAINER / "vitals-entrypoint", COMPOSE.parent / "secrets.sh"],
        ids=lambda p: p.name,
    )
    def test_a_script_has_no_pitfall_that_is_known(self, path: Path):
        checked = run("shellcheck", path)
        assert 0 == checked.returncode, checked.stdout
