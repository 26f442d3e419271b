"""Bodies as JSON and back, in which a number that is not finite is a word: nan, inf or -inf.

JSON has no such numbers, and msgspec writes null for them. But null says that nothing was measured,
and a loss that is nan says that a run is broken.
"""

import math
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_PLAIN = (str, bytes, int, float, type(None))


def to_json(body: object) -> bytes:
    """Return the body as JSON that ``from_json`` reads back."""
    return msgspec.json.encode(jsonable(body))


def from_json(raw: bytes, kind: type[T]) -> T:
    """Return what ``to_json`` wrote.

    Raises:
        msgspec.DecodeError: it is no JSON, or not of that kind.
    """
    # Not strict: a word that is a number is taken for one, wherever no text is expected.
    return msgspec.json.decode(raw, type=kind, strict=False)


def jsonable(body: Any) -> Any:
    """Return the body with words for its numbers that are not finite; itself, where it has none."""
    if isinstance(body, float):
        return body if math.isfinite(body) else word_of(body)
    if isinstance(body, msgspec.Struct):
        fields = {name: getattr(body, name) for name in body.__struct_fields__}
        changed = _changed(fields)
        return msgspec.structs.replace(body, **changed) if changed else body
    if isinstance(body, dict):
        changed = _changed(body)
        return body | changed if changed else body
    # The columns of curves are long, and their queries leave nothing in them to be replaced.
    if isinstance(body, list | tuple) and body and not isinstance(body[0], _PLAIN):
        return [jsonable(one) for one in body]
    return body


def _changed(fields: dict[Any, Any]) -> dict[Any, Any]:
    pairs = ((name, value, jsonable(value)) for name, value in fields.items())
    return {name: new for name, value, new in pairs if new is not value}


def word_of(value: float) -> str:
    """Return the word for a number that is not finite; ``float`` reads it."""
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


__all__ = ["from_json", "jsonable", "to_json", "word_of"]
