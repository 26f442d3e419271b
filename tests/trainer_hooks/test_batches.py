"""Batches keep their order and position; what is passed over is not loaded; replays are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.examples import examples, one_in
from tests.trainer_hooks.loaders import (
    ALL,
    LOADERS,
    WORKERS,
    Numbers,
    Resuming,
    Stream,
    noise,
    plain,
    restore,
    rng,
    saved,
    seed,
    stream,
    uninterrupted,
)
from trainer_hooks.data.loader import BatchIndex
from trainer_hooks.lifecycle.data_position import YieldedBatches
from trainvitals.policy.plan import BatchWindow

# torchdata still calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.mark.parametrize("name", [*LOADERS, *one_in(3, WORKERS)])
def test_a_relaunch_in_the_middle_goes_on_with_the_same_batches_and_the_same_random_state(name):
    whole = uninterrupted(ALL[name], 3)
    num = len(whole) // 3
    ends = (1, num - 1, num, num + 1, num + num // 2, 2 * num, 3 * num - 1)
    for stop in [num + num // 2] if name in WORKERS else ends:
        seed()
        batches, _ = stream(ALL[name](), epochs=3)
        for count, _ in enumerate(batches, 1):
            noise()
            if count == stop:
                break
        state, kept = saved(batches.state_dict()), rng()
        seed(stop)  # another process
        again, _ = stream(ALL[name](), epochs=3, state=state)
        assert again.why_not_exact(state) == ""
        restore(kept)
        assert whole[stop:] == [(plain(batch), noise()) for batch in again], stop


@pytest.mark.parametrize("name", [*LOADERS, *one_in(3, WORKERS)])
def test_a_replay_hands_out_the_same_batches_with_the_same_random_state(name):
    whole = uninterrupted(ALL[name], 3)
    num = len(whole) // 3
    there, back = num + num // 2, [num // 2, num // 2 + 1]
    seed()
    loader = ALL[name]()
    batches, _ = stream(loader, epochs=3, can_rewind=True)
    seen, state, kept = [], None, None
    for batch in batches:
        seen.append((plain(batch), noise()))
        if len(seen) == back[0] and state is None:
            state, kept = batches.state_dict(), rng()
        if len(seen) == there:  # once, and once more after another step
            there += there - back[0] + 1 if there == num + num // 2 else 10**9
            torch.rand(9)
            restore(kept)
            assert batches.rewind(state) == ""
    first = whole[: num + num // 2]
    second = whole[back[0] : num + num // 2 + 1]
    assert seen == first + second + whole[back[0] :]


@pytest.mark.parametrize(
    "name",
    [n for n in LOADERS if "with state" not in n] + one_in(3, [*WORKERS][:3]),
)
def test_a_replay_from_the_beginning_is_the_loop_once_more(name):
    whole = uninterrupted(ALL[name], 2)
    seed()
    batches, _ = stream(ALL[name](), epochs=2, can_rewind=True)
    seen, gone_back = [], False
    for batch in batches:
        seen.append((plain(batch), noise()))
        if len(seen) == 4 and not gone_back:
            gone_back = True
            assert batches.rewind(None) == ""
    assert seen == whole[:4] + whole


def test_moving_on_passes_over_the_window_without_loading_it():
    torch.manual_seed(3)
    order = [b.tolist() for b in DataLoader(Numbers(), 4, shuffle=True)]
    torch.manual_seed(3)
    data = Numbers()
    batches, _ = stream(DataLoader(data, 4, shuffle=True))
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == BatchIndex(0, 1):
            torch.rand(100)  # a restore has changed the random state since
            batches.move_to(BatchIndex(0, 4))
    assert seen == order[:2] + order[4:]
    assert sorted(data.loaded) == sorted(i for batch in seen for i in batch)


def test_a_move_past_the_end_goes_on_in_the_next_epoch():
    batches, _ = stream(DataLoader(Numbers(8), 2), epochs=2)
    positions = []
    for _ in batches:
        positions.append(batches.position)
        if batches.position == BatchIndex(0, 1):
            batches.move_to(BatchIndex(0, 6))
    assert positions == [BatchIndex(0, 0), BatchIndex(0, 1), BatchIndex(1, 2), BatchIndex(1, 3)]


def test_a_window_over_the_end_of_an_epoch_is_passed_over_on_both_sides():
    for loader in (DataLoader(Numbers(8), 2), [0, 1, 2, 3], DataLoader(Stream(), 3)):
        batches, _ = stream(loader, epochs=2, windows=[BatchWindow(0, 3, 3)])
        positions = []
        for _ in batches:
            positions.append(tuple(batches.position))
        assert positions == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3)]
        assert [tuple(w)[:3] for w in map(vars_of, batches.windows)] == [(0, 3, 1), (1, 0, 2)]


def vars_of(window):
    return window.epoch, window.first_batch, window.num_batches


def test_windows_hold_in_every_replay_and_after_a_relaunch():
    batches, _ = stream(DataLoader(Numbers(24), 2), can_rewind=True)
    seen, states = [], {}
    for _ in batches:
        seen.append(batches.position.batch)
        states.setdefault(seen[-1], batches.state_dict())
        if len(seen) == 6:
            batches.skip(BatchWindow(0, 4, 3))
            assert batches.rewind(states[1]) == ""
        elif len(seen) == 10:
            batches.skip(BatchWindow(0, 8, 2))
            assert batches.rewind(states[2]) == ""
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3, 7, 8, 3, 7, 10, 11]
    again, _ = stream(DataLoader(Numbers(24), 2), state=saved(batches.state_dict()))
    assert again.windows == batches.windows
    fresh, _ = stream(DataLoader(Numbers(24), 2), state=states[1], windows=batches.windows)
    assert [fresh.position.batch for _ in fresh] == [2, 3, 7, 10, 11]


def test_any_iterable_will_do():
    batches, _ = stream(range(5), epochs=2)
    assert list(batches) == [*range(5), *range(5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_keep_their_order_after_a_move_in_a_later_epoch(workers):
    def loader():
        torch.manual_seed(7)
        keywords = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(Numbers(), 4, shuffle=True, **keywords)

    plain_one = loader()
    order = [[b.tolist() for b in plain_one] for _ in range(2)]
    batches, _ = stream(loader(), epochs=2)
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == BatchIndex(1, 1):
            batches.move_to(BatchIndex(1, 4))
    assert seen == order[0] + order[1][:2] + order[1][4:]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 2),
        DataLoader(Stream(), None),
        DataLoader(Numbers(10), None),
        [0, 2, 4, 6, 8],
    ],
    ids=["iterable", "iterable unbatched", "unbatched", "list"],
)
def test_other_loaders_move_on_as_well(loader):
    order = [str(b) for b in loader]
    batches, _ = stream(loader, epochs=2)
    seen = []
    for batch in batches:
        seen.append(str(batch))
        if batches.position == BatchIndex(0, 0):
            batches.move_to(BatchIndex(0, 3))
    assert seen == [order[0], *order[3:], *order]


def test_a_source_that_can_be_read_once_moves_on_from_where_it_is():
    batches, _ = stream(iter(range(10)))
    seen = []
    for number in batches:
        seen.append(number)
        if number == 2:
            batches.move_to(BatchIndex(0, 6))
    assert seen == [0, 1, 2, 6, 7, 8, 9]


def test_what_has_no_state_does_not_go_back_and_says_why():
    batches, _ = stream(DataLoader(Stream(), 2), can_rewind=True)
    seen, state = [], None
    for batch in batches:
        seen.append(batch.tolist())
        state = state or batches.state_dict()
        if len(seen) == 3:
            assert batches.rewind(state) == "the loader has no state_dict"
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    again, _ = stream(DataLoader(Stream(), 2), state=saved(state))
    assert again.why_not_exact(state) == "the loader has no state_dict"
    assert [b.tolist() for b in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_another_number_of_ranks_goes_on_behind_what_all_of_them_had_seen():
    batches, _ = stream(DataLoader(Numbers(24), 2), num_ranks=2)
    for _ in batches:
        if batches.position.batch == 2:
            break
    state = saved(batches.state_dict())
    again, _ = stream(DataLoader(Numbers(48), 2), num_ranks=1, state=state)
    assert again.why_not_exact(state) == "the data was shared by 2 ranks, now by 1"
    assert next(iter(again)).tolist() == [12, 13]


def test_a_state_that_is_no_plain_values_is_left_out_and_said():
    class Odd:
        def __iter__(self):
            return iter(range(4))

        def state_dict(self):
            return {"me": self}

        def load_state_dict(self, state):
            raise AssertionError(state)

    batches, _ = stream(Odd())
    next(iter(batches))
    state = saved(batches.state_dict())
    assert "plain values" in batches.why_not_exact(state)
    again, _ = stream(Odd(), state=state)
    assert list(again) == [1, 2, 3]


def test_a_loader_whose_state_cannot_be_had_or_taken_trains_on():
    class Broken:
        def __iter__(self):
            return iter(range(4))

        def state_dict(self):
            raise RuntimeError("not now")

        load_state_dict = state_dict

    batches, _ = stream(Broken())
    next(iter(batches))
    assert saved(batches.state_dict())["loader"] is None
    again, _ = stream(Broken(), state=batches.state_dict() | {"loader": {"position": 1}})
    with pytest.raises(TypeError):
        Broken.state_dict()
    assert list(again) == [1, 2, 3]


def test_a_loader_of_another_class_stays_what_it_is():
    class Moved(DataLoader):
        def __iter__(self):
            return (-batch for batch in super().__iter__())

    batches, _ = stream(Moved(Numbers(8), 2))
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == BatchIndex(0, 0):
            batches.move_to(BatchIndex(0, 2))
    assert seen == [[0, -1], [-4, -5], [-6, -7]]


def test_the_loader_is_left_as_it_was():
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    before = dict(loader.__dict__)
    batches, _ = stream(loader, epochs=2)
    assert len(list(batches)) == 12
    assert before | {"_iterator": loader._iterator} == loader.__dict__
    assert loader._iterator._index_sampler is loader.batch_sampler
    assert len(list(loader)) == 6


def test_a_window_longer_than_the_loader_and_than_all_epochs_ends_the_loop():
    batches, _ = stream(DataLoader(Numbers(8), 2), epochs=3)
    seen = []
    for _ in batches:
        seen.append(batches.position)
        if len(seen) == 2:
            batches.move_to(BatchIndex(0, 9))
        if len(seen) == 3:
            batches.move_to(BatchIndex(0, 1000))
    assert seen == [BatchIndex(0, 0), BatchIndex(0, 1), BatchIndex(2, 1)]


def test_a_source_longer_than_it_knows_of_is_not_waited_for_after_its_end():
    batches, waits = stream(iter(()))
    assert list(batches) == []
    assert waits == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_each_batch_are_known_without_loading(workers):
    seed()
    out, loader = YieldedBatches(), DataLoader(Numbers(10), 4, shuffle=True, num_workers=workers)
    batches, _ = stream(loader, epochs=2, handed_out=out.add)
    for batch in batches:
        (taken,), num_samples = out.pop_batches()
        assert (tuple(batch.tolist()), batches.position) == (taken.indices, taken.position)
        assert len(batch) == num_samples


def test_workers_that_hand_out_in_any_order_tell_no_samples_and_are_not_exact():
    out = YieldedBatches()
    loader = DataLoader(Numbers(10), 2, num_workers=2, in_order=False)
    batches, _ = stream(loader, handed_out=out.add)
    for _ in batches:
        assert [None] == [batch.indices for batch in out.pop_batches()[0]]
    assert "in_order" in batches.why_not_exact(batches.state_dict())


# ------------------------------------------------------------------------- against a simple model

ACTIONS = st.lists(
    st.tuples(
        st.integers(1, 9),  # batches until it happens
        st.sampled_from(["replay", "relaunch", "move on", "first"]),
        st.integers(0, 30),  # which state
        st.integers(0, 7),  # how many batches the window has
    ),
    max_size=6,
)


@pytest.mark.parametrize("name", ["shuffle", "own generator", "sampler with state", "list"])
@settings(max_examples=examples(15), deadline=None)
@given(actions=ACTIONS, length=st.integers(1, 7))
def test_it_is_a_list_with_a_pointer_and_a_set_of_what_is_passed_over(name, actions, length):
    make = {
        "shuffle": lambda: DataLoader(Numbers(4 * length), 4, shuffle=True),
        "own generator": lambda: DataLoader(
            Numbers(4 * length), 4, shuffle=True, generator=torch.Generator().manual_seed(4)
        ),
        "sampler with state": lambda: DataLoader(
            Numbers(4 * length), 4, sampler=Resuming(4 * length)
        ),
        "list": lambda: [[i] for i in range(length)],
    }[name]
    whole = [batch for batch, _ in uninterrupted(make, 3, noise=lambda: None)]
    seed()
    batches, _ = stream(make(), epochs=3, can_rewind=True)
    source = iter(batches)
    pointer, passed, states, begin = 0, set(), [], (0, rng())
    for wait, action, which, size in [*actions, (10**6, "", 0, 0)]:
        for _ in range(wait):
            while pointer in passed:
                pointer += 1
            batch = next(source, None)
            if batch is None:
                assert pointer >= len(whole)
                return
            assert whole[pointer] == plain(batch)
            pointer += 1
            states.append((pointer, batches.state_dict(), rng()))
        there, state, kept = states[which % len(states)]
        state = saved(state)
        onset = max(0, pointer - 1 - size // 2)
        window = BatchWindow(*divmod(onset, length), size)
        if size:
            passed |= set(range(onset, onset + size))
            batches.skip(window)
        if action == "replay":
            restore(kept)
            assert batches.rewind(state) == ""
            pointer = there
        elif action == "first":
            restore(begin[1])
            if batches.rewind(None) == "":
                pointer = begin[0]
            else:
                assert name == "sampler with state"
        elif action == "move on" and size:
            batches.move_to(BatchIndex(*divmod(onset + size, length)))
            pointer = max(pointer, onset + size)
        elif action == "relaunch":
            seed(which)
            batches, _ = stream(
                make(), epochs=3, can_rewind=True, state=state, windows=batches.windows
            )
            source = iter(batches)
            restore(kept)
            pointer, begin = there, (there, kept)
            states = [(there, state, kept)]
