import os
import subprocess
import sys

from tests.agent.builders import ManualClock
from tests.agent.fake_nvml import BACK, LOST, gpus, no_driver, recorded
from trainvitals.catalog import GPU_METRICS, GPU_SCHEMA
from trainvitals.records import Note
from vitals_agent.gpu import ROUNDS_BETWEEN_LOOKS, GpuReport, GpuSampler

COLUMNS = {metric.column for metric in GPU_METRICS}
LATER = {"last_xid", "nvlink_crc_errors", "nvlink_replay_errors", "nvlink_recovery_errors"}
"""Columns that a Hopper GPU without an error does not have."""


def values_of(report: GpuReport) -> list[dict]:
    return [sample.values for sample in report.samples]


def codes(notes: tuple[Note, ...]) -> list[str]:
    return [note.code for note in notes]


def test_a_gpu_is_read_in_base_units():
    report = GpuSampler(recorded("h100_x8")).sample()
    expected = {
        "utilization_ratio": 0.98,
        "memory_utilization_ratio": 0.61,
        "memory_used_bytes": 61203283968.0,
        "memory_total_bytes": 85520809984.0,
        "memory_reserved_bytes": 579862528.0,
        "temperature_celsius": 58.0,
        "memory_temperature_celsius": 70.0,
        "power_watts": 648.0,
        "power_limit_watts": 700.0,
        "energy_joules": 912345678.901,
        "sm_clock_hertz": 1.755e9,
        "memory_clock_hertz": 2.619e9,
        "throttle_reasons": 4,
        "ecc_corrected_errors": 2,
        "ecc_uncorrected_errors": 0,
        "remapped_rows_corrected": 0,
        "remapped_rows_uncorrected": 0,
        "row_remap_pending": 0,
        "row_remap_failed": 0,
        "pcie_receive_bytes_per_second": 1.893e9,
        "pcie_transmit_bytes_per_second": 412.3e6,
        "pcie_replays": 0,
        "nvlink_receive_bytes": (5120000000 - 1024) * 1024.0,
        "nvlink_transmit_bytes": 5120000000 * 1024.0,
    }
    assert expected == values_of(report)[0]
    assert COLUMNS - LATER == set(expected)
    assert 8 == len(report.samples)


def test_a_row_of_a_gpu_is_what_the_schema_takes_and_gives_back():
    (values,) = values_of(GpuSampler(gpus("GPU-1")).sample())
    row = GPU_SCHEMA.pack(0, [values.get(column.name) for column in GPU_SCHEMA.columns])
    found = GPU_SCHEMA.unpack(row)
    assert values == {name: found[name] for name in values}
    assert found.get("last_xid") is None


def test_a_driver_before_the_newer_calls_is_read_with_the_older_ones():
    old, new = values_of(GpuSampler(recorded("a100_old_driver")).sample())
    assert (33924055040.0, 4) == (old["memory_used_bytes"], old["throttle_reasons"])
    assert "memory_reserved_bytes" not in old
    assert new["memory_used_bytes"] + new["memory_reserved_bytes"] == old["memory_used_bytes"]
    assert 0 == old["nvlink_replay_errors"]


def test_a_field_the_gpu_does_not_have_is_missing_and_not_zero():
    nvml = gpus("GPU-1")
    no = {"error": nvml.NVML_ERROR_NOT_SUPPORTED}
    calls = {"nvmlDeviceGetPowerUsage": no, "nvmlDeviceGetMemoryInfo_v2": no}
    nvml.change("GPU-1", {"calls": calls, "fields": {"3": no, "82": (1 << 64) - 1}})
    missing = {
        "power_watts",
        "memory_used_bytes",
        "memory_total_bytes",
        "memory_reserved_bytes",
        "ecc_corrected_errors",
        "memory_temperature_celsius",
    }
    (values,) = values_of(GpuSampler(nvml).sample())
    assert COLUMNS - LATER - missing == set(values)


def test_bindings_without_a_function_leave_its_columns_missing():
    class Older(type(gpus())):
        nvmlDeviceGetFieldValues = nvmlEventSetCreate = property()  # noqa: N815
        nvmlDeviceGetMigMode = property()  # noqa: N815

    nvml = gpus("GPU-1")
    nvml.__class__ = Older
    (values,) = values_of(GpuSampler(nvml).sample())
    assert "power_watts" in values
    assert "ecc_corrected_errors" not in values


def test_a_gpu_that_falls_off_the_bus_shows_its_xid_and_is_said_once_and_the_others_go_on():
    nvml = recorded("h100_falls_off_the_bus")
    sampler = GpuSampler(nvml)
    first, second = (sample.uuid for sample in sampler.sample().samples)
    for _ in range(3):
        nvml.next_round()
    report = sampler.sample()
    assert ([second], [(second, 79)]) == (report.lost, report.xids)
    assert {"last_xid": 79} == values_of(report)[1]
    again = sampler.sample()
    assert ([], [], [first]) == (again.lost, again.xids, [s.uuid for s in again.samples])
    nvml.change(second, BACK)
    back = sampler.sample()
    assert [second] == back.back
    assert 79 == values_of(back)[1]["last_xid"]


