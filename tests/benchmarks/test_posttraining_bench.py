"""The benchmark of post-training: its plan, its counts, and two trainings."""

import pytest

from vitals_bench.posttraining import with_trl
from vitals_bench.posttraining.kinds import FAULTS, HEALTHY, KINDS, ONSET
from vitals_bench.posttraining.measure import SEEDS, Options, Outcome, figures, measure_trainings
from vitals_bench.rows import Grid, Row

pytestmark = pytest.mark.nightly


def rows_of(outcomes: list[Outcome]) -> dict[str, float | None]:
    return {row.name: row.ours for row in figures(outcomes) if isinstance(row, Row)}


def test_half_of_the_seeds_are_held_out_and_every_task_has_a_healthy_kind():
    assert len(FAULTS) >= 12
    assert len(HEALTHY) * len(SEEDS) >= 40
    assert {"grpo", "rloo", "ppo", "dpo", "sft", "reward_model"} == {
        kind.task for kind in HEALTHY.values()
    }
    held_out = [seed for seed in SEEDS if Outcome(kind="solved", seed=seed).is_held_out]
    assert len(SEEDS) == 2 * len(held_out)
    assert all(kind.onset < kind.steps for kind in KINDS.values())


def test_a_report_before_the_onset_or_by_another_name_is_not_right():
    right = Outcome(kind="parser breaks", seed=1, findings=[(ONSET + 17, "dead_reward")])
    early = Outcome(kind="parser breaks", seed=3, findings=[(ONSET - 1, "dead_reward")])
    other = Outcome(kind="parser breaks", seed=5, findings=[(ONSET + 5, "kl_runaway")])
    assert [17, None, None] == [outcome.delay for outcome in (right, early, other)]
    rows = rows_of([right, early, other, Outcome(kind="solved", seed=1, num_pages=1)])
    assert 100 / 3 == rows["faults reported by name, held-out seeds"]
    assert 100 / 3 == rows["first reports that are right, held-out seeds"]
    assert 1 == rows["healthy runs with a page, held-out seeds"]
    assert 0 == rows["healthy runs with an action, held-out seeds"]


def test_two_trainings_are_judged_and_do_not_run_again(tmp_path):
    results = tmp_path / "results.jsonl"
    options = Options(kinds=("parser breaks", "DPO"), seeds=(0,), results=results)
    entries = list(measure_trainings(quick=True, options=options))
    (table,) = [entry for entry in entries if isinstance(entry, Grid)]
    assert ["1/1", None] == [row[2] for row in table.rows]
    size = results.stat().st_size
    assert [entry.plain() for entry in entries] == [
        entry.plain() for entry in measure_trainings(quick=True, options=options)
    ]
    assert size == results.stat().st_size


def test_trainings_with_trl_have_rows_of_their_own():
    found = Outcome(kind="TRL: LoRA not trained", seed=0, findings=[(2, "adapter")])
    silent = Outcome(kind="TRL: DPO leaked pairs", seed=1)
    healthy = Outcome(kind="TRL: GRPO", seed=1, findings=[(90, "dead_reward")], num_actions=1)
    rows = rows_of([found, silent, healthy])
    assert 50 == rows["faults reported by name, with TRL's trainers"]
    assert 1 == rows["healthy runs with a report about the scalars, with TRL's trainers"]
    assert 1 == rows["healthy runs with an action, with TRL's trainers"]
    assert not [name for name in rows if name.endswith(("held-out seeds", "setting seeds"))]


@pytest.mark.skipif(with_trl.is_installed(), reason="TRL is installed")
def test_trainings_with_trl_are_left_out_where_it_is_not_installed(capfd):
    options = Options(kinds=("TRL",), seeds=(0,))
    (table,) = measure_trainings(quick=False, options=options)
    assert () == table.rows
    assert "TRL: GRPO 0: left out, because TRL is not installed" in capfd.readouterr().err


def test_a_report_before_the_loss_and_the_wait_after_a_low_entropy_are_counted():
    early = Outcome(kind="SFT, few rows", seed=1, findings=[(40, "memorized")], lost_at=41)
    late = Outcome(kind="SFT, few rows", seed=3, findings=[(60, "memorized")], lost_at=41)
    toy = Outcome(
        kind="reward without signal", seed=1, findings=[(50, "policy_collapse")], low_entropy_at=38
    )
    silent = Outcome(kind="SFT, few rows", seed=5)
    assert [True, False, True, False] == [o.is_in_time for o in (early, late, toy, silent)]
    rows = rows_of([early, late, toy])
    assert 50 == rows["the same, of the faults in which a tenth is lost at all, held-out seeds"]
    assert 12 == rows["from a tenth of the entropy to the report, longest, held-out seeds"]
