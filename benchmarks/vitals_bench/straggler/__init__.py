"""How soon and how rightly a late rank is named, by what, and that none is where there is none."""

from vitals_bench.straggler.measure import measure_cost, measure_stragglers

PARTS = {"stragglers": measure_stragglers, "cost": measure_cost}
