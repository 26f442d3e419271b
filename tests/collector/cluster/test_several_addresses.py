"""Who reads from several collectors asks the first that answers."""

from tests.e2e.lab import free_port
from tests.support.served import Served
from trainvitals.io.client import discover_collector
from trainvitals.io.lookup import known_collector


def test_of_several_collectors_the_first_that_answers_is_asked(served: Served) -> None:
    several = f"https://127.0.0.1:{free_port()}, {served.url}"
    address = discover_collector({"VITALS_COLLECTOR_URL": several})
    assert address is not None
    assert address.url == known_collector(several).url == served.url


def test_where_none_answers_the_first_is_named() -> None:
    first, second = (f"https://127.0.0.1:{free_port()}" for _ in range(2))
    assert known_collector(f"{first},{second}").url == first
