"""Ten questions about a long run with two rollbacks; what was planted is what must be answered."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.long_run import BEGIN, LAYERS, NUM_RANKS, RUN, SECOND, LongRun, Trouble
from tests.support.served import Served
from trainvitals.arrays import Series
from trainvitals.cli.main import main
from trainvitals.client import Client, Run
from trainvitals.views import IncidentView
from vitals_collector.api.app import CollectorSettings
from vitals_collector.ingest.ingest import ingest_all
from vitals_collector.storage.store import open_data_store

AT_ONCE = 50
LENGTHS = [
    pytest.param(4_000, id="short"),
    pytest.param(1_000_000, id="million", marks=[pytest.mark.slow, pytest.mark.timeout(3_600)]),
]


@dataclass(frozen=True)
class Asked:
    """The run as it was made, and the ways people ask about it."""

    made: LongRun
    run: Run
    where: tuple[str, ...]
    """What says to a command which collector to ask."""
    data: Path

    def vitals(self, *words: object, exit_code: int = 0) -> str:
        """Return what a command writes."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                code = main([str(word) for word in words])
            except SystemExit as end:
                code = end.code
        assert exit_code == (code or 0)
        return " ".join(out.getvalue().split())

    def told(self) -> list[IncidentView]:
        """Return the incidents of both rollbacks; what the collector watches has its own."""
        found = [
            i for i in self.run.incidents() if any(d.decision.cost_steps > 1 for d in i.decisions)
        ]
        return sorted(found, key=lambda one: one.onset_step)

    def near(self, metric: str, trouble: Trouble, **how: str) -> Series:
        """Return the branch that the trouble ended, from long before it on."""
        steps = {"from_step": trouble.onset - 300, "to_step": trouble.bad + 1}
        found = self.run.series(metric, branch="all", **steps, **how)
        is_first = found.attempt == found.attempt.min()
        return Series(
            metric=found.metric,
            source=found.source,
            unit=found.unit,
            branch="all",
            step=found.step[is_first],
            time_unix_ns=found.time_unix_ns[is_first],
            attempt=found.attempt[is_first],
            value=found.value[is_first],
            num_total=int(is_first.sum()),
        )


@pytest.fixture(scope="module", params=LENGTHS)
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    """The run in a collector's store, as its ingest stores it and upkeep leaves it."""
    made, data = LongRun(request.param), tmp_path_factory.mktemp("long") / "data"
    with contextlib.closing(open_data_store(data)) as store:
        some: list[bytes] = []
        for raw in made.batches():
            some.append(raw)
            if len(some) == AT_ONCE:
                ingest_all(store, some, BEGIN)
                some = []
        ingest_all(store, some, BEGIN)
        while not store.numbers.merge():
            pass
    with Served(CollectorSettings(data=data)) as served:
        where = ("--collector", served.url, "--token-file", str(data / "tokens.json"))
        with Client(served.url, served.tokens.read) as client:
            yield Asked(made, client.run(RUN), where, data)


def first_away(series: Series) -> int:
    """Return the first step at which a curve is far from all that it was long before."""
    usual = series.value[:200]
    middle = float(np.median(usual))
    far = 8 * float(np.median(np.abs(usual - middle)) * 1.4826)
    is_away = ~(np.abs(series.value - middle) <= far)  # NaN is away as well
    return int(series.step[is_away][0]) if is_away.any() else 1 << 62


def test_no_step_is_missing_and_nothing_is_smoothed(asked: Asked):
    loss = asked.run.series("steps.loss")
    last = {row.record.step: row.record for row in asked.made.rows}
    assert asked.made.num_steps == len(loss) == loss.num_total
    assert [last[step].loss for step in range(asked.made.num_steps)] == loss.value.tolist()
    norms = asked.run.series("steps.grad_norm", branch="all")
    assert [row.tick for row in asked.made.rows if np.isnan(row.record.grad_norm)] == (
        (norms.time_unix_ns[np.isnan(norms.value)] - BEGIN) // SECOND
    ).tolist()


def test_when_did_it_start(asked: Asked):
    acted_on = [v.finding for v in asked.run.findings() if v.finding.level == "actionable"]
    onsets = [
        min(found.onset_step for found in acted_on if found.step in steps)
        for steps in (range(t.onset, t.bad + 10) for t in (asked.made.shard, asked.made.gpu))
    ]
    assert [asked.made.shard.bad, asked.made.gpu.bad] == onsets
    assert onsets == [one.onset_step for one in asked.told()]


def test_which_signal_moved_first(asked: Asked):
    shard, gpu = asked.made.shard, asked.made.gpu
    names = ("steps.loss", "steps.grad_norm", f"layers.{shard.layer}")
    moved = {name: first_away(asked.near(name, shard)) for name in names}
    assert [shard.onset, shard.onset + 20, shard.bad] == sorted(moved.values())
    assert [names[2], names[1], names[0]] == sorted(moved, key=moved.__getitem__)
    assert [f"rank:{shard.rank}", "run", shard.layer, "run"] == [
        mover.row for mover in asked.run.movers(shard.bad)[:4]
    ]
    pace = asked.near("steps.step_duration_seconds", gpu, source=f"rank:{gpu.rank}")
    assert (gpu.onset, gpu.bad) == (
        int(pace.step[pace.value > 1.5 * np.median(pace.value)][0]),
        first_away(asked.near("steps.grad_norm", gpu)),
    )


