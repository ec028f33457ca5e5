"""Turning a run's key into connections that nobody without it can open, read or change.

The key makes an Ed25519 key pair and a certificate, the same bits wherever they are made. Both sides of a TLS 1.3
connection show that certificate, prove that they hold its private key, and accept no other: whoever knows the run's key
is let in, and anyone else is stopped by the handshake. All members of a run are equal in this; they trust one another
with the run as they do with its data.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import hmac
import os
import socket
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nearlinear.errors import InputError

_PURPOSE = b"nearlinear: the certificate of a run, 1"
_SINCE, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)  # fixed: part of the signed bits


@dataclass(frozen=True, slots=True)
class Identity:
    """What one run's key makes.

    Args:
        certificate: In DER.
        accepting: For who listens.
        dialling: For who calls.
    """

    certificate: bytes
    accepting: ssl.SSLContext
    dialling: ssl.SSLContext

    def wrap(self, sock: socket.socket, *, listening: bool) -> ssl.SSLSocket:
        """Return ``sock`` under TLS, the handshake yet to come."""
        context = self.accepting if listening else self.dialling
        return context.wrap_socket(sock, server_side=listening, do_handshake_on_connect=False)

    def require_own(self, sock: ssl.SSLSocket) -> None:
        """Check, after the handshake, that the other side has shown this run's certificate.

        Raises:
            ssl.SSLError: It has not.
        """
        shown = sock.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(shown, self.certificate):
            raise ssl.SSLError("the peer's certificate is not this run's")


@functools.lru_cache(maxsize=8)
def identity(key: bytes) -> Identity:
    """Return what ``key`` makes.

    Raises:
        InputError: The package that makes certificates is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise InputError(
            "strategy 'local' needs the package cryptography for its certificates; pip install 'nearlinear[internet]'"
        ) from None
    private = Ed25519PrivateKey.from_private_bytes(hmac.digest(key, _PURPOSE, hashlib.sha256))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nearlinear")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, None)
    )
    certificate = made.public_bytes(serialization.Encoding.DER)
    pem = made.public_bytes(serialization.Encoding.PEM) + private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(
        certificate,
        _context(ssl.PROTOCOL_TLS_SERVER, certificate, pem),
        _context(ssl.PROTOCOL_TLS_CLIENT, certificate, pem),
    )


def _context(protocol: int, certificate: bytes, pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is pinned, whatever the host is called
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption: every connection proves the key anew
    # Python takes a private key from a file alone; this one is readable by its owner and gone at once.
    descriptor, path = tempfile.mkstemp(prefix="nearlinear-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        Path(path).unlink(missing_ok=True)
    return context
