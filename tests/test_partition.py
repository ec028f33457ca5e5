"""The split of a graph into stages: valid, as good as the best there is on small graphs, and bounded on all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.core.graph import Graph, Operator, Tensor, in_order
from nearlinear.errors import InputError
from nearlinear.planning.partition import InfeasibleError, Partition, partition
from nearlinear.planning.partition.bound import bound
from nearlinear.planning.partition.machines import machines
from nearlinear.planning.partition.problem import build

EXACT = 1e-9  # relative: sums of the same numbers in another order


# ---- what a plan costs, written out once more without arrays


def costs(
    graph: Graph,
    assignment: Sequence[int],
    speeds: Sequence[float],
    bandwidth: float,
) -> list[float]:
    loads = [0.0 for _ in speeds]
    for operator, device in zip(graph.operators, assignment, strict=True):
        loads[device] += (operator.forward + operator.backward) / speeds[device]
    factor = (2 if graph.training else 1) / bandwidth
    for tensor in graph.tensors:
        home = assignment[tensor.producer]
        others = {assignment[each] for each in tensor.consumers} - {home}
        for device in others:
            loads[device] += factor * tensor.bytes
        if others:
            loads[home] += factor * tensor.bytes
    return loads


def sequence(graph: Graph, assignment: Sequence[int]) -> list[int] | None:
    """The devices in the order in which a microbatch passes them, or None where it comes back to one."""
    after: dict[int, set[int]] = {device: set() for device in assignment}
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            if assignment[consumer] != assignment[tensor.producer]:
                after[assignment[tensor.producer]].add(assignment[consumer])
    order: list[int] = []
    while after:
        free = [device for device in after if not any(device in others for others in after.values())]
        if not free:
            return None
        order.append(min(free))
        del after[min(free)]
    return order


def held(graph: Graph, assignment: Sequence[int], device: int) -> float:
    return sum(op.state_bytes for op, where in zip(graph.operators, assignment, strict=True) if where == device)


def together(graph: Graph, assignment: Sequence[int]) -> bool:
    homes: dict[str, set[int]] = {}
    for operator, device in zip(graph.operators, assignment, strict=True):
        if operator.group is not None:
            homes.setdefault(operator.group, set()).add(device)
    return all(len(each) == 1 for each in homes.values())


def brute_force(graph: Graph, speeds: Sequence[float], bandwidth: float, memory: float | None) -> float:
    """The least maximum load over every assignment there is, inf where none is valid."""
    best = math.inf
    for assignment in itertools.product(range(len(speeds)), repeat=len(graph.operators)):
        load = max(costs(graph, assignment, speeds, bandwidth))
        if load < best and together(graph, assignment) and sequence(graph, assignment) is not None:
            fits = memory is None or all(held(graph, assignment, d) <= memory for d in range(len(speeds)))
            best = load if fits else best
    return best


def check(
    graph: Graph, plan: Partition, speeds: Sequence[float], bandwidth: float, memory: float | None = None
) -> None:
    """Raise unless the plan is valid and says of itself what the evaluator above says."""
    loads = costs(graph, plan.assignment, speeds, bandwidth)
    assert plan.loads == pytest.approx(loads, rel=EXACT)
    assert plan.objective == pytest.approx(max(loads), rel=EXACT)
    assert plan.bound <= plan.objective
    order = sequence(graph, plan.assignment)
    assert order is not None, f"stages wait for each other: {plan.assignment}"
    assert set(plan.stages) == set(plan.assignment)
    place = {device: index for index, device in enumerate(plan.stages)}
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            assert place[plan.assignment[tensor.producer]] <= place[plan.assignment[consumer]]
    assert together(graph, plan.assignment)
    for device in range(len(speeds)):
        assert plan.memory[device] == pytest.approx(held(graph, plan.assignment, device), rel=EXACT)
        assert memory is None or plan.memory[device] <= memory * (1 + EXACT)


# ---- graphs


@st.composite
def graphs(draw: st.DrawFn, most: int = 7, groups: bool = True) -> Graph:
    count = draw(st.integers(1, most))
    number = st.integers(0, 9)
    operators = tuple(
        Operator(
            f"op{n}",
            forward=float(draw(number)),
            backward=float(draw(number)),
            state_bytes=float(draw(number)),
            group=draw(st.sampled_from([None, None, None, "a", "b"])) if groups else None,
        )
        for n in range(count)
    )
    tensors = []
    for producer in range(count - 1):
        for _ in range(draw(st.integers(0, 2))):
            readers = draw(st.sets(st.integers(producer + 1, count - 1), min_size=1, max_size=3))
            tensors.append(Tensor(producer, tuple(sorted(readers)), float(draw(number))))
    return Graph(operators, tuple(tensors), training=draw(st.booleans()))


def shuffled(graph: Graph, order: Sequence[int]) -> tuple[Graph, list[int]]:
    """The same graph with other names, its nodes given in another order; and where each node went."""
    place = {old: new for new, old in enumerate(order)}
    operators = [dataclasses.replace(graph.operators[old], name=f"renamed {new}") for new, old in enumerate(order)]
    tensors = [
        Tensor(place[each.producer], tuple(sorted(place[c] for c in each.consumers)), each.bytes)
        for each in reversed(graph.tensors)
    ]
    again = in_order(operators, tensors, training=graph.training)
    where = {operator.name: index for index, operator in enumerate(again.operators)}
    return again, [where[f"renamed {place[old]}"] for old in range(len(order))]


# ---- properties


@given(graphs(most=6), st.integers(1, 3), st.sampled_from([0.5, 2.0, 50.0]), st.sampled_from([None, 12.0, 25.0]))
@settings(max_examples=120, deadline=None)
def test_small_graphs_get_the_best_plan_there_is(
    graph: Graph, devices: int, bandwidth: float, memory: float | None
) -> None:
    best = brute_force(graph, [1.0] * devices, bandwidth, memory)
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            partition(graph, devices, bandwidth, memory)
        return
    plan = partition(graph, devices, bandwidth, memory)
    check(graph, plan, [1.0] * devices, bandwidth, memory)
    assert plan.objective == pytest.approx(best, rel=EXACT)
    assert plan.bound == pytest.approx(best, rel=1e-6)


@given(graphs(most=6), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=3), st.sampled_from([1.0, 9.0]))
@settings(max_examples=60, deadline=None)
def test_devices_of_unlike_speed_get_the_best_plan_there_is(
    graph: Graph, speeds: list[float], bandwidth: float
) -> None:
    plan = partition(graph, speeds, bandwidth)
    check(graph, plan, speeds, bandwidth)
    assert plan.objective == pytest.approx(brute_force(graph, speeds, bandwidth, None), rel=EXACT)
    assert plan.bound <= plan.objective


@given(graphs(most=6), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_what_does_not_fit_is_refused_with_the_least_memory_that_would_do(graph: Graph, devices: int) -> None:
    with_room = min(
        max(held(graph, assignment, device) for device in range(devices))
        for assignment in itertools.product(range(devices), repeat=len(graph.operators))
        if together(graph, assignment) and sequence(graph, assignment) is not None
    )
    if with_room > 0:
        with pytest.raises(InfeasibleError, match="does not fit") as caught:
            partition(graph, devices, 1.0, with_room * 0.999)
        assert caught.value.proven
        assert caught.value.least_memory == pytest.approx(with_room, rel=EXACT)
        check(graph, partition(graph, devices, 1.0, with_room), [1.0] * devices, 1.0, with_room)


@given(graphs(most=12), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_names_and_the_order_of_nodes_do_not_matter(graph: Graph, devices: int, random: object) -> None:
    order = list(range(len(graph.operators)))
    random.shuffle(order)  # type: ignore[attr-defined]
    again, where = shuffled(graph, order)
    plan, other = partition(graph, devices, 3.0), partition(again, devices, 3.0)
    assert other.objective == pytest.approx(plan.objective, rel=EXACT)
    same = [other.assignment[place] for place in where]
    assert costs(graph, same, [1.0] * devices, 3.0) == pytest.approx(list(other.loads), rel=EXACT)


# Where all boundaries can be listed, as here, the plan is the best there is, so an easier task never gets a worse one.
@given(graphs(most=14), st.integers(1, 4), st.sampled_from([1.0, 4.0]), st.integers(15, 60))
@settings(max_examples=60, deadline=None)
def test_a_faster_link_more_memory_or_one_more_device_never_makes_the_plan_worse(
    graph: Graph, devices: int, bandwidth: float, memory: int
) -> None:
    try:
        plan = partition(graph, devices, bandwidth, float(memory))
    except InfeasibleError:
        return
    limit = plan.objective * (1 + EXACT)
    assert partition(graph, devices, bandwidth * 3, float(memory)).objective <= limit
    assert partition(graph, devices, bandwidth, memory * 1.5).objective <= limit
    assert partition(graph, devices + 1, bandwidth, float(memory)).objective <= limit


@given(graphs(most=14), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_one_device_takes_the_sum_and_no_plan_takes_more(graph: Graph, devices: int) -> None:
    assert partition(graph, 1, 1.0).objective == pytest.approx(graph.time, rel=EXACT)
    plan = partition(graph, devices, 1.0)
    check(graph, plan, [1.0] * devices, 1.0)
    assert plan.objective <= graph.time * (1 + EXACT)


# ---- what small graphs do not show


def layered(layers: int, width: int, seed: int, size: float = 1.0) -> Graph:
    random = np.random.default_rng(seed)
    operators = [
        Operator(f"op{n}", forward=float(random.uniform(0.5, 1.5)), state_bytes=1.0) for n in range(layers * width)
    ]
    readers: dict[int, set[int]] = {}
    for node in range(width, layers * width):
        first = (node // width - 1) * width
        for each in random.choice(width, size=min(2, width), replace=False):
            readers.setdefault(first + int(each), set()).add(node)
    tensors = [Tensor(p, tuple(sorted(c)), size) for p, c in sorted(readers.items())]
    return Graph(tuple(operators), tuple(tensors), training=False)


def test_a_graph_with_too_many_boundaries_to_list_gets_a_valid_plan_and_a_bound_below_it() -> None:
    graph = layered(20, 12, seed=1)
    plan = partition(graph, 4, 20.0)
    check(graph, plan, [1.0] * 4, 20.0)
    assert 0 < plan.bound < plan.objective <= 1.1 * plan.bound


# Where a search proves its plan, the bound is the plan itself; here the bound is asked alone.
@given(graphs(most=16), st.integers(2, 5), st.sampled_from([0.3, 1.0, 5.0, 40.0]), st.sampled_from([1.0, 1.2, 3.0]))
@settings(max_examples=200, deadline=None)
def test_the_bound_is_never_above_the_best_plan(graph: Graph, devices: int, bandwidth: float, slack: float) -> None:
    best = partition(graph, devices, bandwidth).objective
    low = bound(build(graph)[0], machines(devices, bandwidth, None, None), best * slack)
    assert low <= best * (1 + EXACT)


def test_the_same_seed_gives_the_same_plan() -> None:
    graph = layered(12, 10, seed=2)
    assert partition(graph, 3, 10.0, seed=5) == partition(graph, 3, 10.0, seed=5)


def test_a_search_that_is_cut_short_returns_a_valid_plan() -> None:
    graph = layered(30, 12, seed=3)
    plan = partition(graph, 6, 10.0, deadline=lambda: True)
    check(graph, plan, [1.0] * 6, 10.0)


def test_more_devices_than_operators_are_left_unused() -> None:
    graph = layered(2, 2, seed=0)
    plan = partition(graph, 100_000, 1e9)
    assert len(plan.loads) == len(plan.memory) == 100_000
    assert plan.objective == pytest.approx(partition(graph, 4, 1e9).objective)


def test_slow_links_leave_devices_unused() -> None:
    operators = tuple(Operator(f"op{n}", forward=1.0) for n in range(16))
    graph = Graph(operators, tuple(Tensor(n, (n + 1,), 1e6) for n in range(15)))
    plan = partition(graph, 8, 1.0)
    assert plan.stages == (0,) and plan.objective == pytest.approx(graph.time)


def test_a_stage_holds_the_activations_of_as_many_microbatches_as_stages_follow_it() -> None:
    # One operator each: the first of three stages holds three microbatches under 1F1B, the last one.
    operators = tuple(Operator(f"op{n}", forward=1.0, state_bytes=10.0, activation_bytes=1.0) for n in range(3))
    graph = Graph(operators, (Tensor(0, (1,), 1.0), Tensor(1, (2,), 1.0)))
    plan = partition(graph, 3, 1e9, 13.0, in_flight=[1, 2, 3])
    assert plan.memory == (13.0, 12.0, 11.0)
    with pytest.raises(InfeasibleError):
        partition(graph, 3, 1e9, 12.5, in_flight=[1, 2, 3])


def test_a_chain_over_links_of_unlike_speed_avoids_the_slow_ones() -> None:
    operators = tuple(Operator(f"op{n}", forward=1.0) for n in range(3))
    graph = Graph(operators, (Tensor(0, (1,), 1.0), Tensor(1, (2,), 1.0)), training=False)
    # Devices 0 and 1 are joined by a slow link; both reach device 2 fast.
    slow, fast = 1.0, 100.0
    plan = partition(graph, 3, [[1, slow, fast], [slow, 1, fast], [fast, fast, 1]])
    assert plan.stages in ((0, 2, 1), (1, 2, 0))
    assert plan.objective == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1.0), "at least one"),
        ((2, 0.0), "bandwidth"),
        ((2, 1.0, -1.0), "memory"),
        (([1.0, 0.0], 1.0), "speed"),
        ((2, [[1.0]]), "shape"),
    ],
)
def test_a_number_out_of_its_range_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        partition(layered(2, 2, seed=0), *arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no operators"):
        partition(Graph(()), 2, 1.0)
