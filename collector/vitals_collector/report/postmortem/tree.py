"""Builds HTML and SVG as a tree, so that no text can ever become markup."""

from xml.etree import ElementTree

from trainvitals.printable import printable

Node = ElementTree.Element


def node(tag: str, *inside: Node | str | None, **attributes: object) -> Node:
    """Return an element; ``stroke_width`` is ``stroke-width``, ``class_`` is ``class``."""
    named = {
        (name if name in _CAMEL else name.rstrip("_").replace("_", "-")): printable(str(value))
        for name, value in attributes.items()
        if value is not None
    }
    made = ElementTree.Element(tag, named)
    for child in inside:
        if isinstance(child, str):
            _add_text(made, printable(child))
        elif child is not None:
            made.append(child)
    return made


def written(root: Node) -> str:
    """Return the tree as HTML."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def style(text: str) -> Node:
    """Return a style sheet of ours: the one text that is not cleaned."""
    made = ElementTree.Element("style")
    made.text = text
    return made


_CAMEL = frozenset({"viewBox", "preserveAspectRatio"})


def _add_text(made: Node, text: str) -> None:
    if len(made):
        made[-1].tail = (made[-1].tail or "") + text
    else:
        made.text = (made.text or "") + text