def test_which_layer(asked: Asked):
    moved = {name: first_away(asked.near(f"layers.{name}", asked.made.shard)) for name in LAYERS}
    assert asked.made.shard.layer == min(moved, key=moved.__getitem__)
    assert asked.made.shard.onset == min(moved.values())
    movers = asked.run.movers(asked.made.shard.bad)
    assert [asked.made.shard.layer] == [one.row for one in movers if one.row in LAYERS]
    told = asked.told()[0].verdict.cause
    where = f"gradient norm of layer `{asked.made.shard.layer}` at step"
    assert f"Moved first: {where} {asked.made.shard.onset:,}" in told


@pytest.mark.parametrize("which", ["shard", "gpu"])
def test_which_rank(asked: Asked, which: str):
    trouble: Trouble = getattr(asked.made, which)
    assert f"Caused by rank {trouble.rank}" in asked.vitals("why", RUN, trouble.bad, *asked.where)
    culprits = asked.near("steps.culprit_rank", trouble)
    assert trouble.rank == culprits.value[culprits.step == trouble.bad]


def test_which_samples(asked: Asked):
    shard = asked.made.shard
    (fed,) = [
        one.batch for one in asked.run.step(shard.bad).data if one.source == f"rank:{shard.rank}"
    ]
    assert asked.made.samples(shard.bad, shard.rank) == fed.sample_ids
    assert shard.bad == fed.first_batch


def test_what_was_the_learning_rate(asked: Asked):
    for trouble in (asked.made.shard, asked.made.gpu):
        rate = asked.near("steps.learning_rate", trouble)
        at = rate.value[rate.step == trouble.bad]
        assert [asked.made.learning_rate(trouble.bad)] == at.tolist()


def test_what_did_the_gpus_do(asked: Asked):
    gpu = asked.made.gpu
    spell = asked.near("steps.grad_norm", gpu)
    begin, end = spell.time_unix_ns[spell.step == gpu.onset][0], spell.time_unix_ns[-1]
    during: dict[str, tuple[float, float]] = {}
    for i in range(NUM_RANKS):
        series = [
            asked.run.series(f"gpu.{name}", source=f"gpu:GPU-{i}")
            for name in ("temperature_celsius", "sm_clock_hertz")
        ]
        is_then = (begin <= series[0].time_unix_ns) & (series[0].time_unix_ns <= end)
        temperature, clock = (one.value[is_then] for one in series)
        during[f"GPU-{i}"] = float(temperature.max()), float(clock.min())
    assert (94.0, 0.9e9) == during.pop(gpu.gpu)
    assert all(hottest < 64 and slowest == 1.7e9 for hottest, slowest in during.values())
    told = " ".join(asked.told()[1].story)
    assert f"sm clock of gpu:{gpu.gpu} went from 1.7 GHz to 900 MHz" in told


def test_what_was_decided_and_why(asked: Asked):
    ledger = [view.decision for view in asked.run.decisions()]
    assert [made.reason for made in asked.made.ledger] == [made.reason for made in ledger]
    # A finite outlier is asked about at once, a non-finite step at the third.
    assert ["rollback", "skip_step", "skip_step", "rollback"] == [made.action for made in ledger]
    for trouble, made, waited in ((asked.made.shard, ledger[0], 0), (asked.made.gpu, ledger[3], 2)):
        told = asked.vitals("why", RUN, made.step, *asked.where)
        assert "(rule: state_damaged)" in told
        assert trouble.bad + waited == made.step
        assert "8.72x" in told and "the state is damaged" in told
        assert f"Action: rolled back to step {made.rollback_to_step} " in told


def test_what_would_another_policy_have_done(asked: Asked, tmp_path: Path):
    patient = tmp_path / "patient.toml"
    patient.write_text(
        "[ladder]\nask_after = 10\nstate_ratio_unclipped = 99\nstate_progress = 999\n"
    )
    words = ("replay", RUN, "--data", asked.data, "--config", patient, "--format", "json")
    said = json.loads(asked.vitals(*words, exit_code=1))  # not as recorded
    troubles = [asked.made.shard, asked.made.gpu]
    assert {"skip_step"} == {made["action"] for made in said["decisions"]}
    assert {t.bad for t in troubles} <= {made["step"] for made in said["decisions"]}
    as_it_was = json.loads(asked.vitals(*words[:4], "--format", "json"))
    assert [made.action for made in asked.made.ledger] == [
        made["action"] for made in as_it_was["decisions"]
    ]


def test_what_did_it_cost(asked: Asked):
    told = asked.told()
    num = asked.made.num_discarded
    assert (num, num) == (sum(i.cost_steps for i in told), sum(i.cost_seconds for i in told))
    left_behind = asked.run.series("steps.loss", branch="discarded")
    ledger = [view.decision for view in asked.run.decisions()]
    again = sum(made.cost_steps for made in ledger if made.action == "rollback")
    assert asked.made.num_discarded == again == len(left_behind)
    lost = {row.record.step for row in asked.made.rows if row.record.skipped}
    assert lost <= set(left_behind.step.tolist())
    assert asked.made.num_discarded * SECOND == sum(
        int(np.ptp(left_behind.time_unix_ns[left_behind.attempt == attempt])) + SECOND
        for attempt in (1, 2)
    )
