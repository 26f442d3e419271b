import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainvitals.errors import UsageError
from trainvitals.identity import (
    Identity,
    Source,
    check_incarnation,
    check_run_id,
    new_attempt_id,
    new_incarnation,
    new_run_id,
    safe_node_id,
)

TIMES = st.integers(0, (1 << 48) * 1_000_000 - 1)


@given(time_unix_ns=TIMES)
def test_a_new_run_id_is_well_formed(time_unix_ns: int) -> None:
    assert 26 == len(check_run_id(new_run_id(time_unix_ns)))


@given(earlier=TIMES, later=TIMES)
def test_run_ids_sort_by_time(earlier: int, later: int) -> None:
    if earlier // 1_000_000 < later // 1_000_000:
        assert new_run_id(earlier) < new_run_id(later)


def test_two_runs_of_the_same_moment_differ() -> None:
    assert 1000 == len({new_run_id(5) for _ in range(1000)})


@given(text=st.text(max_size=40))
def test_nothing_else_passes_as_a_run_id(text: str) -> None:
    try:
        assert text == check_run_id(text)
    except UsageError:
        return
    assert text.isascii() and text.isalnum() and len(text) == 26


@pytest.mark.parametrize("text", ["", "../x", "01ARZ3NDEKTSV4RRFFQ69G5FAV\n", "8" * 26, "I" * 26])
def test_dangerous_run_ids_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a ULID"):
        check_run_id(text)


def test_incarnations_are_checked() -> None:
    assert 16 == len(check_incarnation(new_incarnation()))
    for text in ("", "0" * 15, "0" * 16 + "\n", "G" * 16):
        with pytest.raises(UsageError, match="16 hexadecimal"):
            check_incarnation(text)


@given(time_unix_ns=st.integers(0, 4_000_000_000_000_000_000))
def test_an_attempt_id_is_exact_in_a_float(time_unix_ns: int) -> None:
    attempt = new_attempt_id(time_unix_ns)
    assert attempt == int(float(attempt))
    assert attempt // 1000 == time_unix_ns // 1_000_000


@pytest.mark.parametrize("text", ["rank:0", "rank:1023", "gpu:GPU-1a:2b", "node:a.b-c"])
def test_a_source_comes_back_as_written(text: str) -> None:
    assert text == str(Source.parse(text))


@pytest.mark.parametrize(
    "text", ["", "rank", "rank:", "rank:x", "rank:-1", "disk:0", "gpu:a/b", "node: a", "rank:0\n"]
)
def test_a_malformed_source_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Source.parse(text)


def test_only_a_rank_has_a_rank() -> None:
    assert 7 == Source.parse("rank:7").rank
    assert Source.parse("node:7").rank is None


def test_an_identity_checks_everything_that_becomes_a_key(identity: Identity) -> None:
    import msgspec

    assert identity is identity.check()
    for change in ({"run_id": "x"}, {"incarnation": "x"}, {"source": "x"}, {"node": "a/b"}):
        with pytest.raises(UsageError):
            msgspec.structs.replace(identity, **change).check()


@given(hostname=st.text(max_size=200))
def test_any_host_name_becomes_a_usable_node_id(hostname: str) -> None:
    Identity("01ARZ3NDEKTSV4RRFFQ69G5FAV", "0" * 16, "rank:0", safe_node_id(hostname)).check()
    Source.parse(f"node:{safe_node_id(hostname)}")


def test_a_world_that_no_job_has_is_refused() -> None:
    identity = Identity("01JD0000000000000000000000", "0123456789abcdef", "rank:0", "node-a")
    assert identity == identity.check()
    with pytest.raises(UsageError, match="world_size is 2147483648"):
        msgspec.structs.replace(identity, world_size=1 << 31).check()
