"""Settings: a TOML file, overridden by ``VITALS_SECTION_KEY``.

A section is a subclass of ``Settings`` next to the code it configures; its annotations define the
allowed values, bounds included. An error names the key, the value, its origin, and the fix::

    [collector]
    listen = "127.0.0.1:0"        # or VITALS_COLLECTOR_LISTEN
"""

import difflib
import functools
import logging
import numbers
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, inspect

from trainvitals.errors import ConfigError

_LOG = logging.getLogger("trainvitals")

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0.0)]
AboveZero = Annotated[float, Meta(gt=0.0)]
AboveOne = Annotated[float, Meta(gt=1.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of settings: frozen, keyword-only, validated.

    A subclass itself has ``frozen=True, kw_only=True``. The allowed values are in the annotation:
    ``window: Annotated[int, Meta(ge=8)] = 64``.
    """

    section: ClassVar[str] = ""
    """Name in errors: its section of the file, or its class."""
    ascending: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Keys whose values must be ascending."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Keys of earlier versions, with their replacement: they have no effect and log a warning."""

    def __post_init__(self) -> None:
        """Validate the values, however the settings were created.

        Raises:
            ConfigError: with the key, its value and the expectation.
        """
        for key, kind in kinds(type(self)).items():
            field_value = getattr(self, key)
            value = _to_python_number(field_value)
            if value is not field_value:
                msgspec.structs.force_setattr(self, key, value)
            if not _is_convertible(value, kind):
                raise self.refusal(key, _describe_expected(value, inspect.type_info(kind)))
        for smaller, larger in (pair for keys in self.ascending for pair in pairwise(keys)):
            least = getattr(self, smaller)
            if not least <= getattr(self, larger):
                raise self.refusal(larger, f"at least {self.section}.{smaller} ({least})")

    def refusal(self, key: str, expected: str, *, hint: str = "") -> ConfigError:
        """Return the error for an invalid value; its hint is the default, unless given."""
        (default,) = (of.default for of in msgspec.structs.fields(self) if of.name == key)
        if not hint and default is not msgspec.NODEFAULT:
            hint = f"the default is {default!r}"
        return ConfigError(
            f"{self.section}.{key} is {getattr(self, key)!r}; it must be {expected}", hint=hint
        )


@functools.cache
def kinds(cls: type[Settings]) -> dict[str, typing.Any]:
    """Return the type of each setting of a section, with its bounds."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


def _to_python_number(value: object) -> object:
    """Return a setting that is a numpy number as Python's: msgspec refuses numpy's."""
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    return value


def _is_convertible(value: object, kind: object) -> bool:
    """Return whether msgspec converts the value to a setting's type."""
    try:
        msgspec.convert(value, kind, dec_hook=_as_path)
    except msgspec.ValidationError:
        return False
    return True


def _as_path(kind: type, value: object) -> object:
    """Return a path setting as a path: a decoding hook of msgspec."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError  # msgspec makes it a ValidationError


# ------------------------------------------------------------------------------ from outside

_RESERVED = ("DIR", "MODE", "SHM", "NODE", "AGENT", "COLLECTOR_URL", "TOKEN_FILE", "RUN_ID")
RESERVED_VARIABLES = frozenset(f"VITALS_{name}" for name in (*_RESERVED, "NAME", "PROJECT"))
"""Reserved variables; a section's key with the same name may still use them."""

_WORDS_OF_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


Sections = Mapping[str, type[Settings]]


class _GivenSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A value and its source."""

    value: object
    source: str
    is_text: bool = False
    """From the environment, where all values are text."""


def load_settings(
    sections: Sections, *, path: Path | None = None, environ: Mapping[str, str]
) -> dict[str, typing.Any]:
    """Return one instance of each section's class.

    Args:
        sections: section name to class.
        path: TOML file; other programs' sections are ignored, unless their name is nearly ours.
        environ: usually ``os.environ``.

    Raises:
        ConfigError: unknown key, wrong type, or a value that cannot work. A key of an earlier
            version is only logged as a warning.
    """
    given_by_section: dict[str, dict[str, _GivenSetting]] = {name: {} for name in sections}
    if path is not None:
        _read_settings_file(path, sections, given_by_section)
    _read_settings_environ(environ, sections, given_by_section)
    return {
        name: _build_section(name, cls, given_by_section[name]) for name, cls in sections.items()
    }


def _read_settings_file(
    path: Path, sections: Sections, given_by_section: dict[str, dict[str, _GivenSetting]]
) -> None:
    """Add the values of the TOML settings file to each section's given values."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"settings file {path}: {error.strerror}",
            hint="VITALS_CONFIG names it; unset VITALS_CONFIG to run without a settings file",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {path} is not UTF-8: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"settings file {path} is not TOML: {error}",
            hint="a section is a line [ladder], a setting a line margin = 3; all are in "
            "docs/SETTINGS.md",
        ) from None
    for section, body in tree.items():
        if section not in sections:
            _refuse_near_miss(section, sections, f"{path}:{_find_setting_line(text, section, '')}")
            continue
        if not isinstance(body, dict):
            raise ConfigError(f"{section} in {path} is {body!r}; it must be a table [{section}]")
        for key, value in body.items():
            source = f"{path}:{_find_setting_line(text, section, key)}"
            given_by_section[section][key] = _GivenSetting(value=value, source=source)


def _read_settings_environ(
    environ: Mapping[str, str],
    sections: Sections,
    given_by_section: dict[str, dict[str, _GivenSetting]],
) -> None:
    """Add the values of ``VITALS_SECTION_KEY`` variables to the given values."""
    longest_first = sorted(sections, key=len, reverse=True)
    for variable, text in environ.items():
        for section in longest_first:
            prefix = f"VITALS_{section.upper()}_"
            if not variable.startswith(prefix):
                continue
            key = variable.removeprefix(prefix).lower()
            if variable in RESERVED_VARIABLES and key not in kinds(sections[section]):
                break
            given_by_section[section][key] = _GivenSetting(
                value=text, source=f"variable {variable}", is_text=True
            )
            break


def _build_section(
    section: str, cls: type[Settings], given_values: Mapping[str, _GivenSetting]
) -> Settings:
    """Return a section's settings; errors contain the source of each value."""
    allowed = kinds(cls)
    for key in given_values.keys() & cls.removed.keys():
        _LOG.warning(
            "vitals: setting %s.%s (%s) no longer exists and has no effect: %s",
            *(section, key, given_values[key].source, cls.removed[key]),
        )
    given_values = {key: item for key, item in given_values.items() if key not in cls.removed}
    for key, item in given_values.items():
        if key not in allowed:
            raise ConfigError(
                f"{section}.{key} = {item.value!r} ({item.source}): there is no such setting",
                hint=_suggest_name(key, allowed) or f"{section} has: {', '.join(sorted(allowed))}",
            )
    values = {
        key: _convert_setting(f"{section}.{key}", allowed[key], item)
        for key, item in given_values.items()
    }
    try:
        return cls(**values)
    except ConfigError as error:
        sources = "; ".join(f"{section}.{key}: {item.source}" for key, item in given_values.items())
        raise ConfigError(
            f"{error.text} ({sources})" if sources else error.text, hint=error.hint, code=error.code
        ) from None
    except TypeError as error:
        raise ConfigError(f"[{section}] is incomplete: {error}") from None


def _convert_setting(name: str, kind: object, item: _GivenSetting) -> object:
    """Return the value converted to the annotated type, or raise an error with the expectation."""
    info = inspect.type_info(kind)
    value = _parse_setting_text(str(item.value), info) if item.is_text else item.value
    try:
        return msgspec.convert(value, kind, dec_hook=_as_path)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{name} = {item.value!r} ({item.source}): it must be {_describe_type(info)}",
            hint=f"correct it in: {item.source}",
        ) from None


