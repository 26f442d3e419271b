"""The guide of a plain loop: what it shows beside its diff trains as well."""

import re

import pytest

from tests.integrations.declared import FRAMEWORKS
from tests.integrations.guides import GUIDES, loop, on_two_ranks, side

pytestmark = [pytest.mark.integrations, pytest.mark.dist, pytest.mark.slow]
(TORCHRUN,) = [framework for framework in FRAMEWORKS if framework.module == "torchrun"]


def test_the_watched_loop_of_the_guide_trains(tmp_path):
    (shown,) = re.findall(r"```python\n(.*?)```", (GUIDES / "torchrun.md").read_text(), re.S)
    plain = side(loop(TORCHRUN), "-")
    before, _, rest = plain.partition("for step in range(100):\n")
    after = rest[rest.index("if dist.get_rank()") :]
    trained = on_two_ranks(tmp_path / "watched", f"import trainvitals\n{before}{shown}{after}")
    bare = on_two_ranks(tmp_path / "bare", plain)
    assert pytest.approx(bare.loss, rel=1e-3) == trained.loss
    assert 1 == len(trained.runs)
