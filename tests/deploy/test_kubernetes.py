"""The chart as Helm renders it, and the examples of jobs: valid, hardened, and true of Vitals."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.compose import DEPLOY
from tests.e2e.lab import Lab, free_port, open_lab, until
from tests.house.pages import block
from tests.support.deploy import run, settings_of_vitals
from trainvitals import __version__
from trainvitals.cli.main import main
from trainvitals.io.control_key import control_folder
from vitals_collector.api.auth import OPEN_PATHS
from vitals_deploy import prometheus

CHART = DEPLOY / "helm" / "vitals"
GUIDE = DEPLOY.parent / "docs" / "guides" / "deploy.md"
EXAMPLES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RULES = CHART / "files" / "vitals_rules.yml"
SHARED = [
    {"name": "VITALS_COLLECTOR_DATABASE_FILE", "value": "/run/secrets/database"},
    {"name": "VITALS_DATA", "value": "s3://bucket/prefix"},
]
VARIANTS = {
    "plain": (),
    "everything": (
        *("--set", "monitoring.enabled=true", "--set", "monitoring.labels.release=prometheus"),
        *("--set", "agent.runtimeClassName=nvidia", "--set", "collector.replicas=2"),
        *("--set", "collector.storageClassName=fast", "--set", "collector.hosts={v.example.org}"),
        *("--set-json", f"collector.env={json.dumps(SHARED)}"),
        *("--set-json", 'agent.nodeSelector={"gpu":"yes"}'),
    ),
    "the least": ("--set", "agent.enabled=false", "--set", "networkPolicy.enabled=false"),
}
WITH_PODS = ("StatefulSet", "DaemonSet", "Job")


def rendered(variant: str, folder: Path, *more: object) -> Path:
    """Return what Helm makes of the chart."""
    helm = ("helm", "template", "vitals", CHART, "--namespace", "training", *VARIANTS[variant])
    helm += more
    # It would keep a cache in the home.
    home = {name: str(folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
    done = subprocess.run(helm, capture_output=True, text=True, env=os.environ | home, check=False)
    assert 0 == done.returncode, done.stderr
    path = folder / "rendered.yaml"
    path.write_text(done.stdout)
    return path


def objects(path: Path) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text()) if each}


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """Return what a file says of pods."""
    for kind, each in objects(path).items():
        if kind in WITH_PODS:
            yield each["spec"]["template"]["spec"]
        elif kind == "TrainingRuntime":
            for job in each["spec"]["template"]["spec"]["replicatedJobs"]:
                yield job["template"]["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def secrets_of_the_guide(folder: Path, lab: Lab) -> None:
    """Run the guide's lines; what they make with kubectl lies in ``secrets``, as it is mounted."""
    (folder / "vitals").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainvitals "$@"\n')
    (folder / "vitals").chmod(0o755)
    asked = (
        'kubectl() { for w; do printf "%s\\n" "$w"; done >>calls; echo >>calls; }; helm() { :; }\n'
    )
    lines = asked + block(GUIDE, "test: secrets").body.replace("timeout 20", "timeout 8")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-c", lines], cwd=folder, env=lab.environ(PATH=path), check=True)
    for call in (folder / "calls").read_text().split("\n\n"):
        words = call.split("\n")
        if "secret" in words:
            mounted = folder / "secrets" / words[words.index("generic") + 1]
            mounted.mkdir(parents=True)
            for word in words:
                if word.startswith("--from-file="):
                    *name, source = word.split("=")[1:]
                    content = (folder / source).read_bytes()
                    (mounted / (name[0] if name else Path(source).name)).write_bytes(content)
    assert [] == [p.name for p in folder.glob("*.json") if p.stat().st_mode & 0o077]


def test_the_rules_in_the_chart_are_those_of_prometheus():
    assert prometheus.render_rules() == RULES.read_text(), f"{RULES} is stale: run `make docs`"


