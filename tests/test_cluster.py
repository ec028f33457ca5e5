"""A cluster is told in words or read from a file, keeps what it was told, and prints itself for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.core.catalogue import DEVICES, LINKS, find_device, load_cluster, parse_cluster
from nearlinear.core.cluster import Cluster, Crowd, Device, Exchange, Island, Link
from nearlinear.errors import InputError

CPU = Device("cpu", 8e9, {"float32": 50e9}, 10e9)
NEAR, FAR = Link(1e-5, 1e10, 0.02), Link(1e-3, 1.25e8)


def four() -> Cluster:
    """Two islands of two, and everything that a probe finds."""
    return Cluster(
        (CPU,) * 4,
        (Island((0, 1), NEAR), Island((2, 3), NEAR)),
        FAR,
        pairs=((0, 1, Link(2e-3, 1e8)),),
        uplinks=2.0,
        crowds=(Crowd(2, 0.9, 0.6), Crowd(4, 0.5, 0.3)),
        exchanges=(
            Exchange("all_reduce", "gloo ring", 2, NEAR, Link(1e-5, 1e9), ((4.0, 1e-5), (1e6, 1e-3))),
            Exchange("all_reduce", "gloo ring", 4, FAR),
        ),
        source="a test",
    )


# ---- values


def test_a_cluster_survives_a_file() -> None:
    again = Cluster.from_json(four().to_json())
    assert again == four()
    assert again.source == "a test"


def test_a_file_of_an_earlier_release_is_read() -> None:
    raw = json.loads(four().to_json())
    for later in ("uplinks", "crowds", "exchanges"):
        del raw[later]
    assert Cluster.from_json(json.dumps(raw)).link(0, 2) == Link(2e-3, 1e8)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "nearlinear-cluster/9"}', '{"format": "nearlinear-cluster/1"}']
)
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a cluster"):
        Cluster.from_json(text)


@pytest.mark.parametrize("devices", [[(0,), (0, 1)], [(0,)], [(0, 1, 2)], []])
def test_every_device_belongs_to_one_island(devices: list[tuple[int, ...]]) -> None:
    with pytest.raises(InputError, match="must hold each of its 2 devices once"):
        Cluster((CPU, CPU), tuple(Island(each, NEAR) for each in devices), FAR)


def test_a_pair_of_islands_that_do_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 islands has no pair of islands \(0, 2\)"):
        Cluster((CPU, CPU), (Island((0,), NEAR), Island((1,), NEAR)), FAR, pairs=((0, 2, NEAR),))


def test_a_device_without_speed_is_refused() -> None:
    with pytest.raises(InputError, match="device 'cpu': float32 is 0; it must be above 0"):
        Device("cpu", 8e9, {"float32": 0}, 10e9)


def test_links_are_those_of_the_island_the_pair_or_between() -> None:
    three = Cluster((CPU,) * 3, tuple(Island((i,), NEAR) for i in range(3)), FAR, pairs=((0, 2, NEAR),))
    assert four().link(0, 1) == NEAR
    assert (three.link(1, 0), three.link(2, 0)) == (FAR, NEAR)


def test_the_slowest_link_of_a_ring_has_the_worst_of_both() -> None:
    three = Cluster(
        (CPU,) * 3, tuple(Island((i,), NEAR) for i in range(3)), Link(1e-3, 1e9), pairs=((0, 1, Link(1e-4, 1e7)),)
    )
    assert three.slowest([0, 1, 2]) == Link(1e-3, 1e7)


def test_the_first_devices_keep_what_concerns_them() -> None:
    three, two, one = (four().first(count) for count in (3, 2, 1))
    assert [island.devices for island in three.islands] == [(0, 1), (2,)]
    assert three.pairs == four().pairs
    assert [each.ranks for each in three.exchanges] == [2]
    assert two.pairs == ()
    assert two.crowds == (Crowd(2, 0.9, 0.6),)
    assert (three.crowd(3), one.crowds) == (four().crowd(3), ())
    assert len(one.devices) == 1
    for count in (0, 5):
        with pytest.raises(InputError, match=f"a cluster of 4 devices has no {count} first ones"):
            four().first(count)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_links_do_not_change_when_devices_leave(devices: int, size: int, data: st.DataObject) -> None:
    islands = tuple(
        Island(tuple(range(i, min(i + size, devices))), Link(i * 1e-6, 1e9)) for i in range(0, devices, size)
    )
    pairs = tuple(
        (a, b, Link(a + b, 1e6)) for a in range(len(islands)) for b in range(a + 1, len(islands)) if (a + b) % 2
    )
    whole = Cluster((CPU,) * devices, islands, FAR, pairs)
    count = data.draw(st.integers(1, devices))
    part = whole.first(count)
    assert all(part.link(a, b) == whole.link(a, b) for a in range(count) for b in range(a))
    assert Cluster.from_json(part.to_json()) == part


def test_speed_in_a_crowd_is_read_between_the_measured_numbers() -> None:
    shares = [four().crowd(busy) for busy in (1, 2, 3, 4, 8)]
    # What all do together: 1, 1.8, 1.9, 2.0 and 1, 1.2, 1.2, 1.2; three that share two cores do no more than four.
    assert [each.compute for each in shares] == pytest.approx([1.0, 0.9, 1.9 / 3, 0.5, 0.5])
    assert [each.memory for each in shares] == pytest.approx([1.0, 0.6, 0.4, 0.3, 0.3])


def test_an_exchange_takes_what_it_was_measured_to_take() -> None:
    curve = Exchange("all_reduce", "ring", 2, Link(1e-4, 1e9), None, ((0.0, 1e-4), (1e6, 3e-3), (4e6, 6e-3)))
    assert curve.time(5e5) == pytest.approx(1.55e-3)
    assert curve.time(8e6) == pytest.approx(6e-3 + 4e6 * 1e-9)
    assert Exchange("all_reduce", "ring", 2, Link(1e-4, 1e9)).time(1e6) == pytest.approx(1.1e-3)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "size"), [(0.3, 1e7, 1e6), (1e-3, 1e6, 4e6), (5e-4, 1e9, 65536.0), (0.1, 1e7, 1000.0)]
)
def test_an_exchange_is_waiting_and_bytes(latency: float, bandwidth: float, size: float) -> None:
    points = tuple((each, latency + each / bandwidth) for each in (4.0, 65536.0, 1048576.0, 4194304.0))
    waiting, moving = Exchange("all_reduce", "ring", 2, Link(latency, bandwidth), None, points).split(size)
    assert waiting == pytest.approx(latency, rel=1e-6)
    assert moving == pytest.approx(size / bandwidth, rel=1e-6, abs=1e-12)


def test_a_link_that_falls_short_of_its_bandwidth_is_not_waiting() -> None:
    # At 1 MB a tenth is lost to retransmissions; it is not there for a second operation to use.
    points = ((4.0, 1e-3), (65536.0, 1e-3 + 0.0655), (1e6, 1.1), (4e6, 4.1))
    waiting, moving = Exchange("all_reduce", "ring", 2, Link(1e-3, 1e6), None, points).split(1e6)
    assert waiting < 2e-3 and moving > 1.09


def test_a_cluster_prints_itself_for_people() -> None:
    assert str(four()) == "4 x cpu (8 GB), 10 µs, 80 Gbit/s within 2, 1 ms, 1 Gbit/s between (2 at once)"
    mixed = parse_cluster("2 x V100 16GB + 1 x T4, 100 Mbit/s 50 ms between")
    assert str(mixed) == "2 x V100 16GB (16 GB) + 1 x T4 16GB (16 GB), 50 ms, 100 Mbit/s between"


# ---- words


def shape(cluster: Cluster) -> list[tuple[str, int]]:
    """Return the device and the number of devices of each island."""
    return [(cluster.devices[island.devices[0]].name, len(island.devices)) for island in cluster.islands]


def test_the_example_is_understood() -> None:
    cluster = parse_cluster("64 x H100 80GB, NVLink within 8, 400 Gbit/s between")
    assert shape(cluster) == [("H100 80GB", 8)] * 8
    assert cluster.islands[0].link == LINKS["nvlink 4"]
    assert cluster.between.bandwidth == 50e9
    assert len({device.host for device in cluster.devices}) == 8
    assert cluster.uplinks == 1.0


@pytest.mark.parametrize(
    ("text", "islands", "bandwidth"),
    [
        ("H100", [("H100 80GB", 1)], None),
        ("2xH200, 50 GB/s between", [("H200 141GB", 1)] * 2, 50e9),
        ("4 × v100-32g nvlink within 4", [("V100 32GB", 4)], None),
        ("12 * A100 40 GiB, PCIe 4 within 8, 10 GbE between", [("A100 40GB", 8), ("A100 40GB", 4)], 1.25e9),
        ("8 x NVIDIA A100-SXM4-80GB, NVLink within 4, InfiniBand HDR between", [("A100 80GB", 4)] * 2, 25e9),
        ("2 x rtx3090 + 1 x RTX 4090, PCIe within 2, 1Mbps between", [("RTX 3090 24GB", 2), ("RTX 4090 24GB", 1)], 125e3),  # noqa: E501
        (
            "8 x V100 16GB, NVLink within 8 + 4 x T4, PCIe within 2, 25 Gb/s between",
            [("V100 16GB", 8), ("T4 16GB", 2), ("T4 16GB", 2)],
            3.125e9,
        ),
        ("2 x NVIDIA H100 80GB HBM3, ndr between", [("H100 80GB", 1)] * 2, 50e9),
    ],
)  # fmt: skip
def test_people_write_clusters_in_many_ways(text: str, islands: list[tuple[str, int]], bandwidth: float | None) -> None:
    cluster = parse_cluster(text)
    assert shape(cluster) == islands
    if bandwidth is not None:
        assert cluster.between.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    ("clause", "latency"),
    [
        ("100 Mbit/s 50 ms", 50e-3),
        ("50 ms 100 Mbit/s", 50e-3),
        ("100 Mbit/s with latency 50 ms", 50e-3),
        ("400 Gbit/s 2.5 us", 2.5e-6),
        ("InfiniBand NDR 1 µs", 1e-6),
        ("1 Gbit/s", 200e-6),
        ("10 Gbit/s Ethernet", 50e-6),
        ("InfiniBand EDR", 14e-6),
    ],
)
def test_a_link_has_the_latency_it_is_given_or_that_of_its_kind(clause: str, latency: float) -> None:
    assert parse_cluster(f"2 x L4, {clause} between").between.latency == pytest.approx(latency)


def test_each_device_may_have_a_link_of_its_own() -> None:
    assert parse_cluster("16 x H100, NVLink within 8, 400 Gbit/s each between").uplinks == 8.0


def test_nvlink_is_that_of_the_device() -> None:
    links = [
        parse_cluster(f"2 x {name}, NVLink within 2").islands[0].link for name in ("V100 16GB", "A100 40GB", "B200")
    ]
    assert [link.bandwidth for link in links] == [150e9, 300e9, 900e9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no device is named"),
        ("2 x foo, 1 Gbit/s between", "the device 'foo' in '2 x foo, 1 Gbit/s between' is not known; known are P100"),
        ("2 x A100, 1 Gbit/s between", "'A100' in .* may be A100 40GB or A100 80GB"),
        ("0 x H100", "0 devices in '0 x H100'"),
        ("8 x H100, NVLink within 0", "`within 0` in .* at least one device"),
        ("64 x H100, NVLink in 8", "'NVLink in 8' in .* was not understood"),
        ("64 x H100, warp within 8, 1 Gbit/s between", "'warp' in 'warp within 8' is not a link"),
        ("64 x H100, fast 1 Gbit/s between", "'fast' in 'fast 1 Gbit/s between' is not a link"),
        ("64 x H100, NVLink within 8", "has 8 islands and no link between them"),
        ("2 x T4, NVLink within 2", "T4 16GB has no nvlink"),
        ("2 x cpu, 1 Gbit/s between", "the speed of 'cpu' .* is not known here; measure it with `nearlinear probe"),
        ("2 x T4, 1 Gbit/s between + 2 x L4, 1 Gbit/s between", "names the link between islands 2 times"),
        ("2 x T4, between", "'between' in .* says no link"),
    ],
)
def test_a_word_that_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster(text)
    assert "\n" not in str(caught.value)


def test_measured_devices_may_be_named() -> None:
    cluster = parse_cluster("2 x cpu, 1 Gbit/s between", known=[CPU])
    assert [device.flops["float32"] for device in cluster.devices] == [50e9, 50e9]


def test_a_cluster_is_loaded_from_a_file_or_from_words(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(four().to_json())
    assert load_cluster(str(path)) == four()
    assert load_cluster("2 x T4, 1 Gbit/s between") == parse_cluster("2 x T4, 1 Gbit/s between")
    with pytest.raises(InputError, match=r"there is no cluster file '.*missing.json'"):
        load_cluster(str(tmp_path / "missing.json"))
    path.write_text("[]")
    with pytest.raises(InputError, match="not a cluster"):
        load_cluster(str(path))


@pytest.mark.parametrize("name", list(DEVICES))
def test_every_preset_is_found_by_its_name(name: str) -> None:
    device = find_device(name)
    assert device.name == name
    assert device.memory == float(name.split()[-1].removesuffix("GB")) * 1e9
    # In no data sheet does a narrower format compute slower, and all memories move 300 GB/s to 8 TB/s.
    speeds = [
        device.flops[dtype] for dtype in ("float64", "float32", "tf32", "bfloat16", "float8") if dtype in device.flops
    ]
    assert speeds == sorted(speeds)
    assert 300e9 <= device.memory_bandwidth <= 8e12
