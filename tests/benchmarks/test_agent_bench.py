import pytest

from vitals_bench.agent import agent_cost, measure_agent
from vitals_bench.agent.cost import Cost
from vitals_bench.agent.sweep import SweepCost, measure_sweep, sweep_cost


@pytest.mark.slow
def test_an_agent_beside_eight_ranks_spools_their_rows_and_says_what_each_part_cost():
    cost = agent_cost(seconds=1.0, warm_up_seconds=2.0, ships=True)
    assert cost.num_rows > 0
    assert cost.cpu_seconds > 0
    assert sum(cost.parts.values()) <= cost.cpu_seconds * 1.2
    assert {"tailing and spooling", "samples of GPUs", "shipping and relaying"} <= set(cost.parts)


def test_the_share_of_a_core_is_a_row_with_its_goal_and_its_parts_follow(monkeypatch):
    cost = Cost(seconds=10.0, cpu_seconds=0.05, parts={"a": 0.01, "b": 0.03}, num_rows=320)
    monkeypatch.setattr("vitals_bench.agent.cost.agent_cost", lambda **how: cost)
    rows = list(measure_agent(quick=True))
    assert [0.5, 0.3, 0.1, 0.5, 0.3, 0.1] == [round(row.ours, 9) for row in rows]
    assert [True, None] == [row.met for row in rows[:2]]


@pytest.mark.slow
def test_each_agent_of_a_sweep_has_its_share_of_memory_and_of_a_core():
    cost = sweep_cost(2, seconds=2.0)
    assert 5e6 < cost.pss_bytes < 200e6
    assert 0 < cost.idle < 1
    assert 0 < cost.busy < 1


def test_a_sweep_is_measured_against_the_memory_and_the_core_that_one_agent_may_take(monkeypatch):
    cost = SweepCost(pss_bytes=61e6, idle=0.003, busy=0.006)
    monkeypatch.setattr("vitals_bench.agent.sweep.sweep_cost", lambda jobs, **how: cost)
    rows = list(measure_sweep(quick=True))
    assert [61.0, 0.3, 0.6] == [round(row.ours, 9) for row in rows]
    assert [False, True, False] == [row.met for row in rows]
