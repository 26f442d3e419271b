"""The examples of the guide start the command with options and faults that exist."""

import itertools
import re
import shlex

import yaml

from tests.house.generated import COMMANDS
from tests.house.pages import GUIDES, block
from vitals_plugins.lab.drill.faults import FAULTS

(PAGE,) = [page for page in GUIDES if page.stem == "drill"]


def check_words(words: list[str]) -> None:
    assert ["vitals", "drill"] == words[:2]
    command, _ = COMMANDS["vitals drill"]
    known = {option for parameter in command.params for option in parameter.opts}
    end = words.index("--")
    assert {word for word in words[2:end] if word.startswith("--")} <= known
    assert {after for word, after in itertools.pairwise(words) if word == "--only"} <= set(FAULTS)


def test_the_workflow_and_the_job_start_the_command():
    workflow = yaml.safe_load(block(PAGE, "test: drill; workflow").body)
    commands = [step["run"] for step in workflow["jobs"]["drill"]["steps"] if "run" in step]
    check_words(shlex.split(commands[-1]))
    script = block(PAGE, "test: drill; slurm").body
    check_words(shlex.split(script.splitlines()[-1]))


def test_the_table_lists_all_faults():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)
    assert list(FAULTS) == rows
