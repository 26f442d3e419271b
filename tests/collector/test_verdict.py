"""The verdict on an incident: sentences for somebody who was woken, and commands that work."""

import math
import re
from pathlib import Path

import msgspec
import pytest

from tests.collector.lookback import BAD, decision, end, finding, troubled_run
from tests.collector.rows import OTHER_RUN, RUN, Writer
from tests.support.cli import leave, vitals
from tests.support.queries import query
from tests.support.served import Served
from trainvitals.errors import ConfigError
from trainvitals.records import (
    AttemptStarted,
    Decision,
    Finding,
    FindingRaised,
    RunEnded,
    RunInfo,
    RunStarted,
)
from trainvitals.views import (
    AlertView,
    DecisionView,
    EventView,
    FindingView,
    LostWork,
    RunSummary,
    VerdictQuestion,
    VerdictView,
)
from vitals_collector.ingest.ingest import ingest
from vitals_collector.queries.cost import price_in
from vitals_collector.queries.story import IncidentParts
from vitals_collector.queries.user_alerts import user_alert_episodes
from vitals_collector.queries.verdict import (
    MAX_TIMELINE,
    Precedent,
    VerdictFacts,
    verdict,
)
from vitals_collector.storage.store import Store


def run(state: str = "running", **how: object) -> RunSummary:
    known: dict[str, object] = {
        "run_id": RUN, "name": "tiny", "project": "", "user": "", "tags": (), "mode": "heal",
        "state": state, "health": "critical", "world_size": 2, "started_unix_ns": 0,
        "last_seen_unix_ns": 0, "last_step": 560, "loss": 2.0, "grad_norm": 1.0, "num_skips": 3,
        "num_rollbacks": 1, "num_attempts": 2, "num_firing_alerts": 1,
    }  # fmt: skip
    return RunSummary(**(known | how))  # type: ignore[arg-type]


def found(*findings: Finding) -> tuple[FindingView, ...]:
    return tuple(FindingView(run_id=RUN, time_unix_ns=f.step, finding=f) for f in findings)


def ledger(*decisions: Decision) -> tuple[DecisionView, ...]:
    return tuple(
        DecisionView(run_id=RUN, time_unix_ns=d.step * 10 + seq, decision=d)
        for seq, d in enumerate(decisions)
    )


def d(action: str, step: int, **how: object) -> Decision:
    return decision(action, step, **({"mode": "heal"} | how)).decision


def nan(step: int, rank: int = 1) -> Finding:
    return finding(step=step, rank=rank, cause="nonfinite_loss", value=math.nan).finding


def said(**facts: object) -> VerdictView:
    parts: dict[str, object] = {
        "name": "1-540-nonfinite_loss", "attempt": 1, "ordinal": 1, "onset": 540, "last": 542,
        "started_unix_ns": 0, "ended_unix_ns": 0, "cause": "", "rank": -1, "findings": (),
        "decisions": (), "alerts": (), "errors": facts.pop("events", ()), "restarts": (),
    }  # fmt: skip
    parts |= {name: facts.pop(name) for name in parts.keys() & facts.keys()}
    incident = IncidentParts(**parts)  # type: ignore[arg-type]
    known = {"run": run(), "is_open": True, "incident": incident}
    return verdict(VerdictFacts(**(known | facts)))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- cause


def test_a_fault_of_several_steps_is_one_sentence_with_its_rank():
    told = said(
        findings=found(nan(540), nan(541), nan(542)),
        decisions=ledger(*(d("skip_step", s, rank=1, value=math.nan) for s in (540, 541, 542))),
    )
    assert "Rank 1's loss was NaN at steps 540 to 542." == told.cause
    assert "Skipped 3 updates (steps 540 to 542)." == told.action


