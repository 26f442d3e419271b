"""The examples of the guide start the command with options that exist."""

import shlex
import subprocess

import pytest
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


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [(0, "ok", 0), (1, "fail", 1), (1, "", 0), (2, "", 0), (3, "fail", 0), (127, "", 0)],
)
def test_the_prolog_fails_only_for_a_fault_of_the_node(tmp_path, code, output, expected):
    for name, body in (("vitals", f"echo -n {output}; exit {code}"), ("flock", 'shift 5; "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = block(PAGE, "test: preflight; prolog").body
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/bash", "-c", script], env=environ, check=False)
    assert expected == done.returncode
    words = script.replace("\\\n", " ").split("vitals-preflight.lock")[1].split(")")[0]
    check_options(shlex.split(words))
