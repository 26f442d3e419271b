"""The pages that look back: layers, ranks, decisions, checkpoints, incidents."""

import msgspec
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.drawn import commands, drawn
from tests.dashboard.look_back import INCIDENT, incident, proposed, with_look_back
from tests.dashboard.stub import Stub
from tests.support.pages import Open, shown
from trainvitals.detect.registry import KINDS
from trainvitals.document import markdown, page
from trainvitals.document.incident import incident_blocks, verdict_facts
from vitals_dashboard import formatting


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def labels(app: AppTest) -> set[str]:
    return {button.label for button in app.button}


def links(app: AppTest) -> dict[str, str]:
    return {e.proto.label: e.proto.query_string for e in app.get("page_link")}


# ------------------------------------------------------------------------------ layers and ranks


def test_layers_are_a_heat_map_of_the_range_in_the_address_with_what_moved(
    stub: Stub, open_page: Open
) -> None:
    stub.add(with_look_back(samples.sample_run()))
    app = open_page("layers", **{"from": "100", "to": "200"})
    said = shown(app)
    assert "The 14 most unusual of 17 rows." in said
    assert "1 cell with NaN or infinity" in said
    assert "Largest changes up to step 200" in said
    moved = app.dataframe[0].value
    assert ["blocks.7.attn.weight", "rank:3"] == list(moved["Layer or rank"])
    assert ["not finite", "9"] == list(moved["Peak"])
    app.segmented_control(key="layers_metric").set_value("activation")
    assert "opt-in" in shown(app.run())


def test_a_map_says_what_was_rolled_back_and_how_many_steps_a_column_mostly_is(
    stub: Stub, open_page: Open
) -> None:
    sample = with_look_back(samples.sample_run())
    whole = sample.cells["layers.grad_norm"]
    told = "Some steps from 120 to 161 were rolled back: cells there show the most unusual value"
    assert told not in shown(_of(stub, open_page, sample))
    steps = (0, 10, *range(20, len(whole.step) + 18))  # each one was measured from 20 on
    sample.cells["layers.grad_norm"] = msgspec.structs.replace(
        whole, step=steps, rolled_back=(120, 161)
    )
    said = shown(_of(stub, open_page, sample))
    assert told in said and "A column is about" not in said


def _of(stub: Stub, open_page: Open, sample: samples.SampleRun) -> AppTest:
    stub.runs.clear()
    stub.add(sample)
    return open_page("layers")


def test_stragglers_are_named_with_their_node(stub: Stub, open_page: Open) -> None:
    stub.add(with_look_back(samples.sample_run()))
    app = open_page("ranks")
    said = shown(app)
    assert "rank 3 on node-b is slow: " in said
    assert "% above the median of 8 ranks" in said
    findings, sources = (table.value for table in app.dataframe)
    assert ["straggler"] == list(findings["Kind"])
    assert 8 == len(sources)
    app.segmented_control(key="ranks_metric").set_value("temperature")
    assert "No agent has reported this" in shown(app.run())


def test_each_kind_of_finding_about_a_machine_is_on_the_page_of_ranks_and_no_other(
    stub: Stub, open_page: Open
) -> None:
    sample = with_look_back(samples.sample_run())
    (view, *_) = sample.findings
    sample.findings = tuple(
        msgspec.structs.replace(view, finding=msgspec.structs.replace(view.finding, kind=kind))
        for kind in KINDS
    )
    stub.add(sample)
    table = open_page("ranks").dataframe[0].value
    about_machines = {name for name, kind in KINDS.items() if kind.subject == "machine"}
    assert {"stalled", "checkpoint_overdue", "gpu_xid"} < about_machines == set(table["Kind"])


# ------------------------------------------------------------------------------------- decisions


def test_a_decision_shows_its_evidence_and_the_filters_are_an_address(
    stub: Stub, open_page: Open
) -> None:
    stub.add(proposed(with_look_back(samples.sample_run())))
    app = open_page("decisions", action="skip")
    assert "3 of 4 decisions" in shown(app)
    assert [181, 180, 120] == list(app.dataframe[0].value["Step"])
    app = open_page("decisions", done="proposed only")
    said = shown(app)
    assert "1 of 4 decisions" in said and "1 of 1 would have been needed" in said
    assert "proposed, not carried out. 3 skips in 20 steps" in said
    assert "rule: rollback.storm" in said and "hindsight: would have helped" in said
    assert "window=range&from=162&to=362" in links(app)["See it on the curves"]
    assert "This dashboard is read-only" in said and "Send: rollback" not in labels(app)


