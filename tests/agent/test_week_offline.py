"""What a week without a collector needs on a node's disk, from what is really written."""

from tests.agent.builders import NODE, STEPS
from tests.agent.fake_nvml import recorded
from trainvitals.catalog import LAYERS_SCHEMA
from trainvitals.io.spool import read_batches

NUM_RANKS = 8
NUM_LAYERS = 96
SECONDS = 100
WEEK_SECONDS = 7 * 86_400


def test_a_week_of_eight_ranks_and_gpus_at_a_step_a_second_fits_into_the_spool(world):
    agent = world.agent(nvml=recorded("h100_x8"))
    ranks = [world.rank(number) for number in range(NUM_RANKS)]
    layers = ranks[0].journal.open_stream(LAYERS_SCHEMA)
    every_column = {column.name: 1 for column in STEPS.columns}
    for second in range(SECONDS):
        for rank in ranks:
            rank.step(second, **{**every_column, "step": second})
        if second % 10 == 0:  # by default the norms of layers are written at every tenth step
            for layer in range(NUM_LAYERS):
                row = {"step": second, "attempt": 1, "layer": layer}
                layers.append([row.get(column.name, 1) for column in LAYERS_SCHEMA.columns])
        agent.cycle(float(second))
        world.clock.now_ns += 10**9

    for number in range(NUM_RANKS):
        assert list(range(SECONDS)) == world.steps(number)
    sources = {source for source, *_ in world.spooled()}
    assert 2 * NUM_RANKS + 1 == len(sources), f"ranks, GPUs and node {NODE}: {sources}"
    stored = sum(path.stat().st_size for path in world.spool().glob("*.tvs"))
    travels = sum(len(raw) for _, raw in read_batches(world.spool()))
    bound = agent.config.spool_max_bytes
    a_week = WEEK_SECONDS / SECONDS
    assert stored * a_week < bound < travels * a_week, (stored, travels, a_week)
