"""How many cases and examples a property is tried with: some in `make test`.

All cases are in `make test-nightly`, all examples in `make test-slow`.
"""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

THOROUGH = "thorough"
"""The profile of ``--hypothesis-profile`` with all examples."""
_ALL, _SOME = 100, 15


def register_profiles() -> None:
    """Make both profiles known, and take the one with fewer."""
    # A busy machine draws examples slowly, and that is no fault of what they test.
    settings.register_profile(
        THOROUGH, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_ALL
    )
    settings.register_profile("usual", settings.get_profile(THOROUGH), max_examples=_SOME)
    settings.load_profile("usual")


def examples(num: int) -> int:
    """Return how many of ``num`` are tried under the profile that is loaded: at least five."""
    return max(min(num, 5), num * settings().max_examples // _ALL)


def has_nightly(config: pytest.Config) -> bool:
    """Return whether nightly cases run too, for a launch that all cases share."""
    return "not nightly" not in config.option.markexpr


def one_in(num: int, values: Iterable[object]) -> list[ParameterSet]:
    """Return the values of a parametrize: the first and each ``num``-th after it, others nightly.

    A tuple is a value for each of several arguments, as it is for pytest.
    """
    some = []
    for index, value in enumerate(values):
        whole = value if isinstance(value, tuple) else (value,)
        given = value if isinstance(value, ParameterSet) else pytest.param(*whole)
        marks = [pytest.mark.nightly] if index % num else []
        some.append(pytest.param(*given.values, marks=[*given.marks, *marks], id=given.id))
    return some


def each_once(*axes: Sequence[object]) -> list[ParameterSet]:
    """Return all combinations of the values: some contain each value once, others are nightly.

    For arguments that lead through code of their own, whose combinations add no other code.
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    longest = max(map(len, axes))
    daily = {tuple(i % len(axis) for axis in axes) for i in range(longest)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in daily else pytest.mark.nightly,
        )
        for place in places
    ]
