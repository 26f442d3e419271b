import threading

from tests.agent.builders import NODE, RUN
from tests.agent.fake_nvml import gpus, recorded
from tests.support.agent_clients import Later
from trainvitals.catalog import GPU_SCHEMA


def num_rows(world, stream: str) -> int:
    return sum(found == stream for _, found, _, _ in world.spooled())


def test_a_driver_that_hangs_is_said_once_and_all_else_goes_on(world):
    rank = world.rank()
    driver = Later()
    agent = world.agent(nvml=gpus("GPU-1"), spawn=driver)
    for second in range(0, 60, 2):
        rank.step(second)
        agent.cycle(float(second))
    assert list(range(0, 60, 2)) == world.steps()
    assert (30, 30, 0) == tuple(num_rows(world, s) for s in ("node", "process", "gpu"))
    assert (["gpu_hung"], 1) == (world.notes(), len(driver.begun))
    assert agent.health().details["gpu_driver_hung"]
    driver.finish()
    agent.cycle(60.0)
    agent.cycle(62.0)
    driver.finish()
    agent.cycle(62.5)
    assert ["gpu_hung", "gpu_back"] == world.notes()
    assert num_rows(world, "gpu") > 0
    assert not agent.health().details["gpu_driver_hung"]


def test_a_hung_driver_is_named_with_the_gpu_that_was_asked(world):
    world.rank().step(0)
    nvml, agents, during = gpus("GPU-1", "GPU-2"), [], []
    real = nvml.nvmlDeviceGetPowerUsage

    def hangs(handle):
        if handle.uuid == "GPU-2" and agents:
            agents[0].cycle(50.0)  # the main thread goes on meanwhile
            during.append(agents[0].sampling.hung)
            agents.clear()
        return real(handle)

    nvml.nvmlDeviceGetPowerUsage = hangs
    agent = world.agent(nvml=nvml)
    agents.append(agent)
    agent.cycle(0.0)
    assert ["asked for GPU GPU-2"] == during
    assert "the GPU driver does not respond, asked for GPU GPU-2" in world.events()[0].event.text


def test_a_run_that_comes_while_the_driver_hangs_is_told_too(world):
    agent = world.agent(nvml=gpus("GPU-1"), spawn=Later())
    agent.cycle(0.0)
    agent.cycle(20.0)
    world.rank().step(0)
    agent.cycle(22.0)
    assert ["gpu_hung"] == world.notes()


def test_the_values_on_the_page_go_when_the_driver_hangs(world):
    driver = Later()
    agent = world.agent(nvml=gpus("GPU-1"), spawn=driver)
    agent.cycle(0.0)
    driver.finish()
    agent.cycle(1.0)
    assert {"GPU-1"} == set(agent.sampling.gpus)
    agent.cycle(2.0)
    agent.cycle(13.0)
    assert {} == agent.sampling.gpus


def test_the_end_does_not_wait_for_a_driver_that_hangs(world):
    go_on = threading.Event()
    nvml = gpus("GPU-1")
    nvml.nvmlDeviceGetCount = lambda: go_on.wait() and 1
    nvml.nvmlShutdown = go_on.wait
    begun = []

    def spawn(name, function):
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        begun.append(thread)

    agent = world.agent(nvml=nvml, spawn=spawn)
    agent.cycle(0.0)
    agent.cycle(11.0)
    agent.stop()
    assert "asked which GPUs there are" == agent.sampling.hung
    assert 1 == len(begun)  # what may hang too is not begun
    go_on.set()
    begun[0].join(20.0)


def test_a_sampler_that_fails_is_counted_and_its_rows_are_missing(world):
    world.rank().step(0)
    nvml = gpus("GPU-1")
    agent = world.agent(nvml=nvml)
    agent.cycle(0.0)
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: 1 / 0
    agent.cycle(2.0)
    agent.cycle(4.0)
    assert ({"sampler.gpu": 2}, {}) == (agent.faults.counts, agent.sampling.gpus)
    assert (1, 3) == (num_rows(world, "gpu"), num_rows(world, "node"))


def test_gpu_rows_carry_the_time_at_which_the_gpus_were_asked_not_at_which_they_answered(world):
    world.rank().step(0)
    driver = Later()
    agent = world.agent(nvml=gpus("GPU-1"), spawn=driver)
    agent.cycle(0.0)
    asked = world.clock.now_ns
    driver.finish()
    world.clock.now_ns += 3 * 10**9
    agent.cycle(0.5)
    (row,) = [raw for _, stream, _, raw in world.spooled() if stream == "gpu"]
    assert asked == GPU_SCHEMA.unpack(row)["time_unix_ns"] == GPU_SCHEMA.unpack(row)["monotonic_ns"]


def test_xids_and_mig_are_said_in_the_run(world):
    world.rank().step(0)
    nvml = recorded("h100_xid")
    agent = world.agent(nvml=nvml)
    agent.cycle(0.0)
    nvml.next_round()
    nvml.next_round()
    agent.cycle(2.0)
    texts = [row.event.text.rpartition("reported ")[2] for row in world.events()]
    assert ["Xid 94", "Xid 45"] == texts
    agent.stop()
    world.agent(nvml=recorded("h100_mig")).cycle(4.0)
    assert ["gpu_xid", "gpu_xid", "gpu_mig"] == world.notes()
    instances = {source for source, stream, _, _ in world.spooled() if "gpu:MIG-" in source}
    assert 7 == len(instances)
    assert {NODE} == {row.name for row in (world.vitals_dir / RUN / "agents").iterdir()}
