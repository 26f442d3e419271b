"""Settings: a TOML file, overridden by ``VITALS_SECTION_KEY``, overridden by arguments.

A section is a frozen, keyword-only dataclass next to what it configures; its annotations say what
is allowed. An error names the key, the value, where it came from, and the way out::

    [collector]
    listen = "127.0.0.1:0"        # or VITALS_COLLECTOR_LISTEN, or the argument --listen
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from trainvitals.errors import ConfigError

_RESERVED = ("DIR", "MODE", "SHM", "NODE", "AGENT", "COLLECTOR_URL", "TOKEN_FILE", "RUN_ID")
RESERVED_VARIABLES = frozenset(f"VITALS_{name}" for name in (*_RESERVED, "NAME", "PROJECT"))
"""Variables with a meaning of their own; a section's key of the same name may still use them."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A value somebody gave, and where."""

    value: object
    source: str
    is_text: bool = False
    """Came from the environment, where everything is text."""


def load_settings(
    sections: Mapping[str, type],
    *,
    path: Path | None = None,
    environ: Mapping[str, str],
    arguments: Mapping[str, object] | None = None,
) -> dict[str, typing.Any]:
    """Return one instance for each section's dataclass.

    Args:
        sections: section name to dataclass.
        path: TOML file; other programs' sections in it are passed over, near misses are not.
        environ: usually ``os.environ``.
        arguments: ``section.key`` to value; None means "not given".

    Raises:
        ConfigError: unknown key, wrong type, or a value that the dataclass refuses.
    """
    given: dict[str, dict[str, _Given]] = {name: {} for name in sections}
    if path is not None:
        _from_file(path, sections, given)
    _from_environ(environ, sections, given)
    _from_arguments(arguments or {}, sections, given)
    return {name: _build(name, cls, given[name]) for name, cls in sections.items()}


def _from_file(
    path: Path, sections: Mapping[str, type], given: dict[str, dict[str, _Given]]
) -> None:
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {path} is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error
    for section, body in tree.items():
        if section not in sections:
            _refuse_near_miss(section, sections, f"{path}:{_line_of(text, section, '')}")
            continue
        if not isinstance(body, dict):
            raise ConfigError(f"{section} in {path} is {body!r}; it must be a table [{section}]")
        for key, value in body.items():
            source = f"{path}:{_line_of(text, section, key)}"
            given[section][key] = _Given(value=value, source=source)


def _from_environ(
    environ: Mapping[str, str], sections: Mapping[str, type], given: dict[str, dict[str, _Given]]
) -> None:
    longest_first = sorted(sections, key=len, reverse=True)
    for variable, text in environ.items():
        for section in longest_first:
            prefix = f"VITALS_{section.upper()}_"
            if not variable.startswith(prefix):
                continue
            key = variable.removeprefix(prefix).lower()
            if variable in RESERVED_VARIABLES and key not in _kinds(sections[section]):
                break
            given[section][key] = _Given(value=text, source=f"variable {variable}", is_text=True)
            break


def _from_arguments(
    arguments: Mapping[str, object],
    sections: Mapping[str, type],
    given: dict[str, dict[str, _Given]],
) -> None:
    for name, value in arguments.items():
        section, _, key = name.partition(".")
        if section not in sections:
            names = ", ".join(sorted(sections))
            raise ConfigError(f"argument {name!r}: there is no section {section!r}; known: {names}")
        if value is not None:
            option = "--" + key.replace("_", "-")
            given[section][key] = _Given(value=value, source=f"argument {option}")


def _build(section: str, cls: type, given: Mapping[str, _Given]) -> object:
    kinds = _kinds(cls)
    for key, item in given.items():
        if key not in kinds:
            raise ConfigError(
                f"{section}.{key} = {item.value!r} ({item.source}): there is no such setting",
                hint=_suggest(key, kinds) or f"{section} has: {', '.join(sorted(kinds))}",
            )
    values = {key: _convert(f"{section}.{key}", kinds[key], item) for key, item in given.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        sources = "; ".join(f"{section}.{key}: {item.source}" for key, item in given.items())
        raise ConfigError(
            f"{error.text} ({sources})" if sources else error.text, hint=error.hint, code=error.code
        ) from error
    except TypeError as error:
        raise ConfigError(f"[{section}] is incomplete: {error}") from error


def _kinds(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _convert(name: str, kind: object, item: _Given) -> object:
    """Return the value in the annotated type, or say what was expected."""
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    for option in options:
        ok, value = _try_convert(option, item)
        if ok:
            return value
    raise ConfigError(
        f"{name} = {item.value!r} ({item.source}): it must be {_describe(kind)}",
        hint=f"correct it in: {item.source}",
    )


def _try_convert(kind: object, item: _Given) -> tuple[bool, object]:
    value = item.value
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        matching = [c for c in choices if c == value or (item.is_text and str(c) == value)]
        return bool(matching), matching[0] if matching else None
    if typing.get_origin(kind) is tuple:
        return _try_tuple(typing.get_args(kind)[0], item)
    if kind is type(None):
        return value is None or (item.is_text and value == ""), None
    if item.is_text:
        return _from_text(kind, str(value))
    if kind is Path:
        return isinstance(value, str | Path), Path(value) if isinstance(value, str | Path) else None
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number, float(value) if is_number else None  # type: ignore[arg-type]
    return type(value) is kind, value


def _try_tuple(kind: object, item: _Given) -> tuple[bool, object]:
    """A list, or in the environment words between commas."""
    if item.is_text:
        words: list[object] = [word.strip() for word in str(item.value).split(",") if word.strip()]
    elif isinstance(item.value, list | tuple):
        words = list(item.value)
    else:
        return False, None
    converted = [_try_convert(kind, dataclasses.replace(item, value=word)) for word in words]
    return all(ok for ok, _ in converted), tuple(value for _, value in converted)


def _from_text(kind: object, text: str) -> tuple[bool, object]:
    if kind is bool:
        word = text.strip().lower()
        return word in _TRUE | _FALSE, word in _TRUE
    if kind in (int, float, Path, str):
        assert isinstance(kind, type)
        try:
            return True, kind(text)
        except ValueError:
            return False, None
    return False, None


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "nothing",
}


def _describe(kind: object) -> str:
    if _is_union(kind):
        return " or ".join(_describe(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_describe(typing.get_args(kind)[0])}"
    return _WORDS.get(kind, str(kind))


def _refuse_near_miss(section: str, sections: Mapping[str, type], source: str) -> None:
    """Another program's section is none of ours; a misspelt one would be ignored for ever."""
    suggestion = _suggest(section, sections, cutoff=0.8)
    if suggestion:
        raise ConfigError(f"[{section}] ({source}): there is no such section", hint=suggestion)


def _suggest(word: str, candidates: Mapping[str, object], *, cutoff: float = 0.5) -> str:
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def _line_of(text: str, section: str, key: str) -> int:
    """The line of a section's head or key, by sight; the head's where the key is not found."""
    here, head = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if match:
            here = match[1].strip("\"'")
            head = number if here == section else head
        if key and here == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return head
