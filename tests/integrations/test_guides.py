"""Each framework's guide: at most three changed lines, and both sides of them train."""

import importlib.util

import pytest

from tests.integrations.declared import FRAMEWORKS
from tests.integrations.guides import loop, on_two_ranks, side

BEFORE = {
    "deepspeed": "import collections, deepspeed.ops\n"
    "deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)\n"
}
"""What comes before a guide's program here: DeepSpeed would compile an operator for minutes."""
EVERY = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda f: f.title)


@EVERY
def test_at_most_three_lines_change(framework):
    added = [line for line in loop(framework) if line.startswith("+")]
    removed = [line for line in loop(framework) if line.startswith("-")]
    assert 1 <= len(added) <= 3
    assert len(removed) <= len(added)


@pytest.mark.dist
@pytest.mark.slow
@EVERY
def test_both_sides_train_to_the_same_loss_on_two_ranks(framework, tmp_path):
    if framework.package and importlib.util.find_spec(framework.package) is None:
        pytest.skip(f"not installed: {framework.package}")
    before = BEFORE.get(framework.module, "")
    guarded = on_two_ranks(tmp_path / "guarded", before + side(loop(framework), "+"))
    bare = on_two_ranks(tmp_path / "bare", before + side(loop(framework), "-"))
    assert pytest.approx(bare.loss, rel=1e-3) == guarded.loss
    assert [] == bare.runs
    assert 1 == len(guarded.runs)
