"""Turning ``"64 x H100 80GB, NVLink within 8, 400 Gbit/s between"`` into a cluster, with the makers' data sheets.

    cluster   mix { "," clause }                          8 x A100 40GB, NVLink within 8, 100 Gbit/s between
    mix       group { "+" group }                         4 x H100 + 4 x V100 16GB, 25 Gbit/s between
    group     COUNT "x" device { "," clause }             8 x V100 32GB, NVLink within 8 + 4 x T4, 10 Gbit/s between
    clause    link [LATENCY] "within" COUNT               links of the group's islands, COUNT devices each
              link [LATENCY] ["each"] "between"           the link of an island to all others; each: of every device
    link      BANDWIDTH | NAME                            100 Gbit/s, 12.5 GB/s, NVLink, PCIe 4, InfiniBand NDR, 10 GbE

A group without a ``within`` of its own takes that of the last group; where no group has one, every device is a machine
of its own. Capital letters, hyphens, a leading "NVIDIA" and the like do not matter. Speeds are peaks of the data sheets
for dense matrices; what a product reaches is less, and `nearlinear probe` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.errors import InputError
from nearlinear.units import parse_bandwidth, parse_seconds

EXAMPLE = "64 x H100 80GB, NVLink within 8, 400 Gbit/s between"

# Latencies are those of one message of a collective operation, as NCCL assumes them for its ring (hwLat in
# src/graph/tuning.cc, protocol Simple): NVLink 3.4 µs, PCIe 5.7 µs, network 14 µs. For TCP over Ethernet: 50 µs in a
# machine room, 200 µs at 1 Gbit/s and below; these two are ours, and only an order of magnitude. Data sheets have none.
_NVLINK_S, _PCIE_S, _NETWORK_S, _ETHERNET_S, _SLOW_S = 3.4e-6, 5.7e-6, 14e-6, 50e-6, 200e-6
_FAST_ETHERNET, _SLOW_ETHERNET = 12.5e9, 0.125e9  # bytes per second from which, and to which, another latency is taken

LINKS: dict[str, Link] = {
    # Bandwidth per direction, in the sum over a device's links. NVIDIA's data sheets give both directions together.
    "nvlink 1": Link(_NVLINK_S, 80e9),  # P100: 160 GB/s
    "nvlink 2": Link(_NVLINK_S, 150e9),  # V100: 300 GB/s
    "nvlink 3": Link(_NVLINK_S, 300e9),  # A100: 600 GB/s
    "nvlink 4": Link(_NVLINK_S, 450e9),  # H100, H200, GH200: 900 GB/s
    "nvlink 5": Link(_NVLINK_S, 900e9),  # B200: 1.8 TB/s
    "nvlink bridge": Link(_NVLINK_S, 56.25e9),  # RTX 3090, A40, RTX A6000: 112.5 GB/s between two
    "infinity fabric": Link(_NVLINK_S, 448e9),  # MI300X: seven links of 128 GB/s, one to each of the other seven
    # 16 lanes of 8, 16, 32 GT/s in a code of 128 of 130 bits (PCI-SIG base specifications 3.0, 4.0, 5.0).
    "pcie 3": Link(_PCIE_S, 15.75e9),
    "pcie 4": Link(_PCIE_S, 31.5e9),
    "pcie 5": Link(_PCIE_S, 63.0e9),
    # Four lanes (InfiniBand Trade Association's roadmap): FDR 56, EDR 100, HDR 200, NDR 400, XDR 800 Gbit/s.
    "infiniband fdr": Link(_NETWORK_S, 6.8e9),  # 54.5 of 56 Gbit/s carry data
    "infiniband edr": Link(_NETWORK_S, 12.5e9),
    "infiniband hdr": Link(_NETWORK_S, 25e9),
    "infiniband ndr": Link(_NETWORK_S, 50e9),
    "infiniband xdr": Link(_NETWORK_S, 100e9),
}
_PER_DEVICE = {"nvlink", "pcie"}  # stand for the generation that the group's device has


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A row of a data sheet: GB, GB/s, and TFLOP/s per dtype (without sparsity)."""

    name: str
    memory: float
    bandwidth: float
    tflops: tuple[float | None, ...]  # as _DTYPES
    links: tuple[str, ...]  # between devices of one machine, the fastest first
    default: bool = True  # what the name means without more


_DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
_SHEETS = (
    # NVIDIA Tesla P100 data sheet, 2016, SXM2.
    _Sheet("P100 16GB", 16, 732, (5.3, 10.6, None, 21.2, None, None), ("nvlink 1", "pcie 3")),
    # NVIDIA V100 data sheet, 2020, SXM2.
    _Sheet("V100 16GB", 16, 900, (7.8, 15.7, None, 125, None, None), ("nvlink 2", "pcie 3")),
    _Sheet("V100 32GB", 32, 900, (7.8, 15.7, None, 125, None, None), ("nvlink 2", "pcie 3")),
    # NVIDIA T4 data sheet, 2019.
    _Sheet("T4 16GB", 16, 300, (None, 8.1, None, 65, None, None), ("pcie 3",)),
    # NVIDIA A100 data sheet, 2021, SXM.
    _Sheet("A100 40GB", 40, 1555, (9.7, 19.5, 156, 312, 312, None), ("nvlink 3", "pcie 4")),
    _Sheet("A100 80GB", 80, 2039, (9.7, 19.5, 156, 312, 312, None), ("nvlink 3", "pcie 4")),
    # NVIDIA A10, A40 and RTX A6000 data sheets, 2021.
    _Sheet("A10 24GB", 24, 600, (None, 31.2, 62.5, 125, 125, None), ("pcie 4",)),
    _Sheet("A40 48GB", 48, 696, (None, 37.4, 74.8, 149.7, 149.7, None), ("nvlink bridge", "pcie 4")),
    _Sheet("RTX A6000 48GB", 48, 768, (None, 38.7, 77.4, 154.8, 154.8, None), ("nvlink bridge", "pcie 4")),
    # NVIDIA L4 and L40S data sheets, 2023, which give tensor speeds with sparsity: half of them.
    _Sheet("L4 24GB", 24, 300, (None, 30.3, 60, 121, 121, 242.5), ("pcie 4",)),
    _Sheet("L40S 48GB", 48, 864, (None, 91.6, 183, 362, 362, 733), ("pcie 4",)),
    # NVIDIA H100 data sheet, 2023, SXM and PCIe, with sparsity: half of it.
    _Sheet("H100 80GB", 80, 3350, (34, 67, 494.5, 989.5, 989.5, 1979), ("nvlink 4", "pcie 5")),
    _Sheet("H100 PCIe 80GB", 80, 2000, (26, 51, 378, 756.5, 756.5, 1513), ("pcie 5",), default=False),
    # NVIDIA H200 data sheet, 2024, SXM, with sparsity: half of it.
    _Sheet("H200 141GB", 141, 4800, (34, 67, 494.5, 989.5, 989.5, 1979), ("nvlink 4", "pcie 5")),
    # NVIDIA GH200 data sheet, 2023, the version with HBM3, with sparsity: half of it.
    _Sheet("GH200 96GB", 96, 4000, (34, 67, 494.5, 989.5, 989.5, 1979), ("nvlink 4", "pcie 5")),
    # NVIDIA DGX B200 and HGX B200 data sheets, 2024 and 2025: an eighth of the system's.
    _Sheet("B200 180GB", 180, 8000, (37, 75, 1125, 2250, 2250, 4500), ("nvlink 5", "pcie 5")),
    # NVIDIA's architecture white papers for Turing (2018), Ampere GA102 (2020), Ada (2022) and Blackwell RTX (2025);
    # float16 with sums in float32.
    _Sheet("RTX 2080 8GB", 8, 448, (None, 10.1, None, 40.3, None, None), ("pcie 3",)),
    _Sheet("RTX 2080 Ti 11GB", 11, 616, (None, 13.4, None, 53.8, None, None), ("pcie 3",), default=False),
    _Sheet("Titan RTX 24GB", 24, 672, (None, 16.3, None, 130.5, None, None), ("pcie 3",)),
    _Sheet("RTX 3090 24GB", 24, 936, (None, 35.6, 35.6, 71, 71, None), ("nvlink bridge", "pcie 4")),
    _Sheet("RTX 4090 24GB", 24, 1008, (None, 82.6, 82.6, 165.2, 165.2, 330.3), ("pcie 4",)),
    _Sheet("RTX 5090 32GB", 32, 1792, (None, 104.8, 104.8, 209.5, 209.5, 419), ("pcie 5",)),
    # AMD Instinct MI250X and MI300X data sheets, 2021 and 2023; float32 and float64 by matrix instructions.
    _Sheet("MI250X 128GB", 128, 3277, (95.7, 95.7, None, 383, 383, None), ("pcie 4",)),
    _Sheet("MI300X 192GB", 192, 5300, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9), ("infinity fabric", "pcie 5")),
)


