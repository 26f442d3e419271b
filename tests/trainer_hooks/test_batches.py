"""Batches keep their order and their position, and a move costs no loading."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_hooks.batches import Batches, Position
from trainvitals.clock import SystemClock


class Numbers(Dataset):
    def __init__(self, size=24):
        self.size, self.loaded = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


def stream(loader, epochs=1):
    waits = []
    return Batches(
        loader, epochs=epochs, clock=SystemClock(), waited=waits.append, start=Position(0, 0)
    ), waits


def test_the_order_is_the_loader_s_own():
    torch.manual_seed(3)
    plain = [b.tolist() for _ in range(2) for b in DataLoader(Numbers(), 4, shuffle=True)]
    torch.manual_seed(3)
    batches, waits = stream(DataLoader(Numbers(), 4, shuffle=True), epochs=2)
    assert plain == [b.tolist() for b in batches]
    assert len(waits) == 12


def test_moving_on_passes_over_the_window_without_loading_it():
    torch.manual_seed(3)
    order = [b.tolist() for b in DataLoader(Numbers(), 4, shuffle=True)]
    torch.manual_seed(3)
    data = Numbers()
    batches, _ = stream(DataLoader(data, 4, shuffle=True))
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == Position(0, 1):
            torch.rand(100)  # a restore has changed the random state since
            batches.move_to(Position(0, 4))
    assert seen == order[:2] + order[4:]
    assert sorted(data.loaded) == sorted(i for batch in seen for i in batch)


def test_a_move_past_the_end_goes_on_in_the_next_epoch():
    batches, _ = stream(DataLoader(Numbers(8), 2), epochs=2)
    positions = []
    for _ in batches:
        positions.append(batches.position)
        if batches.position == Position(0, 1):
            batches.move_to(Position(0, 6))
    assert positions == [Position(0, 0), Position(0, 1), Position(1, 2), Position(1, 3)]


def test_going_back_replays_the_same_batches():
    torch.manual_seed(5)
    batches, _ = stream(DataLoader(Numbers(), 4, shuffle=True))
    seen, back = [], False
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == Position(0, 3) and not back:
            back = True
            batches.move_to(Position(0, 2))
    assert seen[4:6] == seen[2:4]
    assert len(seen) == 8


def test_any_iterable_will_do():
    batches, _ = stream(range(5), epochs=2)
    assert list(batches) == [*range(5), *range(5)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_keep_their_order_after_a_move_in_a_later_epoch(workers):
    def loader():
        torch.manual_seed(7)
        keywords = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(Numbers(), 4, shuffle=True, **keywords)

    plain = loader()
    order = [[b.tolist() for b in plain] for _ in range(2)]
    batches, _ = stream(loader(), epochs=2)
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == Position(1, 1):
            batches.move_to(Position(1, 4))
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
def test_loaders_that_cannot_seek_draw_and_drop(loader):
    plain = [str(b) for b in loader]
    batches, _ = stream(loader, epochs=2)
    seen = []
    for batch in batches:
        seen.append(str(batch))
        if batches.position == Position(0, 0):
            batches.move_to(Position(0, 3))
    assert seen == [plain[0], *plain[3:], *plain]


def test_a_loader_of_another_class_stays_what_it_is():
    class Moved(DataLoader):
        def __iter__(self):
            return (-batch for batch in super().__iter__())

    batches, _ = stream(Moved(Numbers(8), 2))
    seen = []
    for batch in batches:
        seen.append(batch.tolist())
        if batches.position == Position(0, 0):
            batches.move_to(Position(0, 2))
    assert seen == [[0, -1], [-4, -5], [-6, -7]]


def test_a_window_longer_than_the_loader_and_than_all_epochs_ends_the_loop():
    batches, _ = stream(DataLoader(Numbers(8), 2), epochs=3)
    seen = []
    for _ in batches:
        seen.append(batches.position)
        if len(seen) == 2:
            batches.move_to(Position(0, 9))
        if len(seen) == 3:
            batches.move_to(Position(0, 1000))
    assert seen == [Position(0, 0), Position(0, 1), Position(2, 1)]


def test_a_source_longer_than_it_knows_of_is_not_waited_for_after_its_end():
    batches, waits = stream(iter(()))
    assert list(batches) == []
    assert waits == []