def test_a_hang_is_told_once_with_how_long_it_lasts_what_it_costs_and_what_to_do():
    second = 1_000_000_000
    reason = "Rank 1 is blocked in load.py:52 (read); rank 0 waits for it in all_reduce(17)"
    views = [
        FindingView(
            run_id=RUN,
            time_unix_ns=(100 + waited) * second,
            finding=Finding(
                kind=kind, level="advisory", step=60, detector="hang", rank=1, value=float(waited),
                reason=f"{reason} (for {waited} s)", cause=cause,
            ),
        )
        for kind, waited, cause in (("waiting", 3, ""), ("hang", 5, "hang_blocked"))
    ]  # fmt: skip
    hung = {"onset": 60, "last": 60, "findings": views}
    told = said(run=run(last_step=58, last_seen_unix_ns=190 * second), **hung)
    assert "Hung in step 60: no step has ended for 1 min 30 s." == told.state and told.is_hung
    assert f"{reason} (step 60)." == told.cause
    assert "Idle so far: 1 min 30 s x 2 ranks." == told.cost
    assert told.next.startswith("Check rank 1 and its node; if it stays hung, end the job")
    assert f"vitals stacks {RUN}" == told.commands[0]
    first = told.timeline[0]
    assert ("Last progress", 60, 100 * second) == (first.text, first.step, first.time_unix_ns)
    text = "the wait is over, after 40 s [wait_over]"
    over = EventView(
        time_unix_ns=140 * second, source="node:a", step=60, attempt=1, kind="Note", text=text
    )
    gone_on = said(run=run(last_step=75, last_seen_unix_ns=190 * second), events=(over,), **hung)
    assert "The wait is over, after 40 s" == gone_on.timeline[-1].text
    assert f"{reason} (step 60)." == gone_on.cause
    assert "Running at step 75. Open: last bad step 60." == gone_on.state and not gone_on.is_hung
    assert "Lost work: none." == gone_on.cost


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ((nan(9, 1), nan(9, 3)), "Ranks 1, 3: loss was NaN at step 9."),
        ((nan(9, -1), nan(12, -1)), "Loss was NaN at 2 steps from 9 to 12."),
        ((nan(9, -1), nan(9, 1)), "Loss was NaN at step 9."),
        (
            (finding(step=9, cause="nonfinite_gradient", value=math.inf).finding,),
            "Gradients were infinite at step 9.",
        ),
        (
            tuple(
                finding("spike", s, cause="loss_outlier", value=v, limit=3.2).finding
                for s, v in ((9, 4.3), (10, 9.06))
            ),
            "Loss reached 9.06 (limit 3.2) at steps 9 to 10.",
        ),
        (
            (finding("straggler", 9, reason="rank 3 takes 38 % longer than the others").finding,),
            "Rank 3 takes 38 % longer than the others (step 9).",
        ),
        (
            (finding("user_alert", 9, cause="low", reason="loss < 1", severity="page").finding,),
            "Your alert low: loss < 1 (step 9).",
        ),
    ],
)
def test_each_kind_of_cause_is_told_in_the_fields_words(findings, expected):
    assert expected == said(findings=found(*findings)).cause


def test_what_something_was_done_about_is_told_first_then_what_else_there_was():
    told = said(
        findings=found(
            finding("activation", 530, reason="layer h.1 grows").finding,
            nan(540),
            finding("nonfinite_params", 542, rank=1, value=math.nan).finding,
        ),
        decisions=ledger(d("skip_step", 540, rank=1)),
    )
    assert (
        "Rank 1's loss was NaN at step 540. Then: Layer h.1 grows (step 530). "
        "Then: Rank 1's parameters were NaN at step 542."
    ) == told.cause


def test_a_precursor_is_named_only_where_one_was_recorded():
    facts = {"findings": found(nan(540))}
    assert "precursor" not in said(**facts).cause, "nobody looked for one"
    told = said(**facts, precursor="")
    assert told.cause.endswith(" No precursor before step 540.")
    named = "Moved first: gradient norm of layer `h.1` at step 531."
    assert said(**facts, precursor=named).cause.endswith(named)


# ---------------------------------------------------------------------------- action, cost, before


def test_actions_are_told_in_their_order_with_what_is_left():
    made = ledger(
        d("skip_step", 400, ledger_seq=1),
        d("rollback", 403, ledger_seq=2, rollback_to_step=378, skip_batches=50, budget_left=2),
        d("skip_step", 401, ledger_seq=3, attempt=2),
        d("rollback", 404, ledger_seq=4, rollback_to_step=378, lr_factor=0.5, budget_left=0),
    )
    assert (
        "Skipped 1 update (step 400). Rolled back to step 378; skipped 50 batches. "
        "Skipped 1 update (step 401). Rolled back to step 378; learning rate x0.5. "
        "Rollback budget used up."
    ) == said(decisions=made).action


def test_what_was_only_observed_is_not_told_as_done():
    made = ledger(*(d("skip_step", s, acted=False) for s in (4, 5)), d("rollback", 6, acted=False))
    told = said(run=run(mode="observe"), decisions=made)
    assert "Observed only; would have skipped 2 updates and rolled back." == told.action
    assert "Lost work: none." == told.cost
    assert 'restart it with mode="guard"' in told.next
    assert "Vitals took no action." == said().action


