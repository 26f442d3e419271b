import random

from vitals_agent.backoff import Backoff


class Always(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


def test_delays_double_up_to_a_bound_and_success_forgets_them():
    backoff = Backoff(first_seconds=1.0, max_seconds=8.0, rng=Always())
    delays, now = [], 0.0
    for _ in range(6):
        assert backoff.due(now)
        backoff.failed(now)
        wait = next(t for t in range(100) if backoff.due(now + t))
        delays.append(wait)
        now += wait
    assert [1, 2, 4, 8, 8, 8] == delays
    backoff.succeeded()
    assert backoff.due(0.0)


def test_the_delay_is_spread_over_the_whole_range():
    rng = random.Random(7)
    dues = []
    for _ in range(200):
        backoff = Backoff(first_seconds=10.0, max_seconds=10.0, rng=rng)
        backoff.failed(0.0)
        dues.append(next(t for t in range(101) if backoff.due(t / 10)))
    assert min(dues) < 10 < 90 < max(dues)
