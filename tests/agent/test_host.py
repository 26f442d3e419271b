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

    def net_io_counters(self):
        return None


def test_the_node_gives_every_column_of_the_catalog(tmp_path):
    assert set(COLUMNS) == set(HostSampler(tmp_path).sample())


def test_processor_use_is_the_busy_part_since_the_last_sample_and_guests_count_once(tmp_path):
    system = FakeSystem(CpuTimes(0, 0, 0, 0, 0, 0), CpuTimes(30, 10, 50, 10, 20, 0))
    assert 0.4 == HostSampler(tmp_path, system=system).sample()["cpu_ratio"]


def test_without_time_between_two_samples_processor_use_is_missing_and_not_zero(tmp_path):
    system = FakeSystem(CpuTimes(1, 1, 1, 0, 0, 0), CpuTimes(1, 1, 1, 0, 0, 0))
    assert HostSampler(tmp_path, system=system).sample()["cpu_ratio"] is None


def test_a_namespace_without_network_has_no_network_columns(tmp_path):
    system = FakeSystem(CpuTimes(0, 0, 0, 0, 0, 0), CpuTimes(1, 0, 1, 0, 0, 0))
    values = HostSampler(tmp_path, system=system).sample()
    assert "network_receive_bytes" not in values
    assert 400.0 == values["memory_used_bytes"]


def test_free_bytes_of_a_folder_that_is_not_there_are_missing(tmp_path):
    assert HostSampler(tmp_path / "absent").sample()["shm_free_bytes"] is None
