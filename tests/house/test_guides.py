"""What the guides show is what there is: files that are generated, commands with their options."""

import re
import shlex
from pathlib import Path

import pytest

from tests.house.test_docs import COMMANDS

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


WITH_FILES = [page for page in GUIDES if "<!-- generated: " in page.read_text()]


@pytest.mark.parametrize("page", WITH_FILES, ids=lambda page: page.stem)
def test_a_file_that_is_shown_is_the_one_that_is_generated(page):
    marked = [b for b in blocks(page) if (b["mark"] or "").startswith("generated: ")]
    shown = {b["mark"].removeprefix("generated: "): b["body"] for b in marked}
    for path, body in shown.items():
        assert (ROOT / path).read_text() == body, f"{page.name} shows an older {path}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_command_that_is_shown_is_there_with_its_options(page):
    lines = [
        line[2:]
        for b in blocks(page)
        if b["language"] == "console"
        for line in b["body"].splitlines()
    ]
    found = [shlex.split(line) for line in lines if line.startswith("vitals ")]
    assert found
    for words in found:
        depth = max(n for n in range(len(words) + 1) if " ".join(words[:n]) in {"", *COMMANDS})
        command, _ = COMMANDS[" ".join(words[:depth])]
        known = {option for p in command.params for option in p.opts}
        unknown = [word for word in words[depth:] if word.startswith("--") and word not in known]
        assert (True, []) == (depth > 1, unknown), words


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_setting_that_is_named_is_read_somewhere(page):
    code = "".join(
        path.read_text()
        for room in ("trainvitals", "trainer_hooks", "agent", "collector", "deploy")
        for path in (ROOT / room).rglob("*.py")
    )
    assert [] == [
        name for name in set(re.findall(r"VITALS_\w+", page.read_text())) if name not in code
    ]
