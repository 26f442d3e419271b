"""Post-training: kinds of runs, names of their scalars, and detectors over these scalars.

``names`` is also imported where a model trains; ``set`` runs in the collector, and on rank 0 of a
run that acts on it. ``charts`` orders the quantities for pages and reports.
"""
