"""Emulated links keep the rate, delay and loss they were asked for, and leave nothing behind."""

from __future__ import annotations

import hashlib
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing.links import Network, can_emulate
from nearlinear.testing.router import ETHERNET_HEADER, Loss, Router, measured, piece
from nearlinear.units import parse_bandwidth

DEADLINE = 60.0


def netns(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs namespaces; where there are none it is skipped with the reason."""
    skipped: Callable[..., None] = pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))(test)
    marked: Callable[..., None] = pytest.mark.netns(skipped)
    return marked


# ---- what is asked for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "a network of 0 hosts; it must have 1 to 254"),
        ({"hosts": 255}, "a network of 255 hosts; it must have 1 to 254"),
        ({"hosts": 2, "rate": "fast"}, "'fast' is not a bandwidth"),
        ({"hosts": 2, "rate": 0.0}, "a rate of 0.0; it must be more than 0"),
        ({"hosts": 2, "rate": math.nan}, "a rate of nan; it must be more than 0"),
        ({"hosts": 2, "delay": "40"}, "'40' is not a time"),
        ({"hosts": 2, "delay": -0.1}, "a delay of -0.1; it must be 0 or more"),
        ({"hosts": 2, "loss": 1.5}, "loss is 1.5; it is a probability per packet"),
        ({"hosts": 2, "loss": 1}, "loss is 1; it is a probability per packet"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Network(**arguments)
    assert "\n" not in str(caught.value)


def test_a_host_outside_the_block_of_its_network_is_refused() -> None:
    with pytest.raises(InputError, match="host 1 exists only inside the `with` block"):
        Network(2)[1]


# ---- the router, on a virtual clock


def udp(size: int) -> bytes:
    """Return a frame of one packet that is ``size`` bytes long on a cable."""
    return bytes(10) + b"\x45" + bytes(size - ETHERNET_HEADER - 1)


def tcp(payload: bytes, segment: int, flags: int = 0x19, sequence: int = 2**32 - 5) -> bytes:
    """Return a frame with a payload that the kernel left to be cut into segments; flags are ACK, PSH, FIN."""
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 7, 0x4000, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2")
    header = struct.pack("!HHIIBBHHH", 1, 2, sequence, 0, 5 << 4, flags, 100, 0, 0)
    return struct.pack("=BBHHHH", 1, 1, 40, segment, 20, 16) + ip + header + payload


def arrivals(router: Router, until: float) -> list[tuple[float, int, int]]:
    """Return ``(time, target, bytes)`` of all that arrives, asking every millisecond."""
    return [
        (tick / 1000, target, measured(frame)[1])
        for tick in range(round(until * 1000) + 1)
        for target, frame in router.due(tick / 1000 + 1e-9)
    ]


def test_a_packet_arrives_after_its_transmission_and_the_delay() -> None:
    router = Router(2, rate=1000.0, delay=0.040)
    router.send(0, 1, udp(100), 0.0)
    router.send(0, 1, udp(100), 0.0)
    assert router.wait(0.0) == pytest.approx(0.140)
    assert arrivals(router, 1.0) == [(0.140, 1, 100), (0.240, 1, 100)]
    assert router.wait(1.0) is None


def test_two_hosts_that_send_to_a_third_share_its_downlink() -> None:
    router = Router(3, rate=1000.0, delay=0.040)
    router.send(0, 2, udp(100), 0.0)
    router.send(1, 2, udp(100), 0.0)
    assert arrivals(router, 1.0) == [(0.140, 2, 100), (0.240, 2, 100)]


def test_a_host_that_sends_to_two_others_shares_its_uplink() -> None:
    router = Router(3, rate=1000.0)
    router.send(0, 1, udp(100), 0.0)
    router.send(0, 2, udp(100), 0.0)
    assert arrivals(router, 1.0) == [(0.100, 1, 100), (0.200, 2, 100)]


def test_a_full_queue_drops_what_comes_last() -> None:
    router = Router(2, rate=1000.0, queue=250.0)
    for size in (100, 101, 102, 103, 104):
        router.send(0, 1, udp(size), 0.0)
    assert [size for _, _, size in arrivals(router, 1.0)] == [100, 101, 102]


def test_a_full_queue_drops_the_segments_that_do_not_fit() -> None:
    packet = 100 + 40 + ETHERNET_HEADER
    router = Router(2, rate=1000.0, queue=2.5 * packet)
    router.send(0, 1, tcp(bytes(450), 100), 0.0)
    assert [size for _, _, size in arrivals(router, 2.0)] == [3 * packet]


@given(st.integers(1, 40), st.integers(1, 1448), st.data())
def test_pieces_of_a_frame_are_the_frame(count: int, segment: int, data: st.DataObject) -> None:
    payload = random.Random(count).randbytes(count * segment - data.draw(st.integers(0, segment - 1)))
    frame = tcp(payload, segment)
    cut = data.draw(st.integers(0, count))
    pieces = [piece(frame, *bounds) for bounds in ((0, cut), (cut, count)) if bounds[0] < bounds[1]]

    assert measured(frame) == (count, len(payload) + count * (40 + ETHERNET_HEADER))
    assert sum(measured(each)[0] for each in pieces) == count
    assert sum(measured(each)[1] for each in pieces) == measured(frame)[1]
    assert b"".join(each[50:] for each in pieces) == payload
    for each, begin in zip(pieces, (0, cut) if len(pieces) == 2 else (0,), strict=True):
        words = struct.unpack_from("!10H", each, 10)
        assert sum(words) % 0xFFFF == 0  # the IP header's checksum holds
        assert words[1] == len(each) - 10
        assert struct.unpack_from("!I", each, 34)[0] == (2**32 - 5 + begin * segment) % 2**32
        assert bool(each[43] & 0x01) == (each is pieces[-1])  # FIN is the last one's alone


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32))
def test_losses_do_not_depend_on_how_packets_are_framed(counts: list[int], seed: int) -> None:
    framed, single = Loss(0.2, str(seed)), Loss(0.2, str(seed))
    left = [measured(each)[0] for count in counts for each in framed.survivors(tcp(bytes(count), 1))]
    alone = [each for _ in range(sum(counts)) for each in single.survivors(udp(100))]
    assert sum(left) == len(alone)


# ---- real hosts

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 5000)); print("listening", flush=True)
connection, total, got, begun = server.accept()[0], int(sys.argv[1]), 0, None
while got < total:
    got += len(connection.recv(1 << 16))
    if begun is None and got > total / 4:
        begun, before = time.monotonic(), got
print((got - before) / (time.monotonic() - begun))
"""
SEND = """
import socket, sys
address, total, window = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connection = socket.socket(); connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
connection.connect((address, 5000)); connection.sendall(bytes(total)); connection.recv(1)
"""


def start(network: Network, host: int, code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return network[host].popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE)
    assert ready, f"{process.args!r} printed nothing for {DEADLINE} s"
    return process.stdout.readline().strip()


@netns
@pytest.mark.parametrize("delay", [0.0, "5 ms"])
@pytest.mark.parametrize("rate", ["10 Mbit/s", "100 Mbit/s"])
def test_a_flow_gets_the_rate_that_was_asked_for(rate: str, delay: str | float) -> None:
    asked, measured_rates = parse_bandwidth(rate), list[float]()
    with Network(2, rate=rate, delay=delay) as network:
        # A busy machine can take from a flow what the link would have given, so two shortfalls are forgiven.
        while len(measured_rates) < 3 and not any(got > 0.9 * asked for got in measured_rates):
            receiver = start(network, 1, RECEIVE, int(asked))  # a second's worth
            assert line(receiver) == "listening"
            # A window of 50 ms: more than the link holds and less than its queue, so nothing is dropped on the way.
            start(network, 0, SEND, network[1].address, int(asked), int(asked * 0.025)).wait(DEADLINE)
            measured_rates.append(float(line(receiver)))
    assert 0.9 * asked < max(measured_rates) < 1.1 * asked


ECHO = """
import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); echo.bind(("0.0.0.0", 5000)); print("listening", flush=True)
while True:
    echo.sendto(*echo.recvfrom(100))
"""
PING = """
import socket, sys, time
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); ping.settimeout(20); times = []
for _ in range(15):
    begun = time.monotonic(); ping.sendto(b"ping", (sys.argv[1], 5000)); ping.recv(100)
    times.append(time.monotonic() - begun)
print(min(times))
"""


@netns
@pytest.mark.parametrize("delay", [0.0, 0.020])
def test_a_round_trip_takes_twice_the_delay(delay: float) -> None:
    with Network(2, rate="100 Mbit/s", delay=delay) as network:
        assert line(start(network, 1, ECHO)) == "listening"
        trip = float(line(start(network, 0, PING, network[1].address)))
        assert 2 * delay <= trip < 2 * delay + 0.005


COUNT = """
import socket
sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sink.bind(("0.0.0.0", 5000))
sink.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: what is lost is to be lost on the way
print("listening", flush=True)
sink.settimeout(20); got = []
while (number := sink.recv(100)) != b"end":
    got.append(int(number))
print(got)
"""
SPRAY = """
import socket, sys
spray = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in [*range(int(sys.argv[2])), *["end"] * 20]:  # one "end" may be lost, not 20 of them
    spray.sendto(str(number).encode(), (sys.argv[1], 5000))
"""


@netns
def test_packets_are_lost_as_often_as_asked_and_as_the_seed_says() -> None:
    sent, probability = 3000, 0.05
    expected = Loss(probability, "7/0")
    alone = [number for number in range(sent) if expected.survivors(udp(100))]
    with Network(2, loss=probability, seed=7) as network:
        counter = start(network, 1, COUNT)
        assert line(counter) == "listening"
        start(network, 0, SPRAY, network[1].address, sent)
        got = line(counter)
    assert got == str(alone)
    assert 1 - len(alone) / sent == pytest.approx(probability, abs=0.015)  # nearly four standard deviations


DIGEST = """
import hashlib, socket
server = socket.create_server(("0.0.0.0", 5000)); print("listening", flush=True)
connection, digest = server.accept()[0], hashlib.sha256()
while data := connection.recv(1 << 16):
    digest.update(data)
print(digest.hexdigest())
"""
PUSH = """
import random, socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(random.Random(1).randbytes(int(sys.argv[2])))
"""


@netns
def test_tcp_delivers_every_byte_in_spite_of_losses() -> None:
    total = 2_000_000
    with Network(2, delay="1 ms", loss=0.02) as network:
        digest = start(network, 1, DIGEST)
        assert line(digest) == "listening"
        start(network, 0, PUSH, network[1].address, total)
        assert line(digest) == hashlib.sha256(random.Random(1).randbytes(total)).hexdigest()


ANSWER = """
import socket
server = socket.create_server(("0.0.0.0", 5000)); print("listening", flush=True)
connection = server.accept()[0]
while data := connection.recv(100):
    connection.sendall(data)
"""
ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=20)
for line in sys.stdin:  # a time to wait for an answer to what was asked last
    connection.settimeout(float(line))
    try:
        connection.sendall(b"?")
        print("answered" if connection.recv(100) else "closed", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@netns
@pytest.mark.parametrize("delay", [0.0, "5 ms"])
@pytest.mark.parametrize("end", [0, 1])
def test_a_cut_cable_is_silent_and_a_mended_one_goes_on(delay: str | float, end: int) -> None:
    with Network(2, delay=delay) as network:
        assert line(start(network, 1, ANSWER)) == "listening"
        asker = start(network, 0, ASK, network[1].address)

        def ask(patience: float) -> str:
            assert asker.stdin is not None
            asker.stdin.write(f"{patience}\n")
            asker.stdin.flush()
            return line(asker)

        assert ask(20) == "answered"
        network[end].cut()
        assert ask(0.3) == "TimeoutError"
        network[end].mend()
        assert ask(20) == "answered"


@netns
def test_hosts_know_their_names() -> None:
    show = "import socket; name = socket.gethostname(); print(name, *map(socket.gethostbyname, (name, 'host0')))"
    with Network(2) as network:
        assert line(start(network, 1, show)) == "host1 10.77.0.2 10.77.0.1"


@netns
def test_a_command_of_a_host_runs_there() -> None:
    show = [sys.executable, "-c", "import socket, sys; print(socket.gethostname(), *sys.argv[1:])", "a b", "$0"]
    with Network(2) as network:
        command = network[1].command(show)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout == "host1 a b $0\n"


def left_by(owner: int) -> list[str]:
    """Return the namespaces, and files for them, of a process."""
    folders = [folder for folder in (Path("/run/netns"), Path("/etc/netns")) if folder.exists()]
    return [str(path) for folder in folders for path in folder.glob(f"nearlinear-{owner}-*")]


def ended(pidfd: int) -> bool:
    """Return whether a process ends within the deadline."""
    return bool(select.select([pidfd], [], [], DEADLINE)[0])


def routers_of(owner: int) -> list[int]:
    """Return the routers that a process has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == owner and b"router.py" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


# A process that leaves its parent, session and output: what a `with` block could lose sight of.
FORK = """
import os, time
child = os.fork()
if child:
    print(child, flush=True)
else:
    os.setsid()
time.sleep(1000)
"""


@netns
@pytest.mark.parametrize("delay", [0.0, "1 ms"])
def test_nothing_is_left_after_an_exception(delay: str | float) -> None:
    with pytest.raises(ZeroDivisionError), Network(2, delay=delay) as network:
        process = start(network, 1, FORK)
        grandchild = os.pidfd_open(int(line(process)))
        assert len(left_by(os.getpid())) >= 4
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert ended(grandchild)
    os.close(grandchild)
    assert left_by(os.getpid()) == []
    assert routers_of(os.getpid()) == []


OWNER = """
import sys
from nearlinear.testing.links import Network
with Network(2, delay="1 ms") as network:
    process = network[1].popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@netns
def test_what_a_killed_process_left_is_swept_by_the_next_network() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        inside = os.pidfd_open(int(line(owner)))
        (router,) = map(os.pidfd_open, routers_of(owner.pid))
        assert len(left_by(owner.pid)) == 4
        owner.kill()
    assert ended(router)  # by itself
    with Network(1):
        assert left_by(owner.pid) == []
    assert ended(inside)
    os.close(inside)
    os.close(router)


@netns
def test_the_death_of_the_router_is_told() -> None:
    with (
        pytest.raises(NearlinearError, match="router of the emulated network ended with exit code -9"),
        Network(2, delay="1 ms"),
    ):
        (number,) = routers_of(os.getpid())
        router = os.pidfd_open(number)
        os.kill(number, signal.SIGKILL)
        assert ended(router)
        os.close(router)
    assert left_by(os.getpid()) == []


@netns
def test_two_networks_at_once_do_not_meet() -> None:
    with Network(2) as one, Network(2) as other:
        assert line(start(one, 1, ECHO)) == "listening"
        assert line(start(other, 1, ECHO)) == "listening"
        assert float(line(start(one, 0, PING, one[1].address))) < 1
        one[1].cut()
        assert float(line(start(other, 0, PING, other[1].address))) < 1
