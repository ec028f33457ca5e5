"""Turning a run's address and key into the one word that joins it, and back."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass, field

from nearlinear.errors import InputError

KEY_BYTES = 24  # 192 random bits: nobody guesses them, and they are 32 letters
LONGEST = 512  # letters of a ticket

_SHAPE = re.compile(r"nl1:(\[[0-9A-Fa-f:.%a-z]{2,60}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5}):([A-Za-z0-9_-]{32})")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a run meets, and what proves that one belongs to it.

    Args:
        host: Name or address.
        port: Its port.
        key: The run's secret, ``KEY_BYTES`` random bytes. Whoever has it may join and say what is learnt.

    Raises:
        InputError: They do not make a ticket.

    Example:
        >>> print(Ticket("::1", 4242, bytes(24)))
        nl1:[::1]:4242:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
        >>> Ticket.parse("nl1:[::1]:4242:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA").host
        '::1'
    """

    host: str
    port: int
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise InputError(f"port {self.port} in a ticket; ports run from 1 to 65535")
        if len(self.key) != KEY_BYTES:
            raise InputError(f"a key of {len(self.key)} bytes in a ticket; it has {KEY_BYTES}")
        if _SHAPE.fullmatch(str(self)) is None:
            raise InputError(f"{self.host!r} is no host for a ticket; give a name or an address")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"nl1:{host}:{self.port}:{base64.urlsafe_b64encode(self.key).decode()}"

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Return the ticket that ``str`` wrote.

        Raises:
            InputError: ``text`` is none; it is not repeated, for it may be most of one.
        """
        match = _SHAPE.fullmatch(text) if len(text) <= LONGEST else None
        if match is None:
            raise InputError(
                "that is not a ticket; copy the whole word that `nearlinear run --listen` prints, nl1:<address>:<key>"
            )
        try:
            key = base64.b64decode(match[3], altchars=b"-_", validate=True)
        except binascii.Error:  # the shape leaves no such text, but that is not ours to promise
            raise InputError("the key of that ticket is damaged; copy the whole word again") from None
        return cls(match[1].strip("[]"), int(match[2]), key)


def new_key() -> bytes:
    """Return a key that no other run has."""
    return secrets.token_bytes(KEY_BYTES)
