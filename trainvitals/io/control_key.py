"""The control key: commands are signed with it, and its secret half is never sent.

    control.key   the secret (0600): where people command from; made at a collector's first start
    control.pub   what verifies (0600): also with agents and runs, next to their token file

Ed25519, so verifying does not allow signing: neither a collector, nor a program on its port, nor
the agents and runs with ``control.pub`` can create a command, or change one in transit.
"""

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainvitals.errors import MissingDependencyError, StorageError, UnauthorizedError
from trainvitals.io.private import decode_key, open_private, write_new_private
from trainvitals.io.segments import read_fd
from trainvitals.io.setting_paths import collector_folder, default_data_dir
from trainvitals.records import Command

SECRET_FILE = "control.key"
PUBLIC_FILE = "control.pub"
_BYTES = 32
_CONTEXT = b"trainvitals command 1\0"


def control_folder(
    environ: Mapping[str, str], token_file: Path | None = None, collector: str = ""
) -> Path:
    """Return the directory of the control key: that of the token file, otherwise the collector's.

    Args:
        environ: may name the token file, and the collector by its data directory.
        token_file: value of ``--token-file``.
        collector: value of ``--collector``.
    """
    if token_file is not None or environ.get("VITALS_TOKEN_FILE"):
        return Path(token_file or environ["VITALS_TOKEN_FILE"]).absolute().parent
    named = collector or environ.get("VITALS_COLLECTOR_URL", "")
    return (collector_folder(named) if named else None) or default_data_dir(environ)


def make_control_key(folder: Path) -> None:
    """Create both halves of the control key as private files, unless a public one exists.

    A directory with only ``control.pub`` is unchanged: commands are then signed elsewhere.

    Raises:
        StorageError: they cannot be written.
    """
    if (folder / PUBLIC_FILE).exists():
        return
    try:
        with contextlib.suppress(FileExistsError):
            write_new_private(folder / SECRET_FILE, _key_line(secrets.token_bytes(_BYTES)))
        secret = _read_key_file(folder / SECRET_FILE)
        key = _ed25519().Ed25519PrivateKey.from_private_bytes(secret)
        public = key.public_key().public_bytes_raw()
        with contextlib.suppress(FileExistsError):
            write_new_private(folder / PUBLIC_FILE, _key_line(public))
    except OSError as error:
        raise StorageError(
            f"{folder}: the control key cannot be created: {error.strerror}"
        ) from error


def sign_manual_command(command: Command, folder: Path) -> Command:
    """Sign all fields of an operator's command with the control key in the directory.

    Raises:
        UnauthorizedError: there is no control key in the directory.
        InsecurePathError: others can read it.
        FormatError: it is damaged.
    """
    key = _ed25519().Ed25519PrivateKey.from_private_bytes(read_control_key(folder))
    signature = key.sign(_encode_signed_fields(command))
    return msgspec.structs.replace(command, control_signature=signature.hex())


def read_control_key(folder: Path) -> bytes:
    """Return the secret half of the control key from its private file.

    Raises:
        UnauthorizedError: there is none in the directory.
        InsecurePathError: others can read it.
        FormatError: it is damaged.
    """
    try:
        return _read_key_file(folder / SECRET_FILE)
    except OSError as error:
        raise UnauthorizedError(
            f"{folder / SECRET_FILE}: {error.strerror}; commands are signed with it",
            hint="the collector creates it (0600) at its first start, next to tokens.json: run the "
            "command there, or copy it next to your token file",
        ) from None


def verify_manual_command(command: Command, folder: Path) -> None:
    """Check an operator's signature with the key file ``control.pub`` in the directory.

    Raises:
        UnauthorizedError: it is not signed with the control key, or the key is not known here.
        InsecurePathError: others can change it.
        FormatError: it is damaged.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        public = _read_key_file(folder / PUBLIC_FILE)
    except OSError as error:
        raise UnauthorizedError(
            f"command {command.number} cannot be verified: {folder / PUBLIC_FILE}:"
            f" {error.strerror}",
            hint="copy control.pub (0600) from the collector's data folder to there, next to the"
            " token file that VITALS_TOKEN_FILE names",
        ) from None
    try:
        signature = bytes.fromhex(command.control_signature)
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(
            signature, _encode_signed_fields(command)
        )
    except (ValueError, InvalidSignature):
        raise UnauthorizedError(
            f"command {command.number} is not signed with the control key that"
            f" {folder / PUBLIC_FILE} belongs to",
            hint="whoever sent it has no control.key, or it was changed on its way",
        ) from None


def _ed25519() -> Any:
    """Import the package for the control key only for a command: no rank loads it at its start."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingDependencyError(
            "commands are signed and verified with the package cryptography",
            hint="pip install cryptography",
        ) from None
    return ed25519


def _encode_signed_fields(command: Command) -> bytes:
    """Return the bytes that the control key signs: all fields except the signatures.

    Empty fields are omitted, so that a later version's new field changes nothing if it is not used.
    """
    signed_fields = {
        name: value
        for name, value in msgspec.structs.asdict(command).items()
        if value and name not in ("signature", "control_signature")
    }
    return _CONTEXT + msgspec.msgpack.encode(signed_fields, order="sorted")


def _key_line(raw: bytes) -> bytes:
    return raw.hex().encode() + b"\n"


def _read_key_file(path: Path) -> bytes:
    """Read one half of the control key from its private file; refuse a damaged one."""
    hint = "copy it again from the collector's data folder"
    return decode_key(read_fd(open_private(path)), path, _BYTES, hint)
