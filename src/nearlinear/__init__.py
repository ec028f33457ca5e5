"""nearlinear: two lines, N processes, the numbers of one.

import nearlinear as nl

model, optimizer, loader = nl.distribute(model, optimizer, loader)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from nearlinear.core.cluster import Cluster
from nearlinear.core.forecast import Forecast
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.environment import world_from

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Forecast",
    "NearlinearError",
    "Plan",
    "distribute",
    "gather",
    "is_main",
    "load",
    "mean",
    "rank",
    "save",
    "step",
    "total",
    "world_size",
]


def distribute(
    model: Any,
    optimizer: Any = None,
    *loaders: Any,
    strategy: str | Plan = "auto",
    weight: Callable[[Any], Any] | str | None = None,
) -> Any:
    """Let the run's processes train this model together, with the numbers of one process.

    The objects stay the user's own: they are hooked, not wrapped. In a run of one process only the order of the data
    is touched (it is drawn as it would be for N). Call it again for a second model, without the loaders.

    Args:
        model: A ``torch.nn.Module`` with its parameters on their device, or a Keras 3 model after ``compile``.
        optimizer: What steps its parameters. A compiled Keras model has its own.
        loaders: ``DataLoader``s; each process gets its share of every batch, the batch size stays that of the whole.
            Data that the script shards itself is not handed over. For a loop of one's own over a Keras model,
            ``tf.data.Dataset``s of batches; others come back in their place.
        strategy: ``"data"``, ``"sharded"``, ``"pipeline"``, or a ``Plan``. ``"auto"``: the one that `nearlinear plan`
            found best for this script and as many processes here; without a plan ``"data"``, or in PyTorch what fits
            into memory. ``"local"`` (the model's replicas train apart and are averaged once a round, over the
            Internet) changes the numbers and is never chosen by itself.
        weight: ``weight(batch)``: what a share counts for in the loss's mean; by default its number of samples (for a
            loss that is a mean over tokens: its number of tokens). ``"sum"``: the loss is part of one sum, normalised
            by the script, and gradients are added.

    Returns:
        The given objects that are not None, in order; one object alone if one was given.

    Raises:
        InputError: Something cannot be distributed as given; nothing was changed.
        PeerLostError: Another process did not arrive within the deadline.

    Example:
        >>> model, optimizer, loader = distribute(model, optimizer, loader)  # doctest: +SKIP
    """
    bases = {base.__module__.split(".")[0] for base in type(model).__mro__}
    if "keras" in bases and not ("torch" in bases and optimizer is not None):
        backend = sys.modules["keras"].backend.backend()
        if backend != "tensorflow":
            raise InputError(
                f"Keras runs on {backend!r} here; nearlinear distributes Keras models on TensorFlow "
                "(KERAS_BACKEND=tensorflow), and on torch those with a loop and an optimizer of torch's"
            )
        # The data sets that come back are new ones: a tf.data.Dataset cannot be changed.
        from nearlinear.tensorflow import distribute as distribute_keras

        given = distribute_keras(model, optimizer, loaders, strategy, weight)
    elif "torch" in sys.modules:
        from nearlinear.torch import distribute as distribute_torch

        distribute_torch(model, optimizer, loaders, strategy, weight)
        given = [each for each in (model, optimizer, *loaders) if each is not None]
    else:
        raise InputError(f"the model is a {type(model).__name__}; give a torch.nn.Module or a Keras 3 model")
    return given[0] if len(given) == 1 else tuple(given)


def _front_ends() -> list[Any]:
    """Return the front ends that this process has used, of PyTorch and of Keras."""
    names = ("nearlinear.torch", "nearlinear.tensorflow")
    return [module for name in names if (module := sys.modules.get(name)) is not None]


def _front_end(session: Any, room: str) -> Any:
    """Return the file of this name of the front end that a session is of."""
    return import_module(f"{type(session).__module__.rpartition('.')[0]}.{room}")


def _checkpoints_of(model: Any) -> Any:
    """Return how models of this kind are saved."""
    one = next(iter(model.values()), None) if isinstance(model, dict) else model
    bases = {base.__module__.split(".")[0] for base in type(one).__mro__}
    front_end = "tensorflow" if "keras" in bases and "torch" not in bases else "torch"
    return import_module(f"nearlinear.{front_end}.checkpoint")


def _session(what: str) -> Any:
    """Return the session, or None in a lone process that never called ``distribute``."""
    for front_end in _front_ends():
        current = front_end.session()
        if current is not None:
            return current
    if world_from().size > 1:
        raise InputError(f"{what} was called before nl.distribute; call model, ... = nl.distribute(model, ...) first")
    return None


def _detached(value: Any) -> Any:
    if "torch" not in sys.modules:
        return value
    from nearlinear.torch.metrics import detached

    return detached(value)


def rank() -> int:
    """Return this process's number, 0 to ``world_size() - 1``."""
    return world_from().rank