def _device(sheet: _Sheet) -> Device:
    flops = {dtype: each * 1e12 for dtype, each in zip(_DTYPES, sheet.tflops, strict=True) if each is not None}
    return Device(sheet.name, sheet.memory * 1e9, flops, sheet.bandwidth * 1e9)


DEVICES: dict[str, Device] = {sheet.name: _device(sheet) for sheet in _SHEETS}


def load_cluster(text: str, known: Iterable[Device] = ()) -> Cluster:
    """Return the cluster in a file that `nearlinear probe` wrote, or the one that ``text`` describes.

    Args:
        text: A path, or a description as ``parse_cluster`` takes it.
        known: Devices that a description may name beside those of the catalogue.

    Raises:
        InputError: The file is no cluster, there is no such file, or the description is not understood.
    """
    path = Path(text)
    looks_like_a_path = path.suffix == ".json" or (len(path.parts) > 1 and not re.search(r"\d\s*[x×*]\s*\S", text))
    try:
        if path.is_file():
            return Cluster.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the cluster file {text!r}: {error}") from None
    if looks_like_a_path:
        raise InputError(f"there is no cluster file {text!r}; write one with `nearlinear probe --out {path.name}`")
    return parse_cluster(text, known)


def parse_cluster(text: str, known: Iterable[Device] = ()) -> Cluster:
    """Return the cluster that ``text`` describes.

    Args:
        text: In the grammar at the top of this file.
        known: Devices that may be named beside those of the catalogue, and win over them: those of a cluster file, say.

    Raises:
        InputError: A word is not understood, a device is not known, or a link is missing; the message names it.

    Example:
        >>> print(parse_cluster("64 x H100 80GB, NVLink within 8, 400 Gbit/s between"))
        64 x H100 80GB (80 GB), 3.4 µs, 3,600 Gbit/s within 8, 14 µs, 400 Gbit/s between
    """
    known = tuple(known)
    groups = [_group(part, text, known) for part in text.split("+")]
    between = [group for group in groups if group.between is not None]
    if len(between) > 1:
        raise InputError(f"{text!r} names the link between islands {len(between)} times; once, at the end, is enough")
    devices: list[Device] = []
    islands: list[Island] = []
    for group in groups:
        within, size = group.within or groups[-1].within or (None, 1)
        for begin in range(0, group.count, size):
            members = range(len(devices), len(devices) + min(size, group.count - begin))
            host = f"host{len(islands)}"
            link = _resolve(within, group.device, text) if within is not None else _resolve("pcie", group.device, text)
            devices += [replace(group.device, host=host)] * len(members)
            islands.append(Island(tuple(members), link))
    if len(islands) > 1 and not between:
        raise InputError(
            f"{text!r} has {len(islands)} islands and no link between them; write it like {EXAMPLE!r}"
            + ("" if any(group.within for group in groups) else ", or `within` for devices of one machine")
        )
    uplinks = 1.0
    if between:
        assert between[0].between is not None
        name, each = between[0].between
        link = _resolve(name, between[0].device, text)
        uplinks = float(max(len(island.devices) for island in islands)) if each else 1.0
    else:
        link = islands[0].link
    return Cluster(tuple(devices), tuple(islands), link, uplinks=uplinks, source=f"described as {text!r}")


@dataclass(slots=True)
class _Group:
    count: int
    device: Device
    within: tuple[str | Link, int] | None = None
    between: tuple[str | Link, bool] | None = None


MOST = 100_000
"""Devices of a cluster; lists of more take memory and time that no plan is worth."""

_COUNT = re.compile(r"(\d+)\s*(?:[x×*]\s*|\s)(?=\S)", re.IGNORECASE)


