"""Each peer's rule does what its authors published, its weaknesses included."""

import math

import pytest

from vitals_bench.detect.rules import (
    PEERS,
    FirstOf,
    FlagScale,
    Lightning,
    LlmC,
    LlmFoundry,
    Megatron,
    NonFinite,
    NormAbove,
    OlmoCore,
    TimesMean,
    ZClip,
)
from vitals_bench.detect.series import KINDS, Series, alarms_of

pytestmark = pytest.mark.nightly

CALM = [3.0 + i % 7 / 50 for i in range(400)]
NORMS = [1.0 + i % 5 / 50 for i in range(400)]


def said(rule, losses, norms=None):
    """Return the records at which a rule speaks, and what it says."""
    norms = norms or [None] * len(losses)
    found = {}
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        kind = rule.update(i, loss, norm, None)
        if kind is not None:
            found[i] = kind
    return found


def put(values, **at):
    return [at.get(f"at{i}", value) for i, value in enumerate(values)]


def test_olmo_core_skips_128_records_after_one_nan():
    assert [200, *range(201, 329)] == list(said(OlmoCore(), put(CALM, at200=math.nan), NORMS))


def test_olmo_core_does_so_for_a_nan_norm_and_for_an_infinite_one_too():
    for value in (math.nan, math.inf):
        found = said(OlmoCore(), CALM, put(NORMS, at200=value))
        assert dict.fromkeys(range(200, 329), "grad_explosion") == found


def test_olmo_core_judges_from_its_64th_record_on():
    assert {} == said(OlmoCore(), put(CALM, at62=100.0)[:63])
    assert {63: "spike"} == said(OlmoCore(), put(CALM, at63=100.0)[:64])


def test_olmo_core_takes_a_spike_in_and_misses_the_next():
    assert {200: "spike"} == said(OlmoCore(), put(CALM, at200=60.0, at230=30.0))


def test_one_nan_stays_in_the_sums_of_llm_c_for_ever():
    losses = put(CALM, at150=math.nan, at390=1000.0)
    assert {} == said(LlmC(6.0), losses)
    assert {390: "spike"} == said(LlmC(6.0), put(CALM, at390=1000.0))


def test_llm_c_says_nothing_before_its_window_is_full():
    assert {} == said(LlmC(3.0), put(CALM, at127=100.0)[:128])
    assert {128: "spike"} == said(LlmC(3.0), put(CALM, at128=100.0)[:129])


def test_llm_c_cannot_score_more_than_its_window_allows():
    assert {} == said(LlmC(11.4), put(CALM, at300=1e9))  # a value is within its own window


def test_llm_c_sees_nothing_in_a_constant_loss():
    assert {} == said(LlmC(3.0), [2.0] * 200)


def test_lightning_needs_three_times_the_mean_and_keeps_spikes_out():
    losses = [1.0] * 10 + [2.9] + [1.0] * 10 + [3.1, 3.2, 1.0]
    assert {21: "spike", 22: "spike"} == said(Lightning(), losses)


def test_lightning_never_takes_a_falling_loss_for_a_spike():
    assert {} == said(Lightning(), [50.0, -1.0, -30.0, -40.0])


def test_lightning_takes_a_non_finite_loss_for_one_but_not_the_first():
    assert {5: "nonfinite"} == said(Lightning(), [1.0] * 5 + [math.inf, 1.0])
    assert {} == said(Lightning(), [math.nan])


def test_llm_foundry_never_sees_a_nan_and_is_blind_as_long_as_it_is_in_its_window():
    losses = put([2.0] * 400, at150=math.nan, **{f"at{i}": 9.0 for i in range(200, 230)})
    assert {} == said(LlmFoundry(), losses)


def test_llm_foundry_speaks_at_the_fifth_outlier_in_a_row():
    losses = put([2.0] * 300, **{f"at{i}": 9.0 for i in range(200, 206)})
    assert {204: "spike", 205: "spike"} == said(LlmFoundry(), losses)
    assert {} == said(LlmFoundry(), put(losses, at202=2.0))


