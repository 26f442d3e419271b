"""Which samples fed which step: told of bad steps, kept of every step where asked, all bounded."""

import stat
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_hooks
from tests.support.inside import events_of
from tests.support.watched import until
from trainer_hooks.data.loader import BatchIndex, LoadedBatch
from trainer_hooks.failopen import FaultCounter
from trainer_hooks.lifecycle.data_position import MAX_IDS, MAX_STEPS, DataLedger, plain_id
from trainer_hooks.recovery.manager import CheckpointSettings
from trainer_hooks.repro.capsule import Content, read
from trainer_hooks.repro.data_writer import BadStep, DataWriter
from trainvitals.errors import UsageError
from trainvitals.io.capsules import find_capsules
from trainvitals.io.sample_ids import FOLDER, SampleFile, StepSamples, samples_of
from trainvitals.records import BatchNoted, DataWindowSkipped, Note


class Told:
    """Stands for the journal: keeps the events."""

    def __init__(self):
        self.events = []

    def event(self, event, *, step, attempt):
        self.events.append((step, attempt, event))


class Held:
    """Stands for the writing thread: keeps what it is given."""

    def __init__(self):
        self.put_things = []

    def enqueue(self, what):
        self.put_things.append(what)
        return True


def ledger(**keywords):
    told, held, faults = Told(), Held(), FaultCounter()
    made = DataLedger(told, held, faults, rank=3, lag=1)
    for name, value in keywords.items():
        setattr(made, name, value)
    return made, told, held, faults


def batch(number, indices=(1, 2), content=None):
    return LoadedBatch(BatchIndex(2, number), indices, content, None)


def line(step, ids=(1, 2, 3)):
    return StepSamples(
        step=step, attempt=9, epoch=0, first_batch=step, num_batches=1, sample_ids=ids
    )


def test_a_bad_step_tells_the_samples_of_all_its_batches():
    made, told, held, _ = ledger()
    made.record_batches(7, 1, [batch(4, (5, 6)), batch(5, (torch.tensor(8), "x"))])
    made.record_batches(8, 1, [batch(6)])
    made.process_verdict(7, bad=True)
    made.process_verdict(8, bad=False)
    expected = BatchNoted(
        epoch=2, first_batch=4, num_batches=2, sample_ids=(5, 6, 8, "x"), num_samples=4
    )
    assert [(7, 1, expected)] == told.events
    assert [] == held.put_things


def test_a_step_that_is_trained_again_tells_what_fed_it_the_last_time():
    made, told, _, _ = ledger()
    made.record_batches(7, 1, [batch(4, (5,))])
    made.record_batches(7, 2, [batch(9, (6,))])
    made.process_verdict(7, bad=True)
    assert [(2, 9, (6,))] == [(a, e.first_batch, e.sample_ids) for _, a, e in told.events]


def test_samples_that_are_not_known_are_said_to_be_unknown():
    made, told, held, _ = ledger(sample_ids=True)
    made.record_batches(7, 1, [batch(4, None)])
    made.process_verdict(7, bad=True)
    assert [((), -1)] == [(e.sample_ids, e.num_samples) for _, _, e in told.events]
    assert [] == held.put_things


def test_ids_of_the_user_s_own_are_kept_of_every_step_and_count_first():
    made, told, held, faults = ledger(sample_ids=lambda content: content["id"])
    made.record_batches(0, 1, [batch(0, (1, 2), {"id": ["a", "b"]})])
    made.record_batches(1, 1, [batch(1, (3, 4), {"id": torch.tensor([30, 40])})])
    made.record_batches(2, 1, [batch(2, (5, 6), {"no": 1})])
    made.process_verdict(0, bad=True)
    assert [("a", "b"), (30, 40)] == [one.sample_ids for one in held.put_things]
    assert [("a", "b")] == [e.sample_ids for _, _, e in told.events]
    assert {"sample_ids": 1} == faults.counts


def test_an_event_has_a_bounded_number_of_ids_and_bytes_and_tells_their_number():
    made, told, _, _ = ledger()
    made.record_batches(0, 1, [batch(0, tuple(range(5000)))])
    made.record_batches(1, 1, [batch(1, tuple("w" * 10_000 for _ in range(300)))])
    made.process_verdict(0, bad=True)
    made.process_verdict(1, bad=True)
    numbers, words = (event for _, _, event in told.events)
    assert (MAX_IDS, 5000) == (len(numbers.sample_ids), numbers.num_samples)
    assert (127, 300) == (len(words.sample_ids), words.num_samples)


