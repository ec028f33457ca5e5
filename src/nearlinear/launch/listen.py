"""Turning an address into a run that other machines may join: its centre, its ticket, and its last words."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from nearlinear.errors import InputError
from nearlinear.planning.rounds import direct, fractions, interval, parts
from nearlinear.runtime.environment import silence_s
from nearlinear.runtime.interface import address_to
from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.ticket import Ticket, new_key
from nearlinear.units import size

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # what binds to all interfaces, and one of them
_ELSEWHERE = "192.0.2.1"  # RFC 5737: no machine has it; nothing is sent there, only the way out is looked up
LOOK_S = 0.5
GATHER_S = 10.0  # in which the members of a run whose centre died find the new one


class Listening:
    """The centre of a run, in this process, for as long as a ``with`` block lasts.

    Attributes:
        ticket: What other machines join with.

    Args:
        where: ``HOST:PORT`` to listen on; port 0 for a free one.
        address: ``HOST`` or ``HOST:PORT`` at which others reach it; by default this machine's on the way out.
        say: Told what a person should know.
        place_of: The ticket of a run whose centre died; its members call there until their deadline is over, and the
            run goes on from the one that has come farthest.

    Raises:
        InputError: There is no such address here, or the port is taken.
    """

    def __init__(
        self, where: str, address: str | None, say: Callable[[str], None], place_of: Ticket | None = None
    ) -> None:
        host, port = endpoint(where, "--listen")
        key = new_key() if place_of is None else place_of.key
        founder = secrets.token_hex(16) if place_of is None else None
        self._say = say
        self._centre = Centre.listen(
            host,
            port,
            key,
            say=say,
            interval=interval,
            fractions=fractions,
            direct=direct,
            parts=parts,
            silence_s=silence_s(),
            founder=founder,
            gather_s=0.0 if place_of is None else GATHER_S,
        )
        self._founder = founder
        self._own = Ticket(_ANY.get(host, host), self._centre.port, key)
        if address is None and place_of is not None:
            self.ticket = place_of
        elif address is None:
            self.ticket = Ticket(_way_out() if host in _ANY else host, self._centre.port, key)
        else:
            name, outside = endpoint(address if ":" in address else f"{address}:{self._centre.port}", "--address")
            self.ticket = Ticket(name, outside, key)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process here a member, the first of a new run: that begins with its parameters."""
        found = {"NEARLINEAR_STRATEGY": "local", "NEARLINEAR_TICKET": str(self._own)}
        return found if self._founder is None else found | {"NEARLINEAR_IDENTITY": self._founder}

    def wait_until_all_have_left(self) -> None:
        """Serve on until no member is here."""
        said = False
        while not self._centre.wait_until_empty(LOOK_S):
            if not said:
                said = True
                members = self._centre.standing().members
                self._say(
                    f"{members} member{'s' if members > 1 else ''} still train{'' if members > 1 else 's'}; the run "
                    "lasts until the last has left, or Ctrl-C"
                )

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self._centre.stop()
        standing = self._centre.standing()
        self._say(
            f"{standing.round} rounds; received {size(standing.received)} from the members, sent {size(standing.sent)}"
        )


def endpoint(text: str, option: str) -> tuple[str, int]:
    """Return the host and port in ``text``.

    Raises:
        InputError: It is not ``HOST:PORT``.

    Example:
        >>> endpoint("[::1]:4242", "--listen")
        ('::1', 4242)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise InputError(f"{option} {text!r} is not HOST:PORT; write it like {option} 0.0.0.0:4242")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _way_out() -> str:
    """Return this machine's address on the way to others, or its loopback where it has no such way."""
    try:
        return address_to(_ELSEWHERE)
    except InputError:
        return "127.0.0.1"
