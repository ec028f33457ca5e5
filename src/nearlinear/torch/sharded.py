"""Turning a model into shards: a rank keeps 1/N of every parameter, of its gradient and of its optimizer state.

    forward of a block      every rank's rows ─▶ the whole parameters, while the block runs              all-gather
    backward of a block     the same again; f_r · gradients ─▶ summed over the ranks, this rank's rows    reduce-scatter
    of several copies       the rows, summed over the copies                                              all-reduce
    end of backward         which parameters have a gradient anywhere; is everyone at the same batch      (bytes)
    clip, optimizer.step    on the rows; norms are those of the whole (DTensor)

The sharding is torch's (``fully_shard``, "FSDP2"). Its messages are ours: they are weighted by what this rank's share
counts for, summed and not averaged, and waited for like all others, with a deadline and the name of who is missing.
A parameter that no rank has a gradient for keeps ``p.grad`` as it was, as in one process.

Every backward pass is combined at once, in each pass of an accumulation window too: whole gradients that wait for the
window's end would take the memory that sharding saves.
"""

from __future__ import annotations

import functools
import struct
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nearlinear import events
from nearlinear.core.cluster import Link
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.torch import gradient as gradient_slot
from nearlinear.torch.buffers import Buffers
from nearlinear.torch.collectives import Group, Pending
from nearlinear.torch.reducer import Reducer
from nearlinear.torch.session import Session
from nearlinear.torch.sharded_blocks import LEAF_BYTES, blocks_of, members
from nearlinear.torch.sharded_tensors import (
    Copies,
    found_anywhere,
    is_sharded,
    local,
    meshes,
    reading_plain_state,
    rows_of,
    total_norm,
)
from nearlinear.torch.state import require_equal

Named = Sequence[tuple[str, torch.Tensor]]
_SUCCESSOR = "_nearlinear_shard"
_OF_WHOLE_PARAMETERS = ("LBFGS", "Adafactor", "SparseAdam", "Muon")  # Muon rounds products of rows to 16 bits


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    named: Named,
    session: Session,
    plan: Plan,
    number: int,
) -> list[Shards | Reducer]:
    """Keep this rank's rows of the model's parameters and of the optimizer's state alone, in place.

    The parameters become ``DTensor``s, in the model and, at the same places, in the optimizer's groups. What cannot be
    divided (a single number, a parameter that only the optimizer holds) stays whole on every rank, as under ``data``.

    Args:
        model: The model, equal on all ranks.
        optimizer: What steps its parameters.
        named: Names and parameters: the model's and those that only the optimizer holds.
        session: The run, of two ranks or more.
        plan: Bytes from which a lone layer is a block (``bucket_bytes``), and compression.
        number: Number of the ``distribute`` call, for events.

    Returns:
        What combines the gradients: of the shards, and of what stays whole, if anything.

    Raises:
        InputError: Something cannot be sharded; nothing was changed.
    """
    require_shardable(model, optimizer, named, plan)
    blocks = _blocks(model, plan)
    sharded, left = _divided(model, named)
    mesh, group, copies = _mesh(session, plan.shards_on(session.size), sharded[0][1].device)
    _fully_shard(model, blocks, {p for _, p in left}, mesh, sharded, optimizer, plan)
    _read_gradients_together()
    names = [name for name, _ in sharded]
    parameters = dict(model.named_parameters())
    shards = Shards([(name, parameters[name]) for name in names], model, session, group, copies, number)
    if not left:
        return [shards]
    return [shards, Reducer(left, nn.Module(), session, session.new_group(left[0][1].device), plan, number)]


