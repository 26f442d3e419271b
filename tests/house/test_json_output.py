"""Every command with `--format json` writes what docs/output.schema.json describes."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.collector.rows import RUN, Writer
from tests.house.generated import COMMANDS, build_docs
from tests.support.cli import vitals
from tests.support.served import Served, served_in
from tests.support.story import story, through_a_folder
from tests.support.tokens import token
from trainvitals.records import RunInfo, RunStarted
from trainvitals.views import CommandRequest
from vitals_collector.api.app import CollectorSettings

json_schema = build_docs.json_schema
NOT_RUN = {
    "vitals landscape",  # a checkpoint
    "vitals repro",  # a stored bad step
    *("vitals preflight", "vitals drill"),  # ranks
    "vitals stacks",  # ranks that respond
    *("vitals checkpoints list", "vitals checkpoints verify"),  # a checkpoint
    *("vitals alerts ack", "vitals alerts silence"),  # a firing alert
}
"""Commands that need more than a stored run; their own tests run them."""

FOLDER_COMMANDS: dict[str, tuple[str, ...]] = {
    "vitals runs": ("{runs}",),
    "vitals show": (RUN, "--dir", "{runs}"),
    "vitals show --metric": ("steps.loss", RUN, "--dir", "{runs}"),
    "vitals goodput": (RUN, "--dir", "{runs}"),
    "vitals goodput --all": ("--dir", "{runs}"),
    "vitals forecast": (RUN, "--dir", "{runs}"),
    "vitals query": ("steps", RUN, "--dir", "{runs}"),
    "vitals postmortem": (RUN, "--dir", "{runs}"),
    "vitals why": (RUN, "40", "--dir", "{runs}"),
    "vitals tail": (RUN, "--dir", "{runs}", "-n", "1"),
    "vitals audit": ("{log}",),
    "vitals alerts list": ("--dir", "{runs}"),
    "vitals preflight --failed-nodes": ("--dir", "{runs}"),
    "vitals plan": ("--params", "7e9", "--tokens", "1e12", "--gpus", "64", "--gpu", "h100"),
}
DATA_COMMANDS: dict[str, tuple[str, ...]] = {
    "vitals store size": ("--data", "{data}"),
    "vitals store check": ("--data", "{data}"),
    "vitals token list": ("--data", "{data}"),
    "vitals sql": ("SELECT run_id, name, 0.5 AS half FROM runs", "--data", "{data}"),
    "vitals alerts test": ("--receivers", "{receivers}"),
    "vitals replay": (RUN, "--dir", "{runs}"),
    "vitals doctor": (),
}
SERVED_COMMANDS: dict[str, tuple[str, ...]] = {
    "vitals command": (RUN, "list"),
    "vitals alerts silence --match": ("name=GpuHot", "--reason", "test"),
    "vitals alerts silences": (),
    "vitals alerts unsilence": ("1",),
}
"""In this order, on one collector."""


def strict(node: Any) -> Any:
    """Return the schema without fields that it does not list: readers must accept new ones."""
    if isinstance(node, list):
        return [strict(part) for part in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node else {}
    return closed | {name: strict(part) for name, part in node.items()}


SCHEMA = json.loads(json_schema.text())


def check(command: str, output: str) -> None:
    """Validate what a command wrote."""
    body = json.loads(output)
    schema = {**SCHEMA["commands"][command], "$defs": strict(SCHEMA["$defs"])}
    jsonschema.Draft202012Validator(schema).validate(body)


def run(command: str, arguments: tuple[str, ...], places: dict[str, Path]) -> int:
    filled = [argument.format(**places) for argument in arguments]
    return vitals(*command.split()[1:], *filled, "--format", "json")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("json")
    with through_a_folder(story(), folder):
        pass
    log = folder / "log.csv"
    log.write_text("step,loss\n" + "".join(f"{s},{2 + 1 / (s + 1)}\n" for s in range(600)))
    data = folder / "data"
    data.mkdir(mode=0o700)
    with Served(CollectorSettings(data=data, commit_seconds=0.0)) as collector:
        with collector.client("ingest") as client:
            for raws in story().values():
                client.ingest_all(raws)
        token(collector, "ann", "read")
    receivers = folder / "receivers.toml"
    receivers.touch(0o600)
    receivers.write_text(
        '[[receivers]]\nname = "ops"\nkind = "webhook"\nurl = "http://127.0.0.1:9/"\n'
    )
    return {"runs": folder / "runs", "log": log, "receivers": receivers, "data": data}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with served_in(tmp_path_factory.mktemp("served") / "data") as collector:
        with collector.client("ingest") as client:
            client.ingest(Writer().events(RunStarted(info=RunInfo(name="tiny"))))
            with collector.client("control") as control:
                request = CommandRequest(action="checkpoint", reason="test")
                keys = collector.settings.data
                control.send_command(RUN, request, issued_by="ann", keys=keys)
        yield collector


def test_the_schema_has_each_command_with_json():
    with_json = {
        path
        for path, (command, context) in COMMANDS.items()
        if re.search(r"--format <[^>]*\bjson\b", command.get_help(context))
    }
    assert with_json == {command.partition(" --")[0] for command in json_schema.OUTPUTS}


def test_each_command_is_run_here_or_in_its_own_tests():
    assert json_schema.OUTPUTS.keys() == {
        *(*FOLDER_COMMANDS, *DATA_COMMANDS, *SERVED_COMMANDS, *NOT_RUN),
    }


def test_the_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert 1 == SCHEMA["version"]


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_a_command_on_a_folder_writes_what_the_schema_says(command, places, capsys):
    assert 0 == run(command, FOLDER_COMMANDS[command], places), capsys.readouterr().err
    check(command, capsys.readouterr().out)


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_a_number_that_is_not_finite_is_a_word(command, places, capsys):
    run(command, FOLDER_COMMANDS[command], places)
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "command", [name for name in FOLDER_COMMANDS if RUN in FOLDER_COMMANDS[name]]
)
def test_an_unknown_run_is_a_usage_error_without_output(command, places, capsys):
    arguments = tuple(a.replace(RUN, "absent") for a in FOLDER_COMMANDS[command])
    assert 2 == run(command, arguments, places)
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize("command", DATA_COMMANDS)
def test_a_command_on_other_data_writes_what_the_schema_says(command, places, capsys):
    run(command, DATA_COMMANDS[command], places)
    check(command, capsys.readouterr().out)


def test_commands_on_a_collector_write_what_the_schema_says(served, places, capsys):
    tokens = served.settings.data / "tokens.json"
    where = ("--collector", served.url, "--token-file", str(tokens))
    for command, arguments in SERVED_COMMANDS.items():
        assert 0 == run(command, (*arguments, *where), places), capsys.readouterr().err
        check(command, capsys.readouterr().out)
