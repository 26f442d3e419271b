"""Logs of real small trainings: labelled, scored, and judged by `vitals replay`."""

import json
import math

import pytest

from tests.support.control import run_cli
from vitals_bench import detect
from vitals_bench.detect import trained
from vitals_bench.detect.logs import Logs, read_logs
from vitals_bench.detect.ours import Verdicts
from vitals_bench.detect.series import Alarm
from vitals_bench.judgement import series
from vitals_bench.judgement.series import BEGIN, KINDS, Log, Point, label_of, make_log
from vitals_bench.rows import Grid, Row

pytestmark = pytest.mark.nightly

STEPS = 440
"""Of the trainings here: some more than the step at which faults begin."""
NAMES = ("gan", "spikes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    series.write_logs(folder, 1, names=NAMES, steps=STEPS)
    return folder


@pytest.mark.slow
def test_each_training_is_logged_healthy_and_with_a_fault_as_the_bench_reads_it(folder):
    logs = {log.name: log for log in read_logs(Logs(folder=folder))}
    assert ["gan_s0", "gan_rate_s0", "spikes_s0", "spikes_rate_s0"] == list(logs)
    healthy, damaged = logs["gan_s0"], logs["gan_rate_s0"]
    assert (STEPS, "adversarial", "GAN") == (len(healthy), healthy.loss_kind, healthy.family)
    assert healthy.losses[:BEGIN] == damaged.losses[:BEGIN]
    assert healthy.losses[BEGIN + 1] != damaged.losses[BEGIN + 1]
    assert ((), [BEGIN]) == (healthy.events, [event.onset for event in damaged.events])
    assert 30.0 == pytest.approx(damaged.rates[BEGIN] / healthy.rates[BEGIN])


@pytest.mark.parametrize("name", KINDS)
def test_every_training_can_be_made(name):
    log = make_log(name, "", 0, steps=3)
    assert [0, 1, 2] == [point.step for point in log.points]
    assert all(math.isfinite(point.loss) and point.grad_norm > 0.0 for point in log.points)
    assert KINDS[name].family == label_of(log, log.points)["family"]


@pytest.mark.parametrize("declared", [(), ("--loss-kind", "adversarial")])
@pytest.mark.parametrize("clip", [(), ("--no-clip",)])
def test_nothing_is_done_to_a_healthy_gan(folder, capsys, declared, clip):
    path = folder / "series" / "gan_s0.csv"
    assert 0 == run_cli("replay", str(path), *declared, *clip, "--format", "json")
    assert [] == json.loads(capsys.readouterr().out)["decisions"]


def test_a_jump_of_the_rate_is_told(folder, capsys):
    path = folder / "series" / "gan_rate_s0.csv"
    assert 0 == run_cli("replay", str(path), "--loss-kind", "adversarial", "--format", "json")
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert (BEGIN, "lr_jump") in [(finding["step"], finding["kind"]) for finding in findings]


# ---------------------------------------------------------------------------------------- labels


def log_of(losses, fault="layer"):
    points = [Point(step, loss, 1.0, 0.1) for step, loss in enumerate(losses)]
    return Log(name="log", kind=KINDS["gan"], task=KINDS["gan"].make(seed=0), points=points,
               fault=fault)  # fmt: skip


def course(*, at: float = 0.0, early: float = 0.0) -> list[float]:
    """Return a noisy loss, higher from the fault on for ten steps, and once long before it."""
    losses = [2.0 + 0.1 * (step % 5) for step in range(600)]
    losses[BEGIN : BEGIN + 10] = [loss + at for loss in losses[BEGIN : BEGIN + 10]]
    losses[200] += early
    return losses


@pytest.mark.parametrize(
    ("losses", "healthy", "cls", "severity"),
    [
        (course(at=9.0), course(), "anomalous", "major"),
        (course(at=0.5), course(), "clean_with_minor", "minor"),
        (course(at=9.0, early=20.0), course(early=20.0), "clean_with_minor", "minor"),
        (course(at=math.nan), course(), "anomalous", "major"),
    ],
)
def test_a_fault_is_major_where_it_shows_beside_the_healthy_training(
    losses, healthy, cls, severity
):
    label = label_of(log_of(losses), log_of(healthy, "").points)
    assert (cls, severity) == (label["cls"], label["events"][0]["severity"])


def test_a_fault_ends_where_the_loss_is_as_before():
    (event,) = label_of(log_of(course(at=9.0)), log_of(course(), "").points)["events"]
    assert BEGIN + 9 <= event["end_idx"] <= BEGIN + 14
    forever = [*course()[:BEGIN], *(9.0 for _ in range(200))]
    (event,) = label_of(log_of(forever), log_of(course(), "").points)["events"]
    assert (599, "divergence") == (event["end_idx"], event["kind"])


# ---------------------------------------------------------------------------------- in the bench


def test_the_bench_shows_each_kind_declared_and_not(monkeypatch, folder):
    monkeypatch.setattr(trained, "_trained", lambda *, quick: iter(read_logs(Logs(folder=folder))))
    *rows, grid = detect.PARTS["trained"](quick=True)
    assert all(isinstance(row, Row) and row.met for row in rows)
    assert isinstance(grid, Grid)
    assert [
        ("GAN", "declared"), ("GAN", "not declared"),
        ("AdamW at 3e-2", "declared"), ("AdamW at 3e-2", "not declared"),
    ] == [row[:2] for row in grid.rows]  # fmt: skip
    gan, spikes = grid.rows[0], grid.rows[2]
    assert (1, 1.0, "0/1", 0) == (gan[2], gan[3], gan[5], gan[7])
    assert spikes[3] == 1.0
    assert {len(grid.columns)} == {len(row) for row in grid.rows}


@pytest.mark.slow
def test_the_bench_trains_by_itself():
    made = list(trained._trained(quick=True))
    assert ["ppo_s0", "ppo_rate_s0", "gan_s0", "gan_rate_s0"] == [log.name for log in made]
    assert ["rl", "adversarial"] == [log.loss_kind for log in made[::2]]
    assert {trained.QUICK_STEPS} == {len(log) for log in made}


def test_the_most_that_was_withheld_is_of_any_thousand_steps():
    rows = [*range(0, 2_000, 250), *range(5_000, 5_003)]
    verdict = Verdicts(
        alarms=[], skipped=[Alarm(row, "spike") for row in rows], rollbacks=[], halts=[]
    )
    assert 4 == trained.most_withheld(verdict)
