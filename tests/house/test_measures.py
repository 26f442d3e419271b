"""What it costs to live in this house only falls: the bounds are lowered with each gain."""

import pytest

from tests.house import measures

FILES = {"step": 55, "ingest": 17, "alert": 29, "series": 21}
"""Files that an event may go through at most."""


@pytest.fixture(scope="module")
def events():
    return measures.events()


@pytest.mark.parametrize("event", FILES)
def test_an_event_goes_through_no_more_files_than_before(events, event):
    hops = events[event]
    assert 1 < hops.num_files <= FILES[event], sorted(hops.files)
    assert hops.num_moves > hops.num_files - 2


def test_locals_say_what_they_hold():
    assert measures.sizes()["vague locals in 1,000 lines"] <= 1.0


def test_a_forwarder_is_known_by_its_body():
    tree = measures.ast.parse(
        "def a(x, *y): return b.c(x, *y)\n"
        "def d(x):\n    'Return it.'\n    return b(x)\n"
        "def e(x): return b(x + 1)\n"
        "def f(x):\n    x += 1\n    return b(x)\n"
    )
    assert ["a", "d"] == [f.name for f in tree.body if measures.is_forwarder(f)]
