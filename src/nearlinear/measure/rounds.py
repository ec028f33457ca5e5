"""Turning the ranks of several machines into rounds of pairs to measure: who talks to whom, and when.

up to 8 ranks       every pair, one at a time
more                within a machine its first two ranks; between machines the first rank of each: every pair of
                    machines one at a time if there are few, else as in a tournament, every machine once per round
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Pair = tuple[int, int]

FEW_RANKS, FEW_PAIRS = 8, 28
MOST_ROUNDS = 32  # of a tournament; the pairs beyond are taken to be like the others


def alone(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs to measure, those of one round at once.

    Args:
        hosts: Name of each rank's machine.

    Example:
        >>> alone(["a", "a", "b"])
        [[(0, 1)], [(0, 2)], [(1, 2)]]
    """
    if len(hosts) <= FEW_RANKS:
        return [[pair] for pair in itertools.combinations(range(len(hosts)), 2)]
    members = [ranks for ranks in ranks_of(hosts).values()]
    # The first pairs of different machines do not disturb each other.
    within = [(ranks[0], ranks[1]) for ranks in members if len(ranks) > 1]
    firsts = [ranks[0] for ranks in members]
    pairs = [[pair] for pair in itertools.combinations(firsts, 2)]
    if len(pairs) > FEW_PAIRS:
        pairs = tournament(firsts)[:MOST_ROUNDS]
    return ([within] if within else []) + pairs


def at_once(islands: Sequence[Sequence[int]]) -> list[Pair]:
    """Return pairs between two islands that talk at once, or between pairs of islands where they have one device each.

    Example:
        >>> at_once([(0, 1), (2, 3)]), at_once([(0,), (1,), (2,), (3,)]), at_once([(0, 1), (2,)])
        ([(0, 2), (1, 3)], [(0, 1), (2, 3)], [])
    """
    largest = sorted(islands, key=len, reverse=True)
    if len(largest) < 2:
        return []
    one, other = sorted((sorted(largest[0]), sorted(largest[1])))
    pairs = list(zip(one, other, strict=False))
    if len(pairs) < 2 and len(largest[0]) == 1:
        pairs = list(zip((i[0] for i in islands[::2]), (i[0] for i in islands[1::2]), strict=False))
    return [(min(pair), max(pair)) for pair in pairs] if len(pairs) > 1 else []


def ranks_of(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each machine.

    Example:
        >>> ranks_of(["a", "b", "a"])
        {'a': [0, 2], 'b': [1]}
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return members


def tournament(players: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which every player meets every other once, and nobody plays twice in a round.

    Example:
        >>> tournament([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]

    Source: the circle method, Kirkman 1847.
    """
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
