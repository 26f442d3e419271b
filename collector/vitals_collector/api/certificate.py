"""The collector's certificate: created at the first start, and published in the token file."""

import datetime
import socket
from pathlib import Path

import msgspec

from trainvitals.errors import UNREADABLE, ConfigError, FormatError, StorageError
from trainvitals.io.client import CollectorTokens
from trainvitals.io.private import replace_file
from trainvitals.io.server_identity import SERVER_NAME, TlsTrust, fingerprint

SYSTEM_CA = "system"
_FILE = "tls.pem"


def load_or_create_certificate(data: Path) -> Path:
    """Return the file (0600) with the HTTP server's key and certificate; create it if missing.

    Raises:
        StorageError: it cannot be written.
    """
    path = data / _FILE
    if path.exists():
        return path
    try:
        replace_file(path, _self_signed(), mode=0o600)
    except OSError as error:
        raise StorageError(f"{path}: the certificate cannot be written: {error}") from error
    return path


def _self_signed() -> bytes:
    """Return a new key for the HTTP server and its self-signed certificate, PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
    hosts = dict.fromkeys((SERVER_NAME, "localhost", socket.gethostname()))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clients trust this certificate until they get another one: dates are not needed, and
        # clocks of nodes may be wrong.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts if host.isascii()]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def write_client_trust(token_file: Path, certificate: Path, *, ca: str = "") -> None:
    """Write the server certificate that clients trust into the token file.

    Existing certificates stay: several collectors on one database share one token file, with the
    certificate of each.

    Args:
        token_file: file with the tokens; copied to the clients' machines.
        certificate: PEM; the first one in it is the server's.
        ca: PEM file of the CA that signed it: clients trust that instead; ``system``: the CAs that
            their machines trust.

    Raises:
        ConfigError: a file holds no certificate.
        StorageError: a file cannot be read or written.
    """
    try:
        fields = msgspec.json.decode(token_file.read_bytes(), type=dict[str, object])
        before = msgspec.convert(fields, CollectorTokens).tls
        trust = _build_client_trust(before, certificate, ca)
        if trust != before:
            fields["tls"] = msgspec.to_builtins(trust)
            replace_file(token_file, msgspec.json.encode(fields) + b"\n", mode=0o600)
    except OSError as error:
        raise StorageError(f"{error.filename or token_file}: {error.strerror}") from error
    except (*UNREADABLE, msgspec.ValidationError) as error:
        raise FormatError(
            f"{token_file} is not a token file: {error}", hint="rm it, then start again"
        ) from error


def _build_client_trust(before: TlsTrust, certificate: Path, ca: str) -> TlsTrust:
    """Return what clients trust: this HTTP server's certificate, or its CA."""
    certificates: tuple[str, ...] = ()
    if not ca:
        pem = _read_certificate(certificate)
        certificates = tuple(dict.fromkeys([*before.certificates, pem]))
    ca_pem = "" if ca in ("", SYSTEM_CA) else _read_certificate(Path(ca), whole=True)
    return msgspec.structs.replace(before, certificates=certificates, ca=ca_pem)


def _read_certificate(path: Path, *, whole: bool = False) -> str:
    """Return the first certificate of the server's PEM file, or all; an error if it has none."""
    text = path.read_text(encoding="ascii", errors="replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = text.find(begin)
    last = text.rfind(end) if whole else text.find(end, first)
    pem = text[first : last + len(end)] + "\n" if 0 <= first < last else ""
    try:
        if not whole:
            fingerprint(pem)
    except ValueError:
        pem = ""
    if not pem:
        raise ConfigError(f"{path} holds no certificate; it must be PEM")
    return pem