def test_the_cost_has_units_and_leaves_out_what_nobody_measured():
    lost = LostWork(steps=67, batches=100, tokens=68_000, seconds=11.05)
    assert "Lost work: 67 steps (68 k tokens, 11.1 s x 2 ranks); 100 batches dropped." == (
        said(lost=lost).cost
    )
    lost = LostWork(steps=1, seconds=7_200.0, gpu_hours=16.0, money=40.0)
    assert "Lost work: 1 step (2 h 0 min x 2 ranks, 16 GPU-hours, 40.00 at 2.5 a GPU-hour)." == (
        said(lost=lost).cost
    )
    assert "Lost work: 3 steps." == said(lost=LostWork(steps=3)).cost


def test_it_says_whether_it_was_there_before():
    assert "First time in this run." == said().before
    runs = ("a", "b", "c", "d")
    assert (
        "2 earlier incidents of this cause in this run, last at step 300. "
        "Also in 4 of 17 other runs: a, b, c and 1 more."
    ) == said(precedent=Precedent(steps=(90, 300), runs=runs, num_asked=17)).before
    assert said(precedent=Precedent(num_asked=1)).before.endswith(" In no other run (1 looked at).")


@pytest.mark.parametrize("text", ["", "0", "2.5"])
def test_a_price_is_a_number(text: str):
    assert float(text or 0) == price_in(text)


@pytest.mark.parametrize("text", ["cheap", "-1", "nan", "inf"])
def test_what_is_no_price_is_refused_with_the_way_out(text: str):
    with pytest.raises(ConfigError, match=f"VITALS_GPU_HOUR_PRICE is '{text}'"):
        price_in(text)


# --------------------------------------------------------------------------- state, next command


@pytest.mark.parametrize(
    ("facts", "state", "command"),
    [
        (
            {"run": run("halted"), "decisions": ledger(d("halt", 542)), "run_dir": "/my runs/X"},
            "Halted at step 560. This incident stopped it; last bad step 542.",
            "vitals resume '/my runs/X'",
        ),
        ({"run": run("halted")}, "Halted at step 560. Open: ", f"vitals resume {RUN}"),
        ({"run": run("lost")}, "Lost after step 560: no process reports", f"vitals tail {RUN}"),
        (
            {"run": run(missing=("node-b",))},
            "Running at step 560; missing: node-b. Open: last bad step 542.",
            f"vitals why {RUN} 540",
        ),
        (
            {"decisions": ledger(d("skip_step", 541, rule="outlier", cause="loss_outlier"))},
            "Running at step 560. Open",
            f'vitals command {RUN} accept 541 --reason "..."',
        ),
        (
            {
                "decisions": ledger(
                    d("rollback", 541, acted=False, evidence={"waits_until_step": 800.0},
                      ledger_seq=7)
                )
            },
            "Running at step 560. Open",
            f"vitals command {RUN} approve 7",
        ),
        (
            {"is_open": False},
            "Running at step 560. Resolved: 18 healthy steps since step 542.",
            f"vitals postmortem {RUN} --incident 1-540-nonfinite_loss",
        ),
        (
            {"run": run("finished", last_step=542), "last": 543},
            "Finished after step 542. Unresolved: no healthy step after step 542.",
            f"vitals why {RUN} 540",
        ),
        (
            {"run": run("lost", last_step=542), "is_open": False},
            "Lost after step 542: no process reports. Last bad step 542, with no healthy step",
            f"vitals tail {RUN}",
        ),
    ],
    ids=[
        *("halted", "halted, no folder", "lost", "node gone", "outlier", "waits", "resolved"),
        *("skipped to the end", "lost in it"),
    ],
)  # fmt: skip
def test_each_state_has_its_next_command(facts, state, command):
    told = said(**facts)
    assert told.state.startswith(state)
    assert command == told.commands[0]


def test_a_run_that_ended_in_trouble_is_not_told_that_there_is_nothing_to_do():
    told = said(run=run("finished", last_step=542))
    assert (
        told.next
        == "Check the weights before you use them, or use a checkpoint from before " + ("step 540.")
    )
    assert "Nothing to do." == said(run=run("finished"), is_open=False).next


