"""Delay and accuracy of naming a hang, and false pages."""

from vitals_bench.hang.measure import measure_hangs, measure_healthy, measure_hour

PARTS = {"hangs": measure_hangs, "healthy": measure_healthy, "hour": measure_hour}
