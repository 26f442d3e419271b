"""Delay and accuracy of naming a late rank and its cause, and false reports."""

from vitals_bench.straggler.measure import measure_cost, measure_stragglers

PARTS = {"stragglers": measure_stragglers, "cost": measure_cost}
