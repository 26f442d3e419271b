"""Kernels with known answers: what is right passes bit for bit, and one flipped bit is named."""

import os

import pytest
import torch

from vitals_plugins.lab.burn_in import program as burn_in
from vitals_plugins.lab.burn_in.program import BurnInDevice, find_devices, kernels_for, try_devices
from vitals_plugins.lab.selftest import (
    INNER,
    LARGEST,
    NUM_SUMMED,
    PATTERNS,
    WrongAnswer,
    all_reduce,
    gemm,
    memory,
)

CPU = torch.device("cpu")
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def flip(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """Flip one bit in place, as a fault of the device would."""
    words = tensor.reshape(-1).view(INTEGERS[tensor.element_size()])
    words[element] ^= 1 << bit
    return tensor


def stub_multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Stands in for a device whose product has one wrong bit."""
    return flip(left @ right, element=513, bit=5)


class TestGemm:
    @pytest.mark.parametrize("dtype", LARGEST)
    def test_every_partial_sum_is_an_integer_that_the_type_holds(self, dtype):
        assert INNER * LARGEST[dtype] ** 2 <= 2 / torch.finfo(dtype).eps

    @pytest.mark.parametrize("dtype", LARGEST)
    def test_the_answer_is_right_whatever_the_training_set(self, dtype):
        """A loop's autocast, and float32 products in bfloat16, change no bit of it."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert [None] * 3 == [gemm(CPU, dtype, seed) for seed in range(3)]
        finally:
            torch.set_float32_matmul_precision(before)

    @pytest.mark.parametrize("dtype", LARGEST)
    def test_one_flipped_bit_is_found_with_its_element_and_bits(self, dtype):
        wrong = gemm(CPU, dtype, seed=7, multiply=stub_multiply)
        assert wrong is not None
        assert ("cpu", 7, 513, 1) == (wrong.device, wrong.seed, wrong.element, wrong.num_wrong)
        assert 1 << 5 == wrong.expected ^ wrong.actual
        assert f"gemm {str(dtype)[6:]}, seed 7: element 513 is {wrong.actual:#x}" in str(wrong)
        assert "(bit 5; 1 wrong)" in str(wrong)

    def test_it_is_computed_again_for_the_time_given_and_a_late_fault_is_found(self):
        num_products = 0

        def stub(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            nonlocal num_products
            num_products += 1
            return stub_multiply(left, right) if num_products == 3 else left @ right

        wrong = gemm(CPU, torch.float32, seed=0, seconds=600, multiply=stub)
        assert wrong is not None
        assert 3 == num_products

    def test_a_nan_is_wrong(self):
        wrong = gemm(
            CPU, torch.float32, seed=0, multiply=lambda left, right: (left @ right) * torch.nan
        )
        assert wrong is not None
        assert wrong.num_wrong > 1


class TestMemory:
    WORDS = (4 << 20) + 3  # two whole parts, and one of three words

    @pytest.mark.parametrize("seed", range(len(PATTERNS)))
    def test_what_was_written_is_read_back(self, seed):
        assert memory(torch.empty(self.WORDS, dtype=torch.int64), seed) is None

    @pytest.mark.parametrize("seed", range(len(PATTERNS)))
    @pytest.mark.parametrize("element", [0, (2 << 20) + 11, (4 << 20) + 2])
    def test_one_flipped_bit_is_found_with_its_address_and_bits(self, seed, element):
        block = torch.empty(self.WORDS, dtype=torch.int64)
        num_read = 0

        def stub(part: torch.Tensor) -> torch.Tensor:
            nonlocal num_read
            first, num_read = num_read, num_read + len(part)
            is_there = first <= element < num_read
            return flip(part, element - first, 63) if is_there else part

        wrong = memory(block, seed, read=stub)
        assert wrong is not None
        assert (element, 1) == (wrong.element, wrong.num_wrong)
        assert block.data_ptr() + 8 * element == wrong.address
        assert 1 << 63 == wrong.expected ^ wrong.actual
        assert f"memory {PATTERNS[seed]}, seed {seed}: element {element} at 0x" in str(wrong)

    def test_each_block_has_each_pattern_in_turn(self, monkeypatch):
        """Also where there are as many blocks as patterns."""
        seen: dict[int, list[int]] = {}

        def note(block: torch.Tensor, seed: int) -> None:
            seen.setdefault(block.data_ptr(), []).append(seed % len(PATTERNS))

        monkeypatch.setattr(burn_in, "memory", note)
        monkeypatch.setitem(burn_in.BLOCK_BYTES, "cpu", 64)
        device = BurnInDevice("cpu", CPU, max_bytes=64 * len(PATTERNS))
        for visit in range(len(PATTERNS) ** 2):
            device.try_memory(visit)
        assert [list(range(len(PATTERNS)))] * len(PATTERNS) == [sorted(s) for s in seen.values()]


class TestAllReduce:
    def test_one_flipped_bit_is_found_with_its_element_and_bits(self):
        def stub_reduce(total: torch.Tensor) -> None:
            flip(total.mul_(3), element=NUM_SUMMED - 1, bit=9)  # rank 0 brings w, rank 1 2 w

        wrong = all_reduce(0, 2, CPU, seed=3, reduce=stub_reduce)
        assert wrong is not None
        assert (NUM_SUMMED - 1, 1) == (wrong.element, wrong.num_wrong)
        assert 1 << 9 == wrong.expected ^ wrong.actual

    @pytest.mark.parametrize("num_devices", [2, 3, 5])
    def test_the_sums_of_gloo_are_right_on_every_core(self, num_devices):
        devices = [BurnInDevice(f"cpu {n}", CPU, 64) for n in range(num_devices)]
        *_, last = try_devices(
            devices, {"all-reduce": burn_in.all_reduce_kernel(devices)}, seconds=0.1
        )
        assert ["ok"] * num_devices == [check["status"] for check in last]


class TestBurnIn:
    def test_every_core_is_tried_on_every_kernel_and_by_its_own_thread(self):
        devices = find_devices()
        cores = sorted(os.sched_getaffinity(0))
        assert [f"cpu {core}" for core in cores] == [device.name for device in devices]
        bound = [device.thread.submit(os.sched_getaffinity, 0) for device in devices]
        assert [{core} for core in cores] == [future.result() for future in bound]
        kernels = kernels_for(devices)
        for checks in try_devices(devices, kernels, seconds=600):
            if all(check["status"] == "ok" for check in checks):
                break
            assert {"note"} == {check["status"] for check in checks}  # not all was tried yet
        for check in checks:
            assert all(f"{name} 1x" in check["text"] for name in kernels)

    def test_the_core_with_the_fault_is_named_and_the_other_one_is_not(self):
        devices = [BurnInDevice("cpu 0", CPU, 64), BurnInDevice("cpu 1", CPU, max_bytes=64)]

        def stub(device: BurnInDevice, seed: int) -> WrongAnswer | None:
            multiply = stub_multiply if device.name == "cpu 1" else torch.matmul
            return gemm(CPU, torch.float32, seed, multiply=multiply)

        *_, (sound, faulty) = try_devices(devices, {"gemm float32": stub}, seconds=0.1)
        assert ("ok", "") == (sound["status"], sound["hint"])
        assert ("cpu 1", "fail") == (faulty["name"], faulty["status"])
        assert "first: gemm float32, seed 0: element 513 is 0x" in faulty["text"]
        assert "drain node" in faulty["hint"]
        assert "the processor with cpu 1 is replaced" in faulty["hint"]

    def test_a_device_that_raises_has_failed_and_is_left_alone(self):
        devices = [BurnInDevice("cpu 0", CPU, 64), BurnInDevice("cpu 1", CPU, max_bytes=64)]
        calls = []

        def stub(device: BurnInDevice, seed: int) -> None:
            calls.append(device.name)
            if device is devices[1]:
                raise RuntimeError("uncorrectable ECC error\nmore of it")

        kernels = {"gemm": stub, "all-reduce": stub}
        history = try_devices(devices, kernels, seconds=600)
        *_, last = (next(history) for _ in range(4))
        assert ["cpu 0", "cpu 1", "cpu 0", "cpu 0"] == calls  # and no sum waits for it
        assert "gemm failed: uncorrectable ECC error" in last[1]["text"]
        assert ["note", "fail"] == [check["status"] for check in last]
