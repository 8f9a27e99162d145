"""D = alpha * A @ B^T + beta * C in float64, every matrix split into blocks on a 2x2 mesh, checked against NumPy.

The operands' types carry their shardings (an explicit mesh), so the call needs only `out_sharding`. `explain` prints
what the call will do before it runs.
"""

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

M, N, K = 600, 400, 500
ALPHA, BETA = 0.5, -2.0


def product(a, b, c):
    return jaxmp.matmul(a, b, c, alpha=ALPHA, beta=BETA, transpose_b=True, out_sharding=P("x", "y"))


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape) for shape in ((M, K), (N, K), (M, N)))

    with jax.set_mesh(mesh):
        tiles = [jax.device_put(x, P("x", "y")) for x in (a, b, c)]
        jaxmp.explain(product)(*tiles)
        d = np.asarray(jax.jit(product)(*tiles))

    # The error of a product in any order of summation, element by element (Higham, section 3.5), and of the two sums.
    rounding = np.finfo(np.float64).eps / 2
    bound = (K + 3) * rounding * (abs(ALPHA) * np.abs(a) @ np.abs(b).T + abs(BETA) * np.abs(c))
    used = np.max(np.abs(d - (ALPHA * a @ b.T + BETA * c)) / (2 * bound))  # NumPy rounds as well
    print(f"float64 on {dict(mesh.shape)}: the largest error is {used:.1%} of what rounding allows")
    assert d.dtype == np.float64
    assert used < 1


if __name__ == "__main__":
    main()

# Launch: python examples/03_grid_float64.py
