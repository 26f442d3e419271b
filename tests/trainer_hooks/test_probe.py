"""The probe on one process: what it leaves as it was, what it reads, and when it is off."""

import torch

from tests.trainer_hooks.probing import MoCo, seeded, trained
from tests.trainer_hooks.test_monitor import own_place  # noqa: F401


def test_a_training_is_bit_for_bit_the_same_with_and_without_probing():
    torch.set_num_threads(1)
    bare, _, _ = trained(seeded(MoCo), probe=False)
    probed, readings, is_on = trained(seeded(MoCo), probe=True)
    assert is_on
    assert [r.num_batches for r in readings if r.num_batches] != []
    assert bare == probed
    assert {} == probed["faults"]
