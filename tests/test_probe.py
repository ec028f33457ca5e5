"""`nearlinear probe` recovers the links it was given, finds islands, and measures again when it must."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nearlinear.cli import probe as command
from nearlinear.cli.probe_tables import meaning, show
from nearlinear.core.cluster import Cluster, Crowd, Exchange, Link
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.launch.environment import free_port
from nearlinear.measure import cache, crowds, rounds
from nearlinear.measure.crowds import measure_crowds, wanted_and_there, within_cores
from nearlinear.measure.hardware import Hardware, Others, Place, here, place
from nearlinear.measure.islands import islands_of
from nearlinear.measure.link import fit_alpha_beta
from nearlinear.measure.messages import Both, Direction
from nearlinear.measure.probe import Measured, probe
from nearlinear.measure.speed import NumpyComputer, Speed, measure_speed
from nearlinear.measure.wire import Listener, SocketWire, connect, new_token
from nearlinear.runtime.environment import World
from nearlinear.runtime.meeting import Star
from nearlinear.testing.links import Network, can_emulate
from nearlinear.testing.processes import run_processes
from nearlinear.units import parse_bandwidth, parse_seconds

SCRIPT = Path(__file__).parent / "probed_links.py"
DEADLINE = 120.0
TCP = 0.956  # of a cable's rate are left beside the headers of full packets


def netns(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs namespaces; where there are none it is skipped with the reason."""
    skipped: Callable[..., None] = pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))(test)
    marked: Callable[..., None] = pytest.mark.netns(skipped)
    return marked


# ---- the fit


@given(st.floats(1e-6, 0.1), st.floats(1e5, 1e11), st.integers(12, 26))
def test_exact_times_give_the_link_back(latency: float, bandwidth: float, power: int) -> None:
    sizes = [1.0, *(2.0**power / part for part in (16, 4, 2, 1))]
    link = fit_alpha_beta(sizes, [latency + size / bandwidth for size in sizes])
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(latency, rel=1e-3, abs=1e-3 / bandwidth)
    assert link.spread < 1e-3


def test_the_spread_is_the_relative_residual() -> None:
    times = [1e-3 + 1e-8 * size for size in (1e4, 1e5, 1e6)]
    off = [times[0] * 1.1, times[1], times[2] * 1.1]
    assert fit_alpha_beta([1e4, 1e5, 1e6], times).spread < 1e-6
    assert 0.02 < fit_alpha_beta([1e4, 1e5, 1e6], off).spread < 0.1


def test_a_latency_below_zero_becomes_the_shortest_time() -> None:
    link = fit_alpha_beta([1e6, 2e6], [1e-3, 3e-3])
    assert link.latency == 1e-3
    assert 1e9 < link.bandwidth < 1e10


def test_one_size_is_no_link() -> None:
    with pytest.raises(InputError, match="messages of two sizes"):
        fit_alpha_beta([8, 8], [1.0, 2.0])


# ---- islands

FAST, LAN, WAN = Link(1e-5, 1e10), Link(1e-4, 1.25e8), Link(50e-3, 1.25e7)


def links_of(hosts: Sequence[str], link: Callable[[str, str], Link]) -> dict[tuple[int, int], Link]:
    """Return the link of every pair."""
    return {(a, b): link(hosts[a], hosts[b]) for b in range(len(hosts)) for a in range(b)}


def test_two_and_two_are_two_islands() -> None:
    hosts = ["a", "a", "b", "b"]
    islands, between, others = islands_of(links_of(hosts, lambda a, b: FAST if a == b else LAN), hosts)
    assert [island.devices for island in islands] == [(0, 1), (2, 3)]
    assert ([island.link for island in islands], between, others) == ([FAST, FAST], LAN, ())


def test_equal_links_between_machines_make_each_an_island() -> None:
    islands, between, others = islands_of(links_of(["a", "b", "c"], lambda a, b: LAN), ["a", "b", "c"])
    assert [island.devices for island in islands] == [(0,), (1,), (2,)]
    assert (between, others) == (LAN, ())


