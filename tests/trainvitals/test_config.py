import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from trainvitals.config import AtLeastOne, Settings, kinds, load_settings
from trainvitals.detect.outliers import OutlierConfig
from trainvitals.errors import ConfigError
from trainvitals.policy.judge import SECTIONS
from trainvitals.policy.state import PolicyConfig


class Collector(Settings, frozen=True, kw_only=True):
    section = "collector"

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
        super().__post_init__()
        if self.max_bytes < 1:
            raise self.refusal("max_bytes", "positive", hint="more")


class Demanding(Settings, frozen=True, kw_only=True):
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
    )
    found = settings["collector"]
    assert isinstance(found, Collector)
    return found


def test_defaults_hold_where_nothing_is_given() -> None:
    assert Collector() == load()


def test_variable_beats_file(tmp_path: Path) -> None:
    text = "[collector]\nmax_bytes = 1\nratio = 0.1\nlisten = 'file:1'\n"
    environ = {"VITALS_COLLECTOR_MAX_BYTES": "2", "VITALS_COLLECTOR_RATIO": "0.2"}
    found = load(text, tmp_path=tmp_path, environ=environ)
    assert Collector(max_bytes=2, ratio=0.2, listen="file:1") == found


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


def test_a_key_of_an_earlier_version_is_a_warning_that_names_its_replacement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "vitals.toml"
    path.write_text("[ladder]\nmargin = 7\nmax_firsts = 4\n[outlier]\nfloor = 'any'\n")
    environ = {"VITALS_OUTLIER_LOSS_RATIO": "3"}
    settings = load_settings(SECTIONS, path=path, environ=environ)
    assert PolicyConfig(margin=7) == settings["ladder"]
    assert OutlierConfig() == settings["outlier"]
    lost = "no longer exists and has no effect"
    limits = "progress and sigmas limit the loss"
    assert {
        f"vitals: setting ladder.max_firsts ({path}:3) {lost}: "
        "max_row and max_withheld limit the withheld updates",
        f"vitals: setting outlier.floor ({path}:5) {lost}: {limits}",
        f"vitals: setting outlier.loss_ratio (variable VITALS_OUTLIER_LOSS_RATIO) {lost}: {limits}",
    } == {record.getMessage() for record in caplog.records}


@pytest.mark.parametrize("settings", SECTIONS.values())
def test_a_removed_key_is_no_setting(settings: type[Settings]) -> None:
    assert not settings.removed.keys() & kinds(settings).keys()


def test_a_misspelt_section_is_found_and_another_programs_is_passed_over(tmp_path: Path) -> None:
    assert Collector() == load("[dashboard]\nport = 5\n", tmp_path=tmp_path)
    with pytest.raises(ConfigError, match="there is no such section") as caught:
        load("[colector]\nmax_bytes = 5\n", tmp_path=tmp_path)
    assert "did you mean 'collector'?" == caught.value.hint
    with pytest.raises(ConfigError, match="must be a table"):
        load("collector = 5\n", tmp_path=tmp_path)


def test_variables_with_a_meaning_of_their_own_are_no_settings() -> None:
    environ = {"VITALS_COLLECTOR_URL": "http://x", "VITALS_DIR": "/x", "PATH": "/bin"}
    assert Collector() == load(environ=environ)


def test_a_value_that_the_section_refuses_says_where_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"max_bytes is 0; it must be positive") as caught:
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


# ------------------------------------------------------------------------------ made in code


