"""Tests couple to the code no more than they did: each count may only fall."""

import pytest

from tests.house import coupling


@pytest.fixture(scope="module")
def counts():
    return coupling.counts()


@pytest.mark.parametrize("measure", coupling.MEASURES)
def test_no_folder_couples_more_than_recorded(measure, counts):
    record = coupling.recorded()[measure]
    more = {
        folder: f"{count}, recorded are {record.get(folder, 0)}"
        for folder, count in counts[measure].items()
        if count > record.get(folder, 0)
    }
    assert {} == more, "list the uses of a file: python -m tests.house.coupling FILE"


@pytest.mark.parametrize("measure", coupling.MEASURES)
def test_the_record_is_lowered_with_each_gain(measure, counts):
    fewer = {
        folder: f"{counts[measure][folder]}, recorded are {count}"
        for folder, count in coupling.recorded()[measure].items()
        if count > counts[measure][folder]
    }
    assert {} == fewer, "lower the record: python -m tests.house.coupling"


IMPORTS = """
import os
import torch
from trainvitals import units
"""
IMPORT_OF_HOOKS = "from trainer_hooks.guard import Guard\n"


def measures_of(source: str) -> list[str]:
    return [measure for measure, _ in coupling.uses(IMPORTS + source)]


@pytest.mark.parametrize(
    ("source", "measure"),
    [
        ("units._scale", "private"),
        ("def test_it(journal):\n    journal.rows()._path", "private"),
        ("journal._size = 3", "private"),
        ("from trainvitals.wire import _head_of", "private"),
        ("monkeypatch.setattr(units, 'MOST', 3)", "setattr"),
        ("monkeypatch.setattr('trainvitals.units.MOST', 3)", "setattr"),
        ("monkeypatch.setattr(units.os, 'sync', None)", "setattr"),
        ("setattr(journal, 'rows', None)", "setattr"),
        ("from tests.trainvitals.test_units import shown", "test modules"),
        ("from tests.trainvitals import test_units", "test modules"),
        ("import tests.trainvitals.test_units", "test modules"),
    ],
)
def test_a_use_is_counted_once(source, measure):
    assert [measure] == measures_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "units.scale",
        "units.__name__",
        "os._exit(0)",
        "torch._foreach_norm",
        "row._replace(step=3)",
        "def _rows(): ...\nclass Part:\n    def do(self):\n        self._size = _rows()",
        "monkeypatch.setattr(os, 'sync', None)",
        "monkeypatch.setattr('time.time', None)",
        "monkeypatch.setenv('A', 'b')",
        "from tests.trainvitals.builders import shown",
    ],
)
def test_what_binds_no_test_to_the_code_is_not_counted(source):
    assert [] == measures_of(source)


def test_private_names_of_the_hooks_have_their_own_count():
    name = min(coupling.private_names_of_rank())
    both = measures_of(f"{IMPORT_OF_HOOKS}guard.{name}")
    assert ["private", "private of hooks and policy"] == both
    assert ["private"] == measures_of(f"guard.{name}")
