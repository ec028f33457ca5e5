"""Turning each rank's own gradients into the gradient of one process.

The parameters carry hooks; nothing is wrapped. A window is what lies between two uses of the gradients: one backward
pass, or several that accumulate. In the last one (planning.accumulation foretells which) each gradient is weighted
into its bucket as it becomes ready, and a full bucket is summed over the ranks while backward goes on:

    backward      g5 g4 g3 | g2 g1 g0 |
    bucket 0      ~~~~~~~~~ all-reduce ~~~~~
    bucket 1                 ~~~~~~~~~~~~~~~~ all-reduce ~~~
    p.grad                                                   = the sum      (views into the buckets, no copy back)

Buckets are sent in the same order on every rank, whatever became ready first, so that the ranks' messages match.
A large gradient is not copied: it is its own bucket, weighted and summed where it lies.
The last bucket ends with one flag per parameter: how many ranks have a gradient for it. Where none has, `p.grad` stays
as it was, as in one process, so that weight decay and momentum leave an unused parameter alone. Behind the flags stand
a few marks, one of which each rank sets, by the number of its batch: ranks that are at different batches set different
ones.

If the foretelling was wrong, nothing is: reading `p.grad` (clipping, a scaler, the optimizer, the script itself)
combines first, and what a further backward pass adds to gradients that were combined already is combined by itself
and added.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nearlinear import events
from nearlinear.core.cluster import Link
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError, NearlinearError
from nearlinear.planning.accumulation import Windows
from nearlinear.planning.buckets import bucket_bytes, fill_buckets
from nearlinear.torch import gradient as gradient_slot
from nearlinear.torch import link
from nearlinear.torch.buffers import Buffers
from nearlinear.torch.collectives import Group, Pending
from nearlinear.torch.session import Session
from nearlinear.torch.state import require_equal

IN_PLACE_BYTES = 256 * 1024
_MARKS = 16  # ranks that are up to 15 batches apart set different marks


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel in one message."""

    parameters: list[int]
    offsets: list[int]
    elements: int
    dtype: torch.dtype
    device: torch.device
    in_place: bool = False  # one large gradient, summed where it lies
    buffer: torch.Tensor | None = None
    left: int = 0  # gradients still to be packed
    packed: list[bool] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)  # this rank has a gradient that counts
    pending: Pending | None = None


@dataclass(slots=True)
class _Layout:
    """How the trainable parameters are grouped; one for each set of parameters that require gradients."""

    buckets: list[_Bucket]
    flags: int = 0  # elements at the end of the last bucket, one for each parameter in the order of the buckets
    place: dict[int, tuple[int, int]] = field(default_factory=dict)  # parameter -> bucket, position in it
    sparse: list[int] = field(default_factory=list)


