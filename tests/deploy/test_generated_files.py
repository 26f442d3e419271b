import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy import run
from trainvitals.cli.main import main
from trainvitals.errors import StorageError, UsageError
from trainvitals.io.server_identity import TlsTrust
from vitals_collector.api.certificate import load_or_create_certificate
from vitals_deploy import prometheus
from vitals_deploy.cli import GENERATORS, reader_tokens, write_files
from vitals_deploy.prometheus import agent_targets

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_committed_is_what_the_generator_makes(name):
    for file, text in GENERATORS[name]().items():
        assert text == (DEPLOY / name / file).read_text(), (
            f"{name}/{file} is stale: run `make docs`"
        )


@pytest.mark.parametrize("name", GENERATORS)
def test_nothing_else_is_committed_there(name):
    there = {
        str(path.relative_to(DEPLOY / name))
        for path in (DEPLOY / name).rglob("*")
        if path.is_file()
    }
    assert set(GENERATORS[name]()) == there


def test_a_file_that_somebody_changed_is_not_overwritten(tmp_path):
    write_files(tmp_path, {"a": "one", "b/c": "two"})
    (tmp_path / "b" / "c").write_text("mine")
    with pytest.raises(UsageError, match="exists and its content differs"):
        write_files(tmp_path, {"a": "new", "b/c": "new"})
    assert ("one", "mine") == ((tmp_path / "a").read_text(), (tmp_path / "b" / "c").read_text())
    write_files(tmp_path, {"a": "new", "b/c": "new"}, force=True)
    assert "new" == (tmp_path / "b" / "c").read_text()


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--output"):
        write_files(tmp_path / "file", {"a": "text"})


@pytest.mark.parametrize("name", [*GENERATORS, "all"])
def test_the_command_writes_the_files_and_prints_their_paths(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["deploy", name, "--output", str(tmp_path)])
    assert 0 == exit_.value.code
    printed = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == printed


def test_a_token_that_was_put_in_its_place_is_kept(tmp_path):
    write_files(tmp_path, GENERATORS["prometheus"]())
    (tmp_path / "vitals-read.token").write_text("r3ad")
    for force in (False, True):
        write_files(tmp_path, GENERATORS["prometheus"](), force=force)
        assert "r3ad" == (tmp_path / "vitals-read.token").read_text()


@pytest.mark.servers("promtool", "amtool")
def test_what_the_command_for_all_writes_is_taken_by_prometheus_and_alertmanager_as_it_lies(
    tmp_path,
):
    with pytest.raises(SystemExit):
        main(["deploy", "all", "--output", str(tmp_path)])
    for command in (
        ("promtool", "check", "config", tmp_path / "prometheus/prometheus.yml"),
        ("amtool", "check-config", tmp_path / "alertmanager/alertmanager.yml"),
    ):
        checked = run(*command)
        assert 0 == checked.returncode, checked.stdout + checked.stderr


def test_the_read_token_is_handed_on_in_a_file_that_only_its_owner_reads(tmp_path, capsys):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"read": "r3ad", "ingest": "1ngest", "control": "c0ntrol"}))
    tokens.chmod(0o600)
    with pytest.raises(SystemExit):
        main(["deploy", "prometheus", "--output", str(tmp_path / "out"), "--tokens", str(tokens)])
    written = tmp_path / "out" / "vitals-read.token"
    assert "r3ad" == written.read_text()
    of_agents = tmp_path / "out" / "vitals-agents.token"
    assert reader_tokens(tokens).scrape == of_agents.read_text()
    assert [0o600, 0o600] == [path.stat().st_mode & 0o777 for path in (written, of_agents)]
    made = "".join(path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert "1ngest" not in made
    assert "c0ntrol" not in made
    assert "r3ad" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"read": 3}', "not json"])
def test_a_file_that_is_no_token_file_is_refused(tmp_path, text):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="is not a token file"):
        reader_tokens(path)


