"""Origin of a bad step: the series that left its own quiet range first.

``tracker`` follows the merged steps of a run; ``onsets`` are what it finds.
"""