class Reducer:
    """Combine the gradients of one ``distribute`` call.

    Args:
        named: Names and parameters, the same on every rank.
        model: The module whose buffers are kept equal; its embeddings may have sparse gradients.
        session: The run.
        group: Where this reducer's exchanges run; None in a run of one process.
        plan: Compression and bucket size.
        number: Number of the ``distribute`` call, for events.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        model: nn.Module,
        session: Session,
        group: Group | None,
        plan: Plan,
        number: int,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.session, self.group, self.plan, self.number = session, group, plan, number
        self.link: Link | None = link.measure(group, self.parameters[0].device) if group is not None else None
        self.waited_s = 0.0  # time that backward or the script stood still for an exchange
        self.samples = 0
        self.combined = 0  # exchanges since the last optimizer step
        self.pending = False  # p.grad holds this rank's own gradients
        self._windows = Windows()
        self._in_backward = False
        self._last = True
        self._buffers = Buffers(model, session, group)
        self._order: list[int] | None = None  # agreed on in the first window
        self._expected = [1] * len(self.parameters)  # accumulations in one backward pass (reentrant checkpoints: more)
        self._layouts: dict[tuple[bool, ...], _Layout] = {}
        self._layout = _Layout([])
        self._scale = 1.0  # factor of the window's gradients when they are packed
        self._boost = 1.0  # factor of this pass's gradients before that, where the passes of a window differ
        self._counts = False  # some pass of the window has a weight
        self._overlap = False
        self._open = [False] * len(self.parameters)  # p.grad is of this window
        self._carry: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._installed: list[weakref.ref[torch.Tensor] | None] = [None] * len(self.parameters)
        self._made = [(parameter, (parameter.dtype, parameter.device)) for parameter in self.parameters]
        self._fired = [0] * len(self.parameters)
        self._fired_order: list[int] = []
        self._launched = 0
        self._mark: tuple[int, torch.Tensor | None, int] = (-1, None, 0)
        self._apart: torch.Tensor | None = None  # most marks set at once, where looking at once would wait for a GPU
        embeddings = (nn.Embedding, nn.EmbeddingBag)
        sparse = {id(m.weight) for m in model.modules() if isinstance(m, embeddings) and m.sparse}
        self._is_sparse = [id(parameter) in sparse for parameter in self.parameters]
        self._nodes: list[Any] = []  # autograd holds its accumulators weakly, and their hooks with them
        self._install_hooks()

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass that reaches these parameters is running."""
        # The callback that ends a pass does not come when the pass raised an error.
        return self._in_backward and torch._C._current_graph_task_id() != -1

    # ---- hooks

    def _install_hooks(self) -> None:
        this = weakref.ref(self)
        for index, parameter in enumerate(self.parameters):
            gradient_slot.own(parameter, self)
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen parameter may be trained later on: it gets its hooks now
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_prehook(_before_accumulation(this, index))
            parameter.register_post_accumulate_grad_hook(_after_accumulation(this, index))  # type: ignore[no-untyped-call]
            self._nodes.append(node)
            if frozen:
                parameter.requires_grad_(False)

    def before_accumulation(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Set aside what ``p.grad`` holds of windows gone by; return the gradient weighted, where it must be."""
        if not self._in_backward:
            self._begin(index)
        if not self._open[index]:
            self._open[index] = True
            parameter = self.parameters[index]
            self._carry[index] = gradient_slot.get(parameter)
            if self._carry[index] is not None:
                gradient_slot.put(parameter, None)
        if self._boost == 1.0:
            return None
        # A share of weight zero may hold anything, NaN too (a mean over no tokens); it must not spread.
        return torch.zeros_like(gradient) if self._boost == 0.0 else gradient * self._boost

    def after_accumulation(self, index: int) -> None:
        """Pack a gradient that is ready; send the buckets that are full."""
        self._fired[index] += 1
        if self._order is None and self._fired[index] == 1:
            self._fired_order.append(index)
        if not self._overlap or self._fired[index] < self._expected[index]:
            return
        number, position = self._layout.place.get(index, (-1, -1))
        if number == -1:
            return
        bucket = self._layout.buckets[number]
        if bucket.packed[position]:
            raise NearlinearError(
                f"{self.names[index]} received a gradient {self._fired[index]} times in one backward pass and "
                f"{self._expected[index]} times before, after it was sent; use checkpoint(..., use_reentrant=False)"
            )
        self._pack(bucket, position)
        while self._launched < len(self._layout.buckets) and self._layout.buckets[self._launched].left == 0:
            self._launch()

    def _begin(self, index: int) -> None:
        """Begin a backward pass: ``index`` is the first parameter to receive a gradient."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        gradient: torch.Tensor | None = gradient_slot.get(self.parameters[index])
        marked, held, version = self._mark
        fresh = gradient is None or (marked == index and (gradient is not held or gradient._version != version))
        self._last = self._windows.begin(fresh=fresh)
        scale = self.session.gradient_scale()
        if not self.pending:
            self._counts = False
            self._scale = scale if scale != 0.0 else 1.0
        self._boost = 1.0 if scale == self._scale else scale / self._scale
        self._counts = self._counts or scale != 0.0
        self._in_backward = self.pending = True
        self._mark = (index, None, 0)
        self._fired = [0] * len(self.parameters)
        self._overlap = self._last and self._order is not None
        if self._overlap:
            self._prepare()
        if self.session.batch is not None:
            self.samples += self.session.batch.samples
        events.publish("backward", model=self.number)

    def _end(self) -> None:
        """End a backward pass."""
        self._in_backward = False
        if self._last:
            self.combine()
        index = self._mark[0]
        gradient = gradient_slot.get(self.parameters[index])
        self._mark = (index, gradient, gradient._version if gradient is not None else 0)

    # ---- combining

    def read(self) -> None:
        """Combine because somebody reads the gradients: the pass was the last of its window after all.

        Raises:
            InputError: They are still coming.
        """
        if self.in_backward:
            raise InputError(
                "p.grad was read inside the backward pass, where it is this rank's own and not yet combined; read it, "
                "and step the optimizer, after loss.backward()"
            )
        self._windows.used()
        self.combine()

    def combine(self) -> None:
        """Replace every ``p.grad`` by the gradient of one process; return when that is done.

        Raises:
            PeerLostError: A rank died, stalled or was cut off.
        """
        if self._in_backward and self._launched:
            raise NearlinearError(
                f"a backward pass broke off after {self._launched} of {len(self._layout.buckets)} messages were sent, "
                "so the ranks no longer agree; start again from the last checkpoint"
            )
        self._in_backward = False
        if self._order is None:
            self._agree()
        if not self._overlap:
            self._prepare()
        for bucket in self._layout.buckets[self._launched :]:
            for position, packed in enumerate(bucket.packed):
                if not packed:
                    self._pack(bucket, position)
        while self._launched < len(self._layout.buckets):
            self._launch()
        self._buffers.start(self.session.sample_fraction())
        for bucket in self._layout.buckets:
            self._wait(bucket.pending, "the exchange of gradients")
        self._compare_batches()
        self._unpack()
        for index in self._layout.sparse:
            self._combine_sparse(index)
        for pending in self._buffers.pending:
            self._wait(pending, "the exchange of buffers")
        self._buffers.finish()
        self._overlap, self._launched, self.pending = False, 0, False
        self.combined += 1
        self._open = [False] * len(self.parameters)
        self._carry = [None] * len(self.parameters)
        if events.listened_to("gradients"):
            events.publish("gradients", model=self.number, gradients=self._gradients)

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = gradient_slot.get(parameter)
            if gradient is not None:
                yield name, gradient

    def _prepare(self) -> None:
        """Choose the buckets for the parameters that are trained now, and empty them."""
        trained = tuple(parameter.requires_grad for parameter in self.parameters)
        if trained not in self._layouts:
            self._layouts[trained] = self._lay_out(trained)
        self._layout, self._launched = self._layouts[trained], 0
        for bucket in self._layout.buckets:
            count = len(bucket.parameters)
            # A new buffer each time: the last one is p.grad, and the script may have kept it.
            bucket.buffer = None
            bucket.left, bucket.packed, bucket.present = count, [False] * count, [False] * count

    def _lay_out(self, trained: Sequence[bool]) -> _Layout:
        order = [index for index in self._order or () if trained[index] and not self._is_sparse[index]]
        wires = [self._wire_dtype(parameter) for parameter in self.parameters]
        sizes = [_elements(p) * wire.itemsize for p, wire in zip(self.parameters, wires, strict=True)]
        kinds = [(p.device, wire) for p, wire in zip(self.parameters, wires, strict=True)]
        limit = self.plan.bucket_bytes
        if limit is None:
            total = sum(sizes[index] for index in order)
            shared = self.parameters[0].device.type == "cpu"
            limit = max(total, 1)
            if self.link is not None:
                limit = bucket_bytes(total, self.link.latency, self.link.bandwidth, shared=shared)
        layout = _Layout([], sparse=[i for i, on in enumerate(trained) if on and self._is_sparse[i]])
        for parameters in fill_buckets(order, sizes, kinds, limit):
            offsets, elements = [], 0
            for position, index in enumerate(parameters):
                layout.place[index] = (len(layout.buckets), position)
                elements += elements % 2 if self.parameters[index].is_complex() else 0  # pairs begin at even places
                offsets.append(elements)
                elements += _elements(self.parameters[index])
            device, wire = kinds[parameters[0]]
            in_place = (
                len(parameters) == 1
                and sizes[parameters[0]] >= IN_PLACE_BYTES
                and self.parameters[parameters[0]].dtype == wire
                and self.parameters[parameters[0]].is_contiguous()
            )
            layout.buckets.append(_Bucket(parameters, offsets, elements, wire, device, in_place))
        if layout.buckets:
            layout.buckets[-1].in_place, layout.flags = False, len(layout.place)
        return layout

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if parameter.is_complex():
            return torch.view_as_real(parameter.detach()).dtype
        if self.plan.compress == "bf16" and parameter.dtype in (torch.float32, torch.float64):
            return torch.bfloat16
        return parameter.dtype

    def _agree(self) -> None:
        """Agree with all ranks on what the first window showed: the order of the gradients, and how each comes."""
        gradients = [gradient_slot.get(parameter) for parameter in self.parameters]
        mine = {
            "order": self._fired_order,
            "fired": self._fired,
            "sparse": [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.is_sparse],
            "buffers": self._buffers.changed(),
        }
        everyones = self.session.all_gather_json(mine, "the first exchange of gradients")
        order = dict.fromkeys(index for one in everyones for index in one["order"])
        order.update(dict.fromkeys(reversed(range(len(self.parameters)))))
        self._order = list(order)
        self._expected = [max(1, *(one["fired"][i] for one in everyones)) for i in range(len(self.parameters))]
        hooked = [name for name, p in zip(self.names, self.parameters, strict=True) if p._backward_hooks]
        if hooked and self.session.size > 1:
            self.session.notice(
                f"hooks on {', '.join(hooked[:2])} see the gradient of this rank's share, not of the batch; one that "
                "is not linear (a clamp) changes the numbers"
            )
        for one in everyones:
            for index in one["sparse"]:
                self._is_sparse[index] = True
            self._buffers.follow(one["buffers"])

    def _view(self, bucket: _Bucket, position: int) -> torch.Tensor:
        """Return the place of a gradient in its bucket, shaped and laid out in memory like its parameter."""
        assert bucket.buffer is not None
        parameter, offset = self.parameters[bucket.parameters[position]], bucket.offsets[position]
        if parameter.is_complex():
            return bucket.buffer[offset : offset + _elements(parameter)].view(*parameter.shape, 2)
        if parameter.is_contiguous() or not parameter.is_contiguous(memory_format=_memory_format(parameter)):
            return bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape)
        return bucket.buffer.as_strided(parameter.size(), parameter.stride(), offset)

    def _pack(self, bucket: _Bucket, position: int) -> None:
        index = bucket.parameters[position]
        gradient: torch.Tensor | None = gradient_slot.get(self.parameters[index]) if self._open[index] else None
        if gradient is not None and (gradient.requires_grad or gradient.is_sparse):
            how = "backward(create_graph=True)" if gradient.requires_grad else "a sparse gradient after dense ones"
            remedy = "torch.autograd.grad" if gradient.requires_grad else "sparse=False"
            raise InputError(f"{self.names[index]} got {how}, which cannot be combined; use {remedy}")
        bucket.packed[position] = True
        bucket.left -= 1
        bucket.present[position] = present = gradient is not None and self._counts
        if bucket.in_place and present and gradient is not None and gradient.is_contiguous():
            bucket.buffer = gradient.mul_(self._scale).view(-1)
            return
        if bucket.buffer is None:
            tail = self._layout.flags + _MARKS if bucket is self._layout.buckets[-1] else 0
            bucket.buffer = torch.empty(bucket.elements + tail, dtype=bucket.dtype, device=bucket.device)
        view = self._view(bucket, position)
        if gradient is None or not present:
            view.zero_()
            return
        source = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        if source.dtype == view.dtype:
            torch.mul(source, self._scale, out=view)
        else:
            view.copy_(source * self._scale)

    def _launch(self) -> None:
        bucket = self._layout.buckets[self._launched]
        self._launched += 1
        assert bucket.buffer is not None
        if bucket is self._layout.buckets[-1]:
            present = self._present()
            flags, marks = bucket.buffer[bucket.elements : -_MARKS], bucket.buffer[-_MARKS:]
            flags.fill_(1) if all(present) else flags.copy_(torch.tensor(present))
            marks.zero_()
            loader, batch = self.session.place or (0, 0)
            marks[(5 * loader + batch) % _MARKS] = 1
        if self.group is not None:
            bucket.pending = self.group.start_all_reduce(bucket.buffer, "the exchange of gradients")

    def _wait(self, pending: Pending | None, what: str) -> None:
        if pending is None or self.group is None:
            return
        began = time.perf_counter()
        self.group.wait(pending, what)
        self.waited_s += time.perf_counter() - began

    def _compare_batches(self) -> None:
        if self.group is None or not self._layout.buckets:
            return
        last = self._layout.buckets[-1].buffer
        assert last is not None
        apart = last[-_MARKS:].count_nonzero()
        if apart.device.type == "cpu":
            self._apart = apart
            self._require_same_batch()
        else:  # looking would wait for the GPU; the next comparison of the replicas looks
            self._apart = apart if self._apart is None else torch.maximum(self._apart, apart)

    def _require_same_batch(self) -> None:
        """Check that no rank's gradients were summed with those of another batch.

        Raises:
            InputError: They were; some rank has skipped a batch.
        """
        if self._apart is None or int(self._apart) <= 1:
            return
        places = self.session.all_gather_json(self.session.place, "comparing the batches")
        other = next(rank for rank, place in enumerate(places) if place != places[0])
        (_, first), (loader, second) = (place or (0, 0) for place in (places[0], places[other]))
        raise InputError(
            f"rank 0 trains on batch {first} and rank {other} on batch {second} of loader {loader}: some ranks skipped "
            "a batch that others did not; decide by what is the same on all ranks, nl.mean(loss) say"
        )

    def _present(self) -> list[bool]:
        return [present for bucket in self._layout.buckets for present in bucket.present]

    def _unpack(self) -> None:
        used = self._present()
        if not all(used):  # a rank that has every gradient need not look (on a GPU that would wait for it)
            last = self._layout.buckets[-1]
            assert last.buffer is not None
            used = (last.buffer[last.elements : last.elements + self._layout.flags] > 0.5).tolist()
        verdicts = iter(used)
        for bucket in self._layout.buckets:
            for position, index in enumerate(bucket.parameters):
                parameter = self.parameters[index]
                if not next(verdicts):
                    if self._open[index]:
                        gradient_slot.put(parameter, self._carry[index])
                    continue
                combined = self._view(bucket, position)
                if parameter.is_complex():
                    combined = torch.view_as_complex(combined)
                if combined.dtype != parameter.dtype:
                    combined = combined.to(parameter.dtype)
                self._install(index, combined)
            bucket.buffer, bucket.pending = None, None

    def _install(self, index: int, combined: torch.Tensor) -> None:
        parameter = self.parameters[index]
        # Without a gradient of its own in this window, what the rank has in p.grad is from before it.
        carry = self._carry[index] if self._open[index] else gradient_slot.get(parameter)
        if carry is not None:
            combined = carry.add_(combined) if not carry.is_sparse else carry + combined
        gradient_slot.put(parameter, combined)
        self._installed[index] = weakref.ref(combined)

    def _combine_sparse(self, index: int) -> None:
        """Join the rows of all ranks' sparse gradients."""
        parameter, what = self.parameters[index], f"the exchange of {self.names[index]}'s sparse gradient"
        gradient = gradient_slot.get(parameter) if self._open[index] and self._counts else None
        if gradient is None:
            indices = torch.empty((0, 1), dtype=torch.int64, device=parameter.device)
            values = parameter.detach().new_empty((0, *parameter.shape[1:]))
        else:
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            indices, values = gradient.indices().t().contiguous(), gradient.values() * self._scale
        if self.group is not None:
            began = time.perf_counter()
            counts = self.group.all_gather(
                torch.tensor([len(values), gradient is not None], device=values.device), what
            )
            rows = [int(count[0]) for count in counts]
            used = any(bool(count[1]) for count in counts)
            indices = torch.cat(self.group.all_gather_rows(indices, rows, what))
            values = torch.cat(self.group.all_gather_rows(values, rows, what))
            self.waited_s += time.perf_counter() - began
        else:
            used = gradient is not None
        if used:
            self._install(index, torch.sparse_coo_tensor(indices.t(), values, parameter.shape).coalesce())
        elif self._open[index]:
            gradient_slot.put(parameter, self._carry[index])

    # ---- steps

    def before_step(self, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Make sure that the optimizer reads the gradient of one process.

        Args:
            first: It is the first of the optimizers that step these parameters. A rank whose loss reached none of
                them takes part in the others' exchange here.
        """
        if self.in_backward:
            raise InputError(
                "optimizer.step() was called inside the backward pass, before the gradients of all ranks were "
                "combined; call it after loss.backward()"
            )
        if any(p.dtype != dtype or p.device != device for p, (dtype, device) in self._made[:1]):
            raise InputError(
                f"{self.names[0]} was {self._made[0][1][0]} on {self._made[0][1][1]} when it was handed to distribute; "
                "convert and move the model before"
            )
        if self.pending or (first and self.combined == 0):
            if not self.pending:
                self._adopt()
            self.combine()

    def _adopt(self) -> None:
        """Take gradients that the script has put in ``p.grad`` itself for this rank's own."""
        scale = self.session.gradient_scale()
        self._scale, self._counts = (scale if scale != 0.0 else 1.0), scale != 0.0
        for index, parameter in enumerate(self.parameters):
            gradient: torch.Tensor | None = gradient_slot.get(parameter)
            known = self._installed[index]
            if gradient is not None and gradient is not (known() if known is not None else None):
                self._open[index] = True

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the optimizer stepped."""
        self._windows.step()
        self.combined = 0

    def compare(self, step: int) -> None:
        """Check that the replicas are equal, and of one batch.

        Raises:
            DriftError: A tensor differs between ranks.
            InputError: Some rank has skipped a batch.
        """
        self._require_same_batch()
        parameters = list(zip(self.names, self.parameters, strict=True))
        require_equal([*parameters, *self._buffers.equal()], self.session, step)
        self._agree_on_buffers()

    def _agree_on_buffers(self) -> None:
        """Agree on the buffers that have begun to change, so that they are kept equal from now on."""
        mine = {"changed": self._buffers.changed(), "own": self._buffers.own()}
        everyones = self.session.all_gather_json(mine, "comparing the replicas")
        for one in everyones:
            self._buffers.follow(one["changed"])
        own = everyones[0]["own"]
        apart = [name for name in own if any(one["own"].get(name) != own[name] for one in everyones)]
        if apart:
            self.session.notice(
                f"buffer {apart[0]} differs between the ranks, each of which counts its own share (it is no floating-"
                "point buffer, so it is not averaged); add it up by nl.total where the model reads it"
            )


def _before_accumulation(reducer: weakref.ref[Reducer], index: int) -> Any:
    def hook(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        alive = reducer()
        if alive is None or gradients[0] is None:
            return None
        changed = alive.before_accumulation(index, gradients[0])
        return None if changed is None else (changed,)

    return hook


def _after_accumulation(reducer: weakref.ref[Reducer], index: int) -> Any:
    def hook(_: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.after_accumulation(index)

    return hook


def _elements(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _memory_format(parameter: torch.Tensor) -> torch.memory_format:
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim(), torch.contiguous_format)
