"""Turning recorded operators into the planner's graph: what belongs together, what it is called, what passes between.

A *step* is what becomes one node: all operators of one group. Views cost nothing and are no steps. One that can be
computed anywhere, from the batch alone, without parameters or random numbers (an attention mask, a rotary table), is
not joined to its consumers where there are several: every device makes it for itself, for less than it takes to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nearlinear.core.graph import Operator, Tensor
from nearlinear.torch.capture.recorder import Op, Recorded, View


@dataclass(frozen=True, slots=True)
class Label:
    """What a group is.

    Args:
        path: The module it belongs to (``"encoder.0.mlp"``); empty for the model itself.
        kind: What it does (``"linear"``); empty for whatever moves most bytes in it.
        leaf: Whether the group is all that the module does, and goes by its name.
        mixes: Whether it mixes samples.
    """

    path: str
    kind: str = ""
    leaf: bool = False
    mixes: bool = False


@dataclass(slots=True)
class Step:
    """The operators of one group, added up."""

    group: int
    label: Label
    ops: list[Op] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)  # in the order in which they are met
    buffers: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    # (step that made it, storage) -> views of it that are read here
    reads: dict[tuple[int, int], dict[View, float]] = field(default_factory=dict)

    @property
    def random(self) -> bool:
        return any(op.random for op in self.ops)

    @property
    def kind(self) -> str:
        heaviest = max(self.ops, key=lambda op: (op.flop, op.moved))
        return self.label.kind or heaviest.name.strip("_").removeprefix("native_")


@dataclass(frozen=True)
class Steps:
    """The steps of a forward pass, in the order in which they ran, and what passes between them.

    Args:
        steps: The steps.
        anywhere: Positions of the steps that every device can compute for itself.
        storages: Bytes of each thing that passes, by (step that makes it, storage).
        outputs: Bytes of what the pass returned, by the step that made it.
    """

    steps: tuple[Step, ...]
    anywhere: frozenset[int]
    storages: dict[tuple[int, int], float]
    outputs: dict[int, float]


def steps_of(recorded: Recorded, groups: Sequence[int], labels: Sequence[Label]) -> Steps:
    """Return the steps.

    Args:
        recorded: What was recorded.
        groups: The group of every op. Groups run one after the other or their ops are linked forward only.
        labels: What each group is.
    """
    ops = recorded.ops
    order = sorted({group for op, group in zip(ops, groups, strict=True) if op.name})
    place = {group: number for number, group in enumerate(order)}
    steps = [Step(group, labels[group]) for group in order]
    storages: dict[tuple[int, int], float] = {}
    for op, group in zip(ops, groups, strict=True):
        if group not in place:  # something kept that no operator of a step made: the batch itself
            continue
        here = place[group]
        step = steps[here]
        step.ops.append(op)
        step.parameters.update(dict.fromkeys(sorted(op.parameters)))
        step.buffers |= op.buffers | op.written
        step.written |= op.written
        for (writer, storage), views in op.reads.items():
            source = place[groups[writer]]
            if source != here:
                step.reads.setdefault((source, storage), {}).update(views)
                storages[source, storage] = ops[writer].whole[storage]
    outputs: dict[int, float] = {}
    for (writer, _), size in recorded.outputs.items():
        source = place[groups[writer]]
        outputs[source] = outputs.get(source, 0.0) + size
    return Steps(tuple(steps), frozenset(_anywhere(steps)), storages, outputs)


def _anywhere(steps: Sequence[Step]) -> set[int]:
    found: set[int] = set()
    for number, step in enumerate(steps):
        if not step.parameters and not step.written and not step.random and {each for each, _ in step.reads} <= found:
            found.add(number)
    return found


def tensors_of(steps: Steps) -> tuple[Tensor, ...]:
    """Return what passes between steps.

    Several consumers of one storage read one tensor; it is as large as the views of it that are read, together.
    """
    consumers: dict[tuple[int, int], list[int]] = {}
    views: dict[tuple[int, int], dict[View, float]] = {}
    for number, step in enumerate(steps.steps):
        for key, read in step.reads.items():
            consumers.setdefault(key, []).append(number)
            views.setdefault(key, {}).update(read)
    # What several steps read, and each device can make for itself, does not pass.
    readers: dict[int, set[int]] = {}
    for (source, _), each in consumers.items():
        readers.setdefault(source, set()).update(each)
    return tuple(
        Tensor(key[0], tuple(sorted(consumers[key])), min(sum(views[key].values()), steps.storages[key]))
        for key in sorted(consumers)
        if not (key[0] in steps.anywhere and len(readers[key[0]]) > 1)
    )


def owned(steps: Sequence[Step]) -> tuple[tuple[str, ...], ...]:
    """Return the parameters that count as each step's own: those that no step before it reads."""
    taken: set[str] = set()
    own = []
    for step in steps:
        own.append(tuple(name for name in step.parameters if name not in taken))
        taken.update(step.parameters)
    return tuple(own)


