"""Turning one exchange among members on emulated links, by either way, into seconds beside the least there could be.

    python benchmarks/internet/exchange.py [--rounds 10] [--rate "100 Mbit/s"] [--delay "40 ms"] [--hosts 4]

Every member is a process on a host of its own, the centre one more on the first host. All deliver at once, and an
exchange has lasted until the last of them has the news. Needs Linux and root, for network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.codecs import nbytes
from nearlinear.runtime.local.member import Member, Update
from nearlinear.runtime.local.ticket import Ticket
from nearlinear.runtime.local.update import Sizes
from nearlinear.testing.links import Network
from nearlinear.units import parse_bandwidth, parse_seconds

PORT = 4242
KEY = bytes(24)
PAUSE_S = 1.5  # between two exchanges, as steps of training would
WARM = 4  # exchanges in which connections find the link's speed; they are told beside the others


def centre(way: str) -> None:
    """Serve one run."""
    made = Centre.listen("0.0.0.0", PORT, KEY, patience_s=60, silence_s=20, direct=lambda *known: way == "direct")
    print("up", flush=True)
    while not made.wait_until_empty(0.2) or made.standing().round == 0:
        time.sleep(0.1)
    made.stop()


def member(host: str, values: int, codec: str, members: int, rounds: int, way: str) -> None:
    """Take part in one run, and print when each update was delivered and when its news came."""
    zeros = np.zeros(values, np.float32)
    ticket = Ticket(host, PORT, KEY)
    made = Member.join(ticket, "host", Sizes(values), "x", lambda: zeros, codec=codec, every=5, silence_s=20)
    news = made.news(60)
    change = np.random.default_rng(made.number).normal(size=values).astype(np.float32)
    while news.members < members or (way == "direct" and made._plan is None):
        time.sleep(0.3)
        made.deliver(Update(news, change, 1.0, 1, 1.0))
        news = made.news(120)
    times = []
    for _ in range(rounds):
        time.sleep(PAUSE_S)
        began = time.monotonic()
        made.deliver(Update(news, change, 1.0, 1, 1.0))
        news = made.news(300)
        times.append((news.round, began, time.monotonic(), news.counted))
    print(json.dumps(times), flush=True)
    time.sleep(1.0)
    made.leave()


def measure(way: str, codec: str, values: int, loss: float, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each exchange of one run."""
    with Network(hosts=options.hosts, rate=options.rate, delay=options.delay, loss=loss, seed=options.seed) as network:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        own = [sys.executable, str(Path(__file__).resolve())]
        middle = network[0].popen([*own, "--role", "centre", way], stdout=subprocess.PIPE, text=True, env=environment)
        assert middle.stdout is not None
        middle.stdout.readline()
        processes = []
        for host in range(options.hosts):
            address = "127.0.0.1" if host == 0 else network[0].address
            words = ["--role", "member", address, values, codec, options.hosts, options.rounds + WARM, way]
            command = [*own, *map(str, words)]
            processes.append(network[host].popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        found: list[list[Any]] = [json.loads(each.communicate(timeout=600)[0]) for each in processes]
    rounds: dict[int, list[tuple[float, float]]] = {}
    for each in found:
        for round_, began, ended, counted in each:
            assert counted, f"an update did not count in round {round_ - 1}"
            rounds.setdefault(round_, []).append((began, ended))
    whole = [each for _, each in sorted(rounds.items()) if len(each) == options.hosts]
    return [max(end for _, end in each) - max(begin for begin, _ in each) for each in whole]


def least(way: str, members: int, size: float, rate: float) -> float:
    """Return the seconds that the bytes alone take on the busiest link."""
    if way == "direct":
        return 2 * (members - 1) / members * size / rate
    return 2 * (members - 1) * size / rate  # into the centre, then out of it


def main(options: argparse.Namespace) -> None:
    """Print the table."""
    rate, round_trip = parse_bandwidth(options.rate), 2 * parse_seconds(options.delay)
    print(f"{options.hosts} members, {options.rate} each way, {1e3 * round_trip:.0f} ms there and back")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{options.rounds} exchanges each after {WARM} that warm up, seed {options.seed}; median (least to most)\n")
    print("| values | codec | bytes | loss | way | seconds | bytes / bandwidth | ratio | with round trips | first |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for values, codec in options.cases:
        size = nbytes(codec, values)
        for loss in options.loss:
            for way in options.ways:
                times = measure(way, codec, values, loss, options)
                warm, first = sorted(times[WARM:]), times[0]
                floor = least(way, options.hosts, size, rate)
                trips = (2.5 if way == "direct" else 1.0) * round_trip
                middle = statistics.median(warm)
                print(
                    f"| {values:,} | {codec} | {size:,} | {100 * loss:g} % | {way} | {middle:.3f} "
                    f"({warm[0]:.3f} to {warm[-1]:.3f}) | {floor:.3f} | {middle / floor:.2f} | "
                    f"{middle / (floor + trips):.2f} | {first:.3f} |",
                    flush=True,
                )


def _case(text: str) -> tuple[int, str]:
    values, _, codec = text.partition(":")
    return int(values), codec


if __name__ == "__main__":
    if sys.argv[1:3] == ["--role", "centre"]:
        centre(sys.argv[3])
    elif sys.argv[1:3] == ["--role", "member"]:
        host_, values_, codec_, members_, rounds_, way_ = sys.argv[3:]
        member(host_, int(values_), codec_, int(members_), int(rounds_), way_)
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=10)
        parser.add_argument("--hosts", type=int, default=4)
        parser.add_argument("--rate", default="100 Mbit/s")
        parser.add_argument("--delay", default="40 ms", help="one way")
        parser.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.005])
        parser.add_argument("--ways", nargs="+", default=["direct", "star"])
        parser.add_argument("--seed", type=int, default=0)
        cases = ["4000000:fp32", "4000000:int8", "16000000:int8", "16384:fp32"]
        parser.add_argument("--cases", type=_case, nargs="+", default=[_case(each) for each in cases])
        main(parser.parse_args())
