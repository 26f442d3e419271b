"""docs/DETECTORS.md has an entry for every detector; `test_detectors_page.py` draws them."""

import inspect
import re

import pytest

from docs.drawn.entries import ENTRIES, IN_LOOP, OF_NODES, OF_SCALARS, OF_STEPS
from docs.drawn.loop import falling, losses, noisy
from docs.drawn.runs import ExampleError, in_loop
from trainvitals.detect.detector_set import DetectorSet
from trainvitals.detect.fleet import FleetConfig, FleetDetectors
from trainvitals.detect.fleet import set as fleet
from trainvitals.detect.fleet.speed import PaceConfig
from trainvitals.detect.posttraining.set import WATCHERS

NAMES = [entry.name for entry in ENTRIES]


def functions_that_tell():
    """Return the names of the public functions of ``watch`` that return a finding."""
    return {
        name
        for name, item in vars(fleet).items()
        if inspect.isfunction(item) and "Finding" in str(inspect.signature(item).return_annotation)
    }


class TestNoneIsLeftOut:
    def test_every_detector_of_the_loop_has_an_entry_in_its_order(self):
        drawn_parts = [name for name in DetectorSet().state_dict() if name != "suspended"]
        assert drawn_parts == [entry.name for entry in IN_LOOP]

    def test_every_watcher_of_the_set_has_an_entry(self):
        there = set(FleetDetectors().state_dict()["watchers"]) | functions_that_tell()
        assert there == {entry.name for entry in (*OF_STEPS, *OF_NODES)}

    def test_every_detector_of_scalars_has_an_entry_in_its_order(self):
        assert [watcher.name for watcher in WATCHERS] == [entry.name for entry in OF_SCALARS]

    def test_every_watcher_that_is_public_has_an_entry(self):
        classes = [item for item in vars(fleet).values() if inspect.isclass(item)]
        named = {item.name for item in classes if isinstance(getattr(item, "name", None), str)}
        assert {"learning_rate", "gpu_lost"} < named
        assert set() == named - set(NAMES)

    def test_every_settings_class_of_a_watcher_is_on_the_page(self):
        shown = {entry.config for entry in ENTRIES}
        shown |= {PaceConfig, FleetConfig}  # a part of another, and all of them together
        there = {item for name, item in vars(fleet).items() if name.endswith("Config")}
        assert set() == there - shown


@pytest.mark.parametrize("entry", IN_LOOP, ids=[entry.name for entry in IN_LOOP])
@pytest.mark.parametrize(
    "kind",
    ["RL|reinforcement", "GANs?", "curricul[a-z]+", "large (learning )?rates?|optimizer spikes?"],
)
def test_every_detector_of_the_loop_says_what_it_is_worth_in_each_kind_of_training(entry, kind):
    assert re.search(rf"\b({kind})\b", f"{entry.good} {entry.bad}", re.IGNORECASE)


class TestNoMarkIsSetByHand:
    QUIET = losses(noisy(falling(60), 0.01, 1))

    def test_a_detector_that_should_speak_and_does_not_stops_the_page(self):
        with pytest.raises(ExampleError, match="loss_spike says nothing"):
            in_loop("quiet", self.QUIET, "loss_spike")

    def test_a_detector_that_should_be_silent_and_is_not_stops_the_page(self):
        spiked = losses([2.0] * 40 + [50.0] + [2.0] * 5)
        with pytest.raises(ExampleError, match="to be silent, but loss_spike: loss 50 is above"):
            in_loop("spiked", spiked)
