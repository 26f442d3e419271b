"""Cost of the agent on a node with eight ranks and eight GPUs, in a sweep, and of a rank."""

from vitals_bench.agent.cost import Cost, agent_cost, measure_agent
from vitals_bench.agent.memory import measure_rank
from vitals_bench.agent.sweep import measure_sweep

PARTS = {
    "a node of 8 ranks and 8 GPUs": measure_agent,
    "a sweep on one node": measure_sweep,
    "a rank": measure_rank,
}

__all__ = ["PARTS", "Cost", "agent_cost", "measure_agent", "measure_rank", "measure_sweep"]
