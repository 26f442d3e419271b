"""docs/PRIVACY.md lists what is recorded, and nothing else is; SECURITY.md names each token."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from trainvitals import records
from trainvitals.identity import Identity
from trainvitals.records import RunInfo
from trainvitals.rows import STREAMS
from vitals_collector.api.auth import ServerTokens

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "PRIVACY.md").read_text()


def listed(heading: str) -> list[str]:
    """Return the first cells of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.M)


def names_of(struct: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(struct)]


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Of a run", names_of(RunInfo)),
        ("Of every writer", names_of(Identity)),
        ("Numbers", list(STREAMS)),
        ("Events", [event.__name__ for event in typing.get_args(records.Event)]),
    ],
)
def test_what_is_recorded_is_listed(heading: str, expected: list[str]):
    assert sorted(expected) == sorted(listed(heading))


def test_what_each_token_may_is_said_of_each():
    said = re.findall(r"^\| `(\w+)` \| ", (ROOT / "SECURITY.md").read_text(), re.M)
    assert names_of(ServerTokens) == sorted(said, key=names_of(ServerTokens).index)


def test_a_run_reads_no_more_of_the_environment_than_is_said():
    source = (ROOT / "trainer_hooks" / "lifecycle" / "attributes.py").read_text()
    assert {"VITALS_NAME", "VITALS_PROJECT"} == set(re.findall(r'environ\.get\("(\w+)"', source))
    assert "sys.argv" not in source
    assert "os.environ" not in source


def test_no_address_of_another_s_service_is_in_the_code():
    """What a program contacts by itself: nothing but this machine, and what it is told."""
    addresses: dict[str, str] = {}
    for folder in ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard"):
        for path in (ROOT / folder).rglob("*.py"):
            for host in re.findall(r"https?://([a-z0-9-]+(?:\.[a-z0-9-]+)+)", path.read_text()):
                addresses[host] = str(path.relative_to(ROOT))
    told_of = ("127.0.0.1", ".example", "example.com", "example.org", "w3.org")
    assert [] == [f"{h} in {p}" for h, p in addresses.items() if not h.endswith(told_of)]