def _group(part: str, text: str, known: Sequence[Device]) -> _Group:
    """Return one group of a mix, with the clauses that follow it."""
    head, *clauses = (each.strip() for each in part.split(","))
    # A comma before the first clause may be missing.
    match = re.fullmatch(r"(.*?)(\b(?:with|nvlink|infinity|infiniband)\b.*)", head, re.IGNORECASE)
    if match and match[1].strip():
        head, clauses = match[1].strip(), [match[2].removeprefix("with").strip(), *clauses]
    counted = _COUNT.match(head)
    count, name = (int(counted[1]), head[counted.end() :]) if counted else (1, head)
    if count > MOST:
        raise InputError(f"a cluster of more than {MOST:,} devices is not planned for; {text[:60]!r} names more")
    if count < 1:
        raise InputError(f"{count} devices in {text!r}; a cluster has at least one, like {EXAMPLE!r}")
    group = _Group(count, find_device(name, known, text))
    for clause in clauses:
        if clause:
            _clause(clause, group, text)
    return group


def _clause(clause: str, group: _Group, text: str) -> None:
    """Read one clause into its group."""
    within = re.fullmatch(r"(.*?)\s*\bwithin\b\s*(?:each\s+)?(\d+)?\s*", clause, re.IGNORECASE)
    between = re.fullmatch(r"(.*?)\s*(\beach\b)?\s*\bbetween\b\s*(\beach\b)?\s*", clause, re.IGNORECASE)
    if within:
        count = int(within[2]) if within[2] else group.count
        if count < 1:
            raise InputError(f"`within {count}` in {text!r}; an island has at least one device, like {EXAMPLE!r}")
        group.within = (_link(within[1], clause, text), count)
    elif between:
        group.between = (_link(between[1], clause, text), bool(between[2] or between[3]))
    else:
        raise InputError(
            f"{clause!r} in {text!r} was not understood: a link ends in `within 8` or `between`; "
            f"write it like {EXAMPLE!r}"
        )


_TIME = re.compile(r"(?<![\w./])(\d*\.?\d+)\s*(s|ms|us|µs|μs)(?![\w/])", re.IGNORECASE)
_SPEED = re.compile(r"(?<![\w.])(\d*\.?\d+)\s*([kmgt]?i?)(bits?/s|bits?|bps|b/s|be|bytes/s)(?![\w/])", re.IGNORECASE)


def _link(words: str, clause: str, text: str) -> str | Link:
    """Return the link that is spelled out, or the name of one that depends on the device."""
    latency: float | None = None
    rest = words
    if timed := _TIME.search(rest):
        latency = parse_seconds(f"{timed[1]} {timed[2].lower().replace('μ', 'µ')}")
        rest = rest[: timed.start()] + " " + rest[timed.end() :]
    if speed := _SPEED.search(rest):
        rest = rest[: speed.start()] + " " + rest[speed.end() :]
        bytes_per_s = _bandwidth(speed)
        plain = _normal(rest)
        unknown = [word for word in plain.split() if word not in _FILLERS]
        if unknown:
            raise _not_understood(unknown[0], clause, text)
        if latency is None:
            slow = bytes_per_s <= _SLOW_ETHERNET
            latency = _SLOW_S if slow else _NETWORK_S if bytes_per_s >= _FAST_ETHERNET else _ETHERNET_S
            if "infiniband" in plain:
                latency = _NETWORK_S
        return Link(latency, bytes_per_s)
    plain = " ".join(word for word in _normal(rest).split() if word not in _FILLERS - {"infiniband"})
    plain = {"ib": "infiniband", "if": "infinity fabric", "xgmi": "infinity fabric"}.get(plain, plain)
    plain = re.sub(r"^(fdr|edr|hdr|ndr|xdr)( infiniband)?$", r"infiniband \1", re.sub(r"^ib ", "infiniband ", plain))
    plain = re.sub(r"\b(nvlink|pcie) ?v?(\d)(\.0)?( x16)?$", r"\1 \2", plain)
    if plain in LINKS:
        return LINKS[plain] if latency is None else replace(LINKS[plain], latency=latency)
    if plain in _PER_DEVICE:
        if latency is not None:
            raise InputError(
                f"{clause!r} in {text!r}: give {plain} a generation if it has a latency, like `{plain} 4 5 us`"
            )
        return plain
    if not plain:
        raise InputError(f"{clause!r} in {text!r} says no link; write it like {EXAMPLE!r}")
    raise _not_understood(plain, clause, text)


