"""What the connections between ranks promise, shown by threads that are the ranks of one run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nearlinear.errors import InputError, PeerLostError
from nearlinear.launch.environment import free_port
from nearlinear.runtime.environment import World
from nearlinear.runtime.mesh import LONGEST, Mesh, join


@contextmanager
def meshes(size: int) -> Iterator[Sequence[Mesh]]:
    port = free_port()
    with ThreadPoolExecutor(size) as threads:
        joined = list(threads.map(join, [World(rank, size, rank, size, "127.0.0.1", port) for rank in range(size)]))
    try:
        yield joined
    finally:
        for each in joined:
            each.close(failed=False)


def on_all(joined: Sequence[Mesh], act: Callable[[Mesh], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(joined)) as threads:
        return list(threads.map(act, joined))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_all_reduce_gives_all_ranks_the_same_bits_of_the_sum(size: int) -> None:
    draw = np.random.default_rng(0)
    for dtype, n in (("float32", 100_003), ("float64", 1), ("float32", 0), ("int64", 7)):
        addends = [(draw.normal(size=n) * 100).astype(dtype) for _ in range(size)]
        with meshes(size) as joined:
            arrays = [each.copy() for each in addends]
            on_all(joined, lambda mesh, arrays=arrays: mesh.all_reduce("sum", arrays[mesh.rank], "a sum"))
        for array in arrays:
            assert array.tobytes() == arrays[0].tobytes()
            np.testing.assert_allclose(
                array, np.sum(addends, axis=0), rtol=1e-5, atol=1e-4
            )  # float32, of sums near 100


def test_messages_are_fetched_by_tag_in_any_order() -> None:
    with meshes(2) as (zero, one):
        for number in range(5):
            zero.send(1, f"tag {number}", np.arange(number))
        zero.send(1, "tag 0", b"second")
        for number in (3, 0, 4, 1, 2):
            got = one.receive(0, f"tag {number}", "a message")
            assert np.array_equal(got.view(np.int64), np.arange(number))
        assert one.receive(0, "tag 0", "a message").tobytes() == b"second"


def test_two_ranks_may_send_much_at_once() -> None:
    much = np.random.default_rng(0).integers(0, 255, 40_000_000, dtype=np.uint8)

    def both(mesh: Mesh) -> bool:
        mesh.send(1 - mesh.rank, "much", much)
        return bool(np.array_equal(mesh.receive(1 - mesh.rank, "much", "much"), much))

    with meshes(2) as joined:
        assert on_all(joined, both) == [True, True]


def test_a_message_lands_where_it_is_expected_or_is_copied_there() -> None:
    with meshes(2) as (zero, one):
        early, late = np.zeros(1000), np.zeros(1000)
        one.expect(0, "early", early)
        zero.send(1, "early", np.arange(1000.0))
        zero.send(1, "late", np.arange(1000.0))
        assert one.arrived(0, "late", 5.0)
        for tag, into in (("early", early), ("late", late)):
            one.receive(0, tag, "a message", into)
            assert np.array_equal(into, np.arange(1000.0))


def test_a_message_of_another_length_is_told_with_both_lengths() -> None:
    with meshes(2) as (zero, one):
        zero.send(1, "tag", np.zeros(3))
        with pytest.raises(InputError, match="rank 0 sent 24 bytes in weights and rank 1 expects 16"):
            one.receive(0, "tag", "weights", np.zeros(2))


def test_json_and_barriers_reach_all() -> None:
    with meshes(3) as joined:
        said = on_all(joined, lambda mesh: (mesh.barrier("a start"), mesh.all_gather_json({"r": mesh.rank}))[1])
    assert said == [[{"r": 0}, {"r": 1}, {"r": 2}]] * 3


def test_a_peer_that_hangs_up_is_named_to_who_waits_for_it() -> None:
    with meshes(3) as joined:
        waiting = threading.Thread(target=lambda: time.sleep(0.2) or joined[2].close(failed=True))
        waiting.start()
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 2 on .*: its process ended; it was missing in a step") as caught:
            joined[0].receive(2, "never", "a step")
        assert caught.value.rank == 2
        assert time.monotonic() - began < 10
        waiting.join()


def test_a_peer_that_sends_nothing_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARLINEAR_DEADLINE", "2 s")
    with meshes(2) as (zero, _), pytest.raises(PeerLostError, match=r"waited .* in a step for rank 1 on"):
        zero.receive(1, "never", "a step")


def test_bytes_that_are_no_message_end_the_connection_and_not_the_process() -> None:
    with meshes(2) as (zero, one):
        sender = one._senders[0]
        with sender.lock:
            sender.put((3).to_bytes(1, "big") + (LONGEST + 1).to_bytes(8, "big") + b"abc", np.empty(0, np.uint8))
            sender.flush(1.0)
        assert zero.arrived(1, "any", 5.0)
        assert "wants to send" in zero._inbox.gone[1]


def test_a_stranger_at_the_door_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearlinear.runtime.mesh._HELLO_S", 0.5)
    doors: list[int] = []
    listen = socket.create_server

    def listening(*arguments: Any, **options: Any) -> socket.socket:
        server = listen(*arguments, **options)
        port = server.getsockname()[1]
        if port not in doors:
            doors.append(port)
            threading.Thread(target=stranger, args=(port,), daemon=True).start()
        return server

    def stranger(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"x" * 36)
            time.sleep(1)

    monkeypatch.setattr("nearlinear.runtime.mesh.socket.create_server", listening)
    with meshes(2) as joined:
        assert on_all(joined, lambda mesh: mesh.all_gather_json(mesh.rank)) == [[0, 1]] * 2
    assert doors
