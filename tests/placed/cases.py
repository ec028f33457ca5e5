"""What must hold of a value that lies on the last rank alone: losses that are computed on it, and ways to read it.

``model`` stands for a model in a pipeline: the identity, whose output lies on the last rank, which has waited for the
others by the time it returns. Everything is compared, to the last bit, with the same code on plain tensors.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.messages import pack
from nearlinear.torch.pipeline.placed import placed, real, value_of
from nearlinear.torch.pipeline.values import Values
from nearlinear.torch.session import start

session = start(torch.device("cpu"))
values = Values(session)
RANK, OWNER, MAIN = session.rank, session.size - 1, session.rank == 0

torch.manual_seed(0)
X = torch.randn(6, 5, dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 3, -100, 4])
LARGE = torch.randn(500, 500, dtype=torch.float64)  # 2 MB: more than is kept when nobody holds it
WEIGHT = torch.rand(5, dtype=torch.float64)

Loss = Callable[[torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {}
CLAIMS: dict[str, Callable[[], None]] = {}
_under_way: list[Any] = []


def loss(function: Loss) -> Loss:
    LOSSES[function.__name__] = function
    return function


def claim(function: Callable[[], None]) -> Callable[[], None]:
    CLAIMS[function.__name__] = function
    return function


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, x: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        number = values.began + 1
        values.began_call(number)
        if RANK == OWNER:
            for rank in range(OWNER):
                dist.recv(torch.zeros(1), rank)
        else:
            _under_way.append(dist.isend(torch.zeros(1), OWNER))
        value = x.detach().clone() if RANK == OWNER else torch.empty_like(x, device="meta")
        out = placed(value, values=values, owner=OWNER, call=number, index=0)
        values.ended_call(number)
        return out

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        ctx.gradients.append(real(gradient[0]).clone() if RANK == OWNER else gradient[0])
        return torch.zeros(()), None, None


def model(x: torch.Tensor, gradients: list[torch.Tensor] | None = None) -> torch.Tensor:
    out: torch.Tensor = _Call.apply(torch.zeros((), requires_grad=True), x, [] if gradients is None else gradients)
    return out


def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(value_of(got), wanted.detach())


def refused(do: Callable[[], Any], words: str, kind: type[Exception] = InputError) -> None:
    try:
        do()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


def check_loss(compute: Loss, readers: set[int]) -> None:
    """The loss, read on some ranks, and its gradient are those of plain tensors."""
    plain = X.clone().requires_grad_()
    torch.manual_seed(1)
    wanted = compute(plain)
    gradient = torch.autograd.grad(wanted, plain)[0]
    state = torch.get_rng_state()
    gradients: list[torch.Tensor] = []
    torch.manual_seed(1)
    got = compute(model(X, gradients))
    if RANK in readers:
        assert got.item() == wanted.item(), (got.item(), wanted.item())
    got.backward()
    if RANK == OWNER:
        assert torch.equal(gradients[0], gradient)
    else:
        assert gradients[0].shape == gradient.shape and gradients[0].dtype == gradient.dtype
    assert torch.equal(torch.get_rng_state(), state)  # on every rank, also where nothing was computed


# ---- losses


@loss
def cross_entropy(o: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, Y)


@loss
def weighted_and_smoothed(o: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, Y, weight=WEIGHT, label_smoothing=0.1)


@loss
def sum_over_tokens(o: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, Y, reduction="sum") / (Y != -100).sum()


@loss
def no_valid_token(o: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, torch.full((6,), -100), reduction="sum") + o.sum() * 0


@loss
def squared_error(o: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(o, X * 2) + F.smooth_l1_loss(o, X + 1) + F.huber_loss(o, X * 3)


@loss
def binary(o: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(o, (X > 0).double(), pos_weight=WEIGHT)


@loss
def divergence(o: torch.Tensor) -> torch.Tensor:
    return F.kl_div(o.log_softmax(1), (X * 2).softmax(1), reduction="batchmean")


@loss
def contrastive(o: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(o, dim=1)
    return F.cross_entropy(unit @ unit.T / 0.1, torch.arange(6).roll(1))


@loss
def connectionist(o: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(o[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))


@loss
def triplet(o: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(o[:2], o[2:4], o[4:]) + F.cosine_similarity(o[:3], o[3:]).sum()


@loss
def plain_mask(o: torch.Tensor) -> torch.Tensor:
    return o[Y >= 0].square().mean() + torch.masked_select(o, X > 0).mean()


@loss
def placed_mask(o: torch.Tensor) -> torch.Tensor:
    return o[o > 0].sum() + torch.where(o > 0, o, o.exp()).mean()


@loss
def in_place(o: torch.Tensor) -> torch.Tensor:
    return (o * 2).clamp_(min=0).mul_(o).sum().div_(4)


@loss
def assignment(o: torch.Tensor) -> torch.Tensor:
    p = o * 1
    p[0] = 5
    p[:, 1] *= 2
    p[p > 1] = 0
    return p.square().sum()


@loss
def in_place_on_views(o: torch.Tensor) -> torch.Tensor:
    p = o * 2
    q = p[1:3]
    q.mul_(3)
    q[0, 0] = o[0, 0]
    p += 1
    return (p * q.sum()).sum()


@loss
def views(o: torch.Tensor) -> torch.Tensor:
    return o.view(3, 10).t().reshape(-1)[::2].square().sum() + o.unfold(0, 2, 2).diagonal().exp().sum()


@loss
def loop_over_samples(o: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in o:
        total = total + row.square().sum()
    return torch.stack([total, o.mean()]).mean() + torch.cat([o[:2], o[3:] * 2]).logsumexp(1).mean()


@loss
def selections(o: torch.Tensor) -> torch.Tensor:
    return o.gather(1, Y.clamp(min=0)[:, None]).mean() + o.topk(2, 1).values.sum() + o.sort(1).values[:, 0].sum()


@loss
def linear_algebra(o: torch.Tensor) -> torch.Tensor:
    gram = torch.einsum("ij,ik->jk", o, o) + torch.eye(5)
    return torch.linalg.inv(gram).trace() + torch.linalg.svdvals(o).sum() + torch.cdist(o, o + 1).sum() + gram.logdet()


@loss
def dropout(o: torch.Tensor) -> torch.Tensor:
    return F.dropout(o).square().sum() + (o * torch.rand_like(o)).sum() + F.dropout(o).sum()


@loss
def recomputed(o: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(lambda p: (p.exp() * p).square().mean(), o, use_reentrant=False)
    return out


@loss
def gradient_penalty(o: torch.Tensor) -> torch.Tensor:
    slope = torch.autograd.grad(o.pow(3).sum(), o, create_graph=True)[0]
    return (slope.norm(2, 1) - 1).square().mean()


@loss
def shape_of_lengths(o: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(o.expand(2, 6, 5), torch.tensor([6, 3]), batch_first=True)
    return packed.data.square().sum()


@loss
def normalised(o: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(o[None]).square().sum() + F.batch_norm(o, None, None, training=True).exp().mean()


@loss
def mapped(o: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.func.vmap(lambda row: row.square().sum() * row[0])(o).mean()
    return out


# ---- ways to read


@claim
def numbers_and_texts() -> None:
    out, plain = model(X), X.clone().requires_grad_()
    got, wanted = out.square().mean(), plain.square().mean()
    assert got.item() == wanted.item() and got.detach() == wanted.item() and bool(got > 0) == bool(wanted > 0)
    assert float(got.detach()) == wanted.item() and int(out.argmax()) == int(plain.argmax())
    assert [5, 6, 7, 8, 9, 10][out.argmax(0)[0]] == [5, 6, 7, 8, 9, 10][plain.argmax(0)[0]]
    assert f"{got:.3f}" == f"{wanted:.3f}" and f"{got}" == f"{wanted}" and str(got.detach()) == str(wanted.detach())
    assert repr(got).endswith(", grad_fn=<MeanBackward0>)") and str(out.detach()) == str(X)
    assert max(got, got + 1).item() == wanted.item() + 1
    assert torch.tensor([got.detach(), got.detach()]).tolist() == [wanted.item()] * 2


@claim
def lists_and_arrays() -> None:
    out = model(X)
    assert out.tolist() == X.tolist() and out[2].tolist() == X[2].tolist()
    assert np.array_equal(out.detach().numpy(), X.numpy()) and np.array_equal(np.asarray(out.detach()), X.numpy())
    assert np.array_equal(out.detach().cpu().numpy()[:, 1], X[:, 1].numpy())
    refused(out.numpy, "requires grad", RuntimeError)
    array = out.detach().numpy()
    array[:] = 0  # of its own
    assert out.sum().item() == X.sum().item()


@claim
def comparisons_and_shapes_that_depend_on_values() -> None:
    out = model(X)
    assert torch.equal(out, X) and not torch.equal(out, X + 1) and torch.allclose(out, X)
    assert torch.equal((out > 0).nonzero(), (X > 0).nonzero()) and torch.equal(torch.unique(out), torch.unique(X))
    assert torch.equal(torch.bincount(out.argmax(1)), torch.bincount(X.argmax(1)))
    assert torch.isnan(out).any().logical_not()


@claim
def copies_and_files_are_plain() -> None:
    out = model(X)
    same = copy.deepcopy(out.detach())
    assert type(same) is torch.Tensor and torch.equal(same, X)
    refused(lambda: copy.deepcopy(out), "deepcopy", RuntimeError)
    file = io.BytesIO()
    torch.save({"loss": out.sum().detach(), "out": out[1:3].detach()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["out"], X[1:3]) and loaded["loss"].item() == X.sum().item()


@claim
def a_write_into_a_plain_tensor_is_a_value() -> None:
    out = model(X)
    total, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long)
    total += out.square().mean().detach()
    correct += (out.argmax(1) == Y).sum()
    assert type(total) is torch.Tensor and total.item() == X.square().mean().item()
    assert correct.item() == (X.argmax(1) == Y).sum().item()
    buffer = torch.zeros(6, 5, dtype=torch.float64)
    buffer.copy_(out.detach())
    buffer[1] = out.detach()[2]
    assert torch.equal(buffer[2:], X[2:]) and torch.equal(buffer[1], X[2])
    torch.add(out.detach(), 1, out=buffer)
    assert torch.equal(buffer, X + 1)
    sums = [torch.ones((), dtype=torch.float64), out.sum().detach()]
    torch._foreach_mul_(sums, 2.0)
    assert type(sums[0]) is torch.Tensor and sums[0].item() == 2 and sums[1].item() == 2 * X.sum().item()


@claim
def running_statistics_of_a_head_are_the_same_everywhere() -> None:
    torch.manual_seed(1)
    got = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    wanted = copy.deepcopy(got)
    torch.manual_seed(2)
    one = got(model(X)).square().sum()
    torch.manual_seed(2)
    other = wanted(X).square().sum()
    assert one.item() == other.item() and torch.equal(got[1].running_mean, wanted[1].running_mean)
    one.backward()
    other.backward()
    for p, q in zip(got.parameters(), wanted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and equal(p.grad, q.grad)


@claim
def a_learned_temperature_takes_the_same_steps_everywhere() -> None:
    got = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    wanted = got.detach().clone().requires_grad_()
    optimizers = [torch.optim.Adam([got], lr=0.1), torch.optim.Adam([wanted], lr=0.1)]
    for _ in range(3):
        for optimizer, scale, x in zip(optimizers, (got, wanted), (model(X), X), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(x * scale.exp(), Y).backward()
            torch.nn.utils.clip_grad_norm_([scale], 1.0)
            optimizer.step()
        assert got.item() == wanted.item()


@claim
def only_rank_0_computes_and_reads() -> None:
    out = model(X)
    objective = F.cross_entropy(out, Y)
    if MAIN:
        assert (out.argmax(1) == Y).float().mean().item() == (X.argmax(1) == Y).float().mean().item()
        for k in range(1, 3):
            top = out.topk(k, 1).indices.eq(Y[:, None]).any(1).float().sum().item()
            assert top == X.topk(k, 1).indices.eq(Y[:, None]).any(1).float().sum().item()
    objective.backward()


@claim
def only_rank_0_computes_in_place() -> None:
    out = model(X)
    if MAIN:
        p = out.detach().softmax(1)
        before = p.clone()
        p[:, 0] = 0
        p /= 2
        q = X.softmax(1)
        assert equal(before, q)
        q[:, 0] = 0
        q /= 2
        assert equal(p, q)
    model(X)


@claim
def only_rank_0_draws() -> None:
    torch.manual_seed(3)
    out = model(X)
    if MAIN:
        p = F.dropout(out)
        first, again = p.sum().item(), p.abs().sum().item()
        torch.manual_seed(3)
        q = F.dropout(X)
        assert (first, again) == (q.sum().item(), q.abs().sum().item())
    model(X)


@claim
def a_large_random_result_that_the_owner_has_let_go_of() -> None:
    torch.manual_seed(4)
    wanted = F.dropout(LARGE).abs().sum().item()
    torch.manual_seed(4)
    out = model(LARGE)
    p = F.dropout(out)
    if MAIN:
        assert p.abs().sum().item() == wanted  # with the same noise, computed here
    del p, out
    model(X)


@claim
def only_the_owner_computes_more() -> None:
    out = model(X)
    if RANK == OWNER:
        assert out.square().sum().item() == X.square().sum().item()
        F.cross_entropy(out, Y.roll(1))
    assert F.cross_entropy(out, Y).item() == F.cross_entropy(X, Y).item()


@claim
def rank_0_reads_while_the_others_wait_for_it() -> None:
    out = model(LARGE)
    if MAIN:
        assert out.exp().sum().item() == LARGE.exp().sum().item()
        assert out[3, 4].item() == LARGE[3, 4].item() and out[:2].sum().item() == LARGE[:2].sum().item()
    session.barrier()
    assert out.mean().item() == LARGE.mean().item()


@claim
def losses_are_kept_and_read_later() -> None:
    got, wanted = [], []
    for step in range(5):
        x = X + step
        objective = F.mse_loss(model(x), x * 2)
        got.append(objective.detach())
        wanted.append(F.mse_loss(x, x * 2))
        objective.backward()
    assert torch.stack(got).tolist() == torch.stack(wanted).tolist()
    assert [float(each) for each in got] == [float(each) for each in wanted]
    assert sum(got).item() == sum(wanted).item()  # type: ignore[union-attr]


@claim
def rank_0_reads_what_the_owner_has_let_go_of_a_line_later() -> None:
    before = None
    for step in range(4):
        out = model(X + step)
        if MAIN:
            time.sleep(0.05)  # the owner is past `before = ...` by now; being late is what is tested
            if before is not None:
                assert before.item() == (X + step - 1).square().mean().item()
        before = out.detach().square().mean()
    model(X)


@claim
def what_only_rank_0_kept_over_calls_is_refused() -> None:
    kept = []
    for _ in range(3):
        out = model(X)
        if MAIN:
            kept.append((out.argmax(1) == Y).sum())
    model(X)
    if MAIN:
        refused(kept[0].item, "keep it on every rank, or read it before the next call", NearlinearError)


@claim
def a_label_buffer_that_is_filled_anew() -> None:
    labels, got, wanted = torch.zeros(6, dtype=torch.long), [], []
    for step in range(3):
        labels.copy_((Y.clamp(min=0) + step) % 5)
        got.append(F.cross_entropy(model(X), labels).detach())
        wanted.append(F.cross_entropy(X, labels))
    assert torch.stack(got).tolist() == torch.stack(wanted).tolist()


@claim
def the_same_loss_with_other_labels_is_another_value() -> None:
    out = model(X)
    one, other = F.cross_entropy(out, Y), F.cross_entropy(out, Y.roll(1))
    assert (one.item(), other.item()) == (F.cross_entropy(X, Y).item(), F.cross_entropy(X, Y.roll(1)).item())
    out = model(LARGE)  # its target is so long that it is looked at only when somebody asks
    target = LARGE.clone()
    target[50, 50] += 1
    one, other = F.mse_loss(out, LARGE * 1), F.mse_loss(out, target)
    assert (one.item(), other.item()) == (0.0, F.mse_loss(LARGE, target).item())


@claim
def a_long_target_that_was_changed_is_refused() -> None:
    target = LARGE.clone()
    objective = F.mse_loss(model(LARGE), target)
    target.zero_()
    if RANK != OWNER:
        refused(objective.item, "has been changed in place since")


@claim
def who_is_behind_reads_what_was_there_before_a_write() -> None:
    total = model(X).detach().sum()
    view = total.view(1)
    if RANK != OWNER:
        time.sleep(0.1)  # the owner has added 1 by now
        assert total.item() == X.sum().item()
    total += 1
    assert total.item() == view.item() == (X.sum() + 1).item()


@claim
def writes_through_all_kinds_of_views() -> None:
    got, wanted = model(X).detach() * 1, X * 1
    for t in (got, wanted):
        t.view(-1)[3] = 9
        t[1].zero_()
        t.T[0].add_(1)
        t.diagonal().mul_(2)
        t[2:4, 1:3] = t[0:2, 0:2].clone()
        t.unbind(0)[5].fill_(7)
        t.as_strided((2,), (1,), 4).neg_()
        t.split(2)[1].sub_(3)
        t.swapaxes(0, 1).unsqueeze(0).squeeze(0)[2].exp_()
        t.view(torch.int64)[0, 0] = 0
        t.flatten()[2:4].clamp_(-1, 1)
    assert got[2, 1].item() == wanted[2, 1].item() and equal(got, wanted)


@claim
def reduced_precision() -> None:
    weight = torch.randn(5, 5, requires_grad=True)
    same = weight.detach().clone().requires_grad_()
    out = model(X.float())
    for x, w in ((out, weight), (X.float(), same)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            objective = (x @ w).float().square().mean()
            if x is out:
                assert objective.item() == (X.float() @ w).float().square().mean().item()
                if MAIN:
                    assert (x @ w).sum().item() == (X.float() @ w).sum().item()
        objective.backward()
    assert weight.grad is not None and same.grad is not None and equal(weight.grad, same.grad)
    scaled = torch.amp.GradScaler("cpu").scale(F.cross_entropy(model(X.float()), Y))
    assert isinstance(scaled, torch.Tensor) and scaled.item() == F.cross_entropy(X.float(), Y).item() * 65536


@claim
def evaluation() -> None:
    with torch.no_grad():
        out = model(X)
        assert out.max(1).indices.tolist() == X.max(1).indices.tolist() and out.split(3)[1].sum() == X[3:].sum()
    with torch.inference_mode():
        out = model(X)
        assert F.mse_loss(out, X * 2).item() == F.mse_loss(X, X * 2).item() and out.reshape(30)[3].item() == X[0, 3]
        assert F.linear(out, X).add_(1).sum().item() == (F.linear(X, X) + 1).sum().item()


@claim
def gradients_are_read() -> None:
    out = model(X)
    assert equal(torch.autograd.grad(out.square().sum(), out)[0], 2 * X)
    out, seen = model(X), []
    out.retain_grad()
    out.register_hook(seen.append)
    out.square().sum().backward()
    assert equal(seen[0], 2 * X) and out.grad is not None and out.grad.norm().item() == (2 * X).norm().item()


@claim
def random_numbers_stay_in_step() -> None:
    def draw(o: torch.Tensor) -> list[Any]:
        torch.manual_seed(3)
        some = [F.dropout(o), torch.randn_like(o), torch.bernoulli(o.sigmoid()), torch.poisson(o.exp())]
        return [each.tolist() for each in (*some, torch.multinomial(o.softmax(1), 2), torch.randn(3))]

    assert draw(model(X)) == draw(X)


@claim
def complex_values() -> None:
    x = torch.view_as_complex(X[:, :2].contiguous())
    out = model(x)
    assert out.abs().sum().item() == x.abs().sum().item() and equal(out.conj().imag, x.conj().imag)
    assert equal(out @ out.conj(), x @ x.conj()) and equal(torch.fft.fft(out), torch.fft.fft(x))
    refused(lambda: out.detach().conj().mul_(2), "use the operator that returns a new tensor")


@claim
def a_compiled_loss() -> None:
    compiled = torch.compile(cross_entropy, backend="eager")
    assert compiled(model(X)).item() == cross_entropy(X).item()


@claim
def outputs_of_two_owners_meet() -> None:
    number = values.began + 1
    values.began_call(number)
    session.barrier()
    one = placed(X if RANK == OWNER else X.to("meta"), values=values, owner=OWNER, call=number, index=0)
    two = placed(X * 2 if MAIN else X.to("meta"), values=values, owner=0, call=number, index=1)
    values.ended_call(number)
    assert (one * two).sum().item() == (X * (X * 2)).sum().item() and (two - one).sum().item() == (
        X * 2 - X
    ).sum().item()
    total = one.clone()
    total += two
    assert equal(total, X + X * 2)
    if MAIN:
        assert (one + two).sum().item() == (X + X * 2).sum().item()
    if RANK == OWNER:
        assert (two + one).sum().item() == (X * 2 + X).sum().item()
    session.barrier()


@claim
def what_has_no_meaning_elsewhere_is_refused() -> None:
    out = model(X)
    refused(lambda: out.detach().unsqueeze_(0), "unsqueeze_ cannot write to what a model in a pipeline returned")
    refused(lambda: torch.add(X, X, out=out.detach()), "use the operator that returns a new tensor")
    refused(out.data_ptr, ".numpy() gives its values anywhere")
    refused(out.untyped_storage, f"its memory is on rank {OWNER} alone")
    refused(out.to_sparse, "compute with dense tensors")


@claim
def a_random_operator_called_more_often_on_one_rank_is_refused() -> None:
    out = model(X)
    F.dropout(out)
    if MAIN:
        refused(F.dropout(out).sum().item, "2 times there and 1 times here", NearlinearError)
    model(X)


@claim
def a_forked_child_is_refused_and_harms_nothing() -> None:
    total = model(X).sum()

    def child() -> None:
        try:
            answers.put(total.item())
        except NearlinearError as error:
            answers.put(str(error))

    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    process = fork.Process(target=child)
    process.start()
    answer = answers.get(timeout=30)
    process.join()
    assert answer == X.sum().item() if RANK == OWNER else "a forked child" in answer
    assert total.item() == X.sum().item()


@claim
def named_values_of_all_types() -> None:
    tensors = [
        *(X.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64)),
        torch.tensor(3),
        torch.zeros(0, 5),
        X.T,
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.ones(2).to(torch.float8_e4m3fn),
    ]
    for index, tensor in enumerate(tensors):
        values.offer(f"tensor {index}", lambda tensor=tensor: tensor)
    for index, tensor in enumerate(tensors):
        got = values.fetch(1, f"tensor {index}")
        assert got.dtype == tensor.dtype and got.shape == tensor.shape and got.device.type == "cpu"
        assert (
            index == 8 or got.tolist() == tensor.tolist()
            if got.dtype.itemsize > 1
            else equal(got.float(), tensor.float())
        )
    session.barrier()


@claim
def a_named_value_is_waited_for_until_it_has_its_version() -> None:
    version = [0]
    values.offer("counter", lambda: torch.tensor(version[0]), lambda: version[0])
    session.barrier()
    if RANK == OWNER:
        for _ in range(5):
            time.sleep(0.02)
            version[0] += 1
    else:
        assert values.fetch(OWNER, "counter", 5).item() == 5
    session.barrier()
    values.offer("broken", lambda: torch.zeros(2).view(3))
    session.barrier()
    refused(lambda: values.fetch((RANK + 1) % session.size, "broken"), "shape '[3]' is invalid", NearlinearError)
    session.barrier()


@claim
def a_value_that_never_comes_names_its_rank_and_where_that_is() -> None:
    if MAIN:
        before, session.deadline_s = session.deadline_s, 1.5
        try:
            refused(lambda: values.fetch(1, "never"), "in reading never of rank 1 for rank 1 on ", PeerLostError)
        finally:
            session.deadline_s = before


@claim
def a_stranger_learns_nothing() -> None:
    values.offer("secret", lambda: X)
    session.barrier()
    other = (RANK + 1) % session.size
    address, port, _ = values._places[other]
    asking = pack("named", key="secret", version=0)
    for hello in (pack("hello", rank=1, token="a guess"), b"\xff" * 64, asking):
        with socket.create_connection((address, port), timeout=20) as sock:
            sock.sendall(hello + asking)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert values.fetch(other, "secret").equal(X)
    session.barrier()
