"""The examples of the guide start the command with options that exist."""

import shlex

import yaml

from tests.house.generated import COMMANDS
from tests.house.pages import GUIDES, block

(PAGE,) = [page for page in GUIDES if page.stem == "preflight"]


def check_options(words: list[str]) -> None:
    assert ["vitals", "preflight"] == words[:2]
    command, _ = COMMANDS["vitals preflight"]
    known = {option for parameter in command.params for option in parameter.opts}
    end = words.index("--") if "--" in words else len(words)
    assert {word for word in words[2:end] if word.startswith("--")} <= known


def test_the_init_container_names_its_node():
    (container,) = yaml.safe_load(block(PAGE, "test: preflight; init").body)["initContainers"]
    check_options(container["command"])
    assert "VITALS_NODE" in [variable["name"] for variable in container["env"]]


def test_the_workflow_checks_before_it_trains():
    workflow = yaml.safe_load(block(PAGE, "test: preflight; workflow").body)
    commands = [step["run"] for step in workflow["jobs"]["train"]["steps"] if "run" in step]
    check_options(shlex.split(commands[1]))
    assert commands[1].endswith(f"-- {commands[2]}")