def operators_of(
    steps: Steps, parameters: dict[str, float], trained: set[str], buffers: dict[str, float], state: float
) -> tuple[Operator, ...]:
    """Return the steps as operators, without times.

    Args:
        steps: The steps.
        parameters: Bytes of each parameter; one with two names under the first.
        trained: Those that have gradients.
        buffers: Bytes of each buffer.
        state: Numbers that the optimizer keeps per parameter.
    """
    names = _names(steps.steps)
    groups = _groups(steps.steps)
    left_buffers = dict(buffers)
    operators = []
    for number, (step, names_owned) in enumerate(zip(steps.steps, owned(steps.steps), strict=True)):
        own = {name: parameters[name] for name in names_owned}
        held = sum(left_buffers.pop(name) for name in step.buffers if name in left_buffers)
        held += sum(size * (2 + state if name in trained else 1) for name, size in own.items())
        operators.append(
            Operator(
                name=names[number],
                kind=step.kind,
                flop=sum(op.flop for op in step.ops),
                moved_bytes=sum(op.moved for op in step.ops),
                parameter_bytes=sum(own.values()),
                state_bytes=held,
                activation_bytes=sum(op.kept for op in step.ops),
                mixes_batch=step.label.mixes,
                group=groups.get(number),
            )
        )
    return tuple(operators)


def _names(steps: Sequence[Step]) -> list[str]:
    """Name every step by its module, and by what it does where the module has several."""
    alone: dict[str, int] = {}
    for step in steps:
        alone[step.label.path] = alone.get(step.label.path, 0) + 1
    names: list[str] = []
    seen: dict[str, int] = {}
    for step in steps:
        path = step.label.path
        name = path if path and (step.label.leaf or alone[path] == 1) else f"{path}.{step.kind}".lstrip(".")
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def tied(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return the parameters that several steps read, and those steps."""
    users: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        for name in step.parameters:
            users.setdefault(name, []).append(number)
    return {name: each for name, each in users.items() if len(each) > 1}


def _groups(steps: Sequence[Step]) -> dict[int, str]:
    """Return the steps that must lie together, by the name of their group.

    Those are the calls of one module (its parameters, or buffers it writes, are in all of them). Two modules that share
    a weight, an embedding and the output layer say, are not held together: all that lies between them would be too.
    """
    shared = [(name, users) for name, users in tied(steps).items()]
    writers: dict[str, list[int]] = {}
    written = {name for step in steps for name in step.written}
    for number, step in enumerate(steps):
        for name in step.buffers & written:
            writers.setdefault(name, []).append(number)
    shared += [(name, users) for name, users in sorted(writers.items()) if len(users) > 1]
    group: dict[int, str] = {}
    for name, users in shared:
        if len({steps[number].label.path for number in users}) > 1:
            continue
        label = next((group[number] for number in users if number in group), name)
        merged = {group[number] for number in users if number in group} | {label}
        for number in [*users, *(number for number, each in group.items() if each in merged)]:
            group[number] = label
    return group