def test_equal_links_within_a_machine_make_one_island() -> None:
    islands, _, _ = islands_of(links_of(["a"] * 3, lambda a, b: FAST), ["a"] * 3)
    assert [island.devices for island in islands] == [(0, 1, 2)]


def test_machines_at_one_site_are_an_island_before_the_internet() -> None:
    hosts = ["here1", "here2", "there1", "there2"]
    islands, between, _ = islands_of(links_of(hosts, lambda a, b: LAN if a[:4] == b[:4] else WAN), hosts)
    assert [island.devices for island in islands] == [(0, 1), (2, 3)]
    assert between == WAN


def test_the_fastest_of_three_levels_makes_the_islands_and_the_others_are_kept() -> None:
    hosts = ["here1", "here1", "here2", "here2", "there", "there"]

    def link(a: str, b: str) -> Link:
        return FAST if a == b else LAN if a[:4] == b[:4] else WAN

    islands, between, others = islands_of(links_of(hosts, link), hosts)
    assert [island.devices for island in islands] == [(0, 1), (2, 3), (4, 5)]
    assert (between, others) == (WAN, ((0, 1, LAN),))


def test_links_within_a_machine_may_differ() -> None:
    links = links_of(["a"] * 4, lambda a, b: LAN) | {(0, 1): FAST, (2, 3): FAST}
    islands, between, _ = islands_of(links, ["a"] * 4)
    assert [island.devices for island in islands] == [(0, 1), (2, 3)]
    assert between == LAN


def test_machines_whose_insides_differ_are_islands_all_the_same() -> None:
    # A processor that others kept busy made one machine's links three times as slow as the other's.
    hosts = ["a", "a", "b", "b", "c"]
    links = links_of(hosts, lambda a, b: FAST if a == b else LAN) | {(0, 1): Link(3e-5, 3e9)}
    islands, _, _ = islands_of(links, hosts)
    assert [island.devices for island in islands] == [(0, 1), (2, 3), (4,)]


def test_a_pair_stands_for_others_of_its_machines() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    islands, between, _ = islands_of({(0, 1): FAST, (4, 5): FAST, (0, 4): LAN}, hosts)
    assert [island.devices for island in islands] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert between == LAN


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_noise_of_a_third_does_not_change_the_islands(machines: int, each: int, seed: int) -> None:
    import random

    dice = random.Random(seed)
    hosts = [f"host{i}" for i in range(machines) for _ in range(each)]

    def link(a: str, b: str) -> Link:
        base = FAST if a == b else LAN
        return Link(base.latency * dice.uniform(0.85, 1.15), base.bandwidth * dice.uniform(0.85, 1.15))

    islands, _, _ = islands_of(links_of(hosts, link), hosts)
    assert [island.devices for island in islands] == [tuple(range(i * each, (i + 1) * each)) for i in range(machines)]


@given(st.integers(2, 12))
def test_a_tournament_pairs_everyone_with_everyone_once(players: int) -> None:
    played = rounds.tournament(range(players))
    assert sorted(pair for each in played for pair in each) == [
        (a, b) for a in range(players) for b in range(a + 1, players)
    ]
    for each in played:
        flat = [player for pair in each for player in pair]
        assert len(flat) == len(set(flat))


@given(st.integers(1, 20), st.integers(1, 8))
def test_no_rank_is_in_two_pairs_of_a_round(machines: int, each: int) -> None:
    hosts = [f"host{i}" for i in range(machines) for _ in range(each)]
    plan = rounds.alone(hosts)
    for pairs in plan:
        flat = [rank for pair in pairs for rank in pair]
        assert len(flat) == len(set(flat))
    met = {frozenset((hosts[a], hosts[b])) for pairs in plan for a, b in pairs}
    if len(hosts) > 1:
        assert len(met) == machines * (machines - 1) // 2 + (each > 1) * machines  # every pair of machines, each inside


# ---- wires