def test_agents_are_found_in_their_run_directories(tmp_path, run_id):
    agents = tmp_path / run_id / "agents"
    for node, text in {
        "node-a": '{"pid": 7, "url": "http://10.0.0.5:4711/"}',
        "node-b": '{"pid": 7, "url": ""}',
        "node-c": "{",
    }.items():
        (agents / node).mkdir(parents=True)
        (agents / node / "agent.json").write_text(text)
    expected = {"targets": ["10.0.0.5:4711"], "labels": {"run": run_id, "node": "node-a"}}
    assert [expected] == agent_targets(tmp_path)


def test_agents_are_asked_of_the_collector_unless_run_directories_are_named(tmp_path, run_id):
    main_job = 'url: "https://10.0.0.1:8765/v1/sd/agents"'
    asked = prometheus.prometheus_files(collector="10.0.0.1:8765")
    assert (True, False) == (main_job in asked["prometheus.yml"], "agents/vitals.json" in asked)
    listed = prometheus.prometheus_files(collector="10.0.0.1:8765", agents=[])
    assert (False, True) == ("http_sd" in listed["prometheus.yml"], "agents/vitals.json" in listed)


def test_prometheus_knows_the_collector_by_what_its_token_file_says(tmp_path):
    own = a_certificate(tmp_path)
    placeholder = prometheus.prometheus_files()
    assert placeholder["vitals-collector.pem"].startswith("put the certificate")
    made = prometheus.prometheus_files(tls=TlsTrust(certificates=(own,)))
    assert own == made["vitals-collector.pem"]
    tls = '{"ca_file": "vitals-collector.pem", "server_name": "vitals-collector"}'
    assert 2 == made["prometheus.yml"].count(f"tls_config: {tls}")
    made = prometheus.prometheus_files(tls=TlsTrust(ca="PEM of a CA"))
    assert "PEM of a CA" == made["vitals-collector.pem"]
    assert 'tls_config: {"ca_file": "vitals-collector.pem"}' in made["prometheus.yml"]
    made = prometheus.prometheus_files(tls=TlsTrust())
    assert "vitals-collector.pem" not in made
    assert "tls_config: {}" in made["prometheus.yml"]


def test_the_address_is_taken_as_the_collector_prints_it_and_nothing_else_is(tmp_path, capsys):
    options = ("deploy", "prometheus", "--output", str(tmp_path), "--collector")
    with pytest.raises(SystemExit):
        main([*options, "https://10.0.0.1:8765"])
    made = (tmp_path / "prometheus.yml").read_text()
    assert 'targets: ["10.0.0.1:8765"]' in made
    assert 'url: "https://10.0.0.1:8765/v1/sd/agents"' in made
    assert 2 == main([*options, "vitals_home/collector"])
    assert "--collector is 'vitals_home/collector'; it must be host:port" in capsys.readouterr().err


def a_certificate(folder: Path) -> str:
    """Return a certificate that a collector made."""
    text = load_or_create_certificate(folder).read_text()
    return text[text.index("-----BEGIN CERTIFICATE") :]


@pytest.mark.servers("promtool")
@pytest.mark.parametrize("agents", [None, []])
def test_prometheus_takes_both_ways_to_find_agents(tmp_path, agents):
    write_files(tmp_path, prometheus.prometheus_files(agents=agents))
    checked = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert 0 == checked.returncode, checked.stdout + checked.stderr


class TestSystemd:
    @pytest.mark.servers("systemd-analyze")
    @pytest.mark.parametrize("name", GENERATORS["systemd"]())
    def test_a_unit_is_valid_and_hardened(self, name, tmp_path):
        true = shutil.which("true")
        (path,) = (
            p for p in write_files(tmp_path, GENERATORS["systemd"](vitals=true)) if p.name == name
        )
        verified = run("systemd-analyze", "verify", path)
        assert (0, "") == (verified.returncode, verified.stderr)
        secured = run("systemd-analyze", "security", "--offline=true", "--threshold=20", path)
        assert 0 == secured.returncode, secured.stdout

    def test_the_agent_keeps_its_gpus(self):
        agent = GENERATORS["systemd"]()["vitals-agent.service"]
        assert "DeviceAllow=char-nvidia rw" in agent
        assert "PrivateDevices=" not in agent

    @pytest.mark.parametrize("name", GENERATORS["systemd"]())
    def test_a_unit_listens_on_loopback_only(self, name):
        assert "--listen 127.0.0.1:87" in GENERATORS["systemd"]()[name]


