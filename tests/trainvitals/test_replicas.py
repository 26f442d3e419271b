"""Which replica is wrong, and what is done about it: votes, replays and the ladder."""

import pytest

from tests.trainvitals.policy_run import Run
from trainvitals.detect.replicas import FingerprintVote, find_farthest_rank, vote_on_fingerprints
from trainvitals.policy import CheckpointRef

ALL_OF_4 = [range(4)]
PAIRS = [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("words", "groups", "expected", "rank"),
    [
        ((5, 5, 5, 5), ALL_OF_4, FingerprintVote(), -1),
        ((5, 5, 6, 5), ALL_OF_4, FingerprintVote((2,), (2,)), 2),
        ((6, 5, 5, 5), ALL_OF_4, FingerprintVote((0,), (0,)), 0),
        ((5, 6, 7, 5), ALL_OF_4, FingerprintVote((1, 2), (0, 1, 2, 3)), -1),
        ((5, 6, 6, 5), ALL_OF_4, FingerprintVote((1, 2), (0, 1, 2, 3)), -1),
        ((5, 6, 0, 0), ALL_OF_4, FingerprintVote((1,), (0, 1)), -1),
        ((5, 6, 5, 6), PAIRS, FingerprintVote(), -1),
        ((5, 6, 5, 7), PAIRS, FingerprintVote((3,), (1, 3)), -1),
        ((0, 0, 0, 0), ALL_OF_4, FingerprintVote(), -1),
        ((b"a", b"a", b"b", None), ALL_OF_4, FingerprintVote((2,), (2,)), 2),
    ],
)
def test_the_minority_is_wrong_and_without_a_majority_nobody_is_named(
    words, groups, expected, rank
):
    found = vote_on_fingerprints(words, groups)
    assert (expected, rank) == (found, found.rank)


@pytest.mark.parametrize(
    ("distances", "rank"),
    [
        ({0: 0.0, 1: 0.5}, 1),
        ({0: 0.5, 1: 0.1}, 0),
        ({0: 0.5, 1: 0.3}, -1),
        ({0: 0.0, 1: 0.0}, -1),
        ({0: 1.0, 1: float("inf")}, 1),
        ({1: 2.0}, -1),
    ],
)
def test_of_two_the_one_clearly_further_from_the_replay_is_wrong(distances, rank):
    assert rank == find_farthest_rank(distances)


def test_replicas_that_differ_go_back_and_all_batches_are_trained_again() -> None:
    (decision,) = Run().feed("ok", "apart")
    assert ("rollback", "replica_corrupted", 150, 0, 3, 1.0) == (
        decision.action, decision.rule, decision.rollback_to_step, decision.skip_batches,
        decision.rank, decision.lr_factor,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("apart", "apart", "again 50 steps after a rollback, on rank 3: a persistent fault"),
        ("apart", "either", "two replicas cannot tell"),
        ("either", "apart", "a persistent fault"),
    ],
)
def test_what_is_there_again_on_the_same_rank_halts(first, second, words) -> None:
    run = Run()
    run.feed(first)
    run.restored(150)
    decision = run.feed(*["ok"] * 49, second)[-1]
    assert ("halt", "replica_corrupted") == (decision.action, decision.rule)
    assert words in decision.reason
    assert words in run.state.facts.halted


def test_once_the_budget_s_window_is_over_it_is_a_first_time_again() -> None:
    run = Run(budget_window=100)
    run.feed("apart")
    run.restored(150)
    assert ["rollback"] == [d.action for d in run.feed(*["ok"] * 120, "apart")]


def test_what_comes_again_bit_for_bit_is_told_and_neither_goes_back_nor_halts() -> None:
    run = Run()
    run.feed("apart")
    run.restored(150)
    assert [] == run.feed(*["ok"] * 49, "again", *["ok"] * 49, "again")
    assert [("replica_corrupted", 199, 199), ("replica_corrupted", 249, 199)] == [
        (f.kind, f.step, f.onset_step) for f in run.told
    ]
    assert "bit for bit" in run.told[0].reason
    assert run.state.last_unhealthy_step == 249


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "guard"}, "mode 'guard' does not roll back"),
        ({"mode": "observe"}, "mode 'observe' does not roll back"),
        (
            {"refs": (CheckpointRef(id="late", step=195, state="verified"),)},
            "the only checkpoint is not healthy",
        ),
    ],
)
def test_where_nothing_can_go_back_it_is_told_with_what_is_no_more_saved(options, words) -> None:
    run = Run(**options)
    assert [] == run.feed("apart")
    (finding,) = run.told
    assert ("replica_corrupted", 3) == (finding.kind, finding.rank)
    assert words in finding.reason
    assert "no snapshot or checkpoint is made" in finding.reason


def test_settings_that_differ_are_told_and_what_follows_from_them_is_not() -> None:
    run = Run()
    assert [] == run.feed("settings", "apart", "ok", "settings")
    assert [("settings_differ", 200, 200), ("settings_differ", 203, 200)] == [
        (f.kind, f.step, f.onset_step) for f in run.told
    ]
    assert [3, 3] == [f.rank for f in run.told]
    assert run.state.last_unhealthy_step == 201


def test_what_settings_left_behind_is_told_once_they_agree_again() -> None:
    run = Run()
    assert [] == run.feed("settings", *["ok"] * 120, "apart")
    assert ["settings_differ", "replica_corrupted"] == [f.kind for f in run.told]
    assert "other settings from step 200 on" in run.told[1].reason


def test_a_skip_of_the_same_step_is_part_of_the_rollback_s_entry() -> None:
    run = Run()
    run.feed("ok", "nan")
    assert [1] == [d.ledger_seq for d in run.ledger]
    assert ["rollback"] == [d.action for d in run.feed("apart")]
    assert [1, 2] == [d.ledger_seq for d in run.ledger]