@contextlib.contextmanager
def wires(count: int = 1, deadline_s: float = 20.0) -> Iterator[tuple[SocketWire, SocketWire]]:
    """Give the two ends of a wire of ``count`` connections."""
    token = new_token()
    listener = Listener("127.0.0.1", token)
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(listener.accept, 0, count, deadline_s)
        one = connect("127.0.0.1", listener.port, 0, 1, count, token, deadline_s)
        far = accepted.result(deadline_s)
    try:
        yield one, far
    finally:
        one.close()
        far.close()
        listener.close()


@pytest.mark.parametrize("count", [1, 3])
def test_messages_of_all_sizes_arrive_whole(count: int) -> None:
    sizes = [1, 2, 1000, 1 << 20, (1 << 22) + 1]
    with wires(count) as (one, far), ThreadPoolExecutor(1) as other:
        echo = other.submit(lambda: [(far.receive(size), far.send(size)) for size in sizes])
        for size in sizes:
            one.send(size)
            one.receive(size)
        echo.result(20)
        both = other.submit(far.exchange, 1 << 22)
        one.exchange(1 << 22)
        both.result(20)
        one.tell({"all": ["read"]})  # nothing is left over in between
        assert far.told() == {"all": ["read"]}


def test_a_silent_peer_is_named_after_the_deadline() -> None:
    with wires(deadline_s=0.3) as (one, _), pytest.raises(PeerLostError, match="rank 1 did not answer within 300 ms"):
        one.receive(1)


def test_a_peer_that_hangs_up_is_named() -> None:
    with wires() as (one, far):
        far.close()
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            one.receive(1)


def test_strangers_are_hung_up_on() -> None:
    token = new_token()
    listener = Listener("127.0.0.1", token)
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(listener.accept, 0, 1, 20.0)
        strangers = [connect("127.0.0.1", listener.port, 0, 1, 1, new_token(), 20.0)]  # another token
        strangers.append(connect("127.0.0.1", listener.port, 5, 1, 1, token, 20.0))  # another rank
        garbage = socket.create_connection(("127.0.0.1", listener.port), timeout=20.0)
        garbage.sendall(b"\x00\x04\xff\xff\xff\xff")
        one = connect("127.0.0.1", listener.port, 0, 1, 1, token, 20.0)
        far = accepted.result(20)
        one.tell("hello")
        assert far.told() == "hello"
        assert garbage.recv(1) == b""
        for each in strangers:
            with pytest.raises(PeerLostError):
                each.told()
            each.close()
    garbage.close()
    one.close()
    far.close()
    listener.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    listener = Listener("127.0.0.1", new_token())
    with pytest.raises(PeerLostError, match=r"rank 3 opened 0 of 2 connections .* within 200 ms"):
        listener.accept(3, 2, 0.2)
    listener.close()
    with pytest.raises(PeerLostError, match="rank 3 cannot be reached at"):
        connect("127.0.0.1", listener.port, 0, 3, 1, "token", 2.0)


# ---- the whole, without a framework


