"""Makes external text safe for terminals and logs.

A run's name, a note, a node's name and an error with them may contain anything: an escape sequence
changes the terminal's title or hides a line, a newline starts a line that looks like another
program's.
"""

import logging
import re

from trainvitals.redaction import redact_text

_ACTIVE = re.compile(r"([\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_]))")
"""Characters with a meaning within a line of Markdown: emphasis, code, links, cells, formulas."""
_AT_FIRST = re.compile(r"^(?=[-+#>=:])|^(\d+)(?=[.)])")
"""Characters with a meaning at the start of a line of Markdown: lists, titles, quotes."""


def printable(text: str) -> str:
    """Return the text of any record as one line; control characters become spaces."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def escape_markdown(text: str) -> str:
    """Return third-party text, such as a run's name, escaped for Markdown: no link, no tag."""
    clean = printable(text).strip().replace("&", "&amp;").replace("<", "&lt;").replace("@", "&#64;")
    return _AT_FIRST.sub(r"\1\\", _ACTIVE.sub(r"\\\1", clean))


def name_type(value: object) -> str:
    """Return the class of a value with its article, for errors: "an int", "an SGD", "a dict"."""
    name = type(value).__name__
    # An abbreviation is read letter by letter: an SGD, an LBFGS.
    starts_with_vowel = name[0] in ("AEFHILMNORSX" if name[:2].isupper() else "AEIOUaeiou")
    return f"{'an' if starts_with_vowel else 'a'} {name}"


class LineFormatter(logging.Formatter):
    """Formats a record as one printable line without secrets, and its traceback below, indented.

    Every line of a traceback is printable, and none starts like a log record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a log record as one line without secrets, and its traceback, for any program."""
        text = super().format(record)
        below = self._format_traceback(record)
        line = text.removesuffix(below) if below else text
        shown = [
            printable(line),
            *(f"    {printable(part)}" for part in below.splitlines() if part),
        ]
        return redact_text("\n".join(shown))

    def _format_traceback(self, record: logging.LogRecord) -> str:
        """Return what ``logging`` appends below the line: traceback, and stack if requested."""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        return "\n".join(part for part in (record.exc_text or "", stack) if part)
