"""Writes docs/API.md: signatures and docstrings of everything public.

GitHub shows this page. On the site mkdocstrings renders the same objects (``docs/site_pages.py``).
"""

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

SECTIONS: dict[str, tuple[str, ...]] = {
    "Guard a training loop": (
        "trainvitals.watch",
        "trainvitals.attach",
        "trainvitals.Monitor",
        "trainvitals.Attached",
        "trainvitals.StepOutcome",
    ),
    "Settings": (
        "trainvitals.CheckpointSettings",
        "trainvitals.SignalSettings",
        "trainvitals.EarlyStopping",
        "trainvitals.LRSchedule",
    ),
    "State": ("trainvitals.EMA", "trainvitals.RestoredBest"),
    "Read runs": (
        "trainvitals.client.Client",
        "trainvitals.client.Run",
        "trainvitals.client.Series",
        "trainvitals.client.Cells",
        "trainvitals.client.Table",
    ),
}
"""Heading, to the objects below it."""

INTRO = """\
`import trainvitals` offers the names of the first three sections; they are loaded at their first
use. `trainvitals.client` reads runs and does not need PyTorch. Guides:
[frameworks](guides/frameworks.md), [checkpoints](guides/checkpoints.md),
[signals](guides/signals.md), [Python](guides/python.md). Errors: [ERRORS.md](ERRORS.md).
"""
WITHOUT_CONSTRUCTOR = {
    "trainvitals.Monitor",
    "trainvitals.Attached",
    "trainvitals.client.Run",
    "trainvitals.RestoredBest",
    "trainvitals.StepOutcome",
}
"""Classes whose objects Vitals creates."""
INTERNAL = {
    "end",
    "end_by",
    "when_closed",
    "averages_any",
    "begin",
    "follow",
    "forget",
    "refuse_swapped",
    "refuse_watch",
    "watch",
    "names_of",
    "named_buffers",
    "due",
    "measures",
    "band",
    "refusal",
}
"""Members for other modules of Vitals."""
OURS = ("trainvitals", "trainer_hooks")
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$", re.M)
_ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?: ", re.M)
_MAX_LINE = 88


class Member(NamedTuple):
    """A public method or property of a class."""

    name: str
    value: Any
    is_property: bool


def page(notice: str) -> str:
    """Return the page."""
    lines = ["# Python API", "", notice, INTRO]
    for heading, names in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _object(name)
    return "\n".join(lines).rstrip("\n") + "\n"


def site_page() -> str:
    """Return the page for the site, where mkdocstrings fills it."""
    lines = ["# Python API", "", INTRO]
    for heading, names in SECTIONS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            target = resolve(name)
            path = f"{target.__module__}.{target.__qualname__}"
            lines += [f"::: {path}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def resolve(name: str) -> Any:
    """Return the object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def public_members(cls: type) -> Iterator[Member]:
    """Yield the documented members of a class and of its bases in this project."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith(OURS):
            continue
        for name, value in vars(owner).items():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_property = isinstance(value, property) or hasattr(value, "attrname")
            if (
                name.startswith("_")
                or name in seen | INTERNAL
                or not (callable(plain) or is_property)
            ):
                continue
            if inspect.getdoc(value) and not isinstance(plain, type):
                seen.add(name)
                yield Member(name, plain, is_property)


def _object(name: str) -> Iterator[str]:
    target, short = resolve(name), name.rpartition(".")[2]
    yield from (f"### {short}", "")
    if name not in WITHOUT_CONSTRUCTOR and not is_record(target):
        yield from _signature(short, target)
    yield from (*_markdown(inspect.getdoc(target) or ""), "")
    if not isinstance(target, type):
        return
    yield from _fields(target)
    for member in public_members(target):
        heading = f"#### {short}.{member.name}"
        yield from (heading, "")
        if not member.is_property:
            yield from _signature(member.name, member.value)
        yield from (*_markdown(inspect.getdoc(member.value) or ""), "")


def _fields(cls: type) -> Iterator[str]:
    """Yield the fields of a record that are documented below their definition."""
    from docs.draw_detectors import meanings  # it imports every detector

    if not is_record(cls):
        return
    texts = meanings(cls) | _attributes(cls)
    yield from ("| field | default | meaning |", "|---|---|---|")
    for field in msgspec.structs.fields(cls):
        default = "required" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
        yield f"| `{field.name}` | {default} | {texts[field.name]} |"
    yield ""


def is_record(target: object) -> bool:
    """Whether it is a class of settings, whose fields are its arguments."""
    return isinstance(target, type) and issubclass(target, msgspec.Struct)


def _attributes(cls: type) -> dict[str, str]:
    """Return the entries of the docstring's Attributes section."""
    _, found, body = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    if not found:
        return {}
    body = inspect.cleandoc("\n" + body).replace("``", "`")
    starts = list(_ENTRY.finditer(body))
    ends = [match.start() for match in starts[1:]] + [len(body)]
    return {
        match[1]: " ".join(body[match.end() : end].split())
        for match, end in zip(starts, ends, strict=True)
    }


def _signature(name: str, target: Callable[..., Any]) -> Iterator[str]:
    """Yield the signature as in the source, on one line or with one parameter per line."""
    signature = inspect.signature(target)
    parts, is_keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        part = stars.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            part += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            part += f" = {parameter.default!r}"
        parts.append(part.replace("'", '"'))  # `ruff format` also formats Python in Markdown
    returned = signature.return_annotation
    is_shown = returned is not signature.empty and not isinstance(target, type)
    result = f" -> {_annotation(returned)}" if is_shown else ""
    name, end = (name, "") if isinstance(target, type) else (f"def {name}", ": ...")
    flat = f"{name}({', '.join(parts)}){result}{end}"
    lines = [f"{name}(", *(f"    {part}," for part in parts), f"){result}{end}"]
    language = "text" if isinstance(target, type) else "python"
    yield from (f"```{language}", *([flat] if len(flat) <= _MAX_LINE else lines), "```", "")


def _annotation(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("'", '"')


def _markdown(docstring: str) -> Iterator[str]:
    """Yield the lines of a Google-style docstring as Markdown."""
    text = docstring.replace("``", "`")
    parts = _SECTION.split(text)
    yield parts[0].strip("\n")
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if heading == "Attributes":  # a table of its own
            continue
        yield from ("", f"**{heading}**", "")
        yield from _entries(inspect.cleandoc("\n" + body))


def _entries(body: str) -> Iterator[str]:
    """Yield the entries of a section as a list; what is not an entry stays a paragraph."""
    paragraph, _, rest = body.partition("\n\n")
    starts = list(_ENTRY.finditer(paragraph))
    if not starts:
        yield " ".join(paragraph.split())
        return
    ends = [match.start() for match in starts[1:]] + [len(paragraph)]
    for match, end in zip(starts, ends, strict=True):
        yield f"- `{match[1]}`: " + " ".join(paragraph[match.end() : end].split())
    if rest:
        yield from ("", rest)
