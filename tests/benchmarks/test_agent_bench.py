import pytest

from vitals_bench.agent import agent_cost
from vitals_bench.agent.memory import BARE, rank_memory
from vitals_bench.agent.sweep import sweep_cost

pytestmark = pytest.mark.nightly


@pytest.mark.slow
def test_an_agent_beside_eight_ranks_spools_their_rows_and_says_what_each_part_cost():
    cost = agent_cost(seconds=1.0, warm_up_seconds=2.0, ships=True)
    assert cost.num_rows > 0
    assert cost.cpu_seconds > 0
    assert 5e6 < cost.pss_bytes < 200e6
    assert sum(cost.parts.values()) <= cost.cpu_seconds * 1.2
    assert {"tailing and spooling", "samples of GPUs", "shipping and relaying"} <= set(cost.parts)


@pytest.mark.slow
def test_each_agent_of_a_sweep_has_its_share_of_memory_and_of_a_core():
    cost = sweep_cost(2, seconds=2.0)
    assert 5e6 < cost.pss_bytes < 200e6
    assert 0 <= cost.idle < 1
    assert 0 <= cost.busy < 1


@pytest.mark.slow
def test_a_rank_with_snapshots_has_two_more_copies_of_its_state():
    bare, healing = rank_memory(BARE, 5), rank_memory("heal", 5)
    assert bare.state_bytes == healing.state_bytes
    copies = (healing.written_bytes - bare.written_bytes) / bare.state_bytes
    assert 1.5 < copies < 2.5
