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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearlinear import events
from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.environment import world_from
from nearlinear.testing.faults import Fault, run_script
from nearlinear.testing.imports import after_import

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
        front_end: ``"torch"`` or ``"tensorflow"``.
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
    front_end: str = "torch"

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
        kinds: dict[str, Any] = {
            name: zero[name] for name in ("dtype", "weight", "compress", "distributed", "front_end")
        }
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
        self._models: list[Any] = []
        self._numbers: dict[int, int] = {}  # of a distribute call -> in this record
        self._losses: list[tuple[float, float]] = []
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
        self._over = False
        self._front_end = "torch"  # that the script's models are of
        self._front: Any = None  # and what it has for recorders
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._folder.mkdir(parents=True, exist_ok=True)
        listeners: dict[str, Callable[[dict[str, Any]], None]] = {
            "distributed": self._on_distributed,
            "gradients": self._on_gradients,
            "step": self._on_step,
            "notice": lambda event: self._notices.append(event["message"]),
        }
        for kind, listener in listeners.items():
            self._undo.callback(events.subscribe(kind, listener))
        for module, front_end in FRONT_ENDS.items():
            after_import(module, lambda front_end=front_end: _recording(front_end).watch(self, self._undo))  # type: ignore[misc]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._undo.close()
        self._write()
        # Within a graph of TensorFlow's, what is raised comes out as an error of its own.
        return isinstance(error, _Enough) or (self._over and error is not None)

    # ---- what is noted

    def note_loss(self, value: float, scale: float) -> None:
        """Take the loss of a backward pass, and the factor of this rank's gradients."""
        self._losses.append((value, scale))

    def note_options(self, options: dict[str, Any]) -> None:
        """Take the numbers of the optimizer that is about to step."""
        self._options = options

    def note_type(self, name: str) -> None:
        """Take the name of a type that is computed in."""
        self._autocast.add(name)

    def count_step(self) -> None:
        """Count a step of any optimizer."""
        self._unseen += 1
        if not self._steps and self._unseen >= self._limit:
            self._stop()

    def _stop(self) -> None:
        self._over = True
        raise _Enough

    def _on_distributed(self, event: dict[str, Any]) -> None:
        self._front_end, self._front = event["front_end"], _recording(event["front_end"])
        self._models.append(event["model"])
        self._compress = self._compress or event["plan"].compress
        self._streams = self._fingerprints()
        arrays = {
            f"parameter/{number}/{name}": array
            for number, model in enumerate(self._models)
            for name, array in self._front.arrays(self._front.parameters(model))
        }
        if world_from().rank == 0:
            _save(self._folder / "start.npz", arrays)

    def _on_gradients(self, event: dict[str, Any]) -> None:
        self._gradients.update(self._named("gradient", event["model"], event["gradients"]()))

    def _on_step(self, event: dict[str, Any]) -> None:
        if len(self._steps) == self._limit:  # the script caught it
            self._stop()
        parameters = list(event["parameters"]())
        self._dtypes.update(self._front.types(parameters))
        for kind, names in self._front.random_and_mixing_layers(self._models).items():
            self._layers[kind].update(dict.fromkeys(names))
        self._weight = self._front.weight()
        before, self._streams = self._streams, self._fingerprints()
        self._steps.append(
            {
                "losses": self._losses,
                "samples": event["samples"],
                "options": self._options,
                "drawn": [name for name, state in self._streams.items() if state != before.get(name)],
            }
        )
        arrays = self._gradients | self._named("parameter", event["model"], parameters)
        if world_from().rank == 0:
            _save(self._folder / f"step-{len(self._steps)}.npz", arrays)
        self._losses, self._gradients = [], {}
        if len(self._steps) == self._limit:
            self._stop()

    def _named(self, kind: str, model: int, tensors: Any) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        number = self._numbers.setdefault(model, len(self._numbers))
        for name, array in self._front.arrays(tensors):
            key = f"{kind}/{number}/{name}"
            while key in arrays:  # two models under one optimizer
                key += "'"
            arrays[key] = array
        return arrays

    def _fingerprints(self) -> dict[str, int]:
        """Return a fingerprint of each of the global random streams."""
        numpys: Any = np.random.get_state()
        states = {
            **self._front.streams(),
            "numpy": (numpys[1].tobytes(), *numpys[2:]),
            "random": random.getstate(),
        }
        return {name: hash(state) for name, state in states.items()}

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
            "front_end": self._front_end,
            "dtype": min(dtypes, key=lambda name: (_bits(name), name), default="float32"),
            "weight": self._weight,
            "compress": self._compress,
            "notices": self._notices,
            **{kind: list(names) for kind, names in self._layers.items()},
        }
        (self._folder / f"rank-{rank}.json").write_text(json.dumps(record))


FRONT_ENDS = {"torch": "torch", "keras": "tensorflow"}  # the module that a script imports, and the front end for it


def _recording(front_end: str) -> Any:
    return import_module(f"nearlinear.{front_end}.recording")


def _session() -> Any:
    for front_end in FRONT_ENDS.values():
        module = sys.modules.get(f"nearlinear.{front_end}")
        session = module.session() if module is not None else None
        if session is not None:
            return session
    return None


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _bits(name: str) -> int:
    return {"float64": 64, "float32": 32}.get(name, 16)


def main(argv: Sequence[str]) -> None:
    """Run a script under a ``Recorder``, as this process's script."""
    from nearlinear.runtime.ending import install_excepthook

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
    np.random.seed(SEED)
    random.seed(SEED)
    for module, front_end in FRONT_ENDS.items():
        after_import(module, lambda front_end=front_end: _prepare(front_end, float64=options.float64))  # type: ignore[misc]
    with Recorder(options.folder, options.steps):
        if options.fault is not None:
            options.fault.arm()
        run_script(options.script)


def _prepare(front_end: str, *, float64: bool) -> None:
    recording = _recording(front_end)
    recording.seed(SEED)
    if float64:
        recording.compute_in_float64()


if __name__ == "__main__":
    main(sys.argv[1:])
