"""BatchNorm over the whole batch, where the script asked for it with ``SyncBatchNorm``, on any device.

torch's own runs on GPUs alone and takes every rank's loss to weigh the same. Here the statistics of unequal shares are
merged exactly, and a gradient that crosses ranks carries the weight of the loss it came from: rank ``r`` computes the
gradient of its own loss ``L_r``, the run's loss is ``sum_r f_r L_r``, and gradients are multiplied by ``f_r``
afterwards; so what reaches rank ``r`` from all losses is summed with their weights and divided by its own.

Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983
(merging variances); Ioffe, Szegedy, "Batch Normalization", 2015, arXiv 1502.03167.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from nearlinear.torch.collectives import Group
from nearlinear.torch.session import current

_groups: dict[int, Group] = {}


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` with the statistics of the whole batch on any device."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input``, shape ``(samples, channels, ...)``."""
        session = current()
        use_batch = self.training or self.running_mean is None
        if session is None or session.size == 1 or not use_batch:
            return nn.functional.batch_norm(
                input,
                self.running_mean if not use_batch or self.track_running_stats else None,
                self.running_var if not use_batch or self.track_running_stats else None,
                self.weight,
                self.bias,
                use_batch,
                self._momentum(),
                self.eps,
            )
        batch = (session.training_batch() if torch.is_grad_enabled() else None) or session.batch
        if batch is not None and batch.samples == 1 and input.numel() == input.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        filler = batch is not None and batch.filler
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, filler)  # type: ignore[no-untyped-call]
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                momentum = self._momentum()
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output  # type: ignore[no-any-return]

    def _momentum(self) -> float:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum


def synchronise(model: nn.Module) -> int:
    """Let the model's ``SyncBatchNorm`` layers normalise over the whole batch; return how many there are."""
    layers = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
    for layer in layers:
        layer.__class__ = SyncBatchNorm
    return sum(isinstance(module, SyncBatchNorm) for module in model.modules())


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, filler: bool) -> Any:
        group = _group()
        dims = [d for d in range(x.dim()) if d != 1]
        channels = x.shape[1]
        wide = x.double() if x.dtype == torch.float64 else x.float()
        count = 0.0 if filler else float(x.numel() // channels)
        if count:
            mean = wide.mean(dims)
            m2 = (wide - _spread(mean, x)).square().sum(dims)
        else:
            mean, m2 = wide.new_zeros(channels), wide.new_zeros(channels)
        local = torch.cat([mean, m2, wide.new_tensor([count])])
        parts = torch.stack(group.all_gather(local, "the statistics of BatchNorm"))
        means, m2s, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (m2s.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _spread(mean, x)) * _spread(scale, x)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.filler, ctx.dtype = filler, x.dtype
        output = normal
        if weight is not None:
            output = output * _spread(weight.to(output.dtype), x)
        if bias is not None:
            output = output + _spread(bias.to(output.dtype), x)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        group = _group()
        normal, scale, weight, total = ctx.saved_tensors
        session = current()
        assert session is not None
        fraction = session.gradient_scale()
        dims = [d for d in range(normal.dim()) if d != 1]
        wide = gradient.to(normal.dtype)
        sum_dy, sum_dy_normal = wide.sum(dims), (wide * normal).sum(dims)
        sums = torch.cat([sum_dy, sum_dy_normal])
        sums = sums * fraction if fraction else torch.zeros_like(sums)
        group.all_reduce(sums, "the gradient of BatchNorm")
        own = None
        if fraction and not ctx.filler:
            mean_dy, mean_dy_normal = (sums / (total * fraction)).chunk(2)
            own = wide - _spread(mean_dy, normal) - normal * _spread(mean_dy_normal, normal)
            own = own * _spread(scale * weight.to(scale.dtype) if weight is not None else scale, normal)
            own = own.to(ctx.dtype)
        else:
            own = torch.zeros_like(gradient)
        return (
            own,
            sum_dy_normal.to(weight.dtype) if weight is not None else None,
            sum_dy.to(weight.dtype) if weight is not None else None,
            None,
            None,
        )


def _group() -> Group:
    """Return a group for statistics alone: they are exchanged while gradients are on their way."""
    session = current()
    assert session is not None
    return _groups[id(session)]


def open_group(device: torch.device) -> None:
    """Open that group, on all ranks, once."""
    session = current()
    assert session is not None
    if session.size > 1 and id(session) not in _groups:
        group = session.new_group(device)
        assert group is not None
        _groups[id(session)] = group


def _spread(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``vector``, shape ``(channels,)``, so that it broadcasts over ``like``."""
    return vector.view(1, -1, *([1] * (like.dim() - 2)))