class TestSlurm:
    @pytest.mark.servers("bash")
    @pytest.mark.parametrize("runs", ["$HOME/vitals_runs", "/scratch/my `runs`", 'a"b'])
    def test_the_script_is_valid_shell(self, runs, tmp_path):
        (path,) = write_files(tmp_path, GENERATORS["slurm"](runs=runs))
        checked = run("bash", "-n", path)
        assert (0, "") == (checked.returncode, checked.stderr)

    def test_every_option_of_the_batch_system_stands_before_the_first_command(self):
        lines = GENERATORS["slurm"]()["vitals-train.sbatch"].splitlines()
        first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
        assert [] == [line for line in lines[first:] if line.startswith("#SBATCH")]

    @pytest.mark.servers("shellcheck")
    @pytest.mark.parametrize("runs", ["$HOME/vitals_runs", "/scratch/my runs"])
    def test_the_script_has_no_pitfall_that_is_known(self, runs, tmp_path):
        (path,) = write_files(tmp_path, GENERATORS["slurm"](runs=runs))
        checked = run("shellcheck", path)
        assert (0, "") == (checked.returncode, checked.stdout)

    @pytest.mark.servers("bash")
    @pytest.mark.parametrize(
        ("code", "signals", "requeued"), [(0, "", False), (3, "", False), (1, "USR1", True)]
    )
    def test_it_keeps_the_exit_code_takes_up_what_is_left_and_requeues_when_its_time_is_up(
        self, code, signals, requeued, tmp_path
    ):
        (path,) = write_files(tmp_path, GENERATORS["slurm"](runs=str(tmp_path / "runs")))
        said = tmp_path / "said"
        doubles = {
            "srun": f'[ "$1" = torchrun ] || exit 0; {f"kill -{signals} $PPID;" if signals else ""}'
            f" sleep 0.2; exit {code}",
            "scontrol": "echo n1; echo n2",
            "scancel": "",
        }
        for name, body in doubles.items():
            (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{said}\n{body}\n')
            (tmp_path / name).chmod(0o755)
        settings = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        done = subprocess.run(
            ["bash", path],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **settings},
            capture_output=True,
            timeout=20,
            check=False,
        )
        lines = said.read_text().splitlines()
        assert code == done.returncode
        assert "--rdzv-endpoint=n1:23456" in " ".join(lines)
        assert "srun --ntasks-per-node=1 vitals agent --once" in lines
        assert ("scontrol requeue 123456" in lines) is requeued
        assert ("scancel --signal=TERM 123456" in lines) is requeued


class TestAlertmanager:
    @pytest.mark.servers("amtool")
    def test_the_example_is_valid(self, tmp_path):
        (path,) = write_files(tmp_path, GENERATORS["alertmanager"]())
        checked = run("amtool", "check-config", path)
        assert 0 == checked.returncode, checked.stderr

    @pytest.mark.servers("amtool")
    @pytest.mark.parametrize(
        ("labels", "receiver"),
        [
            (["severity=page", "alert=RunHalted"], "vitals-page"),
            (["severity=notify", "alert=RolledBack"], "vitals-notify"),
            (["alertname=VitalsCollectorDown", "severity=page"], "vitals-page"),
        ],
    )
    def test_only_what_needs_a_human_goes_to_the_pager(self, labels, receiver, tmp_path):
        (path,) = write_files(tmp_path, GENERATORS["alertmanager"]())
        routed = run("amtool", "config", "routes", "test", f"--config.file={path}", *labels)
        assert receiver == routed.stdout.strip()