def renew(optimizer: torch.optim.Optimizer) -> None:
    """Put shards in the place of parameters that an earlier call has sharded: it is a second optimizer of a model."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    successors = {id(p): getattr(p, _SUCCESSOR) for p in held if hasattr(p, _SUCCESSOR)}
    if successors:
        _follow(optimizer, successors)


# ---- before and while the model is divided


def require_shardable(model: nn.Module, optimizer: torch.optim.Optimizer | None, named: Named, plan: Plan) -> None:
    """Check that ``shard`` can do it.

    Args:
        model: The model.
        optimizer: What steps its parameters.
        named: As for ``shard``: what no earlier ``distribute`` call has taken.
        plan: As for ``shard``.

    Raises:
        InputError: It cannot; the message names the parameter or the layer.
    """
    from torch.distributed.fsdp import FSDPModule

    if not named:
        return  # an earlier call has sharded the model; this one is for another optimizer
    sharded, _ = _divided(model, named)
    given = {id(parameter) for _, parameter in named}
    taken = [name for name, parameter in model.named_parameters() if id(parameter) not in given]
    if taken:
        raise InputError(
            f"{taken[0]} was handed to an earlier distribute call with another model; strategy 'sharded' divides a "
            "model as a whole: hand over one model that holds both, or use strategy='data'"
        )
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params") or not hasattr(dist, "reduce_scatter_single"):
        raise InputError(f"strategy 'sharded' needs torch 2.13 or newer, this is {torch.__version__}; use 'data'")
    if type(optimizer).__name__ in _OF_WHOLE_PARAMETERS:
        raise InputError(
            f"{type(optimizer).__name__} works on whole parameters, which no rank has under strategy 'sharded'; use an "
            "optimizer that works number by number, as Adam and SGD do, or strategy='data'"
        )
    if not sharded:
        raise InputError("the model's parameters are single numbers, so there is nothing to shard; use strategy='data'")
    device = sharded[0][1].device
    for name, parameter in sharded:
        if parameter.device != device:
            raise InputError(
                f"{sharded[0][0]} is on {device} and {name} on {parameter.device}; strategy 'sharded' takes a model "
                "on one device: move it, or use strategy='data'"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(f"{name} has a hook that its shard would not call; remove it, or use strategy='data'")
        gradient = gradient_slot.get(parameter)
        if gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes:
            raise InputError(
                f"the gradient of {name} is part of a larger tensor, which its shard would not fill; take "
                "strategy='data', or leave p.grad to autograd"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"{name or 'the model'} has sparse gradients, which cannot be sharded; use sparse=False, or "
                "strategy='data'"
            )
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise InputError(
                f"{name or 'the model'} is compiled; under strategy 'sharded' compile functions that the blocks call, "
                "or use strategy='data'"
            )
    names = {id(p): name for name, p in sharded}
    blocks = _blocks(model, plan)
    inside = {id(p) for block in blocks for p in block.parameters()}
    around = [p for p in model.parameters() if id(p) not in inside]
    for group in (around, *(list(block.parameters()) for block in blocks)):
        kinds: dict[torch.dtype, str] = {}
        for p in group:
            if id(p) in names:
                kinds.setdefault(p.dtype, names[id(p)])
        if len(kinds) > 1:
            (first, a), (second, b) = list(kinds.items())[:2]
            raise InputError(
                f"{a} is {first} and {b} is {second}; parameters that travel together have one type under strategy "
                "'sharded': convert the model to one, or use strategy='data'"
            )
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if id(parameter) not in names:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise InputError(
                    f"{type(optimizer).__name__} has stepped already and its state {key!r} of "
                    f"{names[id(parameter)]} has another shape than the parameter, so it cannot be sharded; call "
                    "distribute before the first step"
                )


def _divided(model: nn.Module, named: Named) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Return what is divided of ``named``, and what stays whole on every rank."""
    own = {id(parameter) for parameter in model.parameters()}
    sharded = [(name, p) for name, p in named if id(p) in own and p.dim() > 0]
    return sharded, [(name, p) for name, p in named if id(p) not in own or p.dim() == 0]


def _blocks(model: nn.Module, plan: Plan) -> list[nn.Module]:
    return blocks_of(model, LEAF_BYTES if plan.bucket_bytes is None else plan.bucket_bytes)


