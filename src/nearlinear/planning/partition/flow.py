"""The fewest bytes that can cross a boundary, as a flow that must pass it, taken apart into paths."""

from __future__ import annotations

from collections.abc import Iterable

EVERYTHING = float("inf")


class Network:
    """Arcs with a capacity each, from node ``SOURCE`` to node ``SINK``; a flow through them cannot exceed any cut.

    Args:
        nodes: How many there are, ``SOURCE`` and ``SINK`` among them.
    """

    SOURCE, SINK = 0, 1

    def __init__(self, nodes: int) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]  # of each node, those that leave it, and their reverses
        self.head: list[int] = []
        self.room: list[float] = []

    def join(self, tail: int, head: int, capacity: float) -> int:
        """Add an arc and return its number; the next one is its reverse."""
        number = len(self.head)
        self.arcs[tail].append(number)
        self.arcs[head].append(number + 1)
        self.head += [head, tail]
        self.room += [capacity, 0.0]
        return number

    def fill(self, least: float) -> None:
        """Send as much as fits, but for what is ``least`` or less (Dinitz 1970)."""
        while True:
            level = self._levels(least)
            if level[self.SINK] < 0:
                return
            self._block(level, least)

    def _levels(self, least: float) -> list[int]:
        level = [-1] * len(self.arcs)
        level[self.SOURCE] = 0
        front = [self.SOURCE]
        while front and level[self.SINK] < 0:
            further = []
            for node in front:
                for arc in self.arcs[node]:
                    head = self.head[arc]
                    if level[head] < 0 and self.room[arc] > least:
                        level[head] = level[node] + 1
                        further.append(head)
            front = further
        return level

    def _block(self, level: list[int], least: float) -> None:
        tried = [0] * len(self.arcs)
        path: list[int] = []
        node = self.SOURCE
        while True:
            if node == self.SINK:
                amount = min(self.room[arc] for arc in path)
                for arc in path:
                    self.room[arc] -= amount
                    self.room[arc ^ 1] += amount
                full = next(place for place, arc in enumerate(path) if self.room[arc] <= least)
                node = self.head[path[full] ^ 1]
                del path[full:]
                continue
            arcs = self.arcs[node]
            while tried[node] < len(arcs):
                arc = arcs[tried[node]]
                if self.room[arc] > least and level[self.head[arc]] == level[node] + 1:
                    break
                tried[node] += 1
            if tried[node] < len(arcs):
                path.append(arcs[tried[node]])
                node = self.head[path[-1]]
            elif path:
                node = self.head[path.pop() ^ 1]
                tried[node] += 1
            else:
                return

    def paths(self, least: float) -> Iterable[tuple[float, list[int]]]:
        """Yield the flow path by path: how much, and along which arcs."""
        flow = self.room[1::2]  # what came back is what went
        while True:
            node, path, seen = self.SOURCE, list[int](), {self.SOURCE: 0}
            while node != self.SINK:
                arc = next((a for a in self.arcs[node] if a % 2 == 0 and flow[a // 2] > least), -1)
                if arc < 0:
                    if not path:
                        return
                    flow[path.pop() // 2] = 0.0  # less than counts is left of it
                    break
                path.append(arc)
                node = self.head[arc]
                if node in seen:  # round in a circle: nothing passes there
                    circle = path[seen[node] :]
                    amount = min(flow[each // 2] for each in circle)
                    for each in circle:
                        flow[each // 2] -= amount
                    break
                seen[node] = len(path)
            else:
                amount = min(flow[each // 2] for each in path)
                for each in path:
                    flow[each // 2] -= amount
                yield amount, path
