"""Turning timed matrix products and copies into a device's speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

SHORTEST_S = 0.03  # a product this long is a large one
LARGEST = 16384  # rows and columns of the largest product
COPY_BYTES = 128 * 2**20  # beyond any processor's cache but the largest servers'
COPY_BYTES_LARGE = 2**30  # for devices with more than 1 TB/s


class Computer(Protocol):
    """Something that multiplies and copies, seen from a framework."""

    name: str
    memory: float

    @property
    def dtypes(self) -> Sequence[str]:
        """Names of the number formats that it multiplies."""

    def product(self, dtype: str, n: int) -> Callable[[], None]:
        """Return what multiplies two matrices of ``n`` rows and columns, and returns when that is done."""

    def copy(self, size: int) -> Callable[[], None]:
        """Return what copies ``size`` bytes, and returns when that is done."""


class NumpyComputer:
    """This machine's processor by NumPy, where there is no framework.

    Args:
        memory: Bytes that are this process's.
    """

    name = "cpu"
    dtypes: Sequence[str] = ("float32", "float64")

    def __init__(self, memory: float) -> None:
        self.memory = memory

    def product(self, dtype: str, n: int) -> Callable[[], None]:
        """Return what multiplies two matrices."""
        one, other, into = (np.ones((n, n), dtype) for _ in range(3))
        return lambda: _nothing(np.matmul(one, other, out=into))

    def copy(self, size: int) -> Callable[[], None]:
        """Return what copies ``size`` bytes."""
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        return lambda: np.copyto(target, source)


def _nothing(_: object) -> None:
    """Take a result and return nothing."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reaches.

    Args:
        flops: Floating-point operations per second of a large matrix product, per dtype.
        memory_bandwidth: Bytes read and written per second by a large copy.
        sizes: Rows of the matrices that the products were of, per dtype.
    """

    flops: dict[str, float]
    memory_bandwidth: float
    sizes: dict[str, int]


def measure_speed(computer: Computer, seconds: float = 0.25) -> Speed:
    """Return the speed of a device that has nothing else to do.

    Args:
        computer: The device.
        seconds: To spend on each dtype, and on copies.
    """
    flops, sizes = {}, {}
    for dtype in computer.dtypes:
        n = 128
        while True:
            product = computer.product(dtype, n)
            product()
            took = _timed(product, 1)[0]
            enough = took >= SHORTEST_S or n >= LARGEST or 3 * 8 * (2 * n) ** 2 > computer.memory / 8
            # bfloat16 on a processor without instructions for it: 100 times slower, and worth no more time.
            if enough or took * 8 > 4 * seconds:
                break
            n *= 2
        flops[dtype], sizes[dtype] = 2.0 * n**3 / median(_for(product, seconds)), n
    return Speed(flops, measure_copy(computer, seconds), sizes)


def measure_copy(computer: Computer, seconds: float = 0.25) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    size = COPY_BYTES
    copy = computer.copy(size)
    copy()
    if copy_bytes(2 * size / min(_timed(copy, 3))) > size:
        size = COPY_BYTES_LARGE
        copy = computer.copy(size)
        copy()
    return 2.0 * size / median(_for(copy, seconds))


def copy_bytes(bandwidth: float) -> int:
    """Return the bytes of a copy that is a large one for a device of this memory bandwidth, in bytes per second."""
    return COPY_BYTES_LARGE if bandwidth > 1e12 else COPY_BYTES


def count_while(action: Callable[[], None], seconds: float, around: float) -> float:
    """Return how often per second an action is done, while it is done for ``around`` seconds before and after, too."""
    _for(action, around, least=1)
    began, done = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds or done == 0:
        action()
        done += 1
    _for(action, around, least=1)
    return done / took


def _timed(action: Callable[[], None], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return taken


def _for(action: Callable[[], None], seconds: float, least: int = 3) -> list[float]:
    taken = _timed(action, least)
    until = time.perf_counter() + seconds - sum(taken)
    while time.perf_counter() < until:
        taken += _timed(action, 1)
    return taken