def together(size: int, act: Callable[[World], Any]) -> list[Any]:
    """Return what ``act`` returns as each of ``size`` ranks, in threads."""
    port = free_port()
    worlds = [World(rank, size, rank, size, "127.0.0.1", port) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        return [each.result(DEADLINE) for each in [ranks.submit(act, world) for world in worlds]]


def test_a_meeting_hears_everyone() -> None:
    def act(world: World) -> list[Any]:
        meeting = Star(world, 20.0)
        heard = [meeting.all_gather_json({"rank": world.rank}), meeting.all_gather_json(world.rank * 2)]
        meeting.close()
        return heard

    assert together(3, act) == [[[{"rank": 0}, {"rank": 1}, {"rank": 2}], [0, 2, 4]]] * 3


def test_who_misses_a_meeting_is_named() -> None:
    port = free_port()
    with pytest.raises(PeerLostError, match="rank 1, 2 of 3 did not arrive within 200 ms"):
        Star(World(0, 3, 0, 3, "127.0.0.1", port), 0.2)
    with pytest.raises(PeerLostError, match="rank 2 found no rank 0"):
        Star(World(2, 3, 2, 3, "127.0.0.1", port), 0.2)


def test_who_leaves_a_meeting_is_named() -> None:
    def act(world: World) -> str:
        meeting = Star(world, 20.0)
        if world.rank == 1:
            meeting.close()
            return ""
        with pytest.raises(PeerLostError) as caught:
            meeting.all_gather_json(0, "the test")
        return str(caught.value)

    assert "rank 1 was lost in the test" in together(2, act)[0]


def test_numpy_measures_a_processor() -> None:
    speed = measure_speed(NumpyComputer(8e9), seconds=0.05)
    assert set(speed.flops) == {"float32", "float64"}
    # A machine that is busy with other things may leave a thousandth of a core.
    assert all(1e6 < flops < 1e14 for flops in speed.flops.values())
    assert 1e6 < speed.memory_bandwidth < 1e13


class Elsewhere:
    """A device whose work takes this machine's processors no time, so that several do not disturb each other."""

    name, memory, dtypes = "elsewhere", 1e9, ("float32",)

    def product(self, dtype: str, n: int) -> Callable[[], None]:
        """Return what takes as long as it would at 10 GFLOP/s."""
        return lambda: time.sleep(2 * n**3 / 1e10)

    def copy(self, size: int) -> Callable[[], None]:
        """Return what takes as long as it would at 4 GB/s."""
        return lambda: time.sleep(2 * size / 4e9)


def spin(seconds: float) -> None:
    """Return after so many seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux alone")
def test_a_busy_program_is_noticed() -> None:
    own, others = Others(), Others()
    busy = "import os, time\nwhile os.times().user < 0.5: pass"
    subprocess.run([sys.executable, "-c", busy], timeout=DEADLINE, check=True)
    assert others.share() > 0.005  # half a second of one core, however long that took
    spin(0.5)
    assert own.share() < 1.0


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let devices that do not disturb each other be watched for a third as long."""
    monkeypatch.setattr(crowds, "WINDOW_S", 0.1)
    monkeypatch.setattr(crowds, "AROUND_S", 0.03)


@pytest.mark.usefixtures("short_windows")
def test_a_probe_gives_all_ranks_the_same_cluster() -> None:
    hardware = Hardware("vm", "a processor", 2, 8e9)

    def act(world: World) -> Measured:
        meeting = Star(world, 60.0)
        try:
            return probe(meeting, Elsewhere(), hardware, address="127.0.0.1", deadline_s=60.0)
        finally:
            meeting.close()

    one, other = together(2, act)
    assert dataclasses.replace(one, seconds=0, began="") == dataclasses.replace(other, seconds=0, began="")
    cluster = one.cluster()
    assert [island.devices for island in cluster.islands] == [(0, 1)]
    assert cluster.devices[0].flops["float32"] == pytest.approx(1e10, rel=0.5)
    assert cluster.link(0, 1).bandwidth > 1e7
    assert [each.busy for each in cluster.crowds] == [2]
    assert Measured.from_json(one.to_json()) == one
    assert Cluster.from_json(one.to_json()) == cluster


# ---- crowds


def test_ranks_that_bring_no_cores_get_no_more_done_than_those_who_had_them() -> None:
    shown = [Crowd(2, 0.9, 0.8), Crowd(4, 0.57, 0.62)]  # 4 x 0.57 and 4 x 0.62 of a core's speed, on two cores
    two_cores = [Place("vm", (rank % 2,), 1) for rank in range(4)]
    assert within_cores(shown, two_cores) == (Crowd(2, 0.9, 0.8), Crowd(4, 0.45, 0.4))
    unpinned = [Place("vm", (0, 1), 2) for _ in range(4)]
    assert within_cores(shown, unpinned) == (Crowd(2, 0.5, 0.5), Crowd(4, 0.25, 0.25))
    for apart in ([Place(f"vm{rank}", (0,), 1) for rank in range(4)], [Place("vm", (rank,), 1) for rank in range(4)]):
        assert within_cores(shown, apart) == tuple(shown)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 3), min_size=1), st.integers(1, 4))))
