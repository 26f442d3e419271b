from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from trainvitals.config import load_settings
from trainvitals.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    listen: str = "127.0.0.1:0"
    max_bytes: int = 1000
    ratio: float = 0.5
    quiet: bool = False
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    data: Path | None = None
    limit: int | None = 3
    mode: Literal["fast", "slow"] = "fast"

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes is {self.max_bytes}; it must be positive", hint="more")


@dataclass(frozen=True, kw_only=True)
class Demanding:
    name: str


def load(text: str | None = None, *, tmp_path: Path | None = None, **more: object) -> Collector:
    path = None
    if text is not None:
        assert tmp_path is not None
        path = tmp_path / "vitals.toml"
        path.write_text(text)
    settings = load_settings(
        {"collector": Collector},
        path=path,
        environ=more.get("environ", {}),  # type: ignore[arg-type]
        arguments=more.get("arguments"),  # type: ignore[arg-type]
    )
    found = settings["collector"]
    assert isinstance(found, Collector)
    return found


def test_defaults_hold_where_nothing_is_given() -> None:
    assert Collector() == load()


def test_argument_beats_variable_beats_file(tmp_path: Path) -> None:
    text = "[collector]\nmax_bytes = 1\nratio = 0.1\nlisten = 'file:1'\n"
    environ = {"VITALS_COLLECTOR_MAX_BYTES": "2", "VITALS_COLLECTOR_RATIO": "0.2"}
    arguments = {"collector.max_bytes": 3, "collector.listen": None}
    found = load(text, tmp_path=tmp_path, environ=environ, arguments=arguments)
    assert Collector(max_bytes=3, ratio=0.2, listen="file:1") == found


def test_every_type_is_read_from_a_file(tmp_path: Path) -> None:
    text = """
    [collector]
    max_bytes = 7
    ratio = 1
    quiet = true
    hosts = ["a", "b"]
    ports = [1, 2]
    data = "/data"
    mode = "slow"
    """
    expected = Collector(
        max_bytes=7,
        ratio=1.0,
        quiet=True,
        hosts=("a", "b"),
        ports=(1, 2),
        data=Path("/data"),
        mode="slow",
    )
    found = load(text, tmp_path=tmp_path)
    assert expected == found
    assert float is type(found.ratio)


def test_every_type_is_read_from_the_environment() -> None:
    environ = {
        "VITALS_COLLECTOR_QUIET": "Yes",
        "VITALS_COLLECTOR_HOSTS": "a, b",
        "VITALS_COLLECTOR_PORTS": "1,2",
        "VITALS_COLLECTOR_DATA": "/data",
        "VITALS_COLLECTOR_LIMIT": "",
        "VITALS_COLLECTOR_MODE": "slow",
    }
    found = load(environ=environ)
    expected = Collector(
        quiet=True, hosts=("a", "b"), ports=(1, 2), data=Path("/data"), limit=None, mode="slow"
    )
    assert expected == found


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("max_bytes", '"5"', "a whole number"),
        ("max_bytes", "1.5", "a whole number"),
        ("max_bytes", "true", "a whole number"),
        ("ratio", "false", "a number"),
        ("quiet", "1", "true or false"),
        ("listen", "5", "text"),
        ("hosts", '"a"', "a list, each text"),
        ("ports", '[1, "x"]', "a list, each a whole number"),
        ("data", "5", "a path or nothing"),
        ("mode", '"quick"', "one of fast, slow"),
    ],
)
def test_a_wrong_type_in_a_file_is_named_with_its_line(
    tmp_path: Path, key: str, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"# comment\n[collector]\n\n{key} = {text}\n", tmp_path=tmp_path)
    assert f"collector.{key} = " in caught.value.text
    assert f"vitals.toml:4): it must be {expected}" in caught.value.text


@pytest.mark.parametrize(("key", "text"), [("MAX_BYTES", "many"), ("QUIET", "perhaps")])
def test_a_wrong_variable_is_named(key: str, text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"variable VITALS_COLLECTOR_{key}.: it must be"
    ) as caught:
        load(environ={f"VITALS_COLLECTOR_{key}": text})
    assert repr(text) in caught.value.text


def test_an_unknown_key_gets_its_nearest_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such setting") as caught:
        load("[collector]\nmax_byte = 5\n", tmp_path=tmp_path)
    assert "did you mean 'max_bytes'?" == caught.value.hint
    assert "vitals.toml:2" in caught.value.text
    with pytest.raises(ConfigError) as caught:
        load(environ={"VITALS_COLLECTOR_ZZZ": "5"})
    assert "collector has: data, hosts" in caught.value.hint
    with pytest.raises(ConfigError, match="argument --max-byte"):
        load(arguments={"collector.max_byte": 5})


def test_a_misspelt_section_is_found_and_another_programs_is_passed_over(tmp_path: Path) -> None:
    assert Collector() == load("[dashboard]\nport = 5\n", tmp_path=tmp_path)
    with pytest.raises(ConfigError, match="there is no such section") as caught:
        load("[colector]\nmax_bytes = 5\n", tmp_path=tmp_path)
    assert "did you mean 'collector'?" == caught.value.hint
    with pytest.raises(ConfigError, match="must be a table"):
        load("collector = 5\n", tmp_path=tmp_path)
    with pytest.raises(ConfigError, match="there is no section 'other'"):
        load(arguments={"other.key": 5})


def test_variables_with_a_meaning_of_their_own_are_no_settings() -> None:
    environ = {"VITALS_COLLECTOR_URL": "http://x", "VITALS_DIR": "/x", "PATH": "/bin"}
    assert Collector() == load(environ=environ)


def test_a_value_that_the_section_refuses_says_where_it_came_from() -> None:
    with pytest.raises(ConfigError, match="max_bytes is 0; it must be positive") as caught:
        load(environ={"VITALS_COLLECTOR_MAX_BYTES": "0"})
    assert "variable VITALS_COLLECTOR_MAX_BYTES" in caught.value.text
    assert "more" == caught.value.hint


def test_a_setting_without_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"\[demanding\] is incomplete.*name"):
        load_settings({"demanding": Demanding}, environ={})


@pytest.mark.parametrize("raw", [b"[collector", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "vitals.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"settings file .*vitals\.toml is not"):
        load_settings({}, path=path, environ={})
    with pytest.raises(ConfigError, match="No such file"):
        load_settings({}, path=tmp_path / "missing.toml", environ={})