@pytest.mark.servers("helm")
class TestChart:
    @pytest.fixture(params=VARIANTS)
    def file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return rendered(request.param, tmp_path)

    @pytest.fixture
    def everything(self, tmp_path: Path) -> Path:
        return rendered("everything", tmp_path)

    def test_it_has_no_pitfall_that_is_known(self):
        checked = run("helm", "lint", "--strict", CHART)
        assert 0 == checked.returncode, checked.stdout

    @pytest.mark.servers("kubernetes-validate")
    def test_what_it_makes_is_what_kubernetes_takes(self, file):
        checked = run("kubernetes-validate", "--strict", "--no-warn", file)
        assert 0 == checked.returncode, checked.stdout
        assert "StatefulSet" in objects(file)

    def test_no_pod_has_rights_that_it_does_not_need(self, file):
        for pod in pods(file):
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
            assert "OnRootMismatch" == pod["securityContext"]["fsGroupChangePolicy"]
            for container in containers(pod):
                assert {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                } == container["securityContext"]

    def test_what_is_mounted_is_there_and_what_is_there_is_mounted(self, file):
        for kind, each in objects(file).items():
            if kind in WITH_PODS:
                pod = each["spec"]["template"]["spec"]
                there = {volume["name"] for volume in pod["volumes"]}
                there |= {
                    c["metadata"]["name"] for c in each["spec"].get("volumeClaimTemplates", ())
                }
                mounted = {m["name"] for c in containers(pod) for m in c["volumeMounts"]}
                assert there == mounted

    def test_a_command_is_one_that_vitals_knows(self, everything, capsys):
        for pod in pods(everything):
            for container in pod["containers"]:
                command, *options = container["args"]
                with pytest.raises(SystemExit):
                    main([command, "--help"])
                known = capsys.readouterr().out
                for option in options:
                    assert f"{option.partition('=')[0]} " in known

    def test_probes_ask_what_is_answered_without_a_token(self, everything):
        asked = {
            probe["httpGet"]["path"]
            for pod in pods(everything)
            for container in pod["containers"]
            for name, probe in container.items()
            if name.endswith("Probe") and "httpGet" in probe
        }
        assert asked == OPEN_PATHS

    def test_every_variable_for_vitals_is_one_that_is_read(self, everything):
        names = {
            variable["name"]
            for pod in pods(everything)
            for container in containers(pod)
            for variable in container.get("env", ())
        }
        ours = {name.removesuffix("_FILE") for name in names if name.startswith("VITALS_")}
        assert ours <= settings_of_vitals()

    def test_prometheus_calls_them_as_the_rules_do(self, everything):
        found = objects(everything)
        jobs = [
            rule["replacement"]
            for kind, field in (
                ("ServiceMonitor", "endpoints"),
                ("PodMonitor", "podMetricsEndpoints"),
            )
            for rule in found[kind]["spec"][field][0]["relabelings"]
            if rule["targetLabel"] == "job"
        ]
        assert set(
            re.findall(r'job="([\w-]+)"', prometheus.render_rules().replace("\\", ""))
        ) == set(jobs)
        for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"):
            assert "prometheus" == found[kind]["metadata"]["labels"]["release"]
        keys = set(re.findall(r"key: (\S+?)[,}\s]", everything.read_text()))
        assert keys >= set(prometheus.prometheus_files()) - {"prometheus.yml", "vitals_rules.yml"}

    def test_agents_speak_for_nobody_else_as_in_the_scrape_configuration(self, everything):
        endpoint = objects(everything)["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
        jobs = yaml.safe_load(prometheus.prometheus_files()["prometheus.yml"])["scrape_configs"]
        expected = [
            (rule["source_labels"], rule["regex"], rule["action"])
            for rule in jobs[1]["metric_relabel_configs"]
        ]
        assert expected == [
            (rule["sourceLabels"], rule["regex"], rule["action"])
            for rule in endpoint["metricRelabelings"]
        ]

    @pytest.mark.servers("promtool")
    def test_the_rules_are_rules(self, everything, tmp_path):
        (tmp_path / "rules.yml").write_text(
            json.dumps(objects(everything)["PrometheusRule"]["spec"])
        )
        checked = run("promtool", "check", "rules", tmp_path / "rules.yml")
        assert 0 == checked.returncode, checked.stdout + checked.stderr

    def test_the_policy_is_about_the_collectors_and_their_port(self, everything):
        found = objects(everything)
        policy = found["NetworkPolicy"]["spec"]
        labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert [{"protocol": "TCP", "port": "https"}] == policy["ingress"][0]["ports"]
        assert found["Service"]["spec"]["selector"].items() <= labels.items()

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("collector.replica=2", "additional properties 'replica' not allowed"),
            ("collector.replicas=none", "got string, want integer"),
            ("collector.replicas=2", "each collector would have a store of its own"),
            ('collector.env=[{"name":"A","value":5}]', "got number, want string"),
            ("agent.nodeSelector.gpu=true", "got boolean, want string"),
            ('networkPolicy.from=""', "got string, want array"),
            # An empty list of who may come in lets everybody in.
            ("networkPolicy.from=null", "missing property 'from'"),
            ("networkPolicy.from=[{}]", "minProperties"),
            ("monitoring=null", "missing property 'monitoring'"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_in_words(self, setting, words):
        how = "--set-json" if setting.endswith(("]", "null", '"')) else "--set"
        refused = run("helm", "template", "vitals", CHART, how, setting)
        assert 0 != refused.returncode
        assert words in refused.stderr

    def test_a_value_stays_one_word_whatever_is_in_it(self, tmp_path):
        named = 'a: "b" #c\n            - --allow-plain'
        path = rendered("plain", tmp_path, "--set-json", f"collector.hosts={json.dumps([named])}")
        (container,) = objects(path)["StatefulSet"]["spec"]["template"]["spec"]["containers"]
        assert f"--allow-host={named}" in container["args"]
        assert "--allow-plain" not in container["args"]

    def test_the_values_of_the_guide_are_taken(self, tmp_path):
        values = block(GUIDE, "test: values").body
        (tmp_path / "values.yaml").write_text(values)
        path = rendered("plain", tmp_path, "--values", tmp_path / "values.yaml")
        found, given = objects(path), yaml.safe_load(values)
        assert (
            given["networkPolicy"]["from"] == found["NetworkPolicy"]["spec"]["ingress"][0]["from"]
        )
        assert "nvidia" == found["DaemonSet"]["spec"]["template"]["spec"]["runtimeClassName"]
        assert "prometheus" == found["PrometheusRule"]["metadata"]["labels"]["release"]
        assert f'image: "{given["image"]["repository"]}:{__version__}"' in path.read_text()

    @pytest.mark.slow
    def test_its_pods_run_with_what_the_guide_puts_into_secrets(self, tmp_path):
        """Scripts and command lines as they are, but for folders, addresses and ports."""
        chart = objects(rendered("plain", tmp_path))
        collector, agent = f"127.0.0.2:{free_port()}", f"127.0.0.3:{free_port()}"
        here = {
            "0.0.0.0:8765": f"0.0.0.0:{collector.rpartition(':')[2]}",
            "$(POD_IP)": "127.0.0.2",
            "vitals-collector.training.svc:8765": collector,
            "$(HOST_IP):8766": agent,
            "/identity": str(tmp_path / "secrets/vitals-identity"),
            "/tokens/": f"{tmp_path / 'secrets/vitals-agents'}/",
        }

        def start(kind: str, lab: Lab) -> Path:
            """Run what a pod runs; return the folder of its volume."""
            pod, folder = chart[kind]["spec"]["template"]["spec"], tmp_path / kind
            folder.mkdir()

            def put(text: str) -> str:
                for word, ours in {**here, "/var/lib/vitals": str(folder)}.items():
                    text = text.replace(word, ours)
                return text

            (first,), (container,) = pod["initContainers"], pod["containers"]
            for _ in range(2):  # and again where the pod is started again
                subprocess.run([*first["command"], *map(put, first["args"])], check=True)
            lab.start_vitals(*map(put, container["args"]))
            return folder

        def asked(url: str, token: str = "", **headers: str) -> int:
            headers |= {"Authorization": f"Bearer {token}"} if token else {}
            try:
                return httpx.get(url, headers=headers, verify=False, trust_env=False).status_code
            except httpx.HTTPError:
                return 0

        with open_lab(tmp_path) as lab:
            secrets_of_the_guide(tmp_path, lab)
            made = json.loads((tmp_path / "identity/tokens.json").read_text())

            data = start("StatefulSet", lab) / "collector"
            url = f"https://{collector}"
            until(lambda: 200 == asked(f"{url}/healthz"), "the kubelet's probe is answered")
            for name in ("127.0.0.2", "vitals-collector.training.svc", "vitals-collector"):
                assert 200 == asked(f"{url}/v1/runs", made["read"], Host=f"{name}:8765")
            assert 200 != asked(f"{url}/v1/runs", made["read"], Host="elsewhere.example")
            forwarded = url.replace("127.0.0.2", "localhost")  # as by `kubectl port-forward`
            assert 200 == asked(f"{forwarded}/v1/runs", made["read"])
            assert not (data / "control.key").exists(), "commands are signed elsewhere"
            assert (data / "tls.pem").read_bytes() == (tmp_path / "identity/tls.pem").read_bytes()
            training = json.loads((tmp_path / "secrets/vitals-training/tokens.json").read_text())
            assert training.keys() == {"ingest", "tls"}

            start("DaemonSet", lab)
            until(lambda: 200 == asked(f"http://{agent}/healthz"), "the agent's probe is answered")
            scrape = (tmp_path / "secrets/vitals-scrape/vitals-agents.token").read_text()
            assert 200 == asked(f"http://{agent}/metrics", scrape)
            assert 401 == asked(f"http://{agent}/metrics", made["read"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
class TestExamples:
    @pytest.mark.servers("kubernetes-validate")
    def test_it_is_what_kubernetes_takes(self, path):
        checked = run("kubernetes-validate", "--strict", "--no-warn", path)
        assert 0 == checked.returncode, checked.stdout

    def test_every_variable_for_vitals_is_one_that_is_read(self, path):
        assert set(re.findall(r"VITALS_[A-Z_]+", path.read_text())) <= settings_of_vitals()

    def test_what_is_mounted_is_there_and_what_is_there_is_mounted(self, path):
        (pod,) = pods(path)
        mounted = {mount["name"] for c in containers(pod) for mount in c["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == mounted

    def test_a_run_finds_what_verifies_its_commands(self, path):
        """It lies beside the token file: an init container puts it where the training sees it."""
        (pod,) = pods(path)
        (train,) = pod["containers"]
        environ = {each["name"]: each.get("value", "") for each in train["env"]}
        (folder,) = {m["mountPath"] for m in train["volumeMounts"] if m["name"] == "vitals"}
        first, *_ = pod["initContainers"]
        assert control_folder(environ) == Path(folder)
        assert first["command"][-1].endswith(f" {folder}/")

    def test_kubernetes_starts_no_halted_training_anew(self, path):
        """A pod without the run's id would begin at step 0."""
        found = objects(path)
        if "Job" in found:
            job = found["Job"]["spec"]
        else:
            (replicated,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
            job = replicated["template"]["spec"]
        assert 0 == job["backoffLimit"]

    def test_torchrun_takes_the_line(self, path):
        found = objects(path)
        (pod,) = pods(path)
        job = found.get("TrainJob")
        command = job["spec"]["trainer"]["command"] if job else pod["containers"][0]["command"]
        assert "torchrun" == command[0]
        from torch.distributed.run import parse_args

        assert "train.py" == parse_args(command[1:]).training_script