def test_only_the_last_steps_are_remembered_and_fewer_hold_their_batches():
    made, told, held, _ = ledger(keep_batches=True)
    contents = []
    for step in range(200):
        content = torch.ones(3)
        contents.append(weakref.ref(content))
        made.record_batches(step, 1, [batch(step, content=content)])
    del content
    assert [198, 199] == [step for step, content in enumerate(contents) if content() is not None]
    made.process_verdict(199 - MAX_STEPS, bad=True)
    assert [] == told.events
    made.process_verdict(200 - MAX_STEPS, bad=True)
    assert [200 - MAX_STEPS] == [step for step, _, _ in told.events]
    told.events.clear()
    made.process_verdict(199, bad=True, facts={"loss": 2.0})
    (kept,) = held.put_things
    assert kept.file == "capsules/step-00000199-1-rank-3.npz" == told.events[0][2].file
    assert torch.equal(torch.ones(3), kept.content.batches[0])
    assert (2.0, 199) == (kept.content.facts["loss"], kept.content.facts["first_batch"])
    held.put_things.clear()
    del kept
    assert [198] == [step for step, content in enumerate(contents) if content() is not None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (True, 1), (torch.tensor(4), 4), (2.5, "2.5"), ("a" * 300, "a" * 256),
     (2**70, str(2**70)), ((1, 2), "(1, 2)")],
)  # fmt: skip
def test_an_id_is_a_number_or_a_word(value, expected):
    assert expected == plain_id(value)


# ---------------------------------------------------------------------------------------- files


def writer(path, **keywords):
    faults = FaultCounter()
    return DataWriter(path, rank=3, incarnation="abc", faults=faults, **keywords), faults


def test_lines_are_private_and_found_again_by_their_step(tmp_path):
    made, faults = writer(tmp_path)
    for step in (1, 11, 1):
        assert made.enqueue(line(step))
    made.close()
    (path,) = (tmp_path / FOLDER).iterdir()
    assert ("rank-3.abc.jsonl", 0o600) == (path.name, stat.S_IMODE(path.stat().st_mode))
    with path.open("ab") as file:
        file.write(b'{"step":1,"attempt":9,"ep')
    found = list(samples_of(tmp_path, 1))
    assert [(1, 3, (1, 2, 3))] * 2 == [(one.step, one.rank, one.sample_ids) for one in found]
    assert {} == faults.counts


def test_files_stay_within_their_bytes_over_starts_and_the_newest_are_kept(tmp_path):
    for start in ("a", "b"):
        file = SampleFile(tmp_path, rank=0, incarnation=start, max_bytes=2000)
        for step in range(100):
            file.append(line(step))
        file.close()
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).iterdir()]
    assert 1000 < sum(sizes) <= 2000
    kept = [step for step in range(100) if list(samples_of(tmp_path, step))]
    assert kept == list(range(kept[0], 100))


TOLD = {"reason": "loss is nan", "versions": {}, "state": {}, "applied": False, "world_size": 1}


def bad_step(step, batch):
    content = Content(facts=TOLD, batches=[batch], rng=[None])
    return BadStep(f"capsules/step-{step:08d}-1-rank-3.npz", content)


def test_capsules_are_private_whole_and_within_their_bytes(tmp_path):
    made, faults = writer(tmp_path, batch_bytes=30_000)
    for step in range(8):
        one = bad_step(step, torch.rand(2000))
        until(lambda one=one: made.enqueue(one))
    until(lambda: made.enqueue(bad_step(9, torch.rand(20_000))))
    made.close()
    files = find_capsules(tmp_path)
    assert [5, 6, 7] == [file.step for file in files]
    assert {0o600} == {stat.S_IMODE(file.path.stat().st_mode) for file in files}
    assert [(2000,)] * 3 == [tuple(read(file).batches[0].shape) for file in files]
    assert 1 == faults.counts["data.write"]


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(tmp_path, monkeypatch):
    made, faults = writer(tmp_path)
    monkeypatch.setattr(made, "_run", lambda: None)  # a disk that hangs
    taken = [made.enqueue(line(step)) for step in range(1030)]
    assert ([True] * 1024 + [False] * 6, 6) == (taken, faults.counts["data.full"])
    assert [made.enqueue(bad_step(1, torch.ones(1))) for _ in range(5)] == [True] * 4 + [False]


def test_a_disk_that_takes_nothing_is_counted(tmp_path):
    (tmp_path / FOLDER).write_text("no folder")
    made, faults = writer(tmp_path)
    made.enqueue(line(1))
    made.close()
    assert {"data.write": 1} == faults.counts
    assert not made.enqueue(line(2))