@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_repaired_fault_of_the_loop_still_has_to_be_fixed(state):
    decided = d("rollback", 540, rule="lr_jump", cause="lr_jump", rollback_to_step=500)
    told = said(run=run(state), is_open=False, cause="lr_jump", decisions=ledger(decided))
    assert told.next.startswith("Before the next run: Check what sets the rate")


def test_a_timeline_is_short_and_by_time():
    alert = AlertView(
        fingerprint="f", name="TrainingHalted", run_id=RUN, severity="page", state="firing",
        summary="", labels={}, step=560, started_unix_ns=9_000, updated_unix_ns=9_500,
        acknowledged_by="ada",
    )  # fmt: skip
    made = [d("skip_step", s, ledger_seq=s) for s in range(3)]
    made += [d("rollback", 10 + s, ledger_seq=9 + s, rollback_to_step=s) for s in range(20)]
    told = said(findings=found(nan(0)), decisions=ledger(*made), alerts=(alert,)).timeline
    assert MAX_TIMELINE == len(told)
    assert sorted(told, key=lambda line: line.time_unix_ns) == list(told)
    assert "Detected: nonfinite was seen at step 0" == told[0].text
    assert "Skipped 3 updates (steps 0 to 2)." == told[1].text
    assert ["Paged: TrainingHalted", "TrainingHalted acknowledged by ada"] == [
        line.text for line in told[-2:]
    ]
    assert "and 17 more lines" in [line.text for line in told]


# ------------------------------------------------------------------------------- of a real store


def test_a_run_is_told_by_its_gravest_incident_with_what_gpus_cost(store: Store):
    for rank in range(2):  # before a restart: they trained on the same two
        writer = Writer(f"rank:{rank}")
        writer.identity = msgspec.structs.replace(writer.identity, gpu_uuid=f"GPU-{rank}")
        ingest(store, writer.steps(range(1), loss=1.0))
    troubled_run(store)
    asked = query(store)
    asked.gpu_hour_price = 3_600.0
    told = asked.ask(VerdictQuestion(run_id=RUN))
    assert "1-158-nonfinite_loss" == told.verdict.incident_id
    assert ["1-161-straggler", "1-158-nonfinite_loss"] == [i.incident_id for i in told.incidents]
    unjudged = asked.ask(VerdictQuestion(run_id=RUN, judgement=False))
    assert (told.incidents, "") == (unjudged.incidents, unjudged.verdict.state)
    named = "Moved first: gradient norm of layer `h.1` at step 158 (500, usually 3.03;"
    assert told.verdict.cause.startswith(f"Rank 1's loss was NaN at step 160. {named}")
    assert "Skipped 1 update (step 160). Rolled back to step 120." == told.verdict.action
    lost = told.verdict.lost
    assert (42, 21.0, 21.0 * 2 / 3_600, 42.0) == (
        lost.steps, lost.seconds, lost.gpu_hours, pytest.approx(lost.money),
    )  # fmt: skip


def test_other_runs_are_named_as_far_as_the_token_reaches(store: Store):
    troubled_run(store)
    other = Writer(run=OTHER_RUN)
    ingest(store, other.events(RunStarted(info=RunInfo(name="elder")), decision(step=BAD)))
    asked = query(store)
    told = asked.ask(VerdictQuestion(run_id=RUN)).verdict.before
    assert "First time in this run. Also in 1 of 1 other runs: elder." == told
    asked.reach = frozenset({RUN})
    assert "First time in this run." == asked.ask(VerdictQuestion(run_id=RUN)).verdict.before


def test_tokens_of_lost_steps_are_counted_once(store: Store):
    writer = Writer()
    seen = [100 * (step + 1) for step in range(20)]
    ingest(store, writer.steps(range(20), loss=1.0, tokens_seen=seen))
    made = (decision(step=5), decision(step=6, ledger_seq=2), decision(step=9, ledger_seq=3))
    ingest(store, writer.events(*made, step=9))
    told = query(store).ask(VerdictQuestion(run_id=RUN)).verdict
    assert (3, 300) == (told.lost.steps, told.lost.tokens)