def test_a_proposed_rollback_is_carried_out_with_a_reason(stub: Stub, open_page: Open) -> None:
    stub.add(proposed(with_look_back(samples.sample_run())))
    app = open_page("decisions", control=True)
    assert "a manual command spends no rollback budget" in shown(app)
    app.text_input(key="reason_do_4").set_value("  ")
    assert "A command needs a reason" in shown(press(app, "Send: rollback"))
    app.text_input(key="reason_do_4").set_value("bad shard since 9:00")
    shown(press(app, "Send: rollback"))
    ((run_id, sent),) = stub.commands
    assert samples.run_id(1) == run_id
    assert ("rollback", "bad shard since 9:00", "step-000230-ab12") == (
        sent.action, sent.reason, sent.checkpoint_id,
    )  # fmt: skip


def of_rule(sample: samples.SampleRun, rule: str) -> samples.SampleRun:
    last = sample.decisions[-1]
    decision = msgspec.structs.replace(last.decision, rule=rule)
    sample.decisions[-1] = msgspec.structs.replace(last, decision=decision)
    sample.incidents = [incident(sample)]
    return sample


def test_what_was_taken_for_an_outlier_can_be_called_healthy(stub: Stub, open_page: Open) -> None:
    stub.add(of_rule(proposed(with_look_back(samples.sample_run())), "state_damaged"))
    app = open_page("decisions", control=True)
    assert "Marks step 262 as healthy" in shown(app)
    app.text_input(key="reason_accept_4").set_value("a new task begins there")
    press(app, "Send: accept")
    ((_, sent),) = stub.commands
    assert ("accept", 262.0, "a new task begins there") == (sent.action, sent.argument, sent.reason)
    app = open_page("incident", control=True)
    app.text_input(key=f"reason_accept_{INCIDENT}").set_value("the same")
    press(app, "Send: accept")
    assert ("accept", 262.0) == (stub.commands[1][1].action, stub.commands[1][1].argument)


def test_a_rollback_that_waits_for_a_yes_is_approved_or_vetoed(stub: Stub, open_page: Open) -> None:
    sample = proposed(with_look_back(samples.sample_run()))
    last = sample.decisions[-1]
    evidence = {**last.decision.evidence, "waits_until_step": 800.0}
    decision = msgspec.structs.replace(last.decision, evidence=evidence)
    sample.decisions[-1] = msgspec.structs.replace(last, decision=decision)
    stub.add(sample)
    app = open_page("decisions", control=True)
    number = decision.ledger_seq
    app.text_input(key=f"reason_veto_{number}").set_value("the data are meant")
    shown(press(app, "Send: veto"))
    shown(press(app, "Send: approve"))
    assert [("veto", number), ("approve", number)] == [
        (sent.action, int(sent.argument)) for _, sent in stub.commands
    ]
    assert all(sent.control_signature for _, sent in stub.commands)


def test_nan_cannot_be_called_healthy(stub: Stub, open_page: Open) -> None:
    stub.add(of_rule(proposed(with_look_back(samples.sample_run())), "nonfinite_params"))
    for name in ("decisions", "incident"):
        assert "Send: accept" not in labels(open_page(name, control=True))


def test_a_proposal_that_is_dismissed_is_a_note_and_says_so(stub: Stub, open_page: Open) -> None:
    stub.add(proposed(with_look_back(samples.sample_run())))
    app = open_page("decisions", control=True)
    app.text_input(key="by_veto_4").set_value("ada")
    app.text_input(key="reason_veto_4").set_value("the data is fine")
    press(app, "Dismiss")
    note = stub.samples[samples.run_id(1)].annotations[-1]
    assert (262, "ada", "Decision 4 (rollback): vetoed by ada: the data is fine") == (
        note.step, note.by, note.text,
    )  # fmt: skip
    said = app.run().dataframe[0].value["Manual override"]
    assert "vetoed by ada: the data is fine" == next(iter(said))
    assert [] == stub.commands


def test_what_the_mode_would_refuse_is_said_in_place_of_a_button(
    stub: Stub, open_page: Open
) -> None:
    for mode, state, why in (
        ("guard", "running", "it would refuse a rollback"),
        ("observe", "running", "would refuse the command"),
        ("heal", "finished", "The run is finished"),
    ):
        sample = proposed(with_look_back(samples.sample_run()), mode=mode)
        sample.summary = msgspec.structs.replace(sample.summary, state=state)  # type: ignore[arg-type]
        stub.runs.clear()
        stub.add(sample)
        app = open_page("decisions", control=True)
        assert why in shown(app), mode
        assert "Send: rollback" not in labels(app), mode
        assert ("Send: halt" in labels(app)) == (mode == "guard"), mode


# ----------------------------------------------------------------------------------- checkpoints


