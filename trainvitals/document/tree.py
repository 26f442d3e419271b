"""Builds HTML and SVG as a tree, so that no text can ever become markup."""

from typing import Literal
from xml.etree import ElementTree

from trainvitals.printable import printable

Node = ElementTree.Element


def make_element(tag: str, *inside: Node | str | None, **attributes: object) -> Node:
    """Return an element of an HTML or SVG document; ``class_`` is ``class``, ``_`` is ``-``."""
    named = {
        (name if name in _CAMEL else name.rstrip("_").replace("_", "-")): printable(str(value))
        for name, value in attributes.items()
        if value is not None
    }
    element = ElementTree.Element(tag, named)
    for child in inside:
        if isinstance(child, str):
            _add_text(element, printable(child))
        elif child is not None:
            element.append(child)
    return element


def serialize_element(root: Node, method: Literal["html", "xml"] = "html") -> str:
    """Return the tree of a document as HTML or XML."""
    return ElementTree.tostring(root, encoding="unicode", method=method)


def style(text: str) -> Node:
    """Return the style sheet of a document in HTML or SVG: the only text that is not escaped."""
    element = ElementTree.Element("style")
    element.text = text
    return element


_CAMEL = frozenset({"viewBox", "preserveAspectRatio"})


def _add_text(element: Node, text: str) -> None:
    """Add text to an HTML element, after its last child."""
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
