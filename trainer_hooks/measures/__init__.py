"""Signals beyond the gradient's norm; each module is one, and says what it costs.

What is measured after an update travels in the next step's pack: there is one collective a step.
"""
