"""What can be asked for, and what is refused."""

import pytest

from tests.support.inside import device_of
from trainer_hooks import SignalSettings
from trainvitals.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, "every is 2.5"),
        ({"weight_norm": "yes"}, "weight_norm is 'yes'"),
        ({"activations": "*.mlp"}, "must be a tuple"),
        ({"flops_per_token": 0.0}, "flops_per_token is 0.0"),
        ({"flops_per_token": float("nan")}, "flops_per_token is nan"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        SignalSettings(**arguments)


def test_nothing_is_measured_by_default(make_loop):
    loop = make_loop()
    assert device_of(loop.monitor).sampler is None
    assert not any(module._forward_hooks for module in loop.model.modules())
    loop.monitor.close()


def test_noise_scale_without_ddp_is_refused_with_a_way_out(make_loop):
    with pytest.raises(UsageError, match="needs DDP; the model is Sequential"):
        make_loop(signals=SignalSettings(noise_scale=True))


def test_a_pattern_without_a_module_is_refused_with_the_names_there_are(make_loop):
    with pytest.raises(UsageError, match=r"no module is named 'mlp\.\*'") as caught:
        make_loop(signals=SignalSettings(activations=("mlp.*",)))
    assert "0, 1, 2" in caught.value.hint


def test_counting_flops_changes_nothing_and_says_what_was_counted(make_loop):
    loop = make_loop()
    for step in range(3):
        if step == 1:
            with loop.monitor.count_flops():
                loss = loop.backward()
        else:
            loss = loop.backward()
        loop.monitor.step(loss)
    journal = loop.journal()
    forward_and_weights = 2 * 2 * 32 * (4 * 16 + 16)
    input_of_the_last = 2 * 32 * 16
    counted = forward_and_weights + input_of_the_last
    assert journal.notes("flops") == [f"{counted} FLOPs were counted in this step on rank 0"]
    assert journal.steps("mfu_ratio") == {}


def test_the_peak_is_a_setting_of_the_loop(make_loop):
    loop = make_loop(signals=SignalSettings(peak_flops=1e15), tokens_per_step=12)
    for _ in range(3):
        loop.monitor.step(loop.backward())
    assert device_of(loop.monitor).sampler is None, "nothing is measured for it"
    assert all(0.0 < ratio < 1e-3 for ratio in loop.journal().steps("mfu_ratio").values())
    assert loop.journal().steps("mfu_ratio")


def test_off_has_the_same_calls(make_loop):
    loop = make_loop(mode="off", signals=SignalSettings(update_norm=True))
    with loop.monitor.count_flops():
        loss = loop.backward()
    loop.monitor.step(loss)
