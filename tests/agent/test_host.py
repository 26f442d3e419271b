from collections import namedtuple
from types import SimpleNamespace

from vitals_agent.host import COLUMNS, HostSampler

CpuTimes = namedtuple("CpuTimes", "user system idle iowait guest guest_nice")


class FakeSystem:
    def __init__(self, *times):
        self.times = list(times)

    def cpu_times(self):
        return self.times.pop(0)

    def virtual_memory(self):
        return SimpleNamespace(total=1000, available=600)

    def swap_memory(self):
        return SimpleNamespace(used=5)

    def disk_io_counters(self, nowrap):
        return None

    def net_io_counters(self, nowrap):
        return None


CPU = "some avg10=1.50 avg60=0.93 avg300=0.42 total=2500000\nfull avg10=0.00 total=0\n"
IO = "some avg10=0.00 avg60=0.00 avg300=0.00 total=40\nfull avg10=0.00 total=30\n"


def test_the_node_gives_every_column_of_the_catalog(tmp_path):
    for name, text in (("cpu", CPU), ("io", IO), ("memory", IO)):
        (tmp_path / name).write_text(text)
    found = HostSampler(tmp_path, pressure=tmp_path).sample()
    # A machine without disks of its own, as a container may be, has no columns for them.
    assert set(COLUMNS) - {"disk_read_bytes", "disk_write_bytes"} <= set(found) <= set(COLUMNS)


def test_pressure_is_the_seconds_so_far_in_which_tasks_waited(tmp_path):
    (tmp_path / "cpu").write_text(CPU)
    (tmp_path / "io").write_text(IO)
    found = HostSampler(tmp_path, pressure=tmp_path).sample()
    expected = {
        "pressure_cpu_waiting_seconds": 2.5,
        "pressure_io_waiting_seconds": 40e-6,
        "pressure_io_stalled_seconds": 30e-6,
    }
    assert expected == {name: value for name, value in found.items() if "pressure" in name}


def test_a_kernel_that_was_told_not_to_count_pressure_has_no_such_columns(tmp_path):
    (tmp_path / "cpu").mkdir()
    found = HostSampler(tmp_path, pressure=tmp_path).sample()
    assert [] == [name for name in found if "pressure" in name]


def test_processor_use_is_the_busy_part_since_the_last_sample_and_guests_count_once(tmp_path):
    system = FakeSystem(CpuTimes(0, 0, 0, 0, 0, 0), CpuTimes(30, 10, 50, 10, 20, 0))
    assert 0.4 == HostSampler(tmp_path, system=system).sample()["cpu_ratio"]


def test_without_time_between_two_samples_processor_use_is_missing_and_not_zero(tmp_path):
    system = FakeSystem(CpuTimes(1, 1, 1, 0, 0, 0), CpuTimes(1, 1, 1, 0, 0, 0))
    assert HostSampler(tmp_path, system=system).sample()["cpu_ratio"] is None


def test_a_namespace_without_network_or_disks_has_no_such_columns(tmp_path):
    system = FakeSystem(CpuTimes(0, 0, 0, 0, 0, 0), CpuTimes(1, 0, 1, 0, 0, 0))
    values = HostSampler(tmp_path, system=system).sample()
    assert [] == [name for name in values if name.startswith(("network", "disk"))]
    assert 400.0 == values["memory_used_bytes"]


def test_free_bytes_of_a_folder_that_is_not_there_are_missing(tmp_path):
    assert HostSampler(tmp_path / "absent").sample()["shm_free_bytes"] is None
