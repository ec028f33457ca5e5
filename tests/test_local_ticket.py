"""The word that joins a run, and the connections that open with its key and no other."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.errors import InputError
from nearlinear.runtime.local.ticket import KEY_BYTES, Ticket, new_key
from nearlinear.runtime.local.tls import Identity, identity

pytest.importorskip("cryptography")

hosts = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,30}", fullmatch=True) | st.ip_addresses().map(str)


@given(host=hosts, port=st.integers(1, 65535), key=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_a_ticket_comes_back_from_its_text(host: str, port: int, key: bytes) -> None:
    assert Ticket.parse(str(Ticket(host, port, key))) == Ticket(host, port, key)


@given(text=st.text(max_size=80) | st.from_regex(r"nl1:[^ ]{0,20}:[0-9]{0,6}:[A-Za-z0-9_-]{0,40}", fullmatch=True))
def test_any_other_text_is_refused_and_not_repeated(text: str) -> None:
    try:
        ticket = Ticket.parse(text)
    except InputError as error:
        assert len(text) < 8 or text not in str(error)
    else:
        assert str(ticket) == text or ticket.port < 10000  # ports with leading zeros


def test_a_key_is_not_shown_where_a_ticket_is() -> None:
    key = new_key()
    assert repr(key) not in repr(Ticket("host", 1, key))
    assert key != new_key()


def handshake(server: Identity, client: Identity | ssl.SSLContext | None) -> tuple[str | None, str | None]:
    """Return how a handshake ended for both sides, and a first byte each way: None where well, else why not."""
    ends, sides = socket.socketpair(), ["", ""]
    for end in ends:
        end.settimeout(10)

    def serve() -> None:
        sides[0] = _try(lambda: server.wrap(ends[0], listening=True), server)

    thread = threading.Thread(target=serve)
    thread.start()
    if client is None:
        ends[1].sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        ends[1].close()
    elif isinstance(client, Identity):
        sides[1] = _try(lambda: client.wrap(ends[1], listening=False), client)
    else:
        context = client
        sides[1] = _try(lambda: context.wrap_socket(ends[1], do_handshake_on_connect=False), None)
    thread.join()
    return sides[0] or None, sides[1] or None


def _try(wrap: object, own: Identity | None) -> str:
    assert callable(wrap)
    sock = None
    try:
        sock = wrap()
        sock.do_handshake()
        if own is not None:
            own.require_own(sock)
        assert sock.version() == "TLSv1.3"
        sock.sendall(b"x")
        if sock.recv(1) != b"x":
            return "hung up"
    except OSError as error:
        return str(error)
    finally:
        if sock is not None:
            sock.close()
    return ""


def test_both_sides_with_the_key_speak_tls_1_3() -> None:
    key = new_key()
    identity.cache_clear()
    one = identity(key)
    identity.cache_clear()  # as on another machine: made anew, the same bits
    two = identity(key)
    assert one is not two and one.certificate == two.certificate
    assert handshake(one, two) == (None, None)


def test_another_key_is_stopped_by_the_handshake_on_either_side() -> None:
    server, client = handshake(identity(new_key()), identity(new_key()))
    assert server and client


def test_a_client_without_a_certificate_gets_no_word_in() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    server, client = handshake(identity(new_key()), context)
    assert server and client


def test_an_older_tls_and_what_is_no_tls_are_refused() -> None:
    own = identity(new_key())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(own, context)[0]
    assert handshake(own, None)[0]