def test_no_more_cores_are_there_than_are_wanted(ranks: list[tuple[str, set[int], int]]) -> None:
    wanted, there = wanted_and_there([Place(machine, sorted(cores), threads) for machine, cores, threads in ranks])
    assert 0 <= there <= wanted
    assert there <= len({(machine, core) for machine, cores, _ in ranks for core in cores})


def test_containers_of_one_machine_are_known_to_share_its_cores() -> None:
    one, other = (place(Hardware(host, "a processor", 2, 8e9, "1")) for host in ("container1", "container2"))
    assert one.threads == 1
    assert list(one.cores) == sorted(os.sched_getaffinity(0) if sys.platform == "linux" else range(2))
    if Path("/proc/sys/kernel/random/boot_id").exists():
        assert one == other


@pytest.mark.usefixtures("short_windows")
def test_windows_at_once_are_held_against_windows_alone() -> None:
    alone = Speed({"float32": 1e10}, 4e9, {"float32": 512})

    def act(world: World) -> tuple[tuple[Crowd, ...], ...]:
        meeting = Star(world, 60.0)
        try:
            shared, apart = [Place("vm", (0,), 1)] * 2, [Place("vm", (rank,), 1) for rank in range(2)]
            return tuple(measure_crowds(meeting, Elsewhere(), [alone] * 2, places) for places in (shared, apart))
        finally:
            meeting.close()

    one, other = together(2, act)
    assert one == other
    (shared,), (apart,) = one
    # These do not disturb each other; yet if both are on one core, no measurement says so.
    assert 0.5 < apart.compute <= 1.0
    assert 0.5 < apart.memory <= 1.0
    assert (shared.compute, shared.memory) == (0.5, 0.5)


# ---- emulated links


