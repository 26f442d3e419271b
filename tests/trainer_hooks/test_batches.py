"""Batches keep their order and their position, and a move costs no loading."""

import torch
from torch.utils.data import DataLoader, Dataset

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
