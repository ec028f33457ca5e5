"""Turning the first optimizer steps of a script into losses, gradients and parameters in a folder.

    python -m nearlinear.testing.record FOLDER 5 train.py --lr 0.1        run train.py, end it after five steps

    FOLDER/start.npz       the parameters when distribute had returned             written by rank 0,
    FOLDER/step-1.npz      the gradients before clipping, the parameters after     for they are the same on all
    FOLDER/rank-0.json     its losses with their weights, and what may explain a difference

`nearlinear check` makes one such folder with one process and one with N, and compares them (``equivalence.py``). The
gradients of the one process go through the same code (``nearlinear.torch.reducer``) as those of many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearlinear import events
from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.environment import world_from
from nearlinear.testing.faults import Fault, run_script

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, NDArray[Any]]
SEED = 0  # of a script that sets none: its runs are to begin alike


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Args:
        losses: By rank: ``(loss, scale)`` of each backward pass since the step before. ``scale`` is what the rank's
            gradients were multiplied by, so the run's loss is the sum over the ranks of ``scale * loss``. Of a
            pipeline's ranks, which all have the same loss, the first is here.
        gradients: By parameter: the gradient of the whole batch, before the script changed it (clipping).
        parameters: By name: the parameters that the optimizer holds, after the step.
        samples: Samples of the whole batches that came in.
        options: The optimizer's numbers (lr, betas, ...), by name.
        drawn: The random streams that moved: ``"torch"``, ``"cuda"``, ``"numpy"``, ``"random"``.
    """

    losses: tuple[tuple[tuple[float, float], ...], ...] = ()
    gradients: Arrays = field(default_factory=dict)
    parameters: Arrays = field(default_factory=dict)
    samples: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What one run did.

    Args:
        steps: Its optimizer steps.
        ranks: Number of processes.
        start: The parameters it began with.
        dtype: The narrowest type that was computed in: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        weight: What a share counted for: ``"samples"``, ``"function"`` or ``"sum"``.
        compress: What gradients are rounded to on the wire, if to anything.
        batchnorm: Layers that normalised over a rank's own share.
        dropout: Layers that dropped at random.
        notices: What the session said.
        distributed: Whether the script called ``distribute``.
    """

    steps: tuple[Step, ...]
    ranks: int = 1
    start: Arrays = field(default_factory=dict)
    dtype: str = "float32"
    weight: str = "samples"
    compress: str | None = None
    batchnorm: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    distributed: bool = True

    @classmethod
    def read(cls, folder: str | Path) -> Record:
        """Return what ``Recorder`` wrote into ``folder``; arrays are read when they are asked for.

        Raises:
            NearlinearError: A rank wrote nothing.
        """
        folder = Path(folder)
        ranks = [_read_json(folder, 0)]
        ranks += [_read_json(folder, rank) for rank in range(1, ranks[0]["ranks"])]
        zero = ranks[0]
        plain = zero["models"] <= 1
        steps = tuple(
            Step(
                losses=tuple(_pairs(rank["steps"], number) for rank in ranks if rank["counts"]),
                gradients=_Stored(folder / f"step-{number}.npz", "gradient", plain),
                parameters=_Stored(folder / f"step-{number}.npz", "parameter", plain),
                samples=step["samples"],
                options=step["options"],
                drawn=tuple(step["drawn"]),
            )
            for number, step in enumerate(zero["steps"], start=1)
        )
        start = _Stored(folder / "start.npz", "parameter", plain) if zero["distributed"] else {}
        texts: dict[str, Any] = {name: tuple(zero[name]) for name in ("batchnorm", "dropout", "notices")}
        kinds: dict[str, Any] = {name: zero[name] for name in ("dtype", "weight", "compress", "distributed")}
        return cls(steps, len(ranks), start, **kinds, **texts)


def _read_json(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank}.json"
    if not path.exists():
        raise NearlinearError(
            f"rank {rank} left no record in {folder}; a script that ends itself by os._exit or a signal cannot be "
            "recorded: let it return"
        )
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _pairs(steps: Sequence[Mapping[str, Any]], number: int) -> tuple[tuple[float, float], ...]:
    return tuple((loss, scale) for loss, scale in steps[number - 1]["losses"]) if number <= len(steps) else ()


class _Stored(Mapping[str, NDArray[Any]]):
    """The arrays of one kind in a file, by name; stored as ``kind/number of the model/name``."""

    def __init__(self, path: Path, kind: str, plain: bool) -> None:
        self._path = path
        with np.load(path) as file:
            stored = [key.split("/", 2) for key in file.files]
        self._keys = {
            name if plain else f"model {model} {name}": f"{kind}/{model}/{name}"
            for each, model, name in stored
            if each == kind
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        with np.load(self._path) as file:
            array: NDArray[Any] = file[self._keys[name]]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _Enough(BaseException):
    """The steps asked for were taken. (No Exception: a script that catches those must not catch this.)"""


class Recorder:
    """Record what runs in a ``with`` block, and leave the block after a number of optimizer steps.

    The optimizers of all ``distribute`` calls in the block are counted together. A script that has taken as many
    steps with optimizers that were not handed to ``distribute`` is ended too: it will not call it any more.

    Args:
        folder: Where to write; made if it is not there.
        steps: Optimizer steps.

    Raises:
        InputError: ``steps`` is less than 1.

    Example:
        with Recorder("one", steps=5):
            train()
        record = Record.read("one")
    """

    def __init__(self, folder: str | Path, steps: int) -> None:
        if steps < 1:
            raise InputError(f"{steps} steps; at least 1 can be recorded")
        self._folder, self._limit = Path(folder), steps
        self._steps: list[dict[str, Any]] = []
        self._models: list[torch.nn.Module] = []
        self._numbers: dict[int, int] = {}  # of a distribute call -> in this record
        self._losses: list[tuple[float, float]] = []
        self._scale: float | None = None  # of the backward pass in hand, if it reached a distributed model
        self._gradients: dict[str, NDArray[Any]] = {}
        self._options: dict[str, Any] = {}
        self._streams: dict[str, int] = {}
        self._unseen = 0
        self._dtypes: set[str] = set()
        self._autocast: set[str] = set()
        self._compress: str | None = None
        self._layers: dict[str, dict[str, None]] = {"batchnorm": {}, "dropout": {}}
        self._notices: list[str] = []
        self._weight = "samples"
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._folder.mkdir(parents=True, exist_ok=True)
        listeners: dict[str, Callable[[dict[str, Any]], None]] = {
            "distributed": self._on_distributed,
            "backward": self._on_backward,
            "gradients": self._on_gradients,
            "step": self._on_step,
            "notice": lambda event: self._notices.append(event["message"]),
        }
        for kind, listener in listeners.items():
            self._undo.callback(events.subscribe(kind, listener))
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._replace(torch.Tensor, "backward", self._noting_loss)
        self._replace(torch.autocast, "__enter__", self._noting_type)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._undo.close()
        self._write()
        return isinstance(error, _Enough)

    def _replace(self, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._undo.callback(setattr, owner, name, original)
        setattr(owner, name, wrapping(original))

    # ---- what is noted

    def _on_distributed(self, event: dict[str, Any]) -> None:
        self._models.append(event["model"])
        self._compress = self._compress or event["compress"]
        self._streams = _streams()
        arrays = {
            f"parameter/{number}/{name}": array
            for number, model in enumerate(self._models)
            for name, array in _arrays(model.named_parameters())
        }
        if _session().rank == 0:
            _save(self._folder / "start.npz", arrays)

    def _on_backward(self, event: dict[str, Any]) -> None:
        # The reducer has just asked for it too, so that asking again changes nothing and exchanges nothing.
        self._scale = _session().gradient_scale()

    def _noting_loss(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noting(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._scale = None
            result = backward(loss, *args, **options)
            if self._scale is not None and loss.numel() == 1:
                self._losses.append((float(loss.detach()), self._scale))
            self._scale = None  # a tensor subclass calls this twice
            return result

        return noting

    def _noting_type(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noting(autocast: Any) -> Any:
            if autocast._enabled:
                self._autocast.add(_name(autocast.fast_dtype))
            return enter(autocast)

        return noting

    def _on_gradients(self, event: dict[str, Any]) -> None:
        self._gradients.update(self._named("gradient", event["model"], event["gradients"]()))

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._options = {
            f"{key} of group {number}" if len(optimizer.param_groups) > 1 else key: _plain(value)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if _plain(value) is not None
        }

    def _after_step(self, *_: Any) -> None:
        # Comes after the optimizer's own hooks, and so after the event, if there is one.
        self._unseen += 1
        if not self._steps and self._unseen >= self._limit:
            raise _Enough

    def _on_step(self, event: dict[str, Any]) -> None:
        if len(self._steps) == self._limit:  # the script caught it
            raise _Enough
        session, parameters = _session(), list(event["parameters"]())
        self._dtypes.update(_name(parameter.dtype) for _, parameter in parameters)
        for kind, names in _random_and_mixing_layers(self._models).items():
            self._layers[kind].update(dict.fromkeys(names))
        if session.summed:
            self._weight = "sum"
        elif session.batch is not None and session.batch.weight is not None:
            self._weight = "function"
        before, self._streams = self._streams, _streams()
        self._steps.append(
            {
                "losses": self._losses,
                "samples": event["samples"],
                "options": self._options,
                "drawn": [name for name, state in self._streams.items() if state != before.get(name)],
            }
        )
        arrays = self._gradients | self._named("parameter", event["model"], parameters)
        if session.rank == 0:
            _save(self._folder / f"step-{len(self._steps)}.npz", arrays)
        self._losses, self._gradients = [], {}
        if len(self._steps) == self._limit:
            raise _Enough

    def _named(self, kind: str, model: int, tensors: Any) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        number = self._numbers.setdefault(model, len(self._numbers))
        for name, array in _arrays(tensors):
            key = f"{kind}/{number}/{name}"
            while key in arrays:  # two models under one optimizer
                key += "'"
            arrays[key] = array
        return arrays

    def _write(self) -> None:
        session, world = _session(), world_from()
        rank, ranks = (world.rank, world.size) if session is None else (session.rank, session.size)
        # Autocast leaves float64 as it is.
        dtypes = self._dtypes if self._dtypes == {"float64"} else self._dtypes | self._autocast
        record = {
            "ranks": ranks,
            "counts": session is None or rank % (session.size // session.parts) == 0,
            "steps": self._steps,
            "models": len(self._models),
            "distributed": bool(self._models),
            "dtype": min(dtypes, key=lambda name: (_bits(name), name), default="float32"),
            "weight": self._weight,
            "compress": self._compress,
            "notices": self._notices,
            **{kind: list(names) for kind, names in self._layers.items()},
        }
        (self._folder / f"rank-{rank}.json").write_text(json.dumps(record))


def _session() -> Any:
    from nearlinear.torch import session

    return session()


def _arrays(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield copies of whole tensors on rank 0; all ranks take part in gathering those that are sharded, one by one."""
    from nearlinear.torch.sharded_tensors import whole

    rank = _session().rank
    for name, tensor in tensors:
        complete = whole(tensor, f"gathering {name}")
        if rank == 0:
            yield name, _array(complete)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy; NumPy does not know all the short types."""
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        tensor = tensor.to(torch.float32)
    array: NDArray[Any] = tensor.to("cpu", copy=True).numpy()
    return array


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _name(dtype: torch.dtype) -> str:
    """Return the name of the type that rounds: complex numbers round as their parts do."""
    return {"complex64": "float32", "complex128": "float64"}.get(str(dtype)[6:], str(dtype)[6:])


def _bits(name: str) -> int:
    return {"float64": 64, "float32": 32}.get(name, 16)


def _plain(value: Any) -> Any:
    """Return an option of an optimizer as JSON holds it, None if it is no number."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        return list(value) or None
    if hasattr(value, "numel") and value.numel() == 1:
        return float(value)
    return None