def test_checkpoints_say_where_a_rollback_goes(stub: Stub, open_page: Open) -> None:
    sample = with_look_back(samples.sample_run())
    sample.checkpoints[2] = msgspec.structs.replace(
        sample.checkpoints[2], state="bad", detail="moments are not finite"
    )
    stub.add(sample)
    app = open_page("checkpoints", control=True)
    said = shown(app)
    assert "goes to step-000230-ab12, before step 230, in memory: 191 steps" in said
    listed = app.dataframe[0].value
    assert [False, True, False] == ["rollback" in text for text in listed["Next"]]
    assert "bad" in next(iter(listed["State"]))
    app.text_input(key="reason_rollback_newest").set_value("diverges")
    shown(press(app, "Send: rollback"))
    assert ("rollback", "") == (stub.commands[0][1].action, stub.commands[0][1].checkpoint_id)
    assert 1 == len(open_page("checkpoints", worth="bad").dataframe[0].value)


def test_of_a_run_that_ended_only_what_is_on_disk_is_left(stub: Stub, open_page: Open) -> None:
    sample = with_look_back(samples.sample_run())
    sample.summary = msgspec.structs.replace(sample.summary, state="finished")
    stub.add(sample)
    said = shown(open_page("checkpoints", control=True))
    assert "its in-memory snapshots are gone" in said
    assert "in memory:" not in said and "rollback commanded" not in said


def test_where_nothing_is_healthy_it_is_said(stub: Stub, open_page: Open) -> None:
    sample = samples.sample_run()
    sample.checkpoints = [msgspec.structs.replace(c, state="candidate") for c in sample.checkpoints]
    stub.add(sample)
    assert "No checkpoint is healthy" in shown(open_page("checkpoints"))
    sample.checkpoints = []
    assert "No checkpoint or snapshot yet" in shown(open_page("checkpoints"))


# ------------------------------------------------------------------------------------- incidents


def test_an_incident_begins_with_its_verdict_and_then_has_its_evidence(
    stub: Stub, open_page: Open
) -> None:
    sample = with_look_back(samples.sample_run())
    stub.add(sample)
    app = open_page("incident", incident=INCIDENT)
    said = shown(app)
    for fact in verdict_facts(sample.incidents[0].verdict).pairs:
        assert formatting.plain(fact[1], 600) in said, fact
    assert said.index("Rank 3's loss reached") < said.index("At step 178 the gradient norm")
    assert "steps 178 to 262" in said
    assert sample.incidents[0].verdict.commands[0] in commands(app)
    assert "Rolled back to step 230." in said, "the timeline"
    assert 4 == len(drawn(app)), "curves"
    assert 2 == len(app.get("echarts_chart")), "the maps of layers and ranks"
    tables = [table.value for table in app.dataframe]
    assert [3, 1, 1, 1, 1] == [len(table) for table in tables[:5]]
    assert "GPU-3 throttled: power brake" == tables[3]["What"][0]
    assert "17, shard-4/9" == tables[4]["Ids"][0]
    assert "window=range&from=78&to=362" in links(app)["Curves around it"]
    said = shown(open_page("incident", incident="gone"))
    assert "This run has no such incident; showing the newest." in said and "Loss spike" in said


def test_of_several_incidents_an_open_one_is_shown_and_all_are_listed(
    stub: Stub, open_page: Open
) -> None:
    sample = with_look_back(samples.sample_run())
    (first,) = sample.incidents
    replace = msgspec.structs.replace
    newest = replace(first, incident_id="2-400-x", title="The newest")
    is_open = replace(first, incident_id="2-300-y", title="The open one", is_open=True)
    sample.incidents = [newest, is_open, first]
    stub.add(sample)
    app = open_page("incident")
    said = shown(app)
    assert "All incidents (3)" in said
    assert "The open one" in said and "The newest" not in said
    assert ["resolved", "open", "resolved"] == list(app.dataframe[0].value["State"])


def test_the_summary_for_a_ticket_keeps_a_strangers_words_as_words() -> None:
    sample = with_look_back(samples.sample_run(name="*bold* @all"))
    blocks = incident_blocks(sample.incidents[0], sample.summary)
    told = markdown.write_markdown(blocks)
    assert told.startswith("## Loss spike at step 180, rolled back to step 230\n")
    assert "Run: \\*bold\\* &#64;all (" in told
    assert "<script" not in told and "](" not in told.replace("\\](", "")
    assert "- **Before**: First time in this run. Also in 1 of 4 other runs: elder." in told
    assert f"```sh\nvitals postmortem {samples.run_id(1)} --incident {INCIDENT}\n```" in told
    part = page.write_part(blocks)
    assert "<script" not in part and "&lt;script&gt;" in part
    assert "<td>Rolled back to step 230.</td>" in part
