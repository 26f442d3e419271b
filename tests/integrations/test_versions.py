"""The versions that are named are those that were trained with."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.integrations.declared import FRAMEWORKS

ROOT = Path(__file__).parents[2]
NAMED = sorted({f.distribution for f in FRAMEWORKS if f.distribution})


def pins(name):
    lines = (ROOT / "tests" / "integrations" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def numbers(text):
    return [int(part) for part in re.findall(r"\d+", text)]


@pytest.mark.parametrize("distribution", NAMED)
def test_the_extras_ask_for_the_oldest_that_was_trained_with(distribution):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {
        requirement.partition(">=")[2]
        for extra in project["optional-dependencies"].values()
        for requirement in extra
        if requirement.startswith(f"{distribution}>=")
    }
    (oldest,) = asked
    assert numbers(pins("oldest")[distribution])[: len(numbers(oldest))] == numbers(oldest)


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if f.package], ids=lambda f: f.title)
def test_an_adapter_asks_for_the_oldest_that_was_trained_with(framework):
    adapter = ROOT / "trainer_hooks" / "integrations" / f"{framework.module}.py"
    (asked,) = set(re.findall(r'"(\d+\.[\d.]+)"', adapter.read_text()))
    assert numbers(pins("oldest")[framework.distribution])[: len(numbers(asked))] == numbers(asked)
