"""Bias gradients as plain sums and collectives: the reference for the fused ones, also used in their derivatives.

drelu_bgrad, dgelu_bgrad   the stored d summed over all its rows: (n,)
bgrada                     op(a) summed over the contraction: (m,), whole on every rank of the group
bgradb                     op(b) summed over the contraction: (n,), sharded as the columns of d
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator

SCOPE = "jaxmp_bias_gradient"


def summed(name: str) -> str:
    """Returns the matrix that a bias gradient sums, "a", "b" or "d"; "" if the result is no bias gradient."""
    return {"bgrada": "a", "bgradb": "b", "drelu_bgrad": "d", "dgelu_bgrad": "d"}.get(name, "")


def bias_gradient(name: str, spec: MatmulSpec, x: jax.Array) -> jax.Array:
    """Returns the complete bias gradient `name`: sums `x`, one device's shard of `summed(name)`, in the accumulator's
    type, also over ranks, and rounds to d's type."""
    of, product, acc = summed(name), spec.contraction, accumulator(x.dtype)
    dimension, index = (0, "m") if of == "d" else (getattr(product, of).index("k"), "k")
    with jax.named_scope(SCOPE):
        total = jnp.sum(x.astype(acc), dimension, dtype=acc)
        if getattr(spec, f"conjugate_{of}", False):
            total = lax.conj(total)
        if axes := product.sharded(of, index):
            total = collectives.psum(total, axes, source_line=spec.source_line)
        # Every rank gets the sums of all rows of op(a), even if it holds only some of the rows.
        if of == "a" and (rows := product.sharded("a", "m")):
            total = collectives.all_gather(total, rows, axis=0, to="invarying", source_line=spec.source_line)
        return total.astype(spec.out_dtype)
