import random

from vitals_agent.backoff import BacklogRateLimit, Backoff


class Always(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


def test_delays_double_up_to_a_bound_and_success_forgets_them():
    backoff = Backoff(first_seconds=1.0, max_seconds=8.0, rng=Always())
    delays, now = [], 0.0
    for _ in range(6):
        assert backoff.due(now)
        backoff.record_failure(now)
        wait = next(t for t in range(100) if backoff.due(now + t))
        delays.append(wait)
        now += wait
    assert [1, 2, 4, 8, 8, 8] == delays
    backoff.record_success()
    assert backoff.due(0.0)


def test_the_delay_is_spread_over_the_whole_range():
    rng = random.Random(7)
    dues = []
    for _ in range(200):
        backoff = Backoff(first_seconds=10.0, max_seconds=10.0, rng=rng)
        backoff.record_failure(0.0)
        dues.append(next(t for t in range(101) if backoff.due(t / 10)))
    assert min(dues) < 10 < 90 < max(dues)


def test_what_the_other_side_asks_for_is_waited_for_and_spread():
    dues = []
    for seed in range(200):
        backoff = Backoff(first_seconds=1.0, rng=random.Random(seed))
        backoff.record_failure(100.0, retry_after=5.0)
        dues.append(next(t for t in range(200) if backoff.due(100.0 + t / 10)))
    assert 50 <= min(dues) < 60 < 90 < max(dues) <= 100


def test_a_pace_grows_by_steps_and_is_halved_by_a_failure_or_a_slow_answer():
    pace = BacklogRateLimit(slowest=100.0, fastest=1000.0)
    assert 1000.0 == pace.bytes_per_second
    pace.failed()
    assert 500.0 == pace.bytes_per_second
    pace.sent(1, 0.1, 0.0)
    assert 600.0 == pace.bytes_per_second
    pace.sent(1, 1.1, 0.0)
    assert 300.0 == pace.bytes_per_second
    for _ in range(9):
        pace.failed()
    assert 100.0 == pace.bytes_per_second
    for _ in range(20):
        pace.sent(1, 0.1, 0.0)
    assert 1000.0 == pace.bytes_per_second


def test_a_pace_lets_its_bytes_through_each_second_and_no_more():
    pace = BacklogRateLimit(slowest=100.0, fastest=100.0)
    sent_at = []
    for tenth in range(100):
        now = 50.0 + tenth / 10
        while pace.due(now):
            pace.sent(50, 0.0, now)
            sent_at.append(now)
    assert [4, 2, 2, 2] == [sum(s <= now < s + 1 for now in sent_at) for s in (50, 51, 52, 53)]
