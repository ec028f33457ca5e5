"""Turning calls of the user's model into runs of the pipeline, from the first batch on.

At the first call the model is captured with that batch, cut into stages, and checked against itself; then every rank
lets go of the parameters of other stages. What the model returns is on every rank; its values lie where the last stage
is (``placed.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nearlinear import events
from nearlinear.core.cluster import Link
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.torch import link, optimizer_state
from nearlinear.torch.capture import NON_STRICT, STRICT, Captured, capture
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.pipeline.cuts import stages_of, timed
from nearlinear.torch.pipeline.executor import Executor, Run, State, in_order, size
from nearlinear.torch.pipeline.foreign import Foreign
from nearlinear.torch.pipeline.gate import require_same_numbers
from nearlinear.torch.pipeline.materialise import materialise
from nearlinear.torch.pipeline.parameters import Parameters
from nearlinear.torch.pipeline.placed import PlacedTensor, placed, real, value_of
from nearlinear.torch.pipeline.stages import Split, split
from nearlinear.torch.pipeline.transfer import Links
from nearlinear.torch.pipeline.values import Values
from nearlinear.torch.session import Session

_PER_STAGE = 4  # microbatches: the pipeline then stands idle for at most a fifth of the time
_KINDS = 8  # of calls (shapes, training or not) that are captured; each takes seconds
_LOOKED_AT = 1024  # elements of a batch's tensor
_MARKS = 2**31 - 1


@dataclass(frozen=True)
class _Ready:
    """What calls of one kind run on."""

    executor: Executor
    spec: pytree.TreeSpec


class Pipeline:
    """A model of which every rank runs a stage.

    Args:
        named: The model's parameters by name, and those that the optimizer alone holds.
        model: The model; its ``forward`` is replaced.
        session: The run.
        plan: How many stages and microbatches.
        number: Which ``distribute`` call it is of.

    Raises:
        InputError: The ranks do not make whole pipelines, or a parameter is not the model's.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], model: nn.Module, session: Session, plan: Plan, number: int
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.session, self.plan, self.number = session, plan, number
        self.samples, self.waited_s = 0, 0.0
        self.device = self.parameters[0].device
        stages = plan.stages_on(session.size)
        first = session.rank - session.rank % stages
        self.ranks = range(first, first + stages)
        self._model = weakref.ref(model)
        self._own_forward = vars(model).get("forward")  # of the object, where it has one beside its class's
        self._ready: dict[Any, _Ready] = {}
        self._held: Parameters | None = None
        self._values: Values | None = None
        self.link: Link | None = None  # gradients stay where they are
        self._token = torch.zeros((), requires_grad=True)
        self._pieces: tuple[int, int] | None = None  # within nl.step: samples of this microbatch and of the next
        self._within = False  # a backward pass: under nl.step one of all microbatches
        self._seen = 0  # a mark of the batches since the last optimizer step
        self._told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        model.forward = _Forward(self)
        _pipelines.add(self)

    # ---- the model is called

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call of the model and return what it returns."""
        model = self._model()
        assert model is not None
        call = Call.of(args, kwargs, 0)
        if call.samples < 1:
            raise InputError("the batch holds no samples; hand over at least one")
        call = _readable(call)
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        key = _kind(model, call, leaves, spec)
        ready = self._ready.get(key)
        if ready is None:
            with self._plain(model):
                ready = self._ready[key] = self._build(model, call)
        leaves = in_order(call, ready.spec)
        self._seen = (self._seen * 31 + sum(map(_mark, leaves))) % _MARKS
        executor, training = ready.executor, torch.is_grad_enabled()
        assert self._values is not None
        number = self._values.began + 1
        self._values.began_call(number)
        kind = {"training": training, "recompute": self.plan.recompute}
        if self._pieces is None:
            executor.flush()
            run = executor.begin(leaves, call.samples, self.microbatches, **kind)
        else:
            run = executor.begin(leaves, call.samples, 1, following=self._following(call.samples), **kind)
        tensors: tuple[Any, ...] = _through(self._token, self, run, executor, number)
        self._values.ended_call(number)
        given = iter(tensors)
        found = []
        for each in executor.split.returned:
            if each.constant is not None:
                found.append(each.constant[0])
            elif each.shape is None:
                found.append(size(each.expression, call.samples))
            else:
                found.append(next(given))
        return pytree.tree_unflatten(found, executor.split.spec)

    @contextlib.contextmanager
    def _plain(self, model: nn.Module) -> Iterator[None]:
        """Give the model its own ``forward`` back: to be traced, timed and compared."""
        ours = vars(model).pop("forward")
        if self._own_forward is not None:
            model.forward = self._own_forward
        try:
            yield
        finally:
            model.forward = ours

    @property
    def microbatches(self) -> int:
        """Into how many a batch is cut, if it has twice as many samples."""
        return self.plan.microbatches or _PER_STAGE * len(self.ranks)

    @contextlib.contextmanager
    def interleaving(self) -> Iterator[None]:
        """Take each call of the model for one microbatch; the other ranks may be at another one."""
        try:
            yield
            for each in self._ready.values():
                each.executor.settle()
                each.executor.flush()
            if self._within:
                self._backward_ended()
        finally:
            self._pieces = None

    def begin_microbatch(self, samples: int, following: int) -> None:
        """Note how many samples the microbatch has that comes now, and how many the next; 0: there is none."""
        self._pieces = samples, following

    def _following(self, samples: int) -> int:
        """Return with how many samples the model will probably be called next, the same on all ranks; 0: not at all."""
        assert self._pieces is not None
        this, following = self._pieces
        return samples * following // this if samples * following % this == 0 else 0

    @classmethod
    def alive(cls) -> list[Pipeline]:
        """Return those whose models are still there, in the same order on all ranks."""
        return sorted((each for each in _pipelines if each._model() is not None), key=lambda each: each.number)

    def outputs(self, run: Run, executor: Executor, number: int) -> list[torch.Tensor]:
        """Run the forward pass and return the model's tensors, by their place among its outputs."""
        made = run.forward(torch.initial_seed(), number)
        assert self._values is not None
        owner = self.ranks[-1]
        found: list[torch.Tensor] = []
        for index, each in enumerate(executor.split.returned):
            if each.constant is None and each.shape is not None:
                if executor.last:
                    value = made[index].detach().contiguous()
                else:
                    shape = [size(one, run.samples) for one in each.shape]
                    value = torch.empty(shape, dtype=each.dtype, device="meta")
                found.append(
                    placed(value, values=self._values, owner=owner, call=number, index=index, device=self.device)
                )
        return found

    # ---- the first call of a kind

    def _build(self, model: nn.Module, call: Call) -> _Ready:
        if len(self._ready) == _KINDS:
            raise InputError(
                f"the model was called with {_KINDS + 1} kinds of input (shapes beside the number of samples, types, "
                "training or not), and each is captured anew; pad the batches to a few lengths"
            )
        first = self._held is None
        if first and call.samples < 2:
            raise InputError(
                "the first batch holds one sample, and a pipeline needs at least 2 to see which dimension they are; "
                "call the model on 2 samples once, or use strategy 'data'"
            )
        if self.device.type == "meta":
            self.device = next(leaf.device for leaf in call_leaves(call) if isinstance(leaf, torch.Tensor))
        self._require_one_batch(call)
        try:
            with _with_shapes(model, self.device):
                captured = capture(model, call.args, call.kwargs, rungs=(NON_STRICT, STRICT))
        except InputError as error:
            raise InputError(f"{error}; strategy 'data' or 'sharded' trains it as it is") from None
        if captured.program is None:
            raise InputError(
                f"{type(model).__name__} cannot be run in stages: {'; '.join(captured.notes)}; strategy 'data' or "
                "'sharded' trains it as it is"
            )
        stages = len(self.ranks)
        if len(captured.graph.operators) < stages:
            raise InputError(
                f"{stages} stages for a model of {len(captured.graph.operators)} operators; ask for at most that many"
            )
        stage_of = self._plan(model, call, captured) if first else self._as_held(captured)
        cut = split(captured.program, stage_of, stages)
        names = captured.program.call_spec.in_spec
        leaves = in_order(call, names)
        dims = [call.along(leaf) for leaf in leaves]
        state = State(model, captured.program)
        executor = Executor(cut, self.ranks, self.session.rank, state, dims, self.device)
        if first:
            require_same_numbers(model, call, captured, cut, self.session)
            owners = self._owners(model, cut)
            materialise(model, self.device, {name for name, ranks in owners.items() if self.session.rank in ranks})
            self._let_go(model, owners)
        executor.links = Links(self.session, self._all_pairs(executor), self.device)
        return _Ready(executor, names)

    def _require_one_batch(self, call: Call) -> None:
        """All ranks of a pipeline see the same batch, or its numbers are those of no run."""
        mark = sum(_mark(leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf) for leaf in call_leaves(call))
        everyones = self.session.all_gather_json(mark, "the first batch of the pipeline")
        odd = next((rank for rank in self.ranks if everyones[rank] != everyones[self.ranks[0]]), None)
        if odd is not None:
            raise InputError(
                f"rank {odd} calls the model with another batch than rank {self.ranks[0]}, and all ranks of a pipeline "
                "must see the same one; hand the loader to nl.distribute, or seed what draws the batch alike"
            )

    def _plan(self, model: nn.Module, call: Call, captured: Captured) -> dict[str, int]:
        """Return the stage of each node of the program, as rank 0 decides."""
        stages, control = len(self.ranks), self.session.control
        assert control is not None
        measured = link.measure(control, torch.device("cpu"))
        found: list[int] = []
        if self.session.rank == 0:
            graph = timed(model, call, captured, interleaved=self._pieces is not None)
            found = stages_of(graph, model, captured, stages, measured.bandwidth)
        everyones = self.session.all_gather_json([found, _names(captured)], "planning the stages")
        odd = next((rank for rank, each in enumerate(everyones) if each[1] != everyones[0][1]), None)
        if odd is not None:
            raise InputError(f"rank {odd} captured another graph than rank 0; is its torch another version?")
        assignment: list[int] = everyones[0][0]
        return {name: stage for names, stage in zip(captured.nodes, assignment, strict=True) for name in names}

    def _as_held(self, captured: Captured) -> dict[str, int]:
        """Return the stage of each node, by the parameters that the stages hold."""
        assert self._held is not None
        found: dict[str, int] = {}
        least = 0
        for names, parameters in zip(captured.nodes, captured.parameters, strict=True):
            for name in parameters:
                holders = [rank - self.ranks[0] for rank in self._held.owners[name] if rank in self.ranks]
                least = max(least, min(holders))
            found.update(dict.fromkeys(names, least))
        return found

    def _owners(self, model: nn.Module, cut: Split) -> dict[str, tuple[int, ...]]:
        """Return the ranks that hold each parameter and buffer, by its name."""
        stages, replicas = len(self.ranks), self.session.size // len(self.ranks)
        owners: dict[str, tuple[int, ...]] = {}
        program_names = _aliases(model)
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            aliases = program_names[id(parameter)]
            held = sorted({stage for alias in aliases for stage in cut.holders.get(alias, ())})
            written = sorted({stage for alias in aliases for stage in cut.writers.get(alias, ())})
            where = held or written or ([0] if isinstance(parameter, nn.Parameter) else [*range(stages)])
            owners[name] = tuple(replica * stages + stage for replica in range(replicas) for stage in where)
        # What the loss alone uses is where the loss is.
        owners.update(dict.fromkeys(self._more(model), tuple(range(stages - 1, self.session.size, stages))))
        return owners

    def _let_go(self, model: nn.Module, owners: dict[str, tuple[int, ...]]) -> None:
        self._values = _values_of(self.session)
        self._held = Parameters(model, owners, self.session, self.session.control, self._values, self._more(model))
        torch.clear_autocast_cache()  # of weights that the gate has cast: they are about to lose their memory
        self._held.send_away()

    def _more(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters that only the optimizer holds."""
        own = {id(parameter) for parameter in model.parameters()}
        both = zip(self.names, self.parameters, strict=True)
        return {name: parameter for name, parameter in both if id(parameter) not in own}

    def _all_pairs(self, executor: Executor) -> list[tuple[int, int]]:
        stages, first = len(self.ranks), self.ranks[0]
        here = [(a - first, b - first) for a, b in executor.pairs()]
        return [
            (replica * stages + a, replica * stages + b)
            for replica in range(self.session.size // stages)
            for a, b in here
        ]

    # ---- around the optimizer's steps

    def before_step(self, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Hide from the optimizer what lies on other ranks; each rank steps its own."""
        if self._held is not None:
            # By pipeline, so that the ranks of one can be compared.
            told = [0] * (self.session.size // len(self.ranks))
            told[self.session.part] = self._seen
            self._held.step_began(optimizer, told)
            if self._held.sums[self.session.part] != len(self.ranks) * self._seen:
                raise InputError(
                    f"rank {self.session.rank} and another rank of its pipeline have called the model with different "
                    "batches since the last optimizer step; hand the loader to nl.distribute, or seed what draws or "
                    "changes a batch alike on all ranks"
                )
            self._seen = 0
            if optimizer not in self._told:
                self._told.add(optimizer)
                optimizer.register_state_dict_pre_hook(self._say_whose_state)

    def _say_whose_state(self, optimizer: torch.optim.Optimizer) -> None:
        if not optimizer_state.collecting:
            self.session.notice(
                "optimizer.state_dict() holds the state of this rank's own parameters; nl.save writes that of all ranks"
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer stepped."""
        if self._held is not None:
            self._held.step_ended(optimizer)
        for each in self._ready.values():
            each.executor.flush()  # a script that ends here leaves nothing under way
            if each.executor.links is not None:
                self.waited_s += each.executor.links.waited_s
                each.executor.links.waited_s = 0.0

    def compare(self, step: int) -> None:
        """Compare what several ranks hold."""
        if self._held is not None:
            self._held.require_equal(step)

    def backward(self, run: Run, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward pass over one call of the model."""
        assert self._held is not None
        self.samples += run.samples
        events.publish("backward", model=self.number)
        if not self._within:
            self._held.backward_began()
        self._within = True
        with torch.enable_grad():
            run.backward(gradients, {place for place, each in enumerate(gradients) if each is not None})
        if self._pieces is None:
            self._backward_ended()

    def _backward_ended(self) -> None:
        """Count the backward pass over a batch, of all its microbatches."""
        assert self._held is not None
        self._within = False
        self._held.backward_ended()
        if events.listened_to("gradients"):
            self._held.combine()
            events.publish("gradients", model=self.number, gradients=self._held.gradients)
            self.session.barrier("showing the gradients")


class _Through(torch.autograd.Function):
    """Joins the script's own graph to the pipeline's."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, pipeline: Pipeline, run: Run, executor: Executor, number: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.pipeline, ctx.run, ctx.executor = pipeline, run, executor
        made = pipeline.outputs(run, executor, number)
        trainable = run.trainable
        tensors = [each for each in executor.split.returned if each.constant is None and each.shape is not None]
        fixed = [value for value, each in zip(made, tensors, strict=True) if each.parameters.isdisjoint(trainable)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pipeline, run, executor = ctx.pipeline, ctx.run, ctx.executor
        if run is None:
            raise InputError("backward was called twice over one call of the model; call the model again before it")
        ctx.run = None
        session: Session = pipeline.session
        scale = session.gradient_scale() if session.parts > 1 else 1.0
        coming = iter(gradients)
        found: list[torch.Tensor | None] = []
        for each in executor.split.returned:
            gradient = next(coming) if each.constant is None and each.shape is not None else None
            if gradient is not None and executor.last:
                gradient = real(gradient)
                gradient = gradient if scale == 1.0 else gradient * scale
            found.append(gradient)
        pipeline.backward(run, found)
        return None, None, None, None, None


_through: Any = _Through.apply


class _Forward:
    """Stands in for the model's ``forward``; a copy of the model gets the original back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pipeline.call(args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise InputError(
            "the model runs in a pipeline, and no rank holds all of it to copy; copy its state_dict(), which asks the "
            "ranks that hold the rest"
        )

    def __reduce__(self) -> Any:
        raise InputError("the model runs in a pipeline and cannot be pickled; save its state_dict(), or use nl.save")


def call_leaves(call: Call) -> list[Any]:
    """Return what the model is called with, without its structure."""
    return pytree.tree_leaves((call.args, dict(call.kwargs)))


_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
_served: weakref.WeakKeyDictionary[Session, Values] = weakref.WeakKeyDictionary()


def _values_of(session: Session) -> Values:
    if session not in _served:
        _served[session] = Values(session)
    return _served[session]


@contextlib.contextmanager
def _with_shapes(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put tensors without memory in the place of those that have no values here; a tracer asks for none."""
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not (isinstance(tensor, Foreign) or tensor.is_meta):
                    continue
                if id(tensor) not in made:
                    one = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                    is_parameter = held is module._parameters
                    made[id(tensor)] = nn.Parameter(one, tensor.requires_grad) if is_parameter else one
                replaced.append((module, name, tensor))
    for module, name, tensor in replaced:  # not in its dictionary: recurrent layers keep lists of their own
        setattr(module, name, made[id(tensor)])
    try:
        yield
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return names


def _kind(model: nn.Module, call: Call, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Return what calls must have in common to run on the same captured graph."""
    signature: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            dim = call.along(leaf)
            shape = tuple(None if place == dim else length for place, length in enumerate(leaf.shape))
            signature.append((shape, leaf.dtype, leaf.device))
        else:
            signature.append(leaf if isinstance(leaf, int | float | str | bool | None) else repr(leaf))
    modes = tuple(module.training for module in model.modules())
    return str(spec), tuple(signature), modes, _autocast()


def _autocast() -> tuple[Any, ...]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _names(captured: Captured) -> str:
    text = "/".join(name for names in captured.nodes for name in names)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _mark(leaf: Any) -> int:
    """Return a number that tells batches apart: of the shape, and of some elements where they are on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    mark = zlib.crc32(str((leaf.dtype, tuple(leaf.shape))).encode())
    if leaf.device.type != "cpu" or not leaf.numel() or leaf.layout != torch.strided:
        return mark % _MARKS
    flat = leaf.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _LOOKED_AT)].contiguous().view(torch.uint8)
    return zlib.crc32(some.numpy().data, mark) % _MARKS


def _readable(call: Call) -> Call:
    """Return the call with its tensors' values on this rank, where they are those of another pipeline's output.

    Raises:
        InputError: A gradient would have to flow into what the model is called with.
    """
    leaves = call_leaves(call)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"the model is called with a tensor of shape {tuple(leaf.shape)} that requires a gradient, and none "
                "flows out of a pipeline's first stage; detach it, make both models one, or use strategy 'data'"
            )
    if not any(isinstance(leaf, PlacedTensor) for leaf in leaves):
        return call
    args, kwargs = pytree.tree_map_only(PlacedTensor, value_of, (call.args, dict(call.kwargs)))
    return Call(args, kwargs, call.samples, call.dim)