def world_size() -> int:
    """Return the number of processes of the run."""
    return world_from().size


def is_main() -> bool:
    """Return whether this is process 0, which prints and plots for all."""
    return rank() == 0


def step(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that takes a batch and returns its loss: calling it also runs the backward pass.

    The plain loop needs none of it. In a pipeline, forward and backward passes of microbatches then interleave (1F1B;
    Narayanan et al. 2019, doi:10.1145/3341301.3359646), and a stage holds the activations of as many microbatches as
    stages follow it, not of all. The function is called once per microbatch, so its loss must be a mean over samples
    (or over what ``distribute``'s ``weight`` counts); a plain loop is exact for any loss.

    Args:
        fn: Takes the batch, whose tensors have their samples along dimension 0, and returns a loss, a tensor of one
            number.

    Returns:
        The same function; it returns the loss of the whole batch, detached.

    Example:
        @nl.step
        def loss_of(x, y):
            return F.cross_entropy(model(x), y)
    """
    from nearlinear.torch.step import step as step_torch

    return step_torch(fn)


def mean(value: Any) -> Any:
    """Return the weighted mean over the processes, the same on all: a loss or metric as one process sees it.

    Weights are those of the batch in hand; once a loader's pass has ended, those of the whole pass.

    Args:
        value: A number, a tensor, or a mapping or sequence of them.

    Returns:
        The same structure; tensors are detached.
    """
    session = _session("nl.mean")
    if session is None:
        return _detached(value)
    return _front_end(session, "metrics").mean(value, session)


def total(value: Any) -> Any:
    """Return the sum over the processes, the same on all; a share that is only a filler counts zero.

    Args:
        value: A number, a tensor, or a mapping or sequence of them.
    """
    session = _session("nl.total")
    if session is None:
        return _detached(value)
    return _front_end(session, "metrics").total(value, session)


def gather(value: Any) -> Any:
    """Return all processes' rows joined in the order of the unsplit data, fillers left out: exact evaluation.

    Args:
        value: A tensor (or a mapping, sequence or dataclass of them) with one row per sample of the batch in hand or,
            once the pass has ended, per sample of the pass.

    Returns:
        The same structure, the same on all processes. Differentiable: a loss over the gathered batch has the
        gradients of one process.
    """
    session = _session("nl.gather")
    if session is None:
        return value
    return _front_end(session, "metrics").gather(value, session)


def save(path: str | Path, model: Any, optimizer: Any = None, loader: Any = None, **extra: Any) -> None:
    """Write one checkpoint folder; every process calls it. It is whole or absent, also when a process is killed.

    Args:
        path: The folder.
        model: Its ``state_dict`` is kept under the plain model's keys.
        optimizer: Its state is kept under the names of the parameters.
        loader: Its place in the data is kept.
        extra: Numbers, strings, tensors, lists and dicts; or objects with a ``state_dict`` (schedulers, scalers).
    """
    ranks = _session("nl.save")
    _checkpoints_of(model).save(path, model, optimizer, loader, extra, ranks=ranks)


def load(path: str | Path, model: Any, optimizer: Any = None, loader: Any = None, **extra: Any) -> dict[str, Any]:
    """Restore what ``save`` wrote, on any number of processes; the random streams come back too.

    Args:
        path: The folder.
        model: Receives the weights, in place.
        optimizer: Receives its state.
        loader: Goes to its place in the data.
        extra: Objects with ``load_state_dict`` saved under the same names, restored in place.

    Returns:
        The other extras, by name.

    Raises:
        CheckpointError: The folder is no whole checkpoint, or is another model's; nothing was changed.
    """
    ranks = _session("nl.load")
    values: dict[str, Any] = _checkpoints_of(model).load(path, model, optimizer, loader, extra, ranks=ranks)
    return values


for _each in (mean, total, gather):
    # TensorFlow's AutoGraph leaves what bears this mark as it is; it cannot read all of ours.
    setattr(_each, "autograph_info__", None)  # noqa: B010
