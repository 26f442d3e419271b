"""What stands in for pynvml must be like it, or the sampler's tests say nothing."""

import ctypes
import inspect
import json

import pynvml
import pytest

from tests.agent.fake_nvml import RECORDINGS, gpus, recorded
from vitals_agent.nvml_fields import FIELDS
from vitals_bench.agent.replayed_nvml import ReplayedNvml

PLAYED = sorted(name for name in vars(ReplayedNvml) if name.startswith("nvml"))
FILES = sorted(path.stem for path in RECORDINGS.glob("*.json"))


@pytest.mark.parametrize("name", PLAYED)
def test_a_played_function_takes_what_pynvmls_takes(name):
    played = inspect.signature(getattr(gpus(), name)).parameters.values()
    real = inspect.signature(getattr(pynvml, name)).parameters.values()
    # The bindings' sharpest edges: a keyword by another name, a default that differs.
    assert [(p.name, p.default) for p in real] == [(p.name, p.default) for p in played]


@pytest.mark.parametrize("file", FILES)
def test_a_recording_says_where_it_comes_from(file):
    about = json.loads((RECORDINGS / f"{file}.json").read_text())["about"]
    assert "Synthesised after NVML's documentation" in about
    assert "Not recorded on hardware" in about


@pytest.mark.parametrize("file", FILES)
def test_what_a_recording_answers_is_named_as_pynvml_names_it(file):
    recording = json.loads((RECORDINGS / f"{file}.json").read_text())
    for gpu in recording["gpus"]:
        for name in gpu["calls"]:
            function = name.partition(":")[0]
            assert hasattr(pynvml, function.removesuffix("_v2")), function
        known = {str(getattr(pynvml, field.name)) for field in FIELDS}
        assert {key.partition(":")[0] for key in gpu["fields"]} <= known


@pytest.mark.parametrize("field", [field.name for field in FIELDS])
def test_a_field_that_is_asked_for_is_one_of_pynvmls(field):
    assert isinstance(getattr(pynvml, field), int)


def test_errors_are_pynvmls_own_classes():
    nvml = recorded("h100_falls_off_the_bus")
    for _ in range(3):
        nvml.next_round()
    handle = nvml.nvmlDeviceGetHandleByIndex
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        handle(1)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTemperature(handle(0), 77)


def test_structs_are_pynvmls_own_and_a_field_without_an_answer_carries_its_error():
    nvml = gpus("GPU-1")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    found = nvml.nvmlDeviceGetFieldValues(handle, [83, (138, 4294967295), 9999])
    assert isinstance(found, ctypes.Array)
    assert [0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED] == [value.nvmlReturn for value in found]
    assert [912345678901, 5120000000] == [value.value.ullVal for value in found[:2]]
    assert isinstance(nvml.nvmlDeviceGetUtilizationRates(handle), pynvml.c_nvmlUtilization_t)


def test_a_function_that_is_not_played_is_absent_and_constants_are_pynvmls():
    nvml = gpus()
    assert not hasattr(nvml, "nvmlDeviceGetFanSpeed")
    assert pynvml.NVML_CLOCK_SM == nvml.NVML_CLOCK_SM
    assert pynvml.nvmlMemory_v2 == nvml.nvmlMemory_v2
