"""A person's own alerts all the way: a real training, its agent, a collector, and who is told."""

import json
import re
import sys
from collections import Counter

import httpx
import pytest

from tests.e2e.lab import Lab, free_port, open_lab, until
from tests.support.receivers import receiver
from trainvitals.io.client import read_tokens
from trainvitals.io.server_identity import tls_context
from trainvitals.views import AlertsQuestion, RunQuestion, RunsQuestion

pytestmark = pytest.mark.dist

RULES = """
[[rules]]
name = "reward hacked"
when = "mean(reward, 10) > 0.9"
for = 5
level = "page"

[[rules]]
name = "loss is huge"
when = "max(loss, 5) > 1e6"
level = "page"

[[rules]]
name = "few tokens"
when = "tokens_per_second < 1"
"""
MISSING_AFTER = 200
"""Steps without a value after which the training reports that, instead of 1,000."""
TRAINING = """
import pathlib, sys, time
import torch
import trainvitals
from trainer_hooks.features import user_alerts

user_alerts.MISSING_AFTER = {MISSING_AFTER}
phase = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
with trainvitals.watch(model, optimizer, run="own alerts") as monitor:
    while (now := phase.read_text()) != "stop":
        inputs = torch.randn(16, 4)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        monitor.observe(reward=0.95 if now == "bad" else 0.5)
        monitor.alert("loop says bad", when=now == "bad", value=0.95)
        monitor.alert("never", when=loss > 1e6, value=loss, level="page")
        monitor.step(loss)
        time.sleep(0.02)  # little to store: the processes next to it are the subject
    assert {} == monitor.swallowed_errors, monitor.swallowed_errors
"""


class Watched:
    """The run, as a person sees it who is told by a webhook."""

    def __init__(self, lab: Lab, server) -> None:
        self.lab = lab
        self.server = server
        self.port = free_port()
        self.phase = lab.folder / "phase"
        self.phase.write_text("good")

    def posts(self) -> Counter[tuple[str, str]]:
        alerts = [a for _, _, body in self.server.posted for a in json.loads(body)["alerts"]]
        # Of ours a busy machine may raise one: that the steps got slow.
        own = [a for a in alerts if a["name"] == "UserAlert"]
        return Counter((a["labels"]["cause"], a["state"]) for a in own)

    def last_step(self) -> int:
        with self.lab.client(self.port) as client:
            return client.ask(RunQuestion(run_id=self.lab.run_id())).summary.last_step

    def wait_steps(self, num: int) -> None:
        goal = self.last_step() + num
        until(lambda: self.last_step() >= goal, f"step {goal} is stored")

    def serve(self):
        return self.lab.collector(self.port, VITALS_COLLECTOR_WEBHOOK=self.server.url)


def _own(alerts):
    return [alert for alert in alerts if alert.name == "UserAlert"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Play it: good, bad with a collector that is killed and one alert silenced, good again."""
    with open_lab(tmp_path_factory.mktemp("own-alerts")) as lab, receiver() as server:
        watched = Watched(lab, server)
        settings = lab.folder / "vitals.toml"
        settings.write_text(RULES)
        collector = watched.serve()
        lab.agent(watched.port)
        script = lab.folder / "train.py"
        script.write_text(TRAINING.replace("{MISSING_AFTER}", str(MISSING_AFTER)))
        environ = {"VITALS_CONFIG": str(settings), "VITALS_AGENT": "off"}
        training = lab.start("training", sys.executable, str(script), str(watched.phase), **environ)
        with lab.client(watched.port) as client:
            until(lambda: client.ask(RunsQuestion()), "the run is seen")
        watched.wait_steps(20)
        seen = {"healthy": watched.posts()}
        watched.phase.write_text("bad")
        both = {("reward hacked", "firing"), ("loop says bad", "firing")}
        until(lambda: both <= watched.posts().keys(), "both fire")
        watched.wait_steps(30)
        collector.kill()
        collector.wait()
        watched.serve()
        watched.wait_steps(30)
        seen["restarted"] = watched.posts()
        tokens = read_tokens(lab.tokens)
        reply = httpx.get(
            f"https://127.0.0.1:{watched.port}/metrics",
            headers={"Authorization": f"Bearer {tokens.read}"},
            trust_env=False,
            verify=tls_context(tokens.tls),
        )
        seen["metrics"] = reply.text
        where = ("--collector", f"https://127.0.0.1:{watched.port}", "--token-file", lab.tokens)
        seen["silence"] = lab.vitals(
            "alerts", "silence", "loop says bad", "--reason", "known", *where
        )
        seen["list"] = lab.vitals("alerts", "list", "--state", "firing", *where)
        watched.phase.write_text("good")
        until(lambda: ("reward hacked", "resolved") in watched.posts(), "it resolves")
        with lab.client(watched.port) as client:
            question = AlertsQuestion(run_id=lab.run_id(), state="firing")
            until(lambda: not _own(client.ask(question)), "nothing of ours fires any more")
            seen["alerts"] = _own(client.ask(AlertsQuestion(run_id=lab.run_id())))
        watched.wait_steps(max(0, MISSING_AFTER + 50 - watched.last_step()))
        watched.phase.write_text("stop")
        assert 0 == training.wait(60), lab.log("training").read_text()
        seen["posts"] = watched.posts()
        seen["show"] = lab.vitals("show", lab.run_id(), *where)
        first = min(a.step for a in seen["alerts"])
        seen["why"] = lab.vitals("why", lab.run_id(), str(first), *where)
        yield seen


def test_a_healthy_run_is_told_nothing(seen):
    assert {} == seen["healthy"]


def test_each_alert_is_told_once_though_the_collector_was_killed(seen):
    assert {("reward hacked", "firing"): 1, ("loop says bad", "firing"): 1} == seen["restarted"]


def test_it_resolves_once_and_one_that_is_silenced_is_told_no_more(seen):
    assert 0 == seen["silence"].returncode, seen["silence"].stderr
    assert {
        ("reward hacked", "firing"): 1,
        ("loop says bad", "firing"): 1,
        ("reward hacked", "resolved"): 1,
    } == seen["posts"]
    assert {"reward hacked", "loop says bad"} == {alert.title for alert in seen["alerts"]}


def test_a_page_is_on_metrics_for_prometheus(seen):
    lines = [line for line in seen["metrics"].splitlines() if "collector_alert_firing{" in line]
    assert any('"UserAlert"' in line and '"page"' in line for line in lines), lines


def test_the_commands_show_it_by_its_name(seen):
    assert "reward hacked" in seen["list"].stdout
    assert "silenced: known" in seen["list"].stdout
    assert "YOUR ALERT" in seen["show"].stdout
    assert re.search(r"mean\(reward, 10\) is 0\.9\d*, above 0\.9 since step", seen["show"].stdout)
    assert "no value of tokens_per_second was recorded" in seen["show"].stdout
    assert "Your alert (" in seen["why"].stdout, seen["why"].stdout
