"""One trace of the program, on its devices and of its batch: runs its equations one at a time, each compiled alone.

An audit has a side for the reference, and one for each variant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._src.platform.jax_internals import jax_tracing
from jaxmp._src.tools.audit import bits, operations
from jaxmp._src.tools.audit.variation import Relation


@dataclasses.dataclass(eq=False)
class Value:
    """The value of one variable of a trace.

    Attributes:
      array: the array.
      twin, relation: for a variant's value, the corresponding value of the reference, and how they correspond.
      origin: the equation that made it and its line, if the other trace has none like it.
      is_of_batch: whether it depends on the arrays of the batch, and not on its size alone.
      is_mixed: whether it depends on other rows of the batch than its own.
      is_by_device: whether its elements may be in the order of the devices, which differs between meshes.
    """

    array: Any
    twin: Value | None = None
    relation: Relation = "other"
    origin: Any = None
    is_of_batch: bool = False
    is_mixed: bool = False
    is_by_device: bool = False

    @property
    def is_comparable(self) -> bool:
        """True if its bits should be the bits of its twin, or of the twin's rows: not "other", "packed" or mixed."""
        return self.relation not in ("other", "packed") and not self.is_mixed

    @functools.cached_property
    def host(self) -> np.ndarray:
        """Returns a copy on the host, made once; for random keys, their data."""
        return bits.pull(self.array)


class Side:
    """A trace of the program with its arrays, and the compiled equations that have run.

    Attributes:
      fn: the program, a function of a list of arrays; jaxpr: its trace, closed over its constants.
      arrays: what it is called with; options: of the compiler.
      outputs: the names of its results, "[0]['w']".
      inlined: a function that returns a jaxpr with its calls written out, and its constants.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arrays: Sequence[Any],
        mesh: jax.sharding.Mesh | None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Traces `fn` for these arrays. `mesh`: is set while the program is traced and runs, unless it is None."""
        self.fn, self.arrays, self._mesh = fn, list(arrays), mesh
        self.options, self._compiled = dict(compiler_options or {}), dict[Any, Callable[..., Any]]()
        self.inlined = functools.cache(functools.partial(jax_tracing.inlined, body_of=operations.inlined_body))
        with self.scope():
            traced: Any = jax.make_jaxpr(fn, return_shape=True)(self.arrays)
        self.jaxpr, shapes = traced
        self.outputs = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that sets this trace's mesh, if it has one."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def whole(self, fn: Callable[..., Any] | None = None, options: Mapping[str, Any] | None = None) -> list[Any]:
        """Compiles the whole program, or `fn` instead of it, in one piece, and returns its results as a list of leaves.
        `options`: options of the compiler, added to the options of this side."""
        options = {**self.options, **(options or {})} or None
        with self.scope():
            return jax.tree.leaves(jax.jit(fn or self.fn, compiler_options=options)(self.arrays))

    def together(self, equations: Sequence[Any], made: Sequence[Any], values: Mapping[Any, Value]) -> list[Any]:
        """Compiles equations in one piece, runs them on `values` (of all variables that they read from outside), and
        returns the arrays of the variables `made`."""
        inside = {v for eqn in equations for v in eqn.outvars}
        read = list({v: 0 for eqn in equations for v in jax_tracing.variables(eqn) if v not in inside})

        def run(arrays: Sequence[Any]) -> list[Any]:
            found = dict(zip(read, arrays, strict=True))
            jax_tracing.evaluate_each(equations, found)
            return [found[v] for v in made]

        with self.scope():
            return list(jax.jit(run, compiler_options=self.options or None)([values[v].array for v in read]))

    def run(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of one equation as arrays. Its literals stay literals, and the operands in their places
        are ignored. Equal equations share one compiled function."""
        key = _key(eqn)
        if key not in self._compiled:  # keeps the equation alive, because its id may be in the key
            self._compiled[key] = jax.jit(functools.partial(_bind, eqn), compiler_options=self.options or None)
        arrays = [x for v, x in zip(eqn.invars, operands, strict=True) if not jax_tracing.is_literal(v)]
        with self.scope():
            return list(self._compiled[key](arrays))


def _bind(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    left = iter(arrays)
    operands = [v.val if jax_tracing.is_literal(v) else next(left) for v in eqn.invars]
    with jax_tracing.traced_as(eqn):
        return list(jax_tracing.evaluate(eqn, operands))


def _key(eqn: Any) -> Any:
    """Returns a key of primitive, parameters, literals, number of operands and context, but not of operand types.
    Layers of a model repeat most keys. If a part of the key has no hash, the key is the `id` of the equation
    instead."""
    literals = tuple((i, repr(v.val), str(v.aval)) for i, v in enumerate(eqn.invars) if jax_tracing.is_literal(v))
    params = tuple((name, type(value), _exact(value)) for name, value in sorted(eqn.params.items()))
    key = (eqn.primitive, params, literals, len(eqn.invars), id(eqn.ctx))
    try:
        hash(key)
    except TypeError:
        return id(eqn)
    return key


def _exact(value: Any) -> Any:
    """Returns a parameter as part of a key that tells 0.0 from -0.0 and 1 from True, which are equal in Python."""
    if isinstance(value, float | complex | bool):
        return repr(value)
    return tuple((type(one), _exact(one)) for one in value) if isinstance(value, tuple) else value
