"""Turning what people write (``"25 ms"``, ``"10 Mbit/s"``) into seconds and bytes, and back."""

from __future__ import annotations

import re

from nearlinear.errors import InputError

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]\S*)\s*")
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
_BANDWIDTH = {
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
    **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
}


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise InputError(f"{text!r} is not {what}; write it like {example!r} (units: {', '.join(units)})")
    return float(match[1]) * units[match[2]]


def parse_seconds(text: str) -> float:
    """Return the seconds in ``text``.

    Raises:
        InputError: ``text`` is not a number followed by a unit of time.

    Example:
        >>> parse_seconds("25 ms")
        0.025
    """
    return _parse(text, _SECONDS, "a time", "25 ms")


def parse_bytes(text: str) -> float:
    """Return the bytes in ``text``.

    Raises:
        InputError: ``text`` is not a number followed by a unit of size.

    Example:
        >>> parse_bytes("4 MiB")
        4194304.0
    """
    return _parse(text, _BYTES, "a size", "24 GiB")


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second in ``text``.

    Raises:
        InputError: ``text`` is not a number followed by a unit of bandwidth.

    Example:
        >>> parse_bandwidth("10 Mbit/s")
        1250000.0
    """
    return _parse(text, _BANDWIDTH, "a bandwidth", "10 Mbit/s")


def seconds(value: float) -> str:
    """Return ``value`` seconds as people read them.

    Example:
        >>> seconds(0.0251)
        '25.1 ms'
    """
    return _written(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def size(value: float) -> str:
    """Return ``value`` bytes as people read them.

    Example:
        >>> size(4_500_000)
        '4.5 MB'
    """
    return _written(value, (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0)))


def bandwidth(value: float) -> str:
    """Return ``value`` bytes per second in bits, as links are sold.

    Example:
        >>> bandwidth(1.25e6)
        '10 Mbit/s'
    """
    return _written(value * 8, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)))


def _written(value: float, units: tuple[tuple[str, float], ...]) -> str:
    # A hair below a unit is that unit: 0.99999 Gbit/s reads 1 Gbit/s, not 1000 Mbit/s.
    unit, factor = next((each for each in units if abs(value) >= 0.9995 * each[1]), units[-1])
    number = value / factor
    return f"{number:,.0f} {unit}" if abs(number) >= 999.5 else f"{number:.3g} {unit}"
