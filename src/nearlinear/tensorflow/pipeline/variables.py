"""Which rank holds which variable: letting go of the others', and putting them together where all are asked for.

The model and the optimizer keep all their variables, so names, shapes, counts and files are those of one process. What
lies with another rank has no memory here, and whoever reads it is told where it is.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nearlinear.errors import InputError
from nearlinear.runtime.mesh import Mesh

_numbers = itertools.count()


class Elsewhere:
    """Stands in for a TensorFlow variable that another rank holds.

    Args:
        path: The variable's name.
        shape: Its shape.
        dtype: Its type.
        rank: Who holds it.
    """

    def __init__(self, path: str, shape: Sequence[int], dtype: Any, rank: int) -> None:
        self.name, self.shape, self.dtype, self._rank = path, tf.TensorShape(shape), tf.as_dtype(dtype), rank
        self._unique_id = f"elsewhere {next(_numbers)}"

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"variable {self.name!r} lies with rank {self._rank}, which runs its stage; model.get_weights() and "
            "model.save(), called on every rank, put all of them together"
        )

    numpy = read_value = assign = assign_add = assign_sub = __array__ = __tf_tensor__ = _read


class Held:
    """All variables of a model and its optimizer, and who holds them.

    Args:
        mesh: The connections.
        name: Of what they serve, among all that the mesh serves.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._mesh, self._name = mesh, name
        self._ranks: dict[int, tuple[int, ...]] = {}  # by the variable's id; those that are not here lie with all
        self._variables: list[keras.Variable] = []

    def place(self, variable: keras.Variable, ranks: tuple[int, ...]) -> None:
        """Note who holds a variable."""
        self._ranks[id(variable)] = ranks
        self._variables.append(variable)

    def knows(self, variable: keras.Variable) -> bool:
        """Return whether it was said who holds a variable."""
        return id(variable) in self._ranks

    def ranks_of(self, variable: keras.Variable) -> tuple[int, ...]:
        """Return who holds a variable."""
        return self._ranks.get(id(variable), tuple(range(self._mesh.size)))

    def here(self, variable: keras.Variable) -> bool:
        """Return whether this rank holds a variable."""
        return self._mesh.rank in self.ranks_of(variable)

    def forget(self, variables: Collection[keras.Variable]) -> None:
        """Leave out what is not used any more: the state of an optimizer that another has replaced."""
        gone = {id(each) for each in variables}
        self._variables = [each for each in self._variables if id(each) not in gone]
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key not in gone}

    def let_go(self) -> None:
        """Free the memory of what others hold."""
        for each in self._variables:
            self.let_go_of(each)
        gc.collect()

    def let_go_of(self, variable: keras.Variable) -> None:
        """Free the memory of a variable if others hold it."""
        if not self.here(variable) and not isinstance(variable._value, Elsewhere):
            owner = self._ranks[id(variable)][0]
            variable._value = Elsewhere(variable.path, tuple(variable._shape), variable._dtype, owner)

    def make_equal(self, variables: Sequence[keras.Variable]) -> None:
        """Give every rank rank 0's values of what it will hold; all call it, while each has all of it."""
        everyones = self._mesh.all_gather_json([_mark(each) for each in variables], "comparing the variables")
        for number, variable in enumerate(variables):
            tag = f"{self._name}:begin:{number}"
            for rank in self.ranks_of(variable):
                if rank == 0 or everyones[rank][number] == everyones[0][number]:
                    continue
                if self._mesh.rank == 0:
                    self._mesh.send(rank, tag, np.ascontiguousarray(variable.numpy()), "sending the variables")
                elif self._mesh.rank == rank:
                    variable.assign(_like(self._mesh.receive(0, tag, "receiving the variables"), variable))

    @contextlib.contextmanager
    def together(self, ranks: Collection[int], variables: Sequence[keras.Variable]) -> Iterator[None]:
        """Give ``ranks`` some variables for a while; every rank calls it, with the same ones in the same order."""
        what = "putting the variables together"
        for number, variable in enumerate(variables):
            owners, tag = self.ranks_of(variable), f"{self._name}:together:{number}"
            takers = [rank for rank in ranks if rank not in owners]
            if self._mesh.rank == owners[0]:
                for rank in takers:
                    self._mesh.send(rank, tag, np.ascontiguousarray(variable.numpy()), what)
            elif self._mesh.rank in takers:
                _fill(variable, _like(self._mesh.receive(owners[0], tag, what), variable))
        try:
            yield
        finally:
            self.let_go()

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Give this rank memory for all variables for a while, to be written to; what is not its own is lost again."""
        for each in self._variables:
            if not self.here(each):
                _fill(each, np.zeros(tuple(each._shape), tf.as_dtype(each._dtype).as_numpy_dtype))
        try:
            yield
        finally:
            self.let_go()


def _fill(variable: keras.Variable, value: Any) -> None:
    variable._value = tf.Variable(value, dtype=variable._dtype, trainable=variable.trainable, name=variable.name)


def _like(raw: Any, variable: keras.Variable) -> Any:
    return raw.view(tf.as_dtype(variable._dtype).as_numpy_dtype).reshape(tuple(variable._shape))


def _mark(variable: keras.Variable) -> int:
    return zlib.crc32(np.ascontiguousarray(variable.numpy()).tobytes())
