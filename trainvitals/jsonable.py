"""JSON in which a non-finite number is a string: nan, inf or -inf.

JSON has no such numbers, and msgspec writes null for them. But null means "not measured", and a NaN
loss means a broken run.
"""

import math
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

_PLAIN = (str, bytes, int, float, type(None))


def to_json(body: object) -> bytes:
    """Return a view as JSON that ``from_json`` reads back: a NaN becomes a string."""
    return msgspec.json.encode(jsonable(body))


def from_json(raw: bytes, kind: type[T]) -> T:
    """Return the record or view that ``to_json`` wrote.

    Raises:
        UNREADABLE: of ``errors``; it is not JSON, or not of that type.
    """
    # Not strict: a string with a number is converted, unless a text is expected.
    return msgspec.json.decode(raw, type=kind, strict=False)


def jsonable(body: Any) -> Any:
    """Return a view with strings for its non-finite numbers; the view itself if it has none."""
    if isinstance(body, float):
        return body if math.isfinite(body) else non_finite_word(body)
    if isinstance(body, msgspec.Struct):
        changed = _changed_fields(
            {name: getattr(body, name) for name in _find_float_fields(type(body))}
        )
        return msgspec.structs.replace(body, **changed) if changed else body
    if isinstance(body, dict):
        changed = _changed_fields(body)
        return body | changed if changed else body
    if is_dataclass(body) and not isinstance(body, type):
        return {each.name: jsonable(getattr(body, each.name)) for each in fields(body)}
    # The columns of curves are long, and their queries leave nothing in them to be replaced.
    if isinstance(body, list | tuple) and body and not isinstance(body[0], _PLAIN):
        if isinstance(body[0], msgspec.Struct) and not _find_float_fields(type(body[0])):
            return body
        return [jsonable(element) for element in body]
    return body


@cache
def _find_float_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of a view in which there may be a number that is not whole."""
    struct_type = inspect.type_info(kind)
    assert isinstance(struct_type, inspect.StructType)
    return tuple(
        field.name for field in struct_type.fields if _may_hold_float(field.type, frozenset({kind}))
    )


def _may_hold_float(kind: inspect.Type, outer: frozenset[type]) -> bool:
    """Return whether a field of a record or view, by its type, may contain a float."""
    match kind:
        case inspect.FloatType() | inspect.AnyType():
            return True
        case inspect.StructType(cls=cls, fields=members):
            inner = outer | {cls}
            return cls not in outer and any(_may_hold_float(field.type, inner) for field in members)
        case inspect.UnionType(types=kinds) | inspect.TupleType(item_types=kinds):
            return any(_may_hold_float(member, outer) for member in kinds)
        case inspect.DictType(value_type=element):
            return _may_hold_float(element, outer)
        case inspect.ListType(item_type=element) | inspect.VarTupleType(item_type=element):
            return _may_hold_float(element, outer)
        case _:
            return False


def _changed_fields(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a view that change if non-finite numbers become strings."""
    pairs = ((name, value, jsonable(value)) for name, value in values.items())
    return {name: new for name, value, new in pairs if new is not value}


def non_finite_word(value: float) -> str:
    """Return the string for a non-finite number in a view's JSON; ``float`` parses it."""
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


__all__ = ["from_json", "jsonable", "non_finite_word", "to_json"]