def test_of_two_xids_in_one_round_both_are_told_and_the_row_has_the_last():
    nvml = recorded("h100_xid")
    sampler = GpuSampler(nvml)
    assert "last_xid" not in values_of(sampler.sample())[0]
    nvml.next_round()
    nvml.next_round()
    report = sampler.sample()
    assert [94, 45] == [code for _, code in report.xids]
    (values,) = values_of(report)
    assert (45, 1, 1) == (
        values["last_xid"],
        values["ecc_uncorrected_errors"],
        values["row_remap_pending"],
    )
    assert 45 == values_of(sampler.sample())[0]["last_xid"]


def test_a_divided_gpu_gives_each_instances_memory_and_its_own_utilisation_is_missing():
    sampler = GpuSampler(recorded("h100_mig"))
    samples = sampler.sample().samples
    divided, whole = samples[0].values, samples[1].values
    assert {"utilization_ratio", "memory_utilization_ratio"} <= set(whole) - set(divided)
    assert (648.0, 0) == (divided["power_watts"], divided["ecc_uncorrected_errors"])
    instances = samples[2:]
    assert 7 == len(instances)
    assert all(sample.uuid.startswith("MIG-") for sample in instances)
    assert {
        "memory_used_bytes": float(3 << 30),
        "memory_total_bytes": 10200547328.0,
        "memory_reserved_bytes": 0.0,
    } == instances[2].values
    (note,) = sampler.notes
    assert "divided by MIG into 7 instances" in note.text


def test_instances_that_are_taken_apart_and_made_are_followed():
    nvml = recorded("a100_mig")
    sampler = GpuSampler(nvml)
    num_found = [len(sampler.sample().samples)]
    nvml.next_round()
    nvml.next_round()
    (parent, *_) = sampler.sample().samples
    for _ in range(ROUNDS_BETWEEN_LOOKS):
        report = sampler.sample()
    num_found.append(len(report.samples))
    calls = {"nvmlDeviceGetMemoryInfo_v2": {"version": 0, "total": 9, "used": 4}}
    nvml.change(parent.uuid, {"instances": [{"uuid": "MIG-new", "calls": calls}]})
    for _ in range(ROUNDS_BETWEEN_LOOKS):
        report = sampler.sample()
    assert "MIG-new" in [sample.uuid for sample in report.samples]
    assert [] == report.lost
    assert ["gpu_mig"] == codes(sampler.notes)


def test_a_gpu_lost_before_the_agent_came_is_named_by_its_index():
    nvml = gpus("GPU-1", "GPU-2")
    nvml.change("GPU-2", LOST)
    sampler = GpuSampler(nvml)
    assert ["GPU-1"] == [sample.uuid for sample in sampler.sample().samples]
    assert ["GPU 1 does not give its UUID: GPU is lost"] == [note.text for note in sampler.notes]


def test_without_a_driver_the_reason_is_kept_and_nvml_is_not_asked_again():
    nvml = no_driver()
    sampler = GpuSampler(nvml)
    assert ([], []) == (values_of(sampler.sample()), values_of(sampler.sample()))
    assert "NVML is not available: NVML Shared Library Not Found" == sampler.absent
    assert (["no_gpu"], 1) == (codes(sampler.notes), nvml.num_inits)
    sampler.close()
    assert 0 == nvml.num_shutdowns


def test_without_any_gpu_that_is_said():
    sampler = GpuSampler(gpus())
    sampler.sample()
    assert "NVML sees no GPU that responds" == sampler.absent


def test_closing_shuts_nvml_down_once():
    nvml = gpus("GPU-1")
    sampler = GpuSampler(nvml)
    sampler.sample()
    sampler.close()
    sampler.close()
    assert 1 == nvml.num_shutdowns


def test_samples_carry_the_time_at_which_the_gpus_were_asked():
    clock = ManualClock()
    report = GpuSampler(gpus("GPU-1"), clock=clock).sample()
    assert (clock.now_ns, clock.now_ns) == report.taken


def test_a_mask_beyond_a_signed_number_still_fits_the_row():
    nvml = gpus("GPU-1")
    calls = {"nvmlDeviceGetCurrentClocksEventReasons": (1 << 64) - 1}
    nvml.change("GPU-1", {"calls": calls, "fields": {"4": (1 << 64) - 2}})
    (values,) = values_of(GpuSampler(nvml).sample())
    largest = (1 << 63) - 1
    assert (largest, largest) == (values["throttle_reasons"], values["ecc_uncorrected_errors"])


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
