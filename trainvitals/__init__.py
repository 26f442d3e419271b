"""Vitals keeps PyTorch training runs healthy: measures, skips what harms, rolls back, explains.

This package is the core: what is measured, what healthy means, what to do, and how it travels. It
imports neither torch nor SQL. The training library is ``trainer_hooks``.
"""

__version__ = "0.1.0"
