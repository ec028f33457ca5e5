"""Turning one Linux machine into several hosts with slow, long or lossy links between them.

    no delay, no loss                                    delay or loss
    host 0: eth0 ── port0 ┐                              host 0: eth0 (TUN) ── ┐
    host 1: eth0 ── port1 ┴ bridge in a "switch"         host 1: eth0 (TUN) ── ┴ router.py, a process

Every host is a network namespace with an interface ``eth0`` and a host name of its own. At the left, veth pairs are the
cables; a token bucket (TBF) at either end holds the rate. At the right, the router holds rate, delay and loss in user
space, because the kernel's emulator (netem) is often not built in. The machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import math
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing import router
from nearlinear.units import parse_bandwidth, parse_seconds

MOST_HOSTS = 254  # what 10.77.0.0/24 holds
DEADLINE = 30.0  # seconds for anything that is done here, all of it local

_NAMESPACES, _FILES = Path("/run/netns"), Path("/etc/netns")  # where `ip netns` keeps them, and what it lays over /etc
_NAME = re.compile(r"nearlinear-(\d+)-(\d+)-.*")
# Set in every namespace, by a shell. One bandwidth-delay product must fit into a socket: 64 MiB are 1 Gbit/s at 500 ms
# there and back. And no interface but the loopback speaks IPv6, or announcements would be among the packets.
_SETTINGS = """
cd /proc/sys/net
echo 4096 131072 67108864 > ipv4/tcp_rmem
echo 4096 131072 67108864 > ipv4/tcp_wmem
test ! -e ipv6 || echo 1 > ipv6/conf/default/disable_ipv6
"""
_PACKET = 1500 + router.ETHERNET_HEADER
_networks = itertools.count()


class Network:
    """Hosts on one machine, joined by emulated links. A context manager; inside it, ``network[i]`` is host ``i``.

    Args:
        hosts: How many, 1 to 254. Host ``i`` is called ``host<i>`` and has the address ``10.77.0.<i + 1>``.
        rate: Bandwidth of each host's cable, up and down alike, like ``"100 Mbit/s"`` or in bytes per second; headers
            count, so one TCP flow gets at most 95.6 % of it. ``None``: as fast as the machine.
        delay: Time from host to host, one way, like ``"40 ms"`` or in seconds.
        loss: Probability that a packet is lost, 0 or more and less than 1.
        seed: Of the losses: which packets of a host's stream are lost follows from it.

    Before each direction of a cable at most 100 ms of traffic wait, or one bandwidth-delay product where that is more;
    what comes then is dropped, as at a real bottleneck. With a delay or loss, TCP is carried at gigabits per second,
    but only some 30 000 UDP datagrams per second.

    Raises:
        InputError: An argument is out of range, or (on entry) this process may not make networks here.
        NearlinearError: On exit: the router died, so the links were dead too.

    Example:
        with Network(hosts=2, rate="100 Mbit/s", delay="40 ms") as network:
            process = network[1].popen([sys.executable, "script.py"])
            process.wait(timeout=60)
    """

    def __init__(
        self,
        hosts: int,
        rate: str | float | None = None,
        delay: str | float = 0.0,
        loss: float = 0.0,
        *,
        seed: int = 0,
    ) -> None:
        self._rate = math.inf if rate is None else parse_bandwidth(rate) if isinstance(rate, str) else float(rate)
        self._delay = parse_seconds(delay) if isinstance(delay, str) else float(delay)
        self._loss, self._seed = loss, seed
        if not 1 <= hosts <= MOST_HOSTS:
            raise InputError(f"a network of {hosts} hosts; it must have 1 to {MOST_HOSTS}")
        if not self._rate > 0:
            raise InputError(f"a rate of {rate}; it must be more than 0, or None for no limit")
        if not 0 <= self._delay < math.inf:
            raise InputError(f"a delay of {delay}; it must be 0 or more seconds")
        if not 0 <= loss < 1:
            raise InputError(f"loss is {loss}; it is a probability per packet: 0 or more and less than 1")
        prefix = f"nearlinear-{os.getpid()}-{_started(os.getpid())}-{next(_networks)}"
        self._switch = f"{prefix}-switch"
        self._hosts = [Host(i, f"{prefix}-host{i}") for i in range(hosts)]
        self._exit = contextlib.ExitStack()
        self._up = False

    def __getitem__(self, number: int) -> Host:
        if not self._up:
            raise InputError(f"host {number} exists only inside the `with` block of its network")
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Network:
        reason = can_emulate()
        if reason is not None:
            raise InputError(f"no networks can be emulated here: {reason}")
        _sweep()
        with contextlib.ExitStack() as undo:  # if a step fails, those before it are undone
            for host in self._hosts:
                undo.callback(_remove, host.namespace)
                self._add(host)
            if self._delay or self._loss:
                self._join_by_router(undo)
            else:
                undo.callback(_remove, self._switch)
                self._join_by_bridge()
            for host in self._hosts:
                _run(f"ip -n {host.namespace} address add {host.address}/24 dev eth0")
                undo.callback(host._kill)
            self._exit = undo.pop_all()
        self._up = True
        return self

    def __exit__(self, *_: object) -> None:
        self._up = False
        self._exit.close()

    def _add(self, host: Host) -> None:
        """Make a host with everything but its cable."""
        files = _FILES / host.namespace
        files.mkdir(parents=True)
        names = "".join(f"{each.address} {each.name}\n" for each in self._hosts)
        (files / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        _make(host.namespace)

    def _queue(self) -> float:
        """Return the bytes that may wait before a line."""
        return max(self._rate * max(0.1, 2 * self._delay), 10 * _PACKET)

    def _slack(self) -> float:
        """Return the seconds' worth of bytes that may leave at once, so that waking up late costs no bandwidth."""
        return max(0.001, 2 * _PACKET / self._rate)

    def _join_by_bridge(self) -> None:
        _make(self._switch)
        _run(f"ip -n {self._switch} link add bridge up type bridge")
        for host in self._hosts:
            inside, outside = f"-n {host.namespace}", f"-n {self._switch}"
            _run(f"ip {inside} link add eth0 type veth peer name {host.port} netns {self._switch}")
            _run(f"ip {inside} link set eth0 up")
            _run(f"ip {outside} link set {host.port} master bridge up")
            if math.isfinite(self._rate):
                burst, queue = round(self._rate * self._slack()), round(self._queue())
                tbf = f"root tbf rate {round(self._rate * 8)}bit burst {burst} limit {queue}"
                _run(f"tc {inside} qdisc add dev eth0 {tbf}")
                _run(f"tc {outside} qdisc add dev {host.port} {tbf}")
            host._cable = functools.partial(self._switch_port, host.port)

    def _switch_port(self, port: str, state: str) -> None:
        # The switch's end of the cable: the host sees it pulled, keeps its routes, and gets no error.
        _run(f"ip -n {self._switch} link set {port} {state}")

    def _join_by_router(self, undo: contextlib.ExitStack) -> None:
        memory = os.memfd_create("cables")
        with contextlib.ExitStack() as ours:  # descriptors that the router inherits
            ours.callback(os.close, memory)
            os.ftruncate(memory, len(self))
            cables = mmap.mmap(memory, len(self))
            undo.callback(cables.close)
            tuns = []
            with ThreadPoolExecutor(1) as elsewhere:  # a thread that ends here, for it leaves the machine's namespace
                for host in self._hosts:
                    tuns.append(elsewhere.submit(_open_tun, host.namespace).result(DEADLINE))
                    ours.callback(os.close, tuns[-1])
                    # What drops packets is to be the router, not the queue before it (of 500 by default).
                    _run(f"ip -n {host.namespace} link set eth0 txqueuelen 10000 up")
                    host._cable = functools.partial(_mark, cables, host.number)
            link = {"rate": self._rate, "delay": self._delay, "loss": self._loss, "seed": self._seed}
            link |= {"queue": self._queue(), "slack": self._slack()}
            config = {"hosts": tuns, "parent": 0, "cables": memory, "link": link}
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", router.__file__, json.dumps(config)],
                stdin=subprocess.PIPE,
                pass_fds=[memory, *tuns],
                start_new_session=True,
            )
            undo.callback(_stop_router, process)


