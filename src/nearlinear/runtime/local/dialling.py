"""Turning a ticket into a connection to its run, or into what is wrong with the ticket."""

from __future__ import annotations

import socket
import ssl
import time

from nearlinear.errors import InputError
from nearlinear.runtime.local.connection import tune
from nearlinear.runtime.local.ticket import Ticket
from nearlinear.runtime.local.tls import Identity, identity

KNOCK_S = 5.0


def dial(ticket: Ticket, own: Identity, limit_s: float) -> tuple[ssl.SSLSocket, float]:
    """Return a connection to the run, under TLS with both sides known, and the seconds of a round trip.

    Raises:
        OSError: Nobody answers within ``limit_s``, or the other side has another key.
    """
    began = time.monotonic()
    sock = socket.create_connection((ticket.host, ticket.port), timeout=limit_s)
    round_trip_s = time.monotonic() - began
    try:
        tune(sock)
        wrapped = own.wrap(sock, listening=False)
    except BaseException:
        sock.close()
        raise
    try:
        wrapped.do_handshake()
        own.require_own(wrapped)
    except BaseException:
        wrapped.close()
        raise
    return wrapped, round_trip_s


def is_of_another_key(error: OSError) -> bool:
    """Return whether a handshake failed because the two sides have not the same key."""
    alert = isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason or "")
    return alert or isinstance(error, ssl.SSLCertVerificationError)


def wrong_key(ticket: Ticket) -> InputError:
    """Return what to say then."""
    return InputError(
        f"the run at {ticket.host}:{ticket.port} has another key than this ticket; copy the ticket that it prints now"
    )


def require_key(ticket: Ticket) -> None:
    """Knock, before a script is started for nothing. That nobody answers is no matter: the script will call again.

    Raises:
        InputError: The run has another key, or a package is missing.
    """
    own = identity(ticket.key)
    try:
        dial(ticket, own, KNOCK_S)[0].close()
    except OSError as error:
        if is_of_another_key(error):
            raise wrong_key(ticket) from error
