"""Turning a host's name into this machine's address and network interface on the way to it."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from nearlinear.errors import InputError

# "Tell me the address of this interface", as each kernel numbers it.
_SIOCGIFADDR = {"linux": 0x8915, "darwin": 0xC0206921}


def address_to(host: str) -> str:
    """Return the address of this machine that packets to ``host`` carry.

    Raises:
        InputError: ``host`` has no address here, or no route leads to it.

    Example:
        >>> address_to("127.0.0.1")
        '127.0.0.1'
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: picks the route, sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"this machine cannot reach host {host!r} ({reason}); give a name or address that it can"
        ) from None


def interface_to(host: str) -> str | None:
    """Return the network interface that leads to ``host``, or None where no interface has that address as its first.

    gloo and NCCL guess an interface when not told one; on a machine with several (Docker's bridge, say) the guess is
    often one that the peers cannot reach.

    Raises:
        InputError: ``host`` has no address here, or no route leads to it.
    """
    address = address_to(host)
    request = _SIOCGIFADDR.get(sys.platform)
    if request is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # struct ifreq: 16 bytes of name, then a socket address, whose bytes 4 to 8 are the IPv4 address.
                answer = fcntl.ioctl(probe, request, struct.pack("16s24x", name.encode()))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
