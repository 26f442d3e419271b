"""Trainings, as the tests of the hooks have them."""

from tests.trainer_hooks.conftest import out_of_garbage_collection

__all__ = ["out_of_garbage_collection"]
