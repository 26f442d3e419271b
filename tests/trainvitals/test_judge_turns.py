"""Optimizers that take turns: one judge, each with its own reference, rows and accepted levels."""

import msgspec
import numpy as np

from trainvitals.policy import Judge, JudgeConfig, Proposal, StepInputs
from trainvitals.policy.state import DeviceRule, DurablePolicyState
from trainvitals.records import StepRecord

D, G = 1, 2
NAN = float("nan")


class Played:
    """Two players in turns; the discriminator's norm is a thousand times the generator's."""

    def __init__(self, *, mode="guard", judge=None):
        self.judge = judge or Judge(JudgeConfig(loss_kind="adversarial"), mode)
        self.noise = np.random.default_rng(0)
        self.device = {D: DeviceRule(), G: DeviceRule()}
        self.step = 0
        self.decisions = []

    def play(self, turn, *, norm=None, loss=None, command=None):
        usual = 100.0 if turn == D else 0.1
        record = StepRecord(
            step=self.step,
            attempt=1,
            loss=1.0 if loss is None else loss,
            loss_max=1.0 if loss is None else loss,
            grad_norm=usual * self.noise.lognormal(0, 0.2) if norm is None else norm,
            nonfinite_ranks=(0,) if loss is not None and loss != loss else (),
            clips=True,
            turn=turn,
        )
        limits = self.judge.limits(turn)
        row = self.judge.max_row(turn)
        acts = self.judge.mode != "observe"
        record, self.device[turn] = self.device[turn].judge(record, limits, row, acts=acts)
        judgement = self.judge.judge(record, StepInputs(self.step, command=command))
        self.step += 1
        if judgement.decision is not None:
            self.decisions.append(judgement.decision)
        return record

    def rounds(self, num):
        for _ in range(num):
            self.play(D)
            self.play(G)


def test_each_player_has_limits_of_its_own():
    played = Played()
    played.rounds(300)
    assert played.decisions == []
    of_d, of_g = played.judge.limits(D).grad_norm, played.judge.limits(G).grad_norm
    assert of_d > 5000 > 100 > of_g > 5


def test_each_player_has_rows_of_its_own():
    played = Played()
    played.rounds(300)
    withheld = []
    for _ in range(3):
        played.play(D)
        withheld.append(played.play(G, norm=900.0).withheld)  # far below the other's limit
    played.rounds(20)
    assert withheld == [True, True, False]
    assert [decision.action for decision in played.decisions] == ["skip_step"] * 2


def test_steps_that_are_not_finite_add_up_over_the_other_s_sound_ones():
    played = Played()
    played.rounds(50)
    for _ in range(JudgeConfig().ladder.max_skips_in_a_row + 1):
        played.play(D, loss=NAN)
        played.play(G)
    assert played.decisions[-1].action == "halt"


def accepted() -> Played:
    """Return two players; an operator accepted a norm of the discriminator."""
    played = Played()
    played.rounds(300)
    played.play(D, norm=90_000.0)
    accept = Proposal(number=7, action="accept", argument=600.0)
    played.play(D, command=accept)
    return played


def test_a_level_that_one_was_granted_is_not_granted_to_the_other():
    played = accepted()
    assert played.decisions[-1].rule == "operator_accepted"
    assert played.judge.limits(D).grad_norm >= 90_000
    assert played.judge.limits(G).grad_norm < 100


def test_what_was_granted_and_learnt_outlives_a_restart():
    played = accepted()
    facts = msgspec.json.decode(msgspec.json.encode(played.judge.facts), type=DurablePolicyState)
    state = msgspec.json.decode(msgspec.json.encode(played.judge.detector_state()))
    again = Judge(JudgeConfig(loss_kind="adversarial"), "guard", facts=facts)
    again.rolled_back(detector_state=state, attempt=2, step=played.step)
    for turn in (D, G):
        assert again.limits(turn) == played.judge.limits(turn)


def test_the_whole_state_goes_on_alike():
    first = Played()
    first.rounds(200)
    first.play(D, norm=90_000.0)
    other = Judge(JudgeConfig(loss_kind="adversarial"), "guard")
    other.load_state_dict(msgspec.json.decode(msgspec.json.encode(first.judge.state_dict())))
    second = Played(judge=other)
    second.step, second.device = first.step, dict(first.device)
    second.noise.bit_generator.state = first.noise.bit_generator.state
    second.decisions = list(first.decisions)
    for played in (first, second):
        played.play(G)
        played.play(D, norm=90_000.0)
        played.rounds(40)
    assert first.decisions == second.decisions != []
    assert first.judge.digest() == second.judge.digest()


def test_what_is_asked_before_a_turn_begins_changes_nothing():
    """Rank 0 alone asks for limits: its judge must stay as those of the other ranks are."""
    asking, silent = Played(), Played()
    for played in (asking, silent):
        played.play(D)
    before = asking.judge.state_dict()
    asking.judge.limits(G)
    asking.judge.max_row(G)
    assert asking.judge.state_dict() == before == silent.judge.state_dict()