def test_a_rollback_behind_its_attempt_s_beginning_costs_steps_of_both(store: Store):
    writer = Writer()
    first, second = (
        AttemptStarted(id=1, parent=None, fork_step=0, reason="start"),
        AttemptStarted(id=2, parent=1, fork_step=20, reason="rollback"),
    )
    ingest(store, writer.events(first, second))
    for attempt, steps in ((1, range(30)), (2, range(20, 40))):
        seen = [100 * (step + 1) for step in steps]
        took = [float(attempt)] * len(steps)
        ingest(
            store,
            writer.steps(
                steps, attempt=attempt, loss=1.0, tokens_seen=seen, step_duration_seconds=took
            ),
        )
    back = decision(
        "rollback", 39, attempt=2, rollback_to_step=10, decided_at_step=39, new_attempt=3
    )
    ingest(store, writer.events(back, step=39, attempt=2))
    lost = query(store).ask(VerdictQuestion(run_id=RUN)).verdict.lost
    assert (30, 10 * 1.0 + 20 * 2.0, 3_000) == (lost.steps, lost.seconds, lost.tokens)


def test_a_run_without_trouble_says_so(store: Store):
    writer = Writer()
    ingest(store, writer.steps(range(3), loss=1.0))
    ingest(store, writer.events(RunEnded(state="finished"), step=2))
    told = query(store).ask(VerdictQuestion(run_id=RUN))
    assert () == told.incidents
    assert "Finished after step 2. No incidents." == told.verdict.state


def test_the_commands_can_be_copied_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    writer = Writer()
    made = (FindingRaised(finding=nan(5, -1)), decision("halt", 5))
    leave(
        tmp_path / "runs",
        writer.steps(range(8), loss=1.0),
        writer.events(*made, step=5),
        writer.events(RunEnded(state="finished"), step=7),
    )
    assert 0 == vitals("show", tmp_path / "runs")
    shown = capsys.readouterr().out
    assert "Loss was NaN at step 5." in shown
    commands = re.findall(r"^command +(vitals .*)$", shown, re.M)
    assert 2 == len(commands)
    for command in commands:
        assert 0 == vitals(*command.split()[1:], "--dir", tmp_path / "runs"), command


def test_over_http_it_is_the_same(served: Served):
    end(served.store, troubled_run(served.store))
    with served.client() as client:
        told = client.ask(VerdictQuestion(run_id=RUN))
    named = "Moved first: gradient norm of layer `h.1` at step 158 (500, usually 3.03;"
    assert told.verdict.cause.startswith(f"Rank 1's loss was NaN at step 160. {named}")


# ------------------------------------------------------------------------------------ next action


@pytest.mark.parametrize(
    ("cause", "command"),
    [
        ("nonfinite_params", f"vitals checkpoints list {RUN}"),
        ("data_bound", "DataLoader("),
        ("lr_jump", "monitor.expect("),
        ("layer_gradient", "requires_grad"),
    ],
)
@pytest.mark.parametrize("state", ["halted", "running", "finished"])
def test_a_cause_that_goes_on_has_a_command_or_a_line_of_code(cause: str, command: str, state: str):
    told = said(
        run=run(state),
        cause=cause,
        last=560,
        is_lasting=True,
        findings=found(finding(cause, 560).finding),
    )
    assert command in told.next


def test_parameters_that_a_later_check_found_are_told_before_the_loss():
    params = finding("nonfinite_params", 542, rank=1, cause="nonfinite_params", value=1.0).finding
    told = said(
        cause="nonfinite_params",
        findings=found(nan(540), nan(541), nan(542), params),
        decisions=ledger(*(d("skip_step", s, rank=1, value=math.nan) for s in (540, 541))),
    )
    assert told.cause.startswith(
        "Rank 1's parameters were NaN or infinite before step 540, found by the check at step 542. "
        "Then: Rank 1's loss was NaN at steps 540 to 542."
    )


def test_a_straggler_costs_what_the_others_waited_and_few_healthy_steps_resolve_nothing():
    told = said(
        run=run("finished", last_step=549), is_open=False, late_seconds=30.0,
        findings=found(finding("straggler", 542, rank=1).finding),
    )  # fmt: skip
    assert "1 other rank waited 30 s for it." == told.cost
    assert told.state.endswith("Last bad step 542, with 7 healthy steps after it.")


def test_a_custom_alert_that_several_ranks_repeat_is_one_sentence():
    fields = {"kind": "user_alert", "level": "advisory", "detector": "x", "cause": "low"}
    raised = [
        Finding(**fields, step=step, rank=rank, onset_step=9, severity="notify", reason="loss < 1")
        for step, rank in ((9, 2), (10, 0))
    ]
    texts = [episode.text for episode in user_alert_episodes(raised)]
    assert ["Your alert (notify) on ranks 0, 2 at steps 9 to 10: loss < 1."] == texts
