"""What a run costs and when it ends: where its time went, held against worlds that know."""

from vitals_bench.forecast.measure import measure_goodput

PARTS = {"goodput": measure_goodput}
