"""Silent corruption of replicas: seen, named and healed; what is missed; what looking costs."""

from vitals_bench.corruption.measure import measure_clean, measure_flips
from vitals_bench.corruption.words import measure_cost, measure_misses

PARTS = {
    "flips": measure_flips,
    "healthy": measure_clean,
    "misses": measure_misses,
    "cost": measure_cost,
}
