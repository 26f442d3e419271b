"""Copying with a check: every bit arrives, and what is not finite is found wherever it lies."""

import math
from contextlib import contextmanager
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from tests.support.examples import examples
from trainer_hooks.tensors import copying, finite
from trainer_hooks.tensors.copying import CopyPlan, Pair
from trainer_hooks.tensors.optimizer_state import nonfinite_count

LARGEST = {
    torch.float32: 3e38,
    torch.float64: 1e308,
    torch.float16: 65504.0,
    torch.bfloat16: 3e38,
    torch.complex64: 3e38,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.int64: 7.0,
    torch.bool: 1.0,
}
WITHOUT_NAN = (torch.int64, torch.bool)
CPU = torch.device("cpu")


class Source(NamedTuple):
    """What a tensor is made of."""

    size: int = 80
    dtype: torch.dtype = torch.float32
    form: str = "plain"
    value: float = 1.0
    """As a share of the type's largest."""
    spoilt: tuple[float, float] | None = None
    """Where, as a share of the size, and by what."""

    def made(self):
        values = torch.full((self.size,), self.value * LARGEST[self.dtype], dtype=torch.float64)
        if self.is_wrong:
            has_infinity = self.dtype != torch.float8_e4m3fn
            values[int(self.spoilt[0] * self.size)] = self.spoilt[1] if has_infinity else math.nan
        values = values.to(self.dtype)
        if self.form == "transposed" and self.size % 2 == 0:
            return values.view(2, -1).t()
        if self.form == "every other":
            return torch.stack([values, torch.zeros_like(values)], dim=1)[:, 0]
        return values

    @property
    def is_wrong(self):
        return self.spoilt is not None and self.size > 0 and self.dtype not in WITHOUT_NAN


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_BLOCK_BYTES", 28)
        patch.setattr(copying, "_PIECE_BYTES", 84)
        patch.setattr(copying, "_SMALL_BYTES", 24)
        patch.setattr(copying, "_BYTES_PER_THREAD", 84)
        patch.setattr(finite, "_BLOCK_BYTES", 28)
        yield


@contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert count == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


made_of = st.builds(
    Source,
    size=st.integers(1, 80) | st.just(0),
    dtype=st.sampled_from(list(LARGEST)),
    form=st.sampled_from(["plain", "transposed", "every other"]),
    value=st.sampled_from([1.0, -1.0, 0.001]),
    spoilt=st.none()
    | st.tuples(
        st.floats(0, 1, exclude_max=True), st.sampled_from([math.nan, math.inf, -math.inf])
    ),
)


@settings(max_examples=examples(80), deadline=None)
@given(
    sources=st.lists(made_of, max_size=10),
    threads=st.sampled_from([1, 2, 3]),
    exempt=st.sets(st.integers(0, 9), max_size=2),
)
@example(sources=[Source(spoilt=(0.99, math.inf))], threads=2, exempt=set())
@example(sources=[Source(spoilt=(0.0, math.nan), value=-1.0), Source()], threads=2, exempt=set())
def test_every_bit_is_copied_and_exactly_what_is_not_finite_is_counted(sources, threads, exempt):
    live = [source.made() for source in sources]
    copies = [torch.zeros_like(one) for one in live]
    wrong = {i for i, source in enumerate(sources) if source.is_wrong}
    pairs = zip(copies, live, strict=True)
    with torch_threads(threads):
        count = (
            CopyPlan([Pair(c, t, i not in exempt) for i, (c, t) in enumerate(pairs)])
            .run()
            .num_wrong
        )
    assert len(wrong - exempt) == count
    assert [bits(one) for one in live] == [bits(copy) for copy in copies]
    assert len(wrong) == nonfinite_count(live, CPU).item()


def test_large_values_of_both_signs_are_no_alarm_and_one_infinity_among_them_is():
    large = torch.full((1000,), 1e38)
    large[::3] *= -1
    infinite = large.clone()
    infinite[500] = float("inf")
    infinite[501] = float("-inf")
    pairs = [Pair(torch.empty_like(t), t, checked=True) for t in (large, infinite)]
    assert 1 == CopyPlan(pairs).run().num_wrong


def test_a_tensor_that_is_conjugated_or_negated_when_read_is_copied_as_it_reads():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    sources = [numbers.conj(), numbers.conj().imag]
    copies = [torch.zeros(2, dtype=s.dtype) for s in sources]
    pairs = [Pair(c, s, checked=True) for c, s in zip(copies, sources, strict=True)]
    assert 0 == CopyPlan(pairs).run().num_wrong
    assert [[1 - 2j, 3 + 4j], [-2.0, 4.0]] == [c.tolist() for c in copies]


def test_a_copy_that_fails_in_a_thread_is_an_error_here_and_leaves_torch_s_threads():
    with torch_threads(2), pytest.raises(RuntimeError, match="size"):
        CopyPlan([Pair(torch.zeros(3), torch.zeros(8)[::2], checked=True)] * 4).run()


def test_nothing_to_copy_is_nothing_wrong():
    assert 0 == CopyPlan([]).run().num_wrong