def _parse_setting_text(text: str, info: inspect.Type) -> object:
    """Return the value of an environment variable's text; the text itself if it is no literal."""
    if isinstance(info, inspect.UnionType):
        if info.includes_none and not text:
            return None
        options = [_parse_setting_text(text, option) for option in info.types]
        return next((value for value in options if value != text), text)
    if isinstance(info, inspect.BoolType):
        return _WORDS_OF_FLAGS.get(text.strip().lower(), text)
    if isinstance(info, inspect.VarTupleType):
        items = [word.strip() for word in text.split(",")]
        return [_parse_setting_text(word, info.item_type) for word in items if word]
    if isinstance(info, inspect.IntType | inspect.FloatType):
        try:
            return int(text) if isinstance(info, inspect.IntType) else float(text)
        except ValueError:
            return text
    return text


# ---------------------------------------------------------------------------------- descriptions


def _describe_expected(value: object, info: inspect.Type) -> str:
    """Describe the expected value of a setting: for a number, only its bounds, if it has any."""
    number = {inspect.IntType: int, inspect.FloatType: int | float}.get(type(info))
    is_one = number is not None and isinstance(value, number) and not isinstance(value, bool)
    return ", ".join(_describe_bounds(info) if is_one else ()) or _describe_type(info)


_WORDS: dict[type[inspect.Type], str] = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.StrType: "text",
    inspect.NoneType: "nothing",
}


def _describe_type(info: inspect.Type) -> str:
    """Return a setting's type as text for an error message."""
    if isinstance(info, inspect.UnionType):
        options = sorted(info.types, key=lambda option: isinstance(option, inspect.NoneType))
        return " or ".join(_describe_type(option) for option in options)
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(str(choice) for choice in info.values)
    if isinstance(info, inspect.VarTupleType):
        return f"a list, each {_describe_type(info.item_type)}"
    if isinstance(info, inspect.CustomType):
        return "a path" if info.cls is Path else f"a {info.cls.__name__}"
    if isinstance(info, inspect.StructType):
        return f"a {info.cls.__name__}"
    return ", ".join((_WORDS.get(type(info), type(info).__name__), *_describe_bounds(info)))


def _describe_bounds(info: inspect.Type) -> Iterator[str]:
    """Yield the bounds of a setting that is a number or text, for an error message."""
    if isinstance(info, inspect.StrType):
        if info.min_length:
            yield "not empty"
        return
    if not isinstance(info, inspect.IntType | inspect.FloatType):
        return
    if info.ge is not None and info.le is not None:
        yield f"{info.ge:g} to {info.le:g}"
        return
    limits = {"at least": info.ge, "above": info.gt, "at most": info.le, "below": info.lt}
    bounds = " and ".join(
        f"{word} {bound:g}" for word, bound in limits.items() if bound is not None
    )
    if bounds:
        yield bounds


def _refuse_near_miss(section: str, sections: Sections, source: str) -> None:
    """Refuse a misspelt section of the settings; other programs' sections are ignored."""
    suggestion = _suggest_name(section, sections, cutoff=0.8)
    if suggestion:
        raise ConfigError(f"[{section}] ({source}): there is no such section", hint=suggestion)


def _suggest_name(word: str, candidates: Mapping[str, object], *, cutoff: float = 0.5) -> str:
    """Return a hint with the most similar name of a setting; "" without one."""
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def _find_setting_line(text: str, section: str, key: str) -> int:
    """Return the line number of a key in the settings file, or of its section."""
    here, head = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if match:
            here = match[1].strip("\"'")
            head = number if here == section else head
        if key and here == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return head
