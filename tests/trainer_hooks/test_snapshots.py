"""Snapshots in memory: what is kept, what becomes healthy, what is given up."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from tests.trainer_hooks.side_streams import SIDES
from tests.trainer_hooks.training import Training
from trainer_hooks.recovery import manager
from trainer_hooks.recovery.manager import SnapshotRing, is_proven, num_slots
from trainer_hooks.recovery.memory import host_memory_left
from trainer_hooks.tensors.copying import CopyPlan
from trainvitals.errors import CheckpointError, ConfigError

_side = [SIDES["on the host"]]


def pytest_generate_tests(metafunc):
    """Run each test with every one of them."""
    metafunc.fixturenames.append("side")
    metafunc.parametrize("side", SIDES, indirect=True)


@pytest.fixture
def side(request):
    _side[0] = SIDES[request.param]
    yield
    _side[0] = SIDES["on the host"]


def make_ring(training, *, slots=2, interval=4, healthy_after=3):
    return SnapshotRing(
        training.state,
        num_slots=slots,
        interval=interval,
        healthy_after=healthy_after,
        side=_side[0](),
    )


def started(training, **options):
    ring = make_ring(training, **options)
    ring.capture(0, 1, {"batch": 0}, trusted=True)
    ring.commit(0, True)
    return ring


def test_reserved_memory_takes_a_state_that_grows_and_gives_it_back_whole():
    training = Training()
    ring = make_ring(training)
    ring.reserve()  # before the optimizer has any state
    training.run(3)
    before = training.bits()
    ring.capture(3, 1, trusted=True)
    ring.commit(3, True)
    training.run(2)
    ring.restore(ring.newest_committed().id)
    assert before == training.bits()


def states(ring):
    return {ref.step: ref.state for ref in ring.refs()}


def test_the_state_before_the_first_step_is_healthy_as_soon_as_it_is_committed():
    training = Training()
    ring = make_ring(training)
    ring.capture(0, 1, trusted=True)
    assert {0: "candidate"} == states(ring)
    ring.commit(0, True)
    assert {0: "healthy"} == states(ring)


def test_a_snapshot_becomes_verified_by_the_ranks_and_healthy_by_the_steps_after_it():
    training = Training()
    ring = started(training)
    ring.capture(4, 1)
    ring.promote(9, -1)
    assert {0: "healthy", 4: "candidate"} == states(ring)
    ring.commit(4, True)
    ring.promote(5, -1)
    assert {0: "healthy", 4: "verified"} == states(ring)
    assert [4] == [s.step for s in ring.promote(6, -1)]
    assert {0: "healthy", 4: "healthy"} == states(ring)


@pytest.mark.parametrize(
    ("current", "last_unhealthy", "expected"),
    [(6, -1, True), (5, -1, False), (6, 3, True), (6, 4, False), (7, 4, True), (8, 6, False)],
)
def test_a_state_is_proven_by_three_healthy_steps_in_a_row_after_it(
    current, last_unhealthy, expected
):
    assert expected == is_proven(
        4, healthy_after=3, current_step=current, last_unhealthy_step=last_unhealthy
    )


def test_a_snapshot_that_a_rank_refuses_is_dropped_as_bad():
    training = Training()
    ring = started(training)
    training.run(1)
    training.state.tensors()["model.0.weight"][0, 0] = float("nan")
    assert 1.0 == ring.capture(4, 1).item()
    ring.commit(4, False)
    assert {0: "healthy"} == states(ring)
    assert "bad" == ring.take_changes()[-1].state
    assert [] == ring.take_changes()


def test_a_restore_is_exact_hands_back_the_meta_and_drops_what_is_newer():
    training = Training()
    ring = started(training, slots=3)
    training.run(4)
    ring.capture(4, 1, {"batch": 4})
    ring.commit(4, True)
    before, losses = training.bits(), training.run(4)
    ring.capture(8, 1, {"batch": 8})
    restored = ring.restore("memory-00000004-1")
    assert (4, 1, {"batch": 4}, True) == (
        restored.step,
        restored.attempt,
        restored.meta,
        restored.exact,
    )
    assert before == training.bits()
    assert [0, 4] == [ref.step for ref in ring.refs()]
    ring.commit(8, True)  # its flags were still under way
    assert [0, 4] == [ref.step for ref in ring.refs()]
    assert losses == training.run(4)


def test_the_same_snapshot_can_be_restored_again_and_again():
    training = Training()
    ring = started(training)
    first = training.run(4)
    for _ in range(2):
        ring.restore("memory-00000000-1")
        assert first == training.run(4)


def test_after_a_restore_the_next_snapshot_is_due_an_interval_later():
    ring = started(Training())
    assert [False, True] == [ring.due(3), ring.due(4)]
    ring.capture(4, 1)
    ring.commit(4, True)
    assert [False, True] == [ring.due(7), ring.due(8)]
    ring.restore("memory-00000000-1")
    assert [False, True] == [ring.due(3), ring.due(4)]


def test_what_took_a_tensor_s_place_is_what_the_next_snapshot_holds():
    """Each slot knows how to copy what it was filled with last; here all of that has moved."""
    training = Training("adamw")
    ring = started(training, slots=2)
    training.run(2)
    for step in (1, 2, 3, 4):
        ring.capture(step, 1)
        ring.before_update()
        ring.commit(step, True)
    with torch.no_grad():
        weight = training.model[0].weight
        weight.data = weight + 1.0
        training.model[1].running_mean = torch.full((8,), 3.0)
        state = training.optimizer.state[weight]
        state["exp_avg"] = state["exp_avg"] * 2
        training.model[0].mask = torch.zeros(3, 3)
    expected = {k: t.clone() for k, t in training.state.tensors().items()}
    for step in (5, 6):
        ring.capture(step, 1)
        ring.commit(step, True)
        copied = ring.newest_committed().tensors()
        assert expected.keys() == copied.keys()
        assert all(torch.equal(t, copied[k]) for k, t in expected.items())


def test_how_to_copy_is_worked_out_once(monkeypatch):
    training = Training("adamw")
    training.run(1)
    made = []
    monkeypatch.setattr(manager, "CopyPlan", lambda pairs: made.append(pairs) or CopyPlan(pairs))
    ring = make_ring(training)
    for step in range(8):
        training.run(1)
        ring.capture(step, 1)
        ring.commit(step, True)
    assert len(made) == (2 if _side[0]() is None else 0)


@pytest.mark.parametrize("name", ["memory-00000009-1", "../../etc", ""])
def test_a_snapshot_that_is_not_there_is_refused_with_those_that_are(name):
    ring = started(Training())
    with pytest.raises(CheckpointError, match="in memory are: memory-00000000-1"):
        ring.restore(name)


def test_a_candidate_is_not_restored():
    ring = started(Training())
    ring.capture(4, 1)
    with pytest.raises(CheckpointError, match="not in memory"):
        ring.restore("memory-00000004-1")


def test_a_held_snapshot_is_not_overwritten_and_the_rank_that_has_no_room_says_so():
    training = Training()
    ring = started(training)
    snapshot = ring.newest_committed()
    ring.capture(4, 1)
    ring.commit(4, True)
    ring.promote(6, -1)
    held = ring.refs()[0].id
    assert held == snapshot.id
    before = {k: t.clone() for k, t in snapshot.tensors().items()}
    snapshot.hold()
    training.run(3)
    assert 1.0 == ring.capture(8, 1).item()
    assert held not in [ref.id for ref in ring.refs()]
    assert all(torch.equal(t, before[k]) for k, t in snapshot.tensors().items())
    ring.commit(8, False)
    assert (1, {4: "healthy"}) == (ring.num_missed, states(ring))
    snapshot.release()
    assert 0.0 == ring.capture(9, 1).item()


class Broken:
    def state_dict(self):
        raise OSError("the loader's worker died")

    def load_state_dict(self, state_dict):
        pass


def test_state_that_cannot_be_read_becomes_a_flag_never_an_exception():
    training = Training(extra=lambda model: {"data": Broken()})
    ring = make_ring(training)
    assert 1.0 == ring.capture(0, 1).item()
    ring.commit(0, False)
    assert "the loader's worker died" in ring.take_changes()[-1].detail


@pytest.mark.parametrize(
    ("healthy_after", "lag", "interval", "expected"),
    [(20, 1, 31, 2), (20, 1, 21, 3), (20, 1, 100, 2), (20, 1, 5, 8), (0, 0, 1, 2)],
)
def test_there_are_slots_enough_that_a_healthy_one_is_among_them(
    healthy_after, lag, interval, expected
):
    assert expected == num_slots(healthy_after=healthy_after, lag=lag, interval=interval)


@pytest.mark.parametrize("interval", [31, 12, 5])
def test_a_fault_reported_in_time_finds_a_snapshot_before_it_at_every_phase(interval):
    healthy_after, lag = 20, 1
    slots = num_slots(healthy_after=healthy_after, lag=lag, interval=interval)
    ring = started(Training(), slots=slots, interval=interval, healthy_after=healthy_after)
    for step in range(1, 200):
        if ring.due(step):
            ring.capture(step, 1)
        ring.commit(step - lag, True)
        ring.promote(step - 1, -1)
        healthy = [ref.step for ref in ring.refs() if ref.state == "healthy"]
        # Of the faults that may be reported now, the earliest onset needs the oldest snapshot.
        assert min(healthy) <= max(0, step - healthy_after // 2 - healthy_after), step


def test_one_slot_is_refused():
    with pytest.raises(ConfigError, match="at least 2 slots"):
        make_ring(Training(), slots=1)


# ------------------------------------------------------------------------------------ memory


def test_the_bytes_asked_for_before_the_first_step_are_those_in_use_later():
    training = Training("adamw")
    ring = started(training)
    expected = ring.bytes()
    training.run(1)
    steps = sum(t.nbytes for k, t in training.state.tensors().items() if k.endswith(".step"))
    assert expected + 2 * steps == ring.bytes()


def test_a_ring_above_half_of_what_is_left_is_refused_with_a_way_out():
    ring = make_ring(Training())
    ring.check_memory(free=2 * ring.bytes())
    with pytest.raises(CheckpointError, match="half of the memory left") as caught:
        ring.check_memory(free=2 * ring.bytes() - 2)
    assert "interval" in caught.value.hint
    with pytest.raises(CheckpointError, match="2 ranks"):
        ring.check_memory(free=2 * ring.bytes(), ranks_on_node=2)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_left_is_that_of_the_tightest_group_above(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   9000 kB\n",
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": "5000000\n",
            "sys/fs/cgroup/job/memory.current": "2000000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 500000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "2000000\n",
        },
    )
    assert 3_500_000 == host_memory_left(tmp_path)


def test_memory_left_is_read_from_the_old_kind_of_group_too(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000",
        },
    )
    assert 0 == host_memory_left(tmp_path)


def test_memory_left_is_unknown_where_nothing_says_it(tmp_path):
    assert host_memory_left(tmp_path) is None


# ------------------------------------------------------------------------- I6, by exploration


class Life(RuleBasedStateMachine):
    """Any order of events; the newest healthy snapshot is never lost and always restores."""

    @initialize(
        slots=st.integers(2, 4),
        interval=st.integers(1, 6),
        after=st.integers(0, 8),
        side=st.sampled_from([*SIDES]),
    )
    def begin(self, slots, interval, after, side):
        self.weight = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(self.weight.parameters(), lr=0.1)
        state = type(Training().state)(self.weight, [optimizer])
        self.ring = SnapshotRing(
            state,
            num_slots=slots,
            interval=interval,
            healthy_after=after,
            side=SIDES[side](),
        )
        self.step, self.bad, self.attempt, self.pending = 0, -1, 1, []
        self.take(trusted=True)
        self.ring.commit(0, True)

    def take(self, trusted=False):
        with torch.no_grad():
            self.weight.weight.fill_(self.step + self.attempt / 100)
        self.ring.capture(self.step, self.attempt, trusted=trusted)
        self.best = max(self.healthy(), default=(0, 0))

    def healthy(self):
        return [(r.step, r.attempt) for r in self.ring.refs() if r.state == "healthy"]

    @rule(ok=st.booleans(), lag=st.integers(0, 2), well=st.booleans())
    def train(self, ok, lag, well):
        if not well:
            self.bad = self.step
        self.step += 1
        if self.ring.due(self.step):
            self.take()
            self.pending.append((self.step, ok))
        if lag == 0 and self.pending:
            self.ring.commit(*self.pending.pop(0))
        before = max(self.healthy())
        self.ring.promote(self.step - 1, self.bad)
        assert max(self.healthy()) >= before

    @rule()
    def roll_back(self):
        newest = self.ring.newest_healthy()
        restored = self.ring.restore(newest.id)
        assert pytest.approx(restored.step + restored.attempt / 100) == self.weight.weight.item()
        self.step, self.bad, self.pending = restored.step, -1, []
        self.attempt += 1

    @rule()
    def hold_and_release_one(self):
        entry = self.ring.newest_healthy()
        entry.hold()
        entry.release()

    @invariant()
    def a_healthy_one_is_there(self):
        if hasattr(self, "ring"):
            assert self.healthy()
            assert len(self.ring.refs()) <= self.ring.num_slots


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
