"""What a silence may match by: never what takes for ever to look at."""

import pytest

from trainvitals.errors import UsageError
from vitals_collector.alerts.silences import parse_matchers


@pytest.mark.parametrize(
    "pattern", ["([0-9A-Z]+)*x", "(a|b)+", r"(.)\1", "a*b*c*d*e*f", "(.|..)" * 24]
)
def test_patterns_that_can_take_for_ever_are_refused(pattern: str):
    with pytest.raises(UsageError, match="could take too long"):
        parse_matchers([f"run=~{pattern}"])


@pytest.mark.parametrize("pattern", ["Gpu.*", "(NodeLost|RankLost)", "gpu-1[0-7]", "01JD.*x?"])
def test_patterns_that_people_write_are_taken(pattern: str):
    assert 1 == len(parse_matchers([f"name=~{pattern}"]))
