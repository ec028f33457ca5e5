"""What the hooks of one process share: its rank, its connections, and what its share of the batch counts for."""

from __future__ import annotations

import atexit
import functools
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from nearlinear import events
from nearlinear.errors import NearlinearError
from nearlinear.runtime.ending import failed, install_excepthook, read_errors_by
from nearlinear.runtime.environment import World, world_from
from nearlinear.runtime.local.island import Island
from nearlinear.runtime.mesh import Mesh, join

Weight = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank holds of one batch; scalars, of a graph or not.

    Args:
        samples: Samples in the whole batch.
        mine: Samples of it that this rank holds, 0 if what it holds is a filler.
        fraction: The part of the batch's mean that this rank's share stands for; the ranks' sum to one.
    """

    samples: tf.Tensor
    mine: tf.Tensor
    fraction: tf.Tensor

    @property
    def counts(self) -> tf.Tensor:
        """1.0, or 0.0 for a filler."""
        return tf.cast(self.mine > 0, tf.float64)


class Session:
    """One process's part in the run.

    Args:
        world: Who this process is.
        mesh: Its connections to the others; None in a run of one process.
    """

    def __init__(self, world: World, mesh: Mesh | None = None) -> None:
        self.rank, self.size, self.mesh = world.rank, world.size, mesh
        self.island: Island | None = None  # where members train apart
        self.summed = False  # weight="sum": gradients are added, not averaged
        self.weight: Weight | None = None  # what a batch counts for, where the script says so
        self.parts = world.size  # into how many shares a batch is cut
        self.models = self.optimizers = 0  # how many were handed to distribute, and how many were hooked
        self.after_batch: list[Callable[[], None]] = []  # what to do when a loop of the script's own comes back
        self._share: Share | None = None  # of the step that is being traced or run
        self._last: tuple[tf.Variable, tf.Variable] | None = None  # samples and mine, of a loop of the script's own
        self.seen: Any = None  # what the inputs of the latest batch look like: a structure of ``tf.TensorSpec``
        # Gradients that tapes have returned and somebody still holds, by identity.
        self.differentiated: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # What metrics have returned in the step that is being traced or run: the value, how to read it anew, its key.
        self.returned: list[tuple[Any, Callable[[], Any], str | None]] | None = None
        self.samples = 0  # of the latest whole batch, where somebody asked to be told of steps
        self.waited_s = 0.0  # spent in exchanges so far
        self._calls, self._since, self._clock = 0, 0.0, threading.Lock()
        self._said: set[str] = set()
        self.error: NearlinearError | None = None  # what an exchange within a graph has failed of

    @property
    def connected(self) -> Mesh:
        """The connections to the others, where there are others."""
        assert self.mesh is not None
        return self.mesh

    def notice(self, message: str) -> None:
        """Say something a person should know: once, on rank 0."""
        if message in self._said:
            return
        self._said.add(message)
        events.publish("notice", message=message)
        if self.rank == 0:
            print(f"nearlinear: {message}", file=sys.stderr, flush=True)

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every rank's ``value``."""
        return [value] if self.mesh is None else self.mesh.all_gather_json(value, what)

    def settle(self, what: str) -> None:
        """Return when the parameters are those of the run; they always are, but where members train apart."""
        if self.island is not None:
            self.island.settle(what)

    # ---- the batch in hand

    @contextmanager
    def working_on(self, share: Share) -> Iterator[None]:
        """Let ``share`` be that of the batch in hand, for what is traced or run within."""
        before, self._share = self._share, share
        try:
            yield
        finally:
            self._share = before

    def fetched(self, samples: int, mine: int) -> None:
        """Note the batch that a loop of the script's own has fetched."""
        self.samples = samples
        if self._last is None:
            with tf.init_scope():
                self._last = tf.Variable(0.0, dtype=tf.float64), tf.Variable(0.0, dtype=tf.float64)
        for variable, value in zip(self._last, (samples, mine), strict=True):
            variable.assign(float(value))

    def share(self) -> Share:
        """Return this rank's share of the batch in hand; equal shares where no batch is known."""
        if self._share is not None:
            return self._share
        if self._last is not None:
            samples, mine = self._last[0].read_value(), self._last[1].read_value()
            return Share(samples, mine, tf.math.divide_no_nan(mine, samples))
        one, size = tf.constant(1.0, tf.float64), tf.constant(float(self.size), tf.float64)
        return Share(size, one, one / size)

    # ---- exchanges within a graph

    def tag(self, kind: str) -> str:
        """Return a name for an exchange that is the same on all ranks.

        It counts the exchanges of the graph that is being traced, and not the graphs: how often a function is traced
        depends on the shapes that a rank has seen, and shares differ by a row. The same name comes again in another
        graph; messages of one name are read in the order in which they were sent.
        """
        if tf.executing_eagerly():
            return f"{kind}:eager"
        graph = tf.compat.v1.get_default_graph()
        number = getattr(graph, "_nearlinear_exchanges", 0)
        graph._nearlinear_exchanges = number + 1
        return f"{kind}:{number}"

    def guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``act`` as an operation calls it: TensorFlow rewords what it raises, so the error is kept here."""

        def call(*arguments: Any) -> Any:
            self._enter(1)
            try:
                return act(*arguments)
            except NearlinearError as error:
                self.error = self.error or error
                raise
            finally:
                self._enter(-1)

        return call

    def _enter(self, more: int) -> None:
        """Count the time in which one exchange or more is called: the runtime may wait for several at once."""
        with self._clock:
            now = time.perf_counter()
            if self._calls:
                self.waited_s += now - self._since
            self._calls, self._since = self._calls + more, now

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raise what an exchange failed of in place of TensorFlow's error about it."""
        try:
            yield
        except tf.errors.OpError:
            error, self.error = self.error, None
            if error is None:
                raise
            raise error from None

    def close(self) -> None:
        """Say goodbye to the peers, unless the script failed: then they are to notice, and at once."""
        if self.mesh is not None:
            self.mesh.close(failed=failed())


