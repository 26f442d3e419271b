"""`vitals drill` on well-known loops: rows as promised, broken promises, and what it leaves."""

from vitals_bench.drill.measure import measure_drills

PARTS = {"loops": measure_drills}
