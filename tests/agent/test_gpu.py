import os
import subprocess
import sys

from tests.agent.fake_nvml import FakeGpu, FakeNvml
from trainvitals.catalog import GPU_SCHEMA
from vitals_agent.gpu import COLUMNS, GpuReport, GpuSample, GpuSampler


def test_a_gpu_is_read_in_base_units():
    report = GpuSampler(FakeNvml(FakeGpu("GPU-1"))).sample()
    expected = {
        "utilization_ratio": 0.73,
        "memory_used_bytes": float(10 << 30),
        "memory_total_bytes": float(80 << 30),
        "temperature_celsius": 61.0,
        "power_watts": 300.0,
        "power_limit_watts": 700.0,
        "sm_clock_hertz": 1.98e9,
        "throttle_reasons": 4,
        "ecc_uncorrected_errors": 2,
    }
    assert (GpuSample(uuid="GPU-1", values=expected),) == report.samples
    assert set(COLUMNS) == set(expected)


def test_a_field_the_gpu_does_not_have_is_missing_and_not_zero():
    report = GpuSampler(FakeNvml(FakeGpu("GPU-1", absent={"ecc", "power", "memory"}))).sample()
    missing = {
        "ecc_uncorrected_errors",
        "power_watts",
        "memory_used_bytes",
        "memory_total_bytes",
    }
    assert set(COLUMNS) - missing == set(report.samples[0].values)


def test_a_binding_without_a_function_leaves_that_field_missing():
    nvml = FakeNvml(FakeGpu("GPU-1"))
    nvml.nvmlDeviceGetTotalEccErrors = None  # type: ignore[assignment,method-assign]
    del nvml.nvmlDeviceGetTotalEccErrors
    FakeNvmlOld = type("FakeNvmlOld", (FakeNvml,), {"NVML_VOLATILE_ECC": property(_absent)})  # noqa: N806
    report = GpuSampler(FakeNvmlOld(FakeGpu("GPU-1"))).sample()
    assert "ecc_uncorrected_errors" not in report.samples[0].values


def _absent(self):
    raise AttributeError("NVML_VOLATILE_ECC")


def test_a_gpu_that_falls_off_the_bus_is_said_once_and_the_others_go_on():
    first, second = FakeGpu("GPU-1"), FakeGpu("GPU-2")
    sampler = GpuSampler(FakeNvml(first, second))
    sampler.sample()
    second.lost = True
    report = sampler.sample()
    assert ("GPU-2",) == report.lost
    assert ["GPU-1"] == [sample.uuid for sample in report.samples]
    assert () == sampler.sample().lost
    second.lost = False
    assert ("GPU-2",) == sampler.sample().back


def test_a_gpu_lost_before_the_agent_came_is_named_by_its_index():
    sampler = GpuSampler(FakeNvml(FakeGpu("GPU-1"), FakeGpu("GPU-2", lost=True)))
    assert ["GPU-1"] == [sample.uuid for sample in sampler.sample().samples]
    assert ("GPU 1 does not give its UUID: GPU is lost",) == sampler.unnamed


def test_without_a_driver_the_reason_is_kept_and_nvml_is_not_asked_again():
    nvml = FakeNvml(driver=False)
    sampler = GpuSampler(nvml)
    assert [GpuReport(), GpuReport()] == [sampler.sample(), sampler.sample()]
    assert "NVML is not available: NVML Shared Library Not Found" == sampler.absent
    assert 1 == nvml.num_inits
    sampler.close()
    assert 0 == nvml.num_shutdowns


def test_without_any_gpu_that_is_said():
    sampler = GpuSampler(FakeNvml())
    sampler.sample()
    assert "NVML sees no GPU that answers" == sampler.absent


def test_closing_shuts_nvml_down_once():
    nvml = FakeNvml(FakeGpu("GPU-1"))
    sampler = GpuSampler(nvml)
    sampler.sample()
    sampler.close()
    sampler.close()
    assert 1 == nvml.num_shutdowns


def test_a_mask_beyond_a_signed_number_still_fits_the_row():
    report = GpuSampler(FakeNvml(FakeGpu("GPU-1", throttle_mask=(1 << 64) - 1))).sample()
    values = report.samples[0].values
    row = GPU_SCHEMA.pack(0, [values.get(c.name) for c in GPU_SCHEMA.columns])
    assert (1 << 63) - 1 == GPU_SCHEMA.unpack(row)["throttle_reasons"]


def test_the_real_bindings_on_this_machine_give_samples_or_say_why_not():
    sampler = GpuSampler()
    report = sampler.sample()
    assert bool(report.samples) != bool(sampler.absent)
    sampler.close()


def test_without_the_bindings_that_is_said_and_nothing_breaks():
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from vitals_agent.gpu import GpuSampler\n"
        "sampler = GpuSampler(); sampler.sample(); print(sampler.absent)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "not installed" in done.stdout