def _random_and_mixing_layers(models: Sequence[torch.nn.Module]) -> dict[str, list[str]]:
    """Return the layers that make N processes differ from one while they train."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    layers: dict[str, list[str]] = {"batchnorm": [], "dropout": []}
    for model in models:
        for name, module in model.named_modules():
            if not module.training:
                continue
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                layers["batchnorm"].append(name or "the model")
            elif (isinstance(module, _DropoutNd) and module.p > 0) or (
                isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
            ):
                layers["dropout"].append(name or "the model")
    return layers


def _streams() -> dict[str, int]:
    """Return a fingerprint of each of the global random streams."""
    import torch

    numpys: Any = np.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpys[1].tobytes(), *numpys[2:]),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: hash(state) for name, state in states.items()}


def compute_in_float64() -> None:
    """Let a script that was written for float32 compute in float64, from here on.

    New tensors and layers are float64; what a ``DataLoader`` hands out is converted; ``x.float()`` and
    ``module.float()`` give float64. Where a script names ``torch.float32``, or trains on float32 arrays that came
    through no loader, the types will not match, and torch says so.
    """
    import torch
    from torch.utils.data import DataLoader

    from nearlinear.torch.data import map_leaves

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
    batches_of = DataLoader.__iter__

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.double() if leaf.dtype == torch.float32 else leaf
        return leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf

    class Widened:
        def __init__(self, batches: Any) -> None:
            self._batches = batches

        def __iter__(self) -> Widened:
            return self

        def __len__(self) -> int:
            return len(self._batches)

        def __next__(self) -> Any:
            return map_leaves(widen, next(self._batches))

    DataLoader.__iter__ = lambda loader: Widened(batches_of(loader))  # type: ignore[method-assign,assignment,return-value]


def main(argv: Sequence[str]) -> None:
    """Run a script under a ``Recorder``, as this process's script."""
    import torch

    from nearlinear.torch.session import install_excepthook

    parser = argparse.ArgumentParser(prog="python -m nearlinear.testing.record", description=main.__doc__)
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--fault", type=Fault.parse, metavar="KIND:RANK@STEP", help="break a rank, as in kill:1@3")
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]")
    options = parser.parse_args(argv)
    install_excepthook()
    if not options.script:
        raise InputError("which script? write it like `python -m nearlinear.testing.record FOLDER 5 train.py`")
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    if options.float64:
        compute_in_float64()
    with Recorder(options.folder, options.steps):
        if options.fault is not None:
            options.fault.arm()
        run_script(options.script)


if __name__ == "__main__":
    main(sys.argv[1:])
