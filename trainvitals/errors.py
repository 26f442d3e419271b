"""All errors that Vitals raises deliberately.

VitalsError
|-- UsageError                 V1xx  the call or command cannot be carried out
|   |-- ConfigError            V11x  a setting is invalid
|   `-- MissingDependencyError V12x  an optional package is not installed
|-- FormatError                V2xx  data is damaged or has another format
|   |-- NewerVersionError      V21x  written by a newer version of Vitals
|   |-- CheckpointCorruptError V22x  a checkpoint does not match its manifest
|   |-- DamagedBatchError      V23x  the checksum of a batch does not match
|   `-- ForeignBatchError      V24x  the sender may not write to the run of a batch
|-- StorageError               V3xx  a file, directory or database cannot be used
|   `-- InsecurePathError      V31x  wrong owner or mode, or a symbolic link
|-- TransportError             V4xx  the server did not respond, or rejected the request
|   |-- UnauthorizedError      V41x  the token is missing, invalid, or lacks the scope
|   |-- NotOwnerError          V42x  another collector owns the run
|   `-- ServerIdentityError    V43x  the server did not prove that it is the collector
|-- CheckpointError            V5xx  a checkpoint cannot be saved, verified or restored
`-- TrainingHalted             V6xx  the run was halted; the only error of ``Monitor.step``

A code never changes its meaning. The text names the object, the value and the expectation; the
hint names the fix.
"""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for untrusted bytes: the second for invalid UTF-8, the third for values that
are nested too deeply, even in unknown fields."""

CODES = {
    "V101": "The named run, alert, token, command or checkpoint does not exist.",
    "V102": "The request conflicts with the current state: for example a command that has already "
    "been delivered.",
    "V103": "The output of `vitals store backup` already exists.",
    "V302": "The disk or the database is full.",
    "V303": "The database is locked, or another collector holds the lease; try again.",
    "V304": "The collector is busy or shutting down; agents send the rows again.",
    "V305": "Stored rows do not match their checksum.",
    "V411": "The request names another host, or comes from another web page.",
    "V412": "The token is valid, but lacks the scope.",
    "V413": "The token is limited to another project or run.",
    "V414": "The token has expired or was revoked.",
}
"""Codes that refine the code of a class."""


class VitalsError(Exception):
    """Base of all errors of Vitals; prints as ``text [CODE]`` with the hint below it."""

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
    """A batch was damaged in transit or on disk; it is sent again."""

    code = "V230"


class ForeignBatchError(FormatError):
    """A batch belongs to a run or a start that its token may not write to."""

    code = "V240"


class WriterKeyError(ForeignBatchError):
    """A batch has another writer key than the first batch of its writer."""

    code = "V241"


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
    """The collector or another server did not respond, or rejected the request."""

    code = "V400"
    retry_after_seconds = 0.0
    """Seconds after which the server asked to retry."""


class NotOwnerError(TransportError):
    """Another collector owns the run. With several collectors, each run has one owner."""

    code = "V420"

    def __init__(self, text: str, *, hint: str = "", code: str = "", owner: str = "") -> None:
        super().__init__(text, hint=hint, code=code)
        self.owner = owner
        """URL of the owner; "" if unknown."""


class UnauthorizedError(TransportError):
    """The token is missing or invalid."""

    code = "V410"


class ServerIdentityError(TransportError):
    """The server did not prove that it is the collector, or acknowledged rows it never received."""

    code = "V430"


class CheckpointError(VitalsError):
    """A checkpoint cannot be saved, verified or restored."""

    code = "V500"


class TrainingHalted(VitalsError):  # noqa: N818 - a way to end a run, not a fault
    """Vitals halted the run: the rollback budget is used up, or a manual command asked for it."""

    code = "V600"