def _mesh(session: Session, shards: int, device: torch.device) -> tuple[Any, Group, Copies | None]:
    """Return the ranks of this rank's copy as torch's sharding sees them, what carries its messages, and, of several
    copies, the ranks that hold the same rows; one of each serves all models.

    Raises:
        InputError: An earlier call had other copies.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if device.type == "cuda":
        torch.cuda.set_device(device)
    for mesh, group, copies in meshes:
        if mesh.device_type == device.type:
            if mesh.size() != shards:
                raise InputError(
                    f"an earlier distribute call shared its parameters among {mesh.size()} ranks and this one wants "
                    f"{shards}; use one number for all models of a script"
                )
            return mesh, group, copies
    # What the script computes with shards (p.norm(), say) is torch's to exchange, and by a group of its own: where one
    # rank does so alone, the others do not take its message for theirs.
    firsts = range(0, session.size, shards)
    for_torch, for_blocks = (
        [session.new_group(device, range(first, first + shards)) for first in firsts][session.rank // shards]
        for _ in range(2)
    )
    assert for_torch is not None and for_blocks is not None
    mesh = DeviceMesh.from_group(for_torch.process_group, device.type)
    copies = None
    if len(firsts) > 1:
        alike, control = (
            [session.new_group(each, range(place, session.size, shards)) for place in range(shards)][
                session.rank % shards
            ]
            for each in (device, torch.device("cpu"))
        )
        assert alike is not None and control is not None
        copies = Copies(alike, control)
    meshes.append((mesh, for_blocks, copies))
    return meshes[-1]


def _fully_shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ignored: set[torch.Tensor],
    mesh: Any,
    sharded: Named,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if plan.compress == "bf16" else None)
    for _, parameter in sharded:
        if not parameter.is_contiguous():  # channels last, say: rows are divided in memory
            parameter.data = parameter.data.contiguous()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": ignored}
    for block in blocks:
        fully_shard(block, reshard_after_forward=True, **options)
    # After its forward the whole model is divided again, too: whoever reads model.parameters() between forward and
    # backward, or after an evaluation, then sees the parameters that the optimizer holds.
    fully_shard(model, reshard_after_forward=True, **options)
    now = dict(model.named_parameters())
    successors = {id(parameter): now[name] for name, parameter in sharded}
    if optimizer is not None:
        _follow(optimizer, successors)
    for name, parameter in sharded:
        new = successors[id(parameter)]
        gradient = gradient_slot.get(parameter)
        if gradient is not None:
            new.grad = rows_of(gradient, new)  # type: ignore[arg-type]
        _retire(name, parameter, new)


def _follow(optimizer: torch.optim.Optimizer, successors: Mapping[int, torch.Tensor]) -> None:
    """Put the shards, and the rows of their state, in the optimizer where the parameters were."""
    for group in optimizer.param_groups:
        group["params"][:] = [successors.get(id(p), p) for p in group["params"]]
        if len({is_sharded(p) for p in group["params"]}) > 1:
            group["foreach"] = False  # one kernel for many parameters takes either kind
    for parameter in list(optimizer.state):
        new: Any = successors.get(id(parameter))
        if new is None:
            continue
        state = optimizer.state.pop(parameter)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == new.shape:
                state[key] = rows_of(value, new)
        optimizer.state[new] = state


class _Retired:
    """A parameter that was sharded. Who still reads its gradient has kept it from before, and would read nothing."""

    pending = True

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self) -> None:
        raise InputError(
            f"this {self._name} is from before distribute, which put its shard in its place; take model.parameters() "
            "again after distribute, and hand all optimizers of the model to distribute"
        )


def _retire(name: str, parameter: torch.Tensor, successor: torch.Tensor) -> None:
    """Let go of the values of a parameter that was sharded, for whoever still holds it."""
    gradient_slot.put(parameter, None)
    parameter.data = parameter.data.new_empty(0)
    keeper: Any = parameter
    keeper._nearlinear_retired = _Retired(name)
    gradient_slot.own(parameter, keeper._nearlinear_retired)
    setattr(parameter, _SUCCESSOR, successor)


def _read_gradients_together() -> None:
    """Let ``clip_grad_norm_`` and ``GradScaler`` ask all ranks about the gradients, in one message each.

    torch's own norm of shards is a tensor whose value is still to be summed over the ranks when it is read, which one
    rank cannot do alone (to print it) and ``format`` not at all; and its scaler takes shards alone, or none.
    """
    from torch.nn.utils import clip_grad

    module: Any = clip_grad
    norm_of, unscale_of = module._get_total_norm, torch._amp_foreach_non_finite_check_and_unscale_
    if hasattr(norm_of, "nearlinear"):
        return

    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not any(is_sharded(tensor) for tensor in tensors):
            norm: torch.Tensor = norm_of(tensors, norm_type, error_if_nonfinite, foreach)
            return norm
        norm = total_norm(tensors, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {float(norm)}, so they cannot be clipped")
        return norm

    def unscale(gradients: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        rows = [local(gradient) if is_sharded(gradient) else gradient for gradient in gradients]
        unscale_of([each for each in rows if each.numel()], found_inf, inv_scale)
        found_anywhere(gradients, found_inf)

    get_total_norm.nearlinear = True  # type: ignore[attr-defined]
    module._get_total_norm = nn.utils.get_total_norm = get_total_norm
    torch._amp_foreach_non_finite_check_and_unscale_ = unscale  # type: ignore[assignment]


# ---- while it trains


class Shards:
    """Combine the gradients of one sharded model.

    Args:
        named: Names and sharded parameters.
        model: The model, divided.
        session: The run.
        group: What carries the messages among the ranks of a copy.
        copies: And among those that hold the same rows of several copies.
        number: Number of the ``distribute`` call, for events.
    """

    link: Link | None = None

    def __init__(
        self, named: Named, model: nn.Module, session: Session, group: Group, copies: Copies | None, number: int
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.session, self.group, self.copies, self.number = session, group, copies, number
        self.waited_s = 0.0
        self.samples = 0
        self._in_backward = False
        self._accumulates = False  # the pass in hand is loss.backward(), no torch.autograd.grad
        self._scale = 1.0
        self._order = 0  # of the exchanges so far, as a checksum
        self._had: list[bool] = []  # p.grad was there when the pass began
        self._present: set[int] = set()  # parameters that this rank has a gradient for in the pass in hand
        everyone = group if copies is None else session.new_group(self.parameters[0].device)
        assert everyone is not None
        self._buffers = Buffers(model, session, everyone)
        self._agreed = False
        self._queued = dist.get_backend(group.process_group) == "nccl"  # a message waits in a stream of its GPU
        self._nodes: list[Any] = []  # of the whole parameters' gradients, in autograd's graph
        self._numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        _attach(self, model)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass of this model is running."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    # ---- exchanges

    def gather(self, output: torch.Tensor, rows: torch.Tensor, what: str) -> None:
        """Fill ``output`` by every rank's ``rows``."""
        self._note(what)
        self._wait(self.group.start_gather(output, rows, what), what)

    def reduce(self, rows: torch.Tensor, gradients: torch.Tensor, what: str) -> None:
        """Weight this rank's ``gradients``, and fill ``rows`` by its part of the sum over the ranks."""
        if not self._in_backward:
            self._begin()
        if not self._accumulates:
            rows.zero_()
            return
        self._note(what)
        if self._scale == 0.0:
            gradients.zero_()  # a share of weight zero may hold anything, NaN too; it must not spread
        elif self._scale != 1.0:
            gradients.mul_(self._scale)
        self._wait(self.group.start_reduce_scatter(rows, gradients, what), what)
        if self.copies is not None:
            self._wait(self.copies.group.start_all_reduce(rows, what), what)

    def _note(self, what: str) -> None:
        self._order = zlib.crc32(what.encode(), self._order)

    def _wait(self, pending: Pending, what: str) -> None:
        began = time.perf_counter()
        if self._queued:
            pending.wait()  # the stream waits, so that messages overlap; of a dead peer liveness ends the process
        else:
            self.group.wait(pending, what)
        self.waited_s += time.perf_counter() - began

    # ---- a backward pass

    def whole_parameter(self, index: int, parameter: torch.Tensor) -> None:
        """Note that autograd will bring the gradient of parameter ``index`` to ``parameter``, the whole one."""
        this = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            shards = this()
            if shards is not None:
                shards._present.add(index)

        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)

    def _begin(self) -> None:
        """Begin a backward pass: the gradients of its first block are ready."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._in_backward = True
        self._had = [parameter.grad is not None for parameter in self.parameters]
        self._accumulates = any(torch._C._will_engine_execute_node(node) for node in self._nodes)
        if not self._accumulates:
            return
        self._scale = self.session.gradient_scale()
        if self.session.batch is not None:
            self.samples += self.session.batch.samples
        events.publish("backward", model=self.number)

    def _end(self) -> None:
        """End a backward pass: torch has summed the gradients; forget the zeros that no rank has a gradient for."""
        self._in_backward = False
        used = set() if not self._accumulates else self._compare()
        for index, parameter in enumerate(self.parameters):
            if not self._had[index] and index not in used:
                parameter.grad = None
        self._present.clear()
        if not self._accumulates:
            return
        self._combine_buffers()
        if events.listened_to("gradients"):
            events.publish("gradients", model=self.number, gradients=self._gradients)

    def _compare(self) -> set[int]:
        """Return the parameters that some rank has a gradient for, after checking that all are at the same place.

        Raises:
            InputError: A rank skipped a batch, or ran other blocks.
        """
        what = "comparing the backward passes"
        loader, batch = self.session.place or (0, 0)
        counts = self._scale != 0.0
        flags = bytes(counts and index in self._present for index in range(len(self.parameters)))
        mine = flags + struct.pack("<IqI", loader, batch, self._order)
        assert self.session.control is not None
        began = time.perf_counter()
        everyones = self.session.control.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), what)
        self.waited_s += time.perf_counter() - began
        texts = [bytes(each.tolist()) for each in everyones]
        places = [struct.unpack("<IqI", text[len(flags) :]) for text in texts]
        for rank, (loader, batch, order) in enumerate(places):
            if (loader, batch) != places[0][:2]:
                raise InputError(
                    f"rank 0 trains on batch {places[0][1]} and rank {rank} on batch {batch} of loader {loader}: some "
                    "ranks skipped a batch that others did not; decide by what is the same on all ranks, "
                    "nl.mean(loss) say"
                )
            if order != places[0][2]:
                raise InputError(
                    f"ranks 0 and {rank} ran other blocks of the model, or in another order, so their weights were "
                    "mixed up; under strategy 'sharded' all ranks run the same blocks: use strategy='data'"
                )
        return {index for index in range(len(flags)) if any(text[index] for text in texts)}

    def _combine_buffers(self) -> None:
        if not self._agreed:
            self._agreed = True
            for changed in self.session.all_gather_json(self._buffers.changed(), "the first backward pass"):
                self._buffers.follow(changed)
        self._buffers.start(self.session.sample_fraction())
        for pending in self._buffers.pending:
            self._wait(pending, "the exchange of buffers")
        self._buffers.finish()

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                yield name, parameter.grad

    # ---- steps

    def before_step(self, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Make sure that the optimizer reads the gradient of one process."""
        if self.in_backward:
            raise InputError(
                "optimizer.step() was called inside the backward pass, before the gradients of all ranks were "
                "combined; call it after loss.backward()"
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer stepped."""

    def compare(self, step: int) -> None:
        """Compare what several ranks hold: the buffers, and the rows of several copies.

        Raises:
            DriftError: One differs.
        """
        require_equal(self._buffers.equal(), self.session, step)
        if self.copies is not None:
            rows = [(name, local(p)) for name, p in zip(self.names, self.parameters, strict=True) if is_sharded(p)]
            require_equal(rows, self.session, step, self.copies.control)
        for changed in self.session.all_gather_json(self._buffers.changed(), "comparing the replicas"):
            self._buffers.follow(changed)


class _Gather:
    """torch's all-gather of a block's parameters, through ``Shards``."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards, self._what = weakref.ref(shards), f"gathering the parameters of {name}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        _alive(self._shards).gather(output_tensor, input_tensor, self._what)


class _Reduce(_Gather):
    """torch's reduce-scatter of a block's gradients, through ``Shards``."""

    def __init__(self, shards: Shards, name: str) -> None:
        super().__init__(shards, name)
        self._what = f"the exchange of {name}'s gradients"

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        _alive(self._shards).reduce(output_tensor, input_tensor, self._what)


def _alive(reference: weakref.ref[Shards]) -> Shards:
    shards = reference()
    assert shards is not None
    return shards


def _attach(shards: Shards, model: nn.Module) -> None:
    """Hook ``shards`` into the divided model."""
    from torch.distributed.fsdp import FSDPModule

    root: Any = model
    root._get_fsdp_state()._lazy_init()  # now, so that any block may run before the whole model does
    root.set_reduce_scatter_unused_params(True)  # a rank without a gradient takes part in the others' exchange
    root.register_state_dict_post_hook(functools.partial(_note_rows, shards.session))
    divided: dict[Any, str] = {m: path or "the model" for path, m in model.named_modules() if isinstance(m, FSDPModule)}
    for owner, name in divided.items():
        owner.set_gradient_divide_factor(1.0)
        owner.set_force_sum_reduction_for_comms(True)
        owner.set_custom_all_gather(_Gather(shards, name))
        owner.set_custom_reduce_scatter(_Reduce(shards, name))
        within = list(members(owner, divided))
        held = [
            (member, key, shards._numbers[id(p)])
            for member in within
            for key, p in member._parameters.items()
            if p is not None and id(p) in shards._numbers
        ]
        if not held:
            continue
        watch = _Watch(shards, held)
        owner.register_forward_pre_hook(watch)
        for member in within[1:]:
            if any(id(p) in shards._numbers for p in member.parameters()):
                call = _DirectCall(owner, watch)
                member.register_forward_pre_hook(call.before, prepend=True, with_kwargs=True)
                member.register_forward_hook(call.after)


def _note_rows(session: Session, *_: Any) -> None:
    if not reading_plain_state():
        session.notice(
            "state_dict() under strategy 'sharded' gives each rank its own rows (DTensor), and torch.save would write "
            "one rank's; nl.save(path, model) writes the whole"
        )


class _Watch:
    """Shows the whole parameters to ``Shards`` when they are there for the first time, to be trained."""

    def __init__(self, shards: Shards, held: list[tuple[nn.Module, str, int]]) -> None:
        self._shards, self._held = weakref.ref(shards), held

    def __call__(self, *_: Any) -> None:
        if not self._held:
            return
        shards, later = _alive(self._shards), []
        for member, key, index in self._held:
            parameter = member._parameters[key]
            if parameter is None or is_sharded(parameter) or not parameter.requires_grad:
                later.append((member, key, index))
            else:
                shards.whole_parameter(index, parameter)
        self._held = later


class _DirectCall:
    """Lets a module within a block be called by itself: the block's parameters are gathered for it, too."""

    def __init__(self, owner: Any, watch: _Watch) -> None:
        self._owner, self._watch, self._depth = owner, watch, 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._owner._get_fsdp_state()
        if state._training_state.name != "IDLE":  # the block itself runs, or its recomputation
            return None
        self._depth = 1
        given = state._pre_forward(self._owner, args, kwargs)
        self._watch()
        return given

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._depth:
            return None
        self._depth = 0
        return self._owner._get_fsdp_state()._post_forward(self._owner, args, output)
