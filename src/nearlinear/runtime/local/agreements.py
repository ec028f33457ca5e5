"""Turning what members ask each other to agree on into one answer for all: that of the first who asked."""

from __future__ import annotations

from typing import Any

from nearlinear.runtime.local.frames import Malformed

LASTING = 256  # names that are known for the whole run
LASTING_BYTES = 1 << 26
RECENT = 64  # names that are known for a while


class Agreements:
    """The answers.

    Example:
        >>> agreements = Agreements()
        >>> agreements.lasting("the seed", 7, nbytes=1), agreements.lasting("the seed", 8, nbytes=1)
        (7, 7)
        >>> [agreements.recent("batch 3", member, value) for member, value in ((1, "b"), (0, "a"), (1, "b"))]
        ['b', 'a', 'a']
    """

    def __init__(self) -> None:
        self._lasting: dict[str, Any] = {}
        self._bytes = 0
        self._recent: dict[str, tuple[int, Any]] = {}  # by which member

    def lasting(self, name: str, value: Any, nbytes: int) -> Any:
        """Return what the first that asked under ``name`` gave.

        Args:
            name: Of the question.
            value: This one's answer.
            nbytes: What it takes.

        Raises:
            Malformed: There are more names, or they take more, than a run has.
        """
        if name not in self._lasting:
            self._bytes += nbytes
            if len(self._lasting) >= LASTING or self._bytes > LASTING_BYTES:
                raise Malformed(f"more than {LASTING} names or {LASTING_BYTES} bytes to agree on")
        return self._lasting.setdefault(name, value)

    def recent(self, name: str, member: int, value: Any) -> Any:
        """Return what the oldest member gave of those that asked so far under ``name``, one of the latest names.

        Args:
            name: Of the question.
            member: Who asks; the lower, the older.
            value: This one's answer.
        """
        mine = member, value
        self._recent[name] = min(self._recent.get(name, mine), mine, key=lambda each: each[0])
        agreed = self._recent[name][1]
        if len(self._recent) > RECENT:
            self._recent.pop(next(iter(self._recent)))
        return agreed