_current: Session | None = None


def current() -> Session | None:
    """Return this process's session, if ``distribute`` was called."""
    return _current


def start() -> Session:
    """Return this process's session; the first call joins the run.

    Raises:
        InputError: The environment is incomplete, or the port of rank 0 is taken.
        PeerLostError: A rank did not arrive within the deadline.
    """
    global _current
    if _current is None:
        world = world_from()
        install_excepthook()
        read_errors_by(_own_error)
        _current = Session(world, join(world) if world.size > 1 else None)
        atexit.register(_current.close)
        if world.size > 1:
            session = _current
            shuffle_alike(lambda mine: session.all_gather_json(mine, "comparing seeds")[0])
            _note_gradients(session)
    return _current


def _note_gradients(session: Session) -> None:
    """Note what tapes return, so that gradients which a script changes before the optimizer has them are seen."""
    differentiate = tf.GradientTape.gradient

    @functools.wraps(differentiate)
    def noting(tape: tf.GradientTape, *arguments: Any, **options: Any) -> Any:
        gradients = differentiate(tape, *arguments, **options)
        session.differentiated.update((id(each), each) for each in tf.nest.flatten(gradients) if each is not None)
        return gradients

    tf.GradientTape.gradient = noting


def shuffle_alike(first: Callable[[Any], Any]) -> None:
    """Seed TensorFlow's operations alike everywhere, where the script has not: so all shuffle in one order.

    Args:
        first: Returns what the first process has in place of what is given, which is this one's.
    """
    seeded, drawn = first([context.global_seed(), secrets.randbits(31)])
    if seeded is None and context.global_seed() is None:
        tf.random.set_seed(drawn)


def _own_error(error: BaseException) -> NearlinearError | None:
    return _current.error if _current is not None and isinstance(error, tf.errors.OpError) else None
