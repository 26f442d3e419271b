"""Every error Vitals raises on purpose, in one tree.

VitalsError
|-- UsageError                 V1xx  what a person asked for cannot be done as asked
|   |-- ConfigError            V11x  a setting has a wrong value
|   `-- MissingDependencyError V12x  an optional package is not installed
|-- FormatError                V2xx  bytes are not what they should be
|   |-- NewerVersionError      V21x  written by a newer Vitals
|   |-- CheckpointCorruptError V22x  a checkpoint does not match its manifest
|   |-- DamagedBatchError      V23x  a batch's checksum does not hold
|   `-- ForeignBatchError      V24x  a batch is of a run or start that its token may not write
|-- StorageError               V3xx  a file, directory or database cannot be used
|   `-- InsecurePathError      V31x  wrong owner, mode, or a link where none may be
|-- TransportError             V4xx  the other side did not answer, or refused
|   |-- UnauthorizedError      V41x  the token is missing, wrong, or lacks the scope
|   `-- ServerIdentityError    V43x  the server does not prove that it is the collector
|-- CheckpointError            V5xx  no checkpoint can be saved, verified or restored
`-- TrainingHalted             V6xx  the ladder stopped the run; all that ``Monitor.step`` raises

A code never changes its meaning. The text says what happened, the value met, what was expected,
and the hint the way out.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises at bytes of others: the second at text that is no UTF-8, the third at values
that are nested too deeply, be it in fields that nobody knows."""


class VitalsError(Exception):
    """Base of all errors above; prints as ``text [CODE]`` with the hint below it."""

    code = "V000"

    def __init__(self, text: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint
        if code:
            self.code = code

    def __str__(self) -> str:
        body = f"{self.text} [{self.code}]"
        return f"{body}\n\nhint: {self.hint}" if self.hint else body


class UsageError(VitalsError):
    """The call or command cannot be carried out as given."""

    code = "V100"


class ConfigError(UsageError):
    """A setting has a wrong name, type or value."""

    code = "V110"


class MissingDependencyError(UsageError):
    """An optional package is required but not installed."""

    code = "V120"


class FormatError(VitalsError):
    """Data is damaged or not in the expected format."""

    code = "V200"


class NewerVersionError(FormatError):
    """The data was written by a newer version of Vitals."""

    code = "V210"


class DamagedBatchError(FormatError):
    """A batch was damaged on its way or where it lies; sent again, it may arrive whole."""

    code = "V230"


class ForeignBatchError(FormatError):
    """A batch is of a run or a start that belongs to another token than the one it came with."""

    code = "V240"


class CheckpointCorruptError(FormatError):
    """A checkpoint's bytes do not match its manifest."""

    code = "V220"


class StorageError(VitalsError):
    """A file, directory or database cannot be used."""

    code = "V300"


class InsecurePathError(StorageError):
    """A private path has the wrong owner or permissions, or is a symbolic link."""

    code = "V310"


class TransportError(VitalsError):
    """The collector or another server did not answer, or rejected the request."""

    code = "V400"
    retry_after_seconds = 0.0
    """How long the other side asked to be left alone."""


class NotOwnerError(TransportError):
    """Another collector takes the run's rows: of several on one store, each run has one."""

    code = "V420"

    def __init__(self, text: str, *, hint: str = "", code: str = "", owner: str = "") -> None:
        super().__init__(text, hint=hint, code=code)
        self.owner = owner
        """Its address; "" where it told none."""


class UnauthorizedError(TransportError):
    """The token is missing, wrong, or lacks the scope."""

    code = "V410"


class ServerIdentityError(TransportError):
    """The server did not prove that it is the collector, or acknowledged what it was never sent."""

    code = "V430"


class CheckpointError(VitalsError):
    """A checkpoint cannot be saved, verified or restored."""

    code = "V500"


class TrainingHalted(VitalsError):  # noqa: N818 - it is how a run ends, not a fault
    """Vitals halted the run: the rollback budget is used up, or a manual command asked for it."""

    code = "V600"
