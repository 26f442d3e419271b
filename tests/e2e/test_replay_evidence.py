"""A real training with a probe, evaluations, a person's word and an announcement: as recorded."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.trainer_hooks.torchrun import wait_for_agents
from trainvitals.cli.main import main
from vitals_collector.ingest.folder import FolderIngest
from vitals_collector.report.replay import Replay, replay
from vitals_collector.storage.store import open_store

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
import trainer_hooks
from tests.support.watched import send_command

torch.manual_seed(0)
made = torch.Generator().manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, fused=True)
data = [torch.randn(32, 4, generator=made) for _ in range(400)]
data[260] = 20.0 * data[260]


def loss_of(x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


done = set()


def once(step):
    return monitor.step_index == step and not (step in done or done.add(step))


with trainer_hooks.watch(model, optimizer, mode="heal", checkpoints=True) as monitor:
    for x in monitor.batches(data, probe=loss_of):
        if once(60) or once(120) or once(240):
            monitor.evaluate(val_loss=loss_of(data[0]).item())
        if once(150):  # a bit that flips
            with torch.no_grad():
                model[2].weight.mul_(100.0)
        if once(280):
            send_command(monitor, action="accept", argument=253.0)
        if once(300):
            monitor.expect("larger numbers", steps=5)
        if monitor.step_index >= 300:
            x = 3.0 * x
        loss = loss_of(x)
        loss.backward()
        monitor.step(loss, max_norm=1.0)
    assert monitor.swallowed_errors == {}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "shm").mkdir()
    environ = {
        **os.environ,
        "VITALS_DIR": str(folder / "runs"),
        "VITALS_SHM": str(folder / "shm"),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=240
    )
    assert 0 == ran.returncode, ran.stderr
    wait_for_agents(folder / "runs")
    return folder / "runs"


@pytest.fixture(scope="module")
def replayed(trained: Path) -> Replay:
    (run_id,) = [path.name for path in trained.glob("[0-9A-Z]*")]
    with contextlib.closing(open_store("sqlite://")) as store:
        FolderIngest(store, [trained]).poll()
        return replay(store, run_id)


def test_all_that_was_decided_and_read_comes_out_again(replayed: Replay):
    assert [] == replayed.differences()
    # Who gave a command is no evidence: a replay does not know it.
    recorded = [
        replace(d, reason=d.reason.removesuffix(" (operator: test)")) for d in replayed.recorded
    ]
    assert repr(recorded) == repr(list(replayed.decisions))
    assert [
        ("rollback", "state_damaged", 150),
        ("skip_step", "outlier", 253),
        ("accept_level", "operator_accepted", 280),
    ] == [(made.action, made.rule, made.step) for made in replayed.decisions]
    readings = [read for judgement in replayed.judgements for read in judgement.readings]
    assert [
        ("evaluation", "sound"), ("spike", "sound"), ("evaluation", "sound"), ("spike", "state"),
        ("evaluation", "sound"), ("spike", "sound"),
    ] == [(read.trigger, read.verdict) for read in readings]  # fmt: skip


def test_an_accepted_step_is_the_one_that_was_named(replayed: Replay):
    accepted = replayed.decisions[-1]
    assert 253.0 == accepted.evidence["accepted_step"]
    assert "1 outliers, steps 253 to 253, count as normal" in accepted.reason


def test_no_limit_is_in_force_from_the_announcement_until_it_is_over(replayed: Replay):
    after = {record.step for record in replayed.records if record.loss_limit is None} - {0}
    assert set(range(300, 305)) <= after


def test_the_command_says_so(trained: Path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["replay", str(trained)])
    assert not end.value.code
    assert "all as recorded" in capsys.readouterr().err