class Window(Settings, frozen=True, kw_only=True):
    section = "window"
    ascending = (("least", "size", "most"),)

    least: AtLeastOne = 2
    size: Annotated[int, Meta(ge=2, le=100)] = 8
    most: int = 50
    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    name: Annotated[str, Meta(min_length=1)] = "one"
    folder: Path | None = None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"least": 0}, "window.least is 0; it must be at least 1"),
        ({"size": 1}, "window.size is 1; it must be 2 to 100"),
        ({"size": 2.5}, "window.size is 2.5; it must be a whole number, 2 to 100"),
        ({"size": True}, "window.size is True; it must be a whole number, 2 to 100"),
        ({"share": 0}, "window.share is 0; it must be above 0 and at most 1"),
        ({"share": float("nan")}, "window.share is nan; it must be above 0 and at most 1"),
        ({"share": "x"}, "window.share is 'x'; it must be a number, above 0 and at most 1"),
        ({"name": ""}, "window.name is ''; it must be text, not empty"),
        ({"folder": 5}, "window.folder is 5; it must be a path or nothing"),
        ({"least": 9}, r"window.size is 8; it must be at least window.least \(9\)"),
        ({"most": 7}, r"window.most is 7; it must be at least window.size \(8\)"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key_value_and_bound(
    given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        Window(**given)
    with pytest.raises(ConfigError, match=f"^{text}"):
        msgspec.structs.replace(Window(), **given)


def test_a_value_at_its_bound_is_taken_as_it_is() -> None:
    assert (1, 100, 1) == (
        Window(least=1).least,
        Window(size=100, most=100).size,
        Window(share=1).share,
    )


def test_a_bound_is_told_with_the_source_of_the_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"window": Window}, environ={"VITALS_WINDOW_SIZE": "1"})
    text = "window.size = '1' (variable VITALS_WINDOW_SIZE): it must be a whole number, 2 to 100"
    assert text == caught.value.text
    with pytest.raises(ConfigError, match=r"at least window.least \(9\) \(window.least: variable"):
        load_settings({"window": Window}, environ={"VITALS_WINDOW_LEAST": "9"})


def test_errors_name_a_section_as_the_file_does() -> None:
    assert list(SECTIONS) == [cls.section for cls in SECTIONS.values()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_bytes": np.int64(5)}, 5),
        ({"max_bytes": np.int32(5)}, 5),
        ({"ratio": np.float32(0.5)}, 0.5),
        ({"ratio": np.float64(0.5)}, 0.5),
        ({"ratio": np.int64(2)}, 2),
        ({"limit": np.int64(2)}, 2),
    ],
)
def test_numbers_of_numpy_become_plain_ones(given: dict[str, Any], expected: float) -> None:
    (key,) = given
    value = getattr(Collector(**given), key)
    assert value == expected
    assert type(value).__module__ == "builtins"
    msgspec.json.encode({key: value})


def test_no_flag_of_numpy_is_a_number() -> None:
    with pytest.raises(ConfigError, match=r"max_bytes is .*; it must be a whole number"):
        Collector(max_bytes=np.True_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"), [(" 8 ", 8), ("+8", 8), ("1_000", 1000), ("8\n", 8), ("007", 7)]
)
def test_a_variable_is_read_as_python_reads_a_number(text: str, expected: int) -> None:
    for key in ("MAX_BYTES", "LIMIT", "RATIO"):
        found = load(environ={f"VITALS_COLLECTOR_{key}": text})
        assert getattr(found, key.lower()) == expected
    assert load(environ={"VITALS_COLLECTOR_PORTS": f"1,{text}"}).ports == (1, expected)


@pytest.mark.parametrize("text", ["8.0", "1e2", "", "0x10", "1 0"])
def test_a_variable_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"MAX_BYTES.*: it must be a whole number"):
        load(environ={"VITALS_COLLECTOR_MAX_BYTES": text})


def test_what_is_expected_is_said_of_a_number_without_bounds() -> None:
    with pytest.raises(ConfigError, match=r"; it must be a number \["):
        Collector(ratio=10**400)


@pytest.mark.parametrize(
    ("environ", "content"),
    [
        ({"VITALS_COLLECTOR_RATIO": "often"}, b""),
        ({"VITALS_COLLECTOR_MAX_BYTES": "0"}, b""),
        ({"VITALS_COLLECTOR_NOPE": "1"}, b""),
        ({}, b"[collector\n"),
        ({}, b"\xff"),
        ({}, None),
    ],
    ids=["type", "value", "unknown", "no TOML", "no UTF-8", "no file"],
)
def test_an_error_is_shown_once_without_the_one_that_led_to_it(
    environ: dict[str, str], content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "vitals.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_settings({"collector": Collector}, path=path, environ=environ)
    shown = "".join(traceback.format_exception(raised.value))
    assert 1 == shown.count("Traceback (most recent call last)")
