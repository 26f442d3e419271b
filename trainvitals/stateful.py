"""State as JSON types: a class names its attributes, and they are saved and restored by their kind.

    class Level(Stateful):
        STATE = ("_losses", "_best", row("counts", "_onset", "_num_told"))

saves ``{"losses": [...], "best": 2.0, "counts": [17, 1]}``: a key is the attribute's name without
its underscore. Checkpoints and stores contain these states, so keys and order are a format.

A restored attribute gets the type of the existing one: numbers, lists, sets, deques with their
bound, windows, and parts with a state. So an object is first created with its settings, and then
continues as the saved one; lists are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

_PLAIN = frozenset((int, float, str, type(None)))


class Stateful:
    """Base of classes with a state: attributes in ``STATE``, after those of the base classes.

    A key that a saved state lacks is an error, unless it is in ``MAY_LACK``: then the current value
    stays.
    """

    STATE: ClassVar[tuple[str | StateKey, ...]] = ()
    MAY_LACK: ClassVar[bool] = False
    FLAGS_ARE_NUMBERS: ClassVar[bool] = False
    """Whether True and False are saved as 1 and 0."""
    _entries: ClassVar[tuple[StateKey, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        state_names = cls.__dict__.get("STATE", ())
        added = tuple(
            StateKey(name.lstrip("_"), (name,)) if isinstance(name, str) else name
            for name in state_names
        )
        cls._entries = (*cls._entries, *added)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes in ``STATE`` of an object of the core as JSON types."""
        as_numbers = self.FLAGS_ARE_NUMBERS
        return {entry.key: entry.save(self, as_numbers) for entry in self._entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the object that returned ``state``."""
        for entry in self._entries:
            if entry.key in state or not self.MAY_LACK:
                entry.load(self, state[entry.key])


class StatefulRow:
    """Base of small parts, of which there may be thousands: saved as a list, without keys."""

    __slots__ = ()
    STATE: ClassVar[tuple[str, ...]] = ()
    _values: ClassVar[Callable[[Any], tuple[Any, ...]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.STATE:
            cls._values = attrgetter(*cls.STATE)

    def state(self) -> list[Any]:
        """Return the attributes in ``STATE`` as a list of JSON types, without keys."""
        cls = self.__class__
        # Numbers go past the call: thousands of layers are saved after each batch of rows.
        return [v if v.__class__ in _PLAIN else _to_plain_state(v, True) for v in cls._values(self)]

    def restore(self, state: Sequence[Any]) -> None:
        """Set the attributes in ``STATE`` from the list that ``state`` returned."""
        for name, value in zip(self.STATE, state, strict=True):
            setattr(self, name, _restore_value(getattr(self, name), value))


class StateKey(NamedTuple):
    """One key of a state, and the attributes below it."""

    key: str
    attributes: tuple[str, ...]
    is_row: bool = False
    make: Callable[[Any], StatefulRow] | None = None
    """Creates the values of a table; None: they are tuples."""
    num_keys: int = 0
    """For a table: how many of a row's first values are the key; 0: not a table."""
    base: int = 10
    """For an integer saved as text: JSON's numbers are exact to 53 bits only."""

    def save(self, owner: Stateful, flags_are_numbers: bool) -> Any:
        """Return the value of one key in the JSON state of an object of the core."""
        if self.is_row:
            return [
                _to_plain_state(getattr(owner, name), flags_are_numbers) for name in self.attributes
            ]
        value = getattr(owner, self.attributes[0])
        if self.num_keys:
            return [_table_row(key, part, self.num_keys) for key, part in value.items()]
        return f"{value:x}" if self.base == 16 else _to_plain_state(value, flags_are_numbers)

    def load(self, owner: Stateful, saved: Any) -> None:
        """Set the attributes of one key from the JSON state of an object of the core."""
        if self.num_keys:
            setattr(
                owner,
                self.attributes[0],
                dict(self._restore_table_row(owner, row) for row in saved),
            )
        elif self.base == 16:
            setattr(owner, self.attributes[0], int(saved, 16))
        else:
            values = saved if self.is_row else (saved,)
            for name, value in zip(self.attributes, values, strict=True):
                setattr(owner, name, _restore_value(getattr(owner, name), value))

    def _restore_table_row(self, owner: Stateful, row: Sequence[Any]) -> tuple[Any, Any]:
        """Return key and value from one row of a mapping in a JSON state."""
        num = self.num_keys
        key = row[0] if num == 1 else tuple(row[:num])
        if self.make is None:
            return key, tuple(map(_copy_saved, row[num:]))
        value = self.make(owner)
        value.restore(row[num:])
        return key, value


def state_row(key: str, *attributes: str) -> StateKey:
    """Return an entry for ``STATE`` that saves several attributes as one list."""
    return StateKey(key, attributes, is_row=True)


def state_table(
    attribute: str, make: Callable[[Any], StatefulRow] | None = None, *, num_keys: int = 1
) -> StateKey:
    """Return an entry for ``STATE`` that saves a mapping as rows of key and values.

    Args:
        attribute: the mapping's.
        make: creates an empty value, given the owner; None: the values are tuples.
        num_keys: length of the keys, if they are tuples.
    """
    return StateKey(attribute.lstrip("_"), (attribute,), make=make, num_keys=num_keys)


def state_hexadecimal(attribute: str) -> StateKey:
    """Return an entry for ``STATE`` that saves an integer of any size as text."""
    return StateKey(attribute.lstrip("_"), (attribute,), base=16)


def _table_row(key: Any, value: Any, num_keys: int) -> list[Any]:
    """Return one item of a mapping in ``STATE`` as a row of its key and values."""
    keys = (key,) if num_keys == 1 else key
    return [*keys, *(value.state() if isinstance(value, StatefulRow) else value)]


def _to_plain_state(value: Any, flags_are_numbers: bool) -> Any:
    """Return an attribute of a ``Stateful`` object as JSON types."""
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, StatefulRow):
        return value.state()
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, bool):
        return int(value) if flags_are_numbers else value
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _to_plain_state(part, flags_are_numbers) for key, part in value.items()}
    if not isinstance(value, list | tuple | deque):
        return value
    if not value or value[0].__class__ in _PLAIN:
        # a list of one type: checking hundreds of numbers one by one would be slow
        return list(value)
    return [_to_plain_state(part, flags_are_numbers) for part in value]