class Host:
    """One host of a ``Network``."""

    def __init__(self, number: int, namespace: str) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = ".".join(map(str, (*router.SUBNET, number + 1)))
        self.port = f"port{number}"
        self.namespace = namespace
        self._cable: Callable[[str], None]  # takes "down" or "up"
        self._processes: list[subprocess.Popen[Any]] = []

    def popen(self, args: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host.

        It runs in a session of its own. On this host ``socket.gethostname()`` is ``host<i>``, and the names of all
        hosts of the network resolve. What still runs when the network's block ends is killed.

        Args:
            args: The program and its arguments.
            **options: As for ``subprocess.Popen``.
        """
        command = self.command([os.fspath(word) for word in args])
        process = subprocess.Popen(command, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def command(self, args: Sequence[str]) -> list[str]:
        """Return the command that, run on this machine, becomes ``args`` on this host.

        For whoever starts processes by other means than ``popen``. It replaces itself by exec, so that the process
        started is in the end the program itself, and is killed with the others when the network's block ends.

        Args:
            args: The program and its arguments; none, to get what goes before them.

        Example:
            subprocess.run(network[1].command(["hostname"]), timeout=10)
        """
        return [*_entering(self.namespace, self.name), *args]

    def cut(self) -> None:
        """Pull the cable: nothing passes in either direction, and no connection is told."""
        self._cable("down")

    def mend(self) -> None:
        """Put the cable back."""
        self._cable("up")

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(DEADLINE)
        _kill_all(self.namespace)


@functools.cache
def can_emulate() -> str | None:
    """Return why this process cannot make networks here, in one line; None if it can.

    Example:
        pytestmark = pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"no program `{program}` (package {package})"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"no TUN devices: /dev/net/tun: {error.strerror}"
    probe = f"nearlinear-{os.getpid()}-{_started(os.getpid())}-{next(_networks)}-probe"
    try:  # root may be without the right, and a kernel without the parts: in a container, say
        _make(probe)
        _run(f"ip -n {probe} link add cable type veth peer name port")
        _run(f"ip -n {probe} link add bridge type bridge")
        _run(f"tc -n {probe} qdisc add dev cable root tbf rate 1mbit burst 3000 limit 9000")
    except NearlinearError as error:
        return str(error)
    finally:
        _remove(probe)
    return None


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot, which tells it from a later one with its number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _sweep() -> None:
    """Remove what processes left that died without removing it."""
    left = {path.name for folder in (_NAMESPACES, _FILES) if folder.exists() for path in folder.iterdir()}
    for name in left:
        owner = _NAME.fullmatch(name)
        if owner and _started(int(owner[1])) != int(owner[2]):
            _remove(name)


def _make(namespace: str) -> None:
    """Make a namespace with a loopback."""
    _run(f"ip netns add {namespace}")
    _run(f"ip -n {namespace} link set lo up")
    _run([*_entering(namespace, "any"), "/bin/sh", "-e", "-c", _SETTINGS])


def _remove(namespace: str) -> None:
    """End what runs in a namespace, then delete it and its files."""
    if (_NAMESPACES / namespace).exists():
        try:
            _kill_all(namespace)
            _run(f"ip netns delete {namespace}")
        except NearlinearError:
            if (_NAMESPACES / namespace).exists():  # else another process that sweeps was faster
                raise
    shutil.rmtree(_FILES / namespace, ignore_errors=True)


def _kill_all(namespace: str) -> None:
    end = time.monotonic() + DEADLINE
    while pids := _run(f"ip netns pids {namespace}").split():
        if time.monotonic() > end:
            raise NearlinearError(f"processes {', '.join(pids)} in {namespace} outlived a kill by {DEADLINE:.0f} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _stop_router(process: subprocess.Popen[bytes]) -> None:
    code = process.poll()
    with process:
        process.kill()
    if code is not None:
        raise NearlinearError(
            f"the router of the emulated network ended with exit code {code} while the network was in use; "
            "what it said is on standard error"
        )


def _mark(cables: mmap.mmap, host: int, state: str) -> None:
    cables[host] = state == "down"


def _open_tun(namespace: str) -> int:
    """Make a TUN device ``eth0`` in a namespace and return its descriptor; moves the calling thread there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise NearlinearError(f"cannot enter the namespace {namespace}: {os.strerror(ctypes.get_errno())}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # linux/if_tun.h: TUNSETIFF with IFF_TUN | IFF_NO_PI | IFF_VNET_HDR, then TUNSETOFFLOAD with TUN_F_CSUM | TUN_F_TSO4
    fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", b"eth0", 0x0001 | 0x1000 | 0x4000))
    fcntl.ioctl(descriptor, 0x400454D0, 0x01 | 0x02)
    return descriptor


def _entering(namespace: str, name: str) -> list[str]:
    """Return what to put before a command so that it runs in a namespace, on a host of that name.

    Each step replaces the last by exec, so the process that a caller knows is in the end the command itself. The host
    name in /proc/sys is that of the UTS namespace of whoever writes there.
    """
    ip, unshare = (shutil.which(program) or program for program in ("ip", "unshare"))
    naming = f'echo {name} > /proc/sys/kernel/hostname && exec "$@"'
    return [ip, "netns", "exec", namespace, unshare, "--uts", "/bin/sh", "-c", naming, "sh"]


def _run(command: str | list[str]) -> str:
    """Run a command of this machine, words parted by spaces or one by one, and return what it printed.

    Raises:
        NearlinearError: It failed or hung.
    """
    words = command.split() if isinstance(command, str) else command
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise NearlinearError(f"`{' '.join(words)}` did not end within {DEADLINE:.0f} s") from None
    if done.returncode:
        raise NearlinearError(f"`{' '.join(words)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout
