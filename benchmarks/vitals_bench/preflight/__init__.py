"""Nodes with a fault, and healthy ones, that `vitals preflight` measures: which are named."""

from vitals_bench.preflight.measure import measure_preflight

PARTS = {"preflight": measure_preflight}
