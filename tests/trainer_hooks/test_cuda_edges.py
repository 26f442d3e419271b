"""What the library asks of a GPU, checked without one: stand-ins record the calls."""

import contextlib
import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from trainer_hooks import ranks
from trainer_hooks.demo.train import place
from trainer_hooks.probe import isolated_forward
from trainer_hooks.tensors import events, pinned
from trainer_hooks.tensors.gradients import GradientSquares

SECOND_GPU = torch.device("cuda", 1)


def test_an_event_is_recorded_on_the_stream_of_its_device_and_wakes_a_sleeping_host(monkeypatch):
    calls = []

    class StandInEvent:
        def __init__(self, **options):
            calls.append(options)

        def record(self, stream):
            calls.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    events.record_event(SECOND_GPU)
    events.record_event(SECOND_GPU, timed=True)
    assert calls == [
        {"enable_timing": False, "blocking": True},
        ("stream of", SECOND_GPU),
        {"enable_timing": True, "blocking": True},
        ("stream of", SECOND_GPU),
    ]


@pytest.mark.parametrize(("target", "expected"), [("cpu", False), ("meta", True)])
def test_a_copy_that_the_host_will_read_is_waited_for(target, expected):
    calls = []
    tensor = SimpleNamespace(to=lambda device, non_blocking: calls.append((device, non_blocking)))
    events.copy_to(tensor, torch.device(target))
    assert [(torch.device(target), expected)] == calls


def test_gradients_of_several_types_are_summed_in_a_fused_pass_each(monkeypatch):
    passes = []
    real = torch._foreach_norm

    def foreach_norm(tensors, *args, **kwargs):
        passes.append([tensor.dtype for tensor in tensors])
        return real(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_norm", foreach_norm)
    grads = [
        torch.full((3,), 2.0),
        torch.full((2,), 3.0, dtype=torch.bfloat16),
        torch.full((1,), 5.0),
    ]
    squares = GradientSquares([torch.empty(1, device="meta")]).of(grads, torch.device("cpu"))
    torch.testing.assert_close(squares, torch.tensor([12.0, 18.0, 25.0], dtype=torch.float64))
    assert passes == [[torch.float32] * 2, [torch.bfloat16]]


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "expected"),
    [
        (2, 0, ("gloo", "cpu")),
        (2, 1, ("gloo", "cuda:0")),
        (2, 2, ("nccl", "cuda:1")),
        (4, 2, ("gloo", "cuda:1")),
    ],
)
def test_the_demo_runs_on_any_number_of_gpus(num_ranks, num_gpus, expected):
    backend, device = place(1, num_ranks=num_ranks, num_gpus=num_gpus)
    assert expected == (backend, str(device))


def test_a_block_gives_out_buffers_until_it_is_full():
    block = pinned.PinnedBlock(4 * 6 + 2 * 3, 2, torch.device("cpu"))
    transposed = torch.ones(3, 2).T
    one = block.take(transposed)
    other = block.take(torch.ones(3, dtype=torch.bfloat16))
    one.copy_(transposed)
    other.fill_(2.0)
    assert torch.equal(one, transposed) and one.stride() == transposed.stride()
    assert [0, 0] == [tensor.data_ptr() % 64 for tensor in (one, other)]
    assert block.take(torch.ones(1000)) is None


@pytest.mark.parametrize(
    ("device", "reduces_on_host", "expected"),
    [("cpu", False, "ours"), ("cpu", True, None), ("meta", False, None)],
)
def test_a_pack_on_the_host_is_never_given_to_nccl_alone(
    monkeypatch, device, reduces_on_host, expected
):
    groups = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, op, group: groups.append(group)
    )
    ranks.Ranks(0, 2, 0, "ours", reduces_on_host).reduce(torch.ones(1, device=device))
    assert [expected] == groups


@pytest.fixture
def cudart(monkeypatch):
    """Stand in for the CUDA runtime; ``code`` is what it answers to a registration."""
    runtime = SimpleNamespace(code=0, registered=[], released=[], checked=[], devices=[])

    def register(address, size, flags):
        runtime.registered.append((address, size))
        return runtime.code

    def ones(*size, device):
        runtime.checked.append(device)
        raise RuntimeError("CUDA error: resource already mapped")

    @contextlib.contextmanager
    def on(device):
        runtime.devices.append(device)
        yield

    functions = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=runtime.released.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: functions)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch, "ones", ones)
    return runtime


def test_registered_memory_is_released_with_its_tensor(cudart):
    memory = torch.empty(64, dtype=torch.uint8)
    address = memory.data_ptr()
    assert pinned.register_with_cuda(memory, SECOND_GPU)
    assert [(address, 64)] == cudart.registered
    assert [SECOND_GPU] == cudart.devices and not cudart.checked
    del memory
    gc.collect()
    assert [address] == cudart.released


def test_a_failed_registration_leaves_no_error_for_the_next_kernel(cudart):
    cudart.code = 712
    memory = torch.empty(64, dtype=torch.uint8)
    assert not pinned.register_with_cuda(memory, SECOND_GPU)
    assert [SECOND_GPU] == cudart.checked
    del memory
    gc.collect()
    assert not cudart.released


@pytest.mark.parametrize(("manager", "expected"), [(object(), ["force_eager"]), (None, [])])
def test_a_probe_replays_no_graph_whose_outputs_the_loop_holds(monkeypatch, manager, expected):
    stances = []
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.compiler,
        "set_stance",
        lambda stance: stances.append(stance) or contextlib.nullcontext(),
    )
    with isolated_forward.eager_beside_graphs():
        assert expected == stances