# -------------------------------------------------------------------------------- in a whole loop


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("VITALS_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("VITALS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("VITALS_RUN_ID", "01JD0000000000000000000000")
    monkeypatch.setenv("VITALS_AGENT", "off")


class Run:
    """A small training on numbered samples, poisoned where told; notes what fed each step."""

    def __init__(self, *, poisoned=(), workers=0, watch=(), **batches):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        settings = CheckpointSettings(
            directory=trainer_hooks_dir(), healthy_after=5, snapshot_every=5, save_every=5
        )
        config = dict(watch) or {"mode": "heal", "checkpoints": settings}
        self.monitor = trainer_hooks.watch(self.model, self.optimizer, **config)
        self.events = events_of(self.monitor, keep=lambda event, *, step, **_: (step, event))
        data = torch.arange(512).float()
        self.loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
        self.poisoned, self.batches = poisoned, batches
        self.fed = {}
        self.order = []
        self.rolled_back = []

    def train(self, steps, *, micro=1):
        with self.monitor as monitor:
            ids, losses = [], []
            for x in monitor.batches(self.loader, epochs=3, **self.batches):
                place = monitor.batch_position
                ids += x.int().tolist()
                self.order.append((tuple(place), x.int().tolist()))
                bad = tuple(place) in self.poisoned
                loss = self.model(x[:, None] / 512).square().mean() * (float("nan") if bad else 1)
                loss.backward()
                losses.append(loss)
                if len(losses) < micro:
                    monitor.micro(loss)
                    continue
                self.fed[monitor.step_index] = ids
                outcome = monitor.step(loss)
                ids, losses = [], []
                if outcome.decision is not None and outcome.decision.action == "rollback":
                    self.rolled_back.append(outcome.next_step)
                if len(self.fed) >= steps and monitor.step_index >= steps:
                    break
        return self

    def told(self, kind):
        return [(step, event) for step, event in self.events if isinstance(event, kind)]


def trainer_hooks_dir():
    import os
    from pathlib import Path

    return Path(os.environ["VITALS_DIR"]) / "checkpoints"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_step_tells_the_samples_that_fed_it(tmp_path, workers):
    run = Run(poisoned={(0, 5)}, workers=workers, watch={"mode": "guard"}, keep_batches=True)
    run.train(8, micro=2)
    ((step, noted),) = run.told(BatchNoted)
    assert (2, 0, 4, 2) == (step, noted.epoch, noted.first_batch, noted.num_batches)
    assert run.fed[2] == list(noted.sample_ids)
    (file,) = find_capsules(next((tmp_path / "runs").glob("0*")))
    assert noted.file == f"capsules/{file.path.name}"
    assert run.fed[2] == torch.cat(read(file).batches).int().tolist()
    assert {} == run.monitor.swallowed_errors


def test_every_step_s_ids_are_kept_where_they_are_asked_for(tmp_path):
    run = Run(watch={"mode": "guard"}, sample_ids=lambda x: [f"s{int(i)}" for i in x]).train(6)
    (folder,) = (tmp_path / "runs").glob("0*")
    for step in range(6):
        (found,) = samples_of(folder, step)
        assert tuple(f"s{i}" for i in run.fed[step]) == found.sample_ids


POISON = {(0, number) for number in range(30, 36)}


@pytest.fixture
def few_batches(monkeypatch):
    monkeypatch.setenv("VITALS_LADDER_NONFINITE_IN_A_ROW", "3")
    monkeypatch.setenv("VITALS_LADDER_MARGIN", "4")


def test_a_replay_feeds_the_same_batches_and_never_the_window_again(few_batches):
    run = Run(poisoned=POISON, after_rollback="replay").train(60)
    (back,) = run.rolled_back
    places = [place for place, _ in run.order]
    again = places.index((0, back), 33)
    assert places[:again] == [(0, number) for number in range(again)]
    assert places[again:] == [(0, n) for n in range(back, 27)] + [
        (0, 36 + n) for n in range(len(places) - again - 27 + back)
    ]
    by_place = {}
    for place, ids in run.order:
        assert by_place.setdefault(place, ids) == ids
    windows = [(e.first_batch, e.last_batch) for _, e in run.told(DataWindowSkipped)]
    assert [(27, 36)] == windows  # 30 to 32 were seen, and three on either side
    texts = [e.text for _, e in run.told(Note) if e.code == "data"]
    assert [f"data: continues exactly at batch {back} of epoch 0"] == texts


def test_moving_on_goes_on_ahead_of_the_window(few_batches):
    run = Run(poisoned=POISON, after_rollback="move_on").train(60)
    places = [place for place, _ in run.order]
    assert [(0, number) for number in range(len(places) + 6)][:30] == places[:30]
    assert places == sorted(set(places))
    assert [(0, 36)] == [places[places.index((0, 36))]]
    texts = [e.text for _, e in run.told(Note) if e.code == "data"]
    where = "data: continues at batch 36 of epoch 0 (not exact: the loop is not to replay)"
    assert [where] == texts


def test_a_relaunch_goes_on_with_the_next_batch_and_passes_over_what_was_poisoned(few_batches):
    first = Run(poisoned=POISON, after_rollback="replay").train(45)
    second = Run(poisoned=POISON, after_rollback="replay")
    begins = second.monitor.step_index
    assert begins > 0
    second.train(60)
    seen = dict(first.order)
    assert second.order[0][0] > (0, 0)
    common = [place for place, _ in second.order if place in seen]
    assert common
    assert [seen[place] for place in common] == [dict(second.order)[place] for place in common]
    assert not POISON & {place for place, _ in second.order}
    texts = [e.text for _, e in second.told(Note) if e.code == "data"]
    assert texts[0].startswith("data: continues exactly at batch ")


def test_arguments_that_cannot_be_are_refused():
    run = Run(watch={"mode": "guard"})
    with run.monitor as monitor:
        with pytest.raises(UsageError, match="after_rollback is 'rewind'"):
            monitor.batches([1], after_rollback="rewind")
        with pytest.raises(UsageError, match="sample_ids is a str"):
            monitor.batches([1], sample_ids="id")