def _restore_value(present: Any, saved: Any) -> Any:
    """Return a value from a JSON state as the current one's type; update a part in place."""
    if isinstance(present, StatefulRow):
        present.restore(saved)
        return present
    if isinstance(present, Stateful):
        present.load_state_dict(saved)
        return present
    if isinstance(present, dict):
        return _restore_dict(present, saved)
    if isinstance(present, list) and present and isinstance(present[0], _PARTS):
        return [
            _restore_value(part, saved_part)
            for part, saved_part in zip(present, saved, strict=True)
        ]
    if isinstance(present, deque):
        return deque(map(_copy_saved, saved), present.maxlen)
    if isinstance(present, list | tuple | set):
        return type(present)(map(_copy_saved, saved))
    if isinstance(present, bool | int | float) and saved is not None:
        return type(present)(saved)
    return _copy_saved(saved)


def _restore_dict(present: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping from a JSON state; its parts that the state lacks stay unchanged."""
    if not any(isinstance(part, Stateful) for part in present.values()):
        return {key: _copy_saved(value) for key, value in saved.items()}
    for key, part in present.items():
        if key in saved:
            part.load_state_dict(saved[key])
    return present


_PARTS = (bool, deque, Stateful, StatefulRow)
"""Item types of fixed-length lists; other lists are restored as they were saved."""


def _copy_saved(saved: Any) -> Any:
    """Copy a value from a JSON state; refuse text: a number is expected."""
    if isinstance(saved, str):
        raise ValueError(
            f"{saved!r} is not a number"
        )  # a damaged state fails here, not while training
    if isinstance(saved, list | tuple):
        return [_copy_saved(part) for part in saved]
    if isinstance(saved, dict):
        return {key: _copy_saved(part) for key, part in saved.items()}
    return saved
