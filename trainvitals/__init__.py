"""Vitals keeps PyTorch training runs healthy: measure every step, skip what harms, roll back, explain.

This package is the core: what is measured, what healthy means, what to do, and how it travels. It
imports neither torch nor SQL. The training library is ``trainer_hooks``.
"""

__version__ = "0.1.0"
