"""What is said on the wire, read as a stranger's: every length bounded before it costs memory."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.runtime.local import frames
from nearlinear.runtime.local.frames import HEADER, Header, Malformed, Reader, pack, text_of

MOST = 1000


def bound(header: Header) -> int:
    return MOST if header["kind"] == "update" else 0


def read(data: bytes, pieces: int | None = None) -> list[tuple[Header, bytes]]:
    reader = Reader(bound)
    step = pieces or max(len(data), 1)
    found = []
    for start in range(0, len(data), step):
        found += [(header, bytes(payload)) for header, payload in reader.feed(data[start : start + step])]
    return found


def raw(header: bytes, length: int, claimed: int | None = None) -> bytes:
    return struct.pack("!IQ", len(header) if claimed is None else claimed, length) + header


@given(payloads=st.lists(st.binary(max_size=MOST), max_size=5), pieces=st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_messages_come_out_as_they_went_in_however_they_are_cut(payloads: list[bytes], pieces: int) -> None:
    sent = b"".join(pack("update", len(p), round=i) + p for i, p in enumerate(payloads))
    assert [(h["round"], p) for h, p in read(sent, pieces)] == list(enumerate(payloads))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (raw(b"{}", 0, claimed=HEADER + 1), "a header of 65537 bytes"),
        (raw(b"{}", 0, claimed=2**32 - 1), "a header of 4294967295 bytes"),
        (raw(b"", 0), "a header of 0 bytes"),
        (raw(b"no JSON", 0), "no JSON"),
        (raw(b"\xff\xfe", 0), "no JSON"),
        (raw(b"[" * 60000, 0), "no JSON"),
        (raw(b"[1]", 0), "no object"),
        (raw(b'{"kind": 7}', 0), "without a kind"),
        (raw(b'{"kind": "update"}', MOST + 1), "a payload of 1001 bytes in 'update'; it may have 1000"),
        (raw(b'{"kind": "update"}', 2**64 - 1), "it may have 1000"),
        (raw(b'{"kind": "beat"}', 1), "it may have 0"),
    ],
)
def test_what_cannot_be_a_message_is_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read(data)


def test_a_length_costs_no_memory_before_it_is_allowed() -> None:
    tracemalloc.start()
    for length in (MOST + 1, 2**40, 2**64 - 1):
        with pytest.raises(Malformed):
            read(raw(b'{"kind": "update"}', length))
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_mutilated_messages_neither_crash_the_reader_nor_make_it_grow(count: int) -> None:
    generator = random.Random(1)
    good = [pack("update", 40, round=3, base="ab" * 16, samples=2.5) + bytes(40), pack("beat"), pack("agree", name="x")]
    tracemalloc.start()
    refused = 0
    for _ in range(count):
        data = bytearray(generator.choice(good))
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            read(bytes(data[: generator.randrange(len(data) + 1)]))
        except Malformed:
            refused += 1
    assert refused > count / 10
    assert tracemalloc.get_traced_memory()[0] < 1e6
    tracemalloc.stop()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(value=values)
@settings(max_examples=300, deadline=None)
def test_a_field_is_of_its_type_or_refused(value: Any) -> None:
    header = json.loads(json.dumps({"n": value}))
    for field, kinds in ((frames.whole, int), (frames.number, float), (frames.text, str), (frames.truth, bool)):
        with contextlib.suppress(Malformed):
            assert isinstance(field(header, "n"), kinds)
    with contextlib.suppress(Malformed):
        assert all(a >= 0 and b >= 0 for a, b in frames.places(header, "n"))


def test_a_text_is_fit_for_a_terminal_and_short() -> None:
    assert frames.text({"n": "a\x1b[2Jb" + "c" * 500}, "n") == "a?[2Jb" + "c" * 194


def test_a_payload_that_is_no_json_is_refused() -> None:
    with pytest.raises(Malformed, match="no JSON"):
        text_of(memoryview(b"{"))
