"""Post-training: kinds of runs, names of their scalars, and detectors over these scalars.

``names`` is also imported where a model trains; ``set`` runs in the collector.
"""
