"""What a rank of a preflight writes, and how it names its node."""

import pytest

from vitals_plugins.lab.preflight.program import (
    bytes_to_write,
    has_unused_gpu,
    node_name,
    rack_name,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "num_ranks", "is_memory", "expected"),
    [
        (1 << 40, 8, False, 256 * MIB),
        (1 << 30, 8, False, 32 * MIB),  # a quarter of the space for all ranks
        (31 * MIB, 8, False, 0),  # too little to measure
        (0, 1, False, 0),
        (1 << 40, 8, True, 16 * MIB),  # the memory of the container
        (64 * MIB, 8, True, 2 * MIB),
    ],
)
def test_a_write_leaves_most_of_the_free_space(free, num_ranks, is_memory, expected):
    assert expected == bytes_to_write(
        256 * MIB, free=free, num_ranks=num_ranks, is_memory=is_memory
    )


@pytest.mark.parametrize(
    ("environ", "host_name", "expected"),
    [
        ({}, "n1.cluster.example.org", "n1"),
        ({}, "n1", "n1"),
        ({}, "10.0.0.1", "10.0.0.1"),
        ({}, "", "node"),
        ({"SLURMD_NODENAME": "n7"}, "n1", "n7"),
        ({"VITALS_NODE": "ip-1.ec2.internal", "SLURMD_NODENAME": "n7"}, "n1", "ip-1.ec2.internal"),
    ],
)
def test_a_node_has_the_name_of_its_scheduler(environ, host_name, expected):
    assert expected == node_name(environ, host_name)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "n7"}, ""),  # Slurm without a topology
        ({"SLURM_TOPOLOGY_ADDR": "s0.s4.n7"}, "s0.s4"),
        ({"SLURM_TOPOLOGY_ADDR": "s0.s4.n7", "VITALS_RACK": "r2"}, "r2"),
    ],
)
def test_a_rack_is_the_switches_above_the_node(environ, expected):
    assert expected == rack_name(environ)


def test_a_gpu_that_cuda_does_not_find_is_detected_by_its_file(tmp_path):
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert not has_unused_gpu({}, tmp_path)
    (tmp_path / "nvidia3").touch()
    assert has_unused_gpu({}, tmp_path)
    assert not has_unused_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
