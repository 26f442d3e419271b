"""What the agent costs on a node of eight ranks and eight GPUs."""

from vitals_bench.agent.cost import Cost, agent_cost, measure_agent

PARTS = {"a node of 8 ranks and 8 GPUs": measure_agent}

__all__ = ["PARTS", "Cost", "agent_cost", "measure_agent"]