def test_llm_foundry_tells_losses_that_stay_above_the_first_ones():
    found = said(LlmFoundry(), [2.0] * 200 + [3.0] * 100)
    assert dict.fromkeys(range(250, 300), "divergence") == found


def test_megatron_compares_with_the_first_hundred_for_ever():
    losses = [11.0] + [2.0] * 200
    assert {} == said(Megatron(), put(losses, at150=109.0))
    assert {150: "spike"} == said(Megatron(), put(losses, at150=110.0))


def test_megatron_tells_nan_in_either():
    found = said(Megatron(), put(CALM, at3=math.nan), put(NORMS, at5=math.inf))
    assert {3: "nonfinite", 5: "nonfinite"} == found


def test_flagscale_compares_with_the_last_loss_that_passed():
    assert {2: "spike", 3: "spike"} == said(FlagScale(), [1.0, 1.1, 1.4, 1.35, 1.3, 1.5])


def test_flagscale_lets_a_nan_and_what_follows_it_pass():
    assert {} == said(FlagScale(), [1.0, math.nan, 50.0])
    assert {1: "spike", 3: "spike"} == said(FlagScale(), [1.0, math.inf, 1.0, 2.0])


def test_flagscale_is_turned_around_by_a_negative_loss_and_survives_zero():
    assert {1: "spike"} == said(FlagScale(), [-1.0, -1.5, -1.0])
    assert {1: "spike"} == said(FlagScale(), [0.0, 0.1, 0.0])


def test_zclip_is_disabled_by_one_nan_norm():
    spiked = put(NORMS, at300=50.0)
    assert 300 in said(ZClip(), CALM, spiked)
    assert {} == said(ZClip(), CALM, put(spiked, at100=math.nan))


def test_zclip_says_nothing_in_its_first_25_records_and_nothing_of_losses():
    assert {} == said(ZClip(), put(CALM, at200=1e6), put([1.0] * 400, at10=50.0))


def test_zclip_takes_an_infinite_norm_for_its_mean():
    found = said(ZClip(), CALM, put(NORMS, at100=math.inf, at200=50.0))
    assert {100, 200} <= set(found)


def test_the_tutorials_rule_needs_ten_losses_and_takes_the_spike_in():
    assert {} == said(TimesMean(3.0), [1.0] * 9 + [9.0])
    assert {10: "spike"} == said(TimesMean(3.0), [1.0] * 10 + [9.0] + [1.0] * 5)
    assert {} == said(TimesMean(3.0), [1.0] * 10 + [math.nan] + [9.0] * 3)


def test_constants_and_finiteness():
    assert {2: "grad_explosion"} == said(NormAbove(100.0), [1.0] * 3, [math.nan, 100.0, 100.1])
    found = said(NonFinite(), [math.nan, 1.0, None], [1.0, -math.inf, None])
    assert {0: "nonfinite", 1: "nonfinite"} == found


def test_of_several_rules_the_first_speaks_and_all_remember():
    found = said(FirstOf(NonFinite(), TimesMean(3.0)), [1.0] * 10 + [math.inf, 9.0])
    assert {10: "nonfinite"} == found  # the mean is infinite now


ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, None, 1.0]


@pytest.mark.parametrize("name", PEERS)
def test_no_rule_fails_on_any_number_and_each_begins_anew(name):
    values = (ODD + [1.0] * 30) * 8
    series = Series(
        name="odd",
        steps=range(len(values)),
        losses=values,
        norms=values[3:] + values[:3],
        rates=[None] * len(values),
    )
    once = alarms_of(PEERS[name].make, series)
    assert once == alarms_of(PEERS[name].make, series)
    assert {alarm.kind for alarm in once} <= set(KINDS)
