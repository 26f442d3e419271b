"""How soon and how rightly a hang is named, and that nobody is paged for what is none."""

from vitals_bench.hang.measure import measure_hangs, measure_healthy, measure_hour

PARTS = {"hangs": measure_hangs, "healthy": measure_healthy, "hour": measure_hour}
