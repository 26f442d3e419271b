"""Small makers of what the agent's tests need."""

import time

from trainvitals.identity import Identity, new_incarnation

RUN = "01JD0000000000000000000000"
OTHER_RUN = "01JD0000000000000000000001"
NODE = "node-a"


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000_000_000_000

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns


def identity(*, run_id: str = RUN, rank: int = 0, pid: int = 0, node: str = NODE) -> Identity:
    return Identity(
        run_id=run_id,
        incarnation=new_incarnation(),
        source=f"rank:{rank}",
        node=node,
        pid=pid,
        rank=rank,
        local_rank=rank,
        world_size=2,
        started_unix_ns=time.time_ns(),
        started_monotonic_ns=time.monotonic_ns(),
    )