def links_found(hosts: Sequence[int], rate: str, delay: str) -> dict[str, Any]:
    """Return what a probe finds with so many ranks on each host of an emulated network."""
    with Network(len(hosts), rate=rate, delay=delay) as network, contextlib.ExitStack() as open_:
        processes = []
        for host, local_size in enumerate(hosts):
            for local in range(local_size):
                environment = os.environ | {
                    "RANK": str(len(processes)), "WORLD_SIZE": str(sum(hosts)), "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": network[0].address, "MASTER_PORT": "29500",
                }  # fmt: skip
                process = network[host].popen(
                    [sys.executable, str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True
                )
                processes.append(open_.enter_context(process))
        out, _ = processes[0].communicate(timeout=DEADLINE)
        assert [process.wait(DEADLINE) for process in processes] == [0] * sum(hosts)
    found: dict[str, Any] = json.loads(out)
    return found


@netns
@pytest.mark.parametrize(
    ("rate", "delay"),
    [
        ("1 Gbit/s", "0 s"),
        ("100 Mbit/s", "20 ms"),
        pytest.param("100 Mbit/s", "0 s", marks=pytest.mark.full),
        pytest.param("1 Gbit/s", "20 ms", marks=pytest.mark.full),
    ],
)
def test_probe_recovers_the_link_it_was_given(rate: str, delay: str) -> None:
    found = links_found([1, 1], rate, delay)
    for link in found["directions"]:
        assert link["bandwidth"] == pytest.approx(TCP * parse_bandwidth(rate), rel=0.15)
        # Without a delay the programs and the kernel alone are left: tens of microseconds, more on a busy machine.
        assert link["latency"] == pytest.approx(parse_seconds(delay), rel=0.15, abs=2e-3)
    assert found["islands"] == [[0], [1]]


def test_links_between_devices_are_timed_over_the_process_group_of_training() -> None:
    results = run_processes(SCRIPT, 2, ["torch"], env={"OMP_NUM_THREADS": "1"}, timeout_s=DEADLINE)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    found = json.loads(results[0].stdout)
    assert found["islands"] == [[0, 1]]
    assert all(link["bandwidth"] > 1e7 and link["latency"] < 0.1 for link in found["directions"])
    assert all(0 < share < 10 for share in found["duplex"])


@netns
def test_four_ranks_on_two_machines_are_two_islands_that_share_a_link() -> None:
    found = links_found([2, 2], "100 Mbit/s", "0 s")
    assert found["islands"] == [[0, 1], [2, 3]]
    assert found["between"]["bandwidth"] == pytest.approx(TCP * 12.5e6, rel=0.15)
    assert found["others"] == 0
    assert len(found["at_once"]) == 2
    assert sum(found["at_once"]) == pytest.approx(1.0, rel=0.25)
    # One stream fills the link, so four bring nothing; on a busy machine their threads may lose some of it.
    streams = [each for each in found["streams"] if each is not None]
    assert len(streams) == 4
    assert all(0.3 < each < 1.25 for each in streams)


# ---- what is kept


def measured(began: datetime.datetime | None = None, hosts: Sequence[str] = ("a", "a", "b", "b")) -> Measured:
    """Return what a probe of two machines may find."""
    began = began or datetime.datetime.now(datetime.UTC)
    pairs = {}
    for high in range(len(hosts)):
        for low in range(high):
            link = FAST if hosts[low] == hosts[high] else LAN
            one = Direction(low, high, (1, 1000), (link.time(1), link.time(1000)), link)
            two = dataclasses.replace(one, source=high, target=low)
            pairs[low, high] = Both(one, two, 0.97, 1.02 if link == LAN else None)
    return Measured(
        hardware=tuple(Hardware(host, "a processor", 2, 16e9) for host in hosts),
        names=("cpu",) * len(hosts),
        memories=(8e9,) * len(hosts),
        speeds=(Speed({"float32": 40e9, "bfloat16": 1e9}, 9e9, {"float32": 512, "bfloat16": 256}),) * len(hosts),
        crowds=(Crowd(2, 0.95, 0.7), Crowd(4, 0.5, 0.35)),
        pairs=pairs,
        at_once={(0, 2): LAN.bandwidth / 2, (1, 3): LAN.bandwidth / 2},
        exchanges=(
            Exchange("all_reduce", "gloo ring", 4, Link(1e-3, 5e7), Link(1e-5, 1e9), ((4.0, 1e-3), (1e6, 2e-2))),
        ),
        others=0.4,
        began=began.isoformat(timespec="seconds"),
        seconds=12.0,
    )


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cache.find(measured().hardware, env) is None
    path = cache.keep(measured(), env)
    assert path.is_relative_to(tmp_path / "nearlinear")
    assert cache.find(measured().hardware, env) == Measured.from_json(path.read_text())
    assert Cluster.from_json(path.read_text()) == measured().cluster()
    assert [device.name for device in cache.known_devices(env)] == ["cpu"]


@pytest.mark.parametrize(
    "change", [{"host": "c"}, {"processor": "another"}, {"cores": 4}, {"threads": "1"}, {"gpus": ("H100",)}]
)
def test_other_hardware_is_measured_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    cache.keep(measured(), env)
    hardware = list(measured().hardware)
    hardware[2] = dataclasses.replace(hardware[2], **change)
    assert cache.find(hardware, env) is None
    assert cache.find(hardware[:2], env) is None


def test_an_old_or_broken_file_is_measured_anew(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    now = datetime.datetime.now(datetime.UTC)
    cache.keep(measured(now - cache.OLD + datetime.timedelta(minutes=1)), env)
    assert cache.find(measured().hardware, env) is not None
    cache.keep(measured(now - cache.OLD - datetime.timedelta(minutes=1)), env)
    assert cache.find(measured().hardware, env) is None
    cache.path_for(measured().hardware, env).write_text('{"format": "nearlinear-cluster/1"')
    assert cache.find(measured().hardware, env) is None


def test_a_file_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .* name another file with --out"):
        cache.write(tmp_path / "file" / "cluster.json", "")


# ---- what is shown


def test_what_was_measured_is_told_in_words() -> None:
    said = "\n".join(meaning(measured(), measured().cluster()))
    assert "The cluster: 4 x cpu (8 GB), 10 µs, 80 Gbit/s within 2, 100 µs, 1 Gbit/s between." in said
    assert "2 islands: ranks 0-1; ranks 2-3." in said
    assert "An all-reduce of 100 MB (25 million parameters in float32) among all 4 takes 1.9 s" in said
    assert "While all 4 work, each multiplies at 50 % of its speed alone and copies at 35 %." in said
    assert "Other programs took 40 % of the processors meanwhile, so the figures are too low" in said
    assert "2 pairs of islands' devices at once: each has 50 % of its bandwidth; they share a link." in said


@pytest.mark.parametrize("hosts", [["a"], ["a", "a", "b", "b"], [f"host{i // 3}" for i in range(12)]])
def test_tables_fit_a_terminal(hosts: Sequence[str]) -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115, PTH123
    show(measured(hosts=hosts), console)
    text = console.export_text()
    assert "cpu (a processor)" in text
    assert ("Links" in text) == (len(hosts) > 1)


# ---- the command


def run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run the command and return what it wrote."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    options = parser.parse_args(["probe", *arguments])
    assert options.call(options) == 0
    written = capsys.readouterr()
    return written.out, written.err


def test_one_process_is_measured_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "cluster.json"
    shown, err = run(["-n", "1", "--out", str(out), "--json"], capsys)
    assert Cluster.from_json(shown) == Cluster.from_json(out.read_text())
    assert len(Cluster.from_json(shown).devices) == 1
    assert f"the cluster file is {out}" in err
    again, err = run(["-n", "1", "--json"], capsys)
    assert (again, "measured 0 min ago; --fresh measures again" in err) == (shown, True)
    assert here().host in run(["-n", "1"], capsys)[0]


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["-n", "0"], {}, "-n is 0; a probe needs at least 1"),
        (["--nnodes", "2"], {}, "--nnodes needs --rdzv"),
        (["--nnodes", "2", "--rdzv", "a:1", "--node-rank", "2"], {}, "--node-rank is 2; the last of 2 is 1"),
        (
            ["-n", "2"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "-n and --nnodes start processes, and 2 have been started",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], env: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        run(arguments, capsys)


def test_two_processes_are_measured_here(
    probed: tuple[subprocess.CompletedProcess[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done, folder = probed
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = Measured.from_json(done.stdout)
    cluster = found.cluster()
    assert [island.devices for island in cluster.islands] == [(0, 1)]
    for kind in ("all_reduce", "broadcast"):
        exchange = cluster.exchange(kind, 2)
        assert exchange is not None and exchange.time(4) < exchange.time(64e6) < 60
    assert "measuring link 0 - 1 (1 of 1)" in done.stderr
    # What the launcher says of the ranks beforehand is what they say of themselves: else it is measured every time.
    assert cache.find(found.hardware) is not None
    assert re.search(r"measured \d+ min ago", run(["-n", "2", "--json"], capsys)[1])


def test_a_rank_that_is_killed_while_a_link_is_measured_is_named(tmp_path: Path) -> None:
    read, write = os.pipe()
    environment = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "NEARLINEAR_SILENCE": "2 s",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "nearlinear.cli.probe_rank", str(tmp_path / "cluster.json")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NEARLINEAR_EVENTS": str(write)},
            pass_fds=[write],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    os.close(write)
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.wait, DEADLINE)
            stack.callback(rank.kill)
        told = b""
        while b'"link 0 - 1' not in told:
            piece = os.read(read, 4096)
            assert piece, "both ranks ended before they measured a link"
            told += piece
        os.close(read)
        ranks[1].kill()
        _, said = ranks[0].communicate(timeout=DEADLINE)
        ranks[1].communicate(timeout=DEADLINE)
    assert ranks[0].returncode == 1
    assert "nearlinear: error: rank 1" in said
    assert not (tmp_path / "cluster.json").exists()


def test_a_failing_rank_fails_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NEARLINEAR_DEADLINE", "soon")
    with pytest.raises(NearlinearError, match=r"the probe failed: rank \d exited with code 2"):
        command.measured_here(2, fresh=True)