# What may stand around a bandwidth and says nothing.
_FILLERS = {"ethernet", "infiniband", "tcp", "link", "links", "per", "direction", "with", "and", "at", "latency", "lan"}


def _bandwidth(speed: re.Match[str]) -> float:
    number, prefix, unit = speed.groups()
    if unit.lower() in ("be", "bit", "bits"):  # 10 GbE, 400 Gbit
        unit = "bit/s"
    # Gb/s and Gbps are bits, GB/s is bytes; whoever writes gb/s in small letters means bits, as links are sold.
    is_bytes = (unit.startswith("B") and unit.lower() in ("b/s", "bps")) or unit.lower() == "bytes/s"
    letter = {"k": "k", "m": "M", "g": "G", "t": "T"}.get(prefix[:1].lower(), "")
    factor = 1000.0 if letter == "T" else 1.0
    letter = "G" if letter == "T" else letter
    if is_bytes:
        binary = "i" if prefix.endswith("i") else ""
        return factor * parse_bandwidth(f"{number} {letter.upper()}{binary}B/s")
    return factor * parse_bandwidth(f"{number} {letter}bit/s")


def _not_understood(word: str, clause: str, text: str) -> InputError:
    return InputError(
        f"{word!r} in {clause!r} is not a link; write a bandwidth like `100 Gbit/s` or a name "
        f"({', '.join(sorted(LINKS))}), as in {EXAMPLE!r}"
    )


def _resolve(link: str | Link, device: Device, text: str) -> Link:
    """Return the link itself: of the device's generation, where only its kind was named."""
    if isinstance(link, Link):
        return link
    has = next((sheet.links for sheet in _SHEETS if sheet.name == device.name), ("pcie 4",))
    for each in has:
        if each.startswith(link):
            return LINKS[each]
    raise InputError(f"{device.name} has no {link} (it has {', '.join(has)}); write another link in {text!r}")


def find_device(name: str, known: Sequence[Device] = (), text: str = "") -> Device:
    """Return the device that people call ``name``, of ``known`` or of the catalogue.

    Raises:
        InputError: There is none, or there are several.

    Example:
        >>> find_device("NVIDIA H100-SXM5-80GB").name
        'H100 80GB'
    """
    wanted = _normal(name)
    for device in known:
        if _normal(device.name) == wanted:
            return device
    words = [word for word in wanted.split() if word not in _MAKERS and not word.startswith(("sxm", "hbm"))]
    if not words:
        raise InputError(f"no device is named in {text or name!r}; write it like {EXAMPLE!r}")
    found = [sheet for sheet in _SHEETS if set(words) <= set(_normal(sheet.name).split())]
    exact = [sheet for sheet in found if sheet.default] if len(found) > 1 else found
    if len(exact) == 1:
        return DEVICES[exact[0].name]
    where = f" in {text!r}" if text else ""
    if exact:
        raise InputError(
            f"{name!r}{where} may be {' or '.join(sheet.name for sheet in exact)}; write one of them, as in {EXAMPLE!r}"
        )
    if words == ["cpu"]:
        raise InputError(
            f"the speed of 'cpu'{where} is not known here; measure it with `nearlinear probe --out cluster.json`"
        )
    names = ", ".join(dict.fromkeys([*(device.name for device in known), *DEVICES]))
    raise InputError(f"the device {name!r}{where} is not known; known are {names}; write it like {EXAMPLE!r}")


_MAKERS = {"nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "gpus", "s"}


def _normal(name: str) -> str:
    """Return ``name`` in small letters, one space between words, ``80 GiB`` and ``80G`` written ``80gb``."""
    plain = re.sub(r"[-_/()]+", " ", name.lower())
    plain = re.sub(r"\b(\d+) ?g(?:i?b)?\b", r"\1gb", plain)
    plain = re.sub(r"\b(rtx|gtx|titan) ?(?=\d|rtx)", r"\1 ", plain)
    return " ".join(plain.split())
