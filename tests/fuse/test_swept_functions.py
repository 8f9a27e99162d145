"""Functions of JAX, and their gradients, through `fuse` on no mesh, automatic and explicit axes, at every level. Each
gives plain JAX's values and types without a warning, or under a level an error that names the line. Without these
tests, a function could be wrong because `fuse` does not know its jaxpr."""

import functools
import re

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax, nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

N = 8
RNG = np.random.default_rng(5)


def draw(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def spd(a):
    return a @ a.mT + jnp.broadcast_to(N * jnp.eye(N), a.shape)


# Arguments by letter.
ARGS = {
    "x": draw(N, 2 * N),
    "w": draw(2 * N, N),
    "m": draw(N, N) + 4 * jnp.eye(N),
    "s": spd(draw(N, N)),
    "t": jnp.tril(draw(N, N)) + 4 * jnp.eye(N),
    "v": draw(N),
    "u": draw(N),
    "b": draw(4, N, N),
    "S": spd(draw(4, N, N)),
    "q": draw(4, 6, 2, N),
    "p": jnp.abs(draw(N)) + 0.5,
    "c": lax.complex(draw(N, N), draw(N, N)),
    "h": draw(N, 2 * N, dtype=jnp.bfloat16),
    "k": draw(2 * N, N, dtype=jnp.bfloat16),
    "i": jnp.arange(N) % 3,
    "j": jnp.arange(N * N).reshape(N, N) % 5,
    "y": jnp.arange(N * N).reshape(N, N).astype(jnp.int8) % 5,
    "a": draw(2, 3, 9, 9),  # images
    "f": draw(4, 3, 3, 3),
    "g": draw(3, N, N),
    "n": jnp.asarray([3, 0, 5], jnp.int32),
    "r": draw(24),
}

# Functions by the letters of their arguments.
FUNCTIONS = {
    "x": (lambda x: x @ x.T, jnp.cov, jnp.corrcoef, lambda x: jnp.cumsum(x, 0), lambda x: jnp.mean(x, 1), jnp.var,
        jnp.median, jnp.sort, jnp.argmax, lambda x: jnp.where(x > 0, x, 0.0), lambda x: jnp.pad(x, 1),
        lambda x: jnp.apply_along_axis(jnp.dot, 1, x, x[0]), lambda x: jnp.linalg.qr(x.T),
        lambda x: jnp.linalg.svd(x, compute_uv=False), jnp.linalg.pinv, jnp.linalg.norm,
        lambda x: lax.map(lambda row: row @ row, x), lambda x: lax.cumprod(x), lambda x: lax.top_k(x, 3),
        lambda x: lax.approx_max_k(x, 3), lambda x: lax.linalg.symmetric_product(x, jnp.zeros((N, N))),
        lambda x: jax.jacfwd(lambda v: jnp.tanh(x @ v))(x[0]), lambda x: jsp.signal.convolve(x, x, mode="same"),
        lambda x: jsp.special.logsumexp(x @ x.T, axis=0), lambda x: jsp.stats.gaussian_kde(x[:2])(x[2:4]),
        lambda x: jsp.ndimage.map_coordinates(x, [x[0] + 3, x[1] + 3], 1)),
    "xw": (jnp.matmul, jnp.dot, lambda x, w: jnp.einsum("ij,jk->ki", x, w),
        lambda x, w: jnp.vectorize(jnp.matmul, signature="(n,m),(m,k)->(n,k)")(x, w),
        lambda x, w: jnp.linalg.multi_dot([x, w, x, w]), lambda x, w: lax.dot(x, w, precision="highest"),
        lambda x, w: lax.optimization_barrier(x) @ w, lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w),
        lambda x, w: jax.vmap(lambda row: row @ w)(x), lambda x, w: nn.relu(x @ w), lambda x, w: nn.gelu(x @ w),
        lambda x, w: nn.gelu(x @ w, approximate=False), lambda x, w: nn.silu(x @ w), lambda x, w: nn.leaky_relu(x @ w),
        lambda x, w: nn.glu(x @ w), lambda x, w: nn.log_softmax(x @ w), lambda x, w: nn.softmax(x @ w),
        lambda x, w: nn.standardize(x @ w), lambda x, w: nn.logsumexp(x @ w, axis=1),
        lambda x, w: nn.sparse_plus(x @ w), lambda x, w: nn.gelu(x @ w) @ w.T + x),
    "m": (lambda m: jnp.einsum("ij,ij->", m, m), jnp.trace, jnp.tril, jnp.linalg.det, jnp.linalg.slogdet,
        jnp.linalg.inv, lambda m: jnp.linalg.matrix_power(m, 3), lambda m: jnp.linalg.matrix_norm(m),
        jnp.linalg.matrix_rank, lambda m: jnp.linalg.norm(m, 2), lambda m: jnp.linalg.cond(m),
        lambda m: lax.linalg.lu(m)[0], lambda m: lax.linalg.hessenberg(m)[0], lambda m: jsp.linalg.lu(m)[1:],
        lambda m: jsp.linalg.expm(m * 0.1), lambda m: jsp.linalg.expm_frechet(m * 0.1, m * 0.1)[1],
        lambda m: jsp.linalg.block_diag(m, m), lambda m: jsp.linalg.polar(m)[0]),
    "vu": (jnp.dot, jnp.vdot, jnp.outer, jnp.kron, lambda v, u: jnp.einsum("i,j->ij", v, u), jnp.convolve,
        jnp.correlate, lambda v, u: jnp.polyval(v, u), jnp.polymul, jnp.linalg.outer,
        lambda v, u: jsp.linalg.toeplitz(v, u), lambda v, u: jsp.signal.fftconvolve(v, u)),
    "vm": (jnp.matmul, jnp.vecmat, lambda v, m: v @ m @ v,
        lambda v, m: lax.scan(lambda c, row: (jnp.tanh(row * 0.1 + c @ m), c @ row), v, m),
        lambda v, m: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(m @ c), v),
        lambda v, m: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(m @ c[1])), (0, v))[1],
        lambda v, m: lax.cond(v[0] > 0, lambda v: m @ v, lambda v: v @ m, v),
        lambda v, m: lax.switch(1, [jnp.sin, lambda v: m @ v], v)),
    "v": (lambda v: jnp.dot(2.0, v), lambda v: jnp.einsum(",i->i", 2.0, v), jnp.vander, lambda v: jnp.fft.fft(v).real,
        lambda v: jnp.fft.irfft(jnp.fft.rfft(v)), lambda v: jnp.histogram(v, 3)[0],
        lambda v: jsp.optimize.minimize(lambda y: jnp.sum((y - 1) ** 2), v, method="BFGS").x),
    "mv": (jnp.matmul, jnp.linalg.solve, lambda m, v: jax.hessian(lambda v: jnp.sum(jnp.tanh(m @ v)))(v),
        lambda m, v: jax.jvp(lambda v: m @ v, (v,), (v,)), lambda m, v: jax.linear_transpose(lambda v: m @ v, v)(v),
        lambda m, v: jsp.linalg.lu_solve(jsp.linalg.lu_factor(m), v)),
    "s": (jnp.linalg.cholesky, jnp.linalg.eigh, jnp.linalg.eigvalsh,
        lambda s: jnp.linalg.svd(s, full_matrices=False)[1], lambda m: lax.linalg.tridiagonal(m)[1],
        lambda s: jsp.linalg.sqrtm(s).real),
    "sv": (lambda m, v: lax.custom_linear_solve(lambda y: m @ y, v, lambda f, y: jnp.linalg.solve(m, y)),
        lambda s, v: jsp.linalg.cho_solve(jsp.linalg.cho_factor(s), v),
        lambda s, v: jsp.linalg.solve(s, v, assume_a="pos"), lambda s, v: jsp.sparse.linalg.cg(lambda y: s @ y, v)[0],
        lambda s, v: jsp.sparse.linalg.gmres(lambda y: s @ y, v)[0],
        lambda s, v: jsp.sparse.linalg.bicgstab(lambda y: s @ y, v)[0]),
    "q": (lambda q: jnp.einsum("bqhd,bkhd->bhqk", q, q), lambda q: jnp.einsum("...d,...d->...", q, q),
        lambda q: nn.dot_product_attention(q, q, q), lambda q: nn.dot_product_attention(q, q, q, is_causal=True)),
    "r": (lambda r: jnp.polyfit(jnp.arange(24.0), r, 2), lambda r: jsp.signal.welch(r, nperseg=8)[1],
        lambda r: jsp.signal.stft(r, nperseg=8)[2].real, lambda r: jsp.signal.detrend(r)),
    "bm": (jnp.dot, lambda b, m: jnp.tensordot(b, m, ((1, 2), (0, 1))),
        lambda b, m: jnp.einsum("bij,jk,kl->bil", b, m, m)),
    "xx": (jnp.inner, jnp.vecdot, jnp.linalg.vecdot),
    "b": (lambda b: jnp.einsum("bii->b", b), lambda b: lax.dot_general(b, b, (((2,), (2,)), ((0,), (0,)))),
        lambda b: lax.batch_matmul(b, b)),
    "hk": (jnp.matmul, lambda h, k: lax.dot(h, k, preferred_element_type=jnp.float32)),
    "cc": (jnp.matmul, jnp.vdot),
    "mm": (jnp.tensordot, jnp.linalg.solve),
    "xi": (lambda x, i: x[i], lambda x, i: x.at[i].add(1.0)),
    "S": (jnp.linalg.cholesky, jnp.linalg.inv),
    "af": (lambda a, f: lax.conv(a, f, (1, 1), "SAME"),
        lambda a, f: lax.conv_transpose(a, f, (2, 2), "SAME", dimension_numbers=("NCHW", "IOHW", "NCHW"))),
    "p": (
        lambda v: lax.custom_root(lambda y: y**3 - v, v, lambda f, y: jnp.cbrt(v), lambda g, y: y / g(y * 0 + 1)),
        jsp.special.ndtr),
    "tv": (lambda m, v: lax.linalg.triangular_solve(m, v[:, None], left_side=True, lower=True),
        lambda t, v: jsp.linalg.solve_triangular(t, v, lower=True)),
    "xwv": (lambda x, w, v: nn.elu(x @ w + v), lambda x, w, v: nn.softplus(x @ w + v)),
    "bb": (jnp.matmul,),
    "jj": (jnp.matmul,),
    "yy": (jnp.matmul,),
    "bv": (jnp.matvec,),
    "vpu": (jnp.interp,),
    "Sb": (jnp.linalg.solve,),
    "xv": (lambda x, v: jnp.linalg.lstsq(x.T, jnp.concatenate([v, v]))[0],),
    "gn": (lambda g, n: lax.ragged_dot(jnp.ones((N, N)), g, n),),
    "a": (lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 1, 1), "VALID"),),
    "mb": (lambda m, b: lax.associative_scan(jnp.matmul, b),),
    "im": (lambda i, m: nn.one_hot(i, N) @ m,),
    "vs": (lambda v, s: jsp.stats.multivariate_normal.logpdf(v, v * 0, s),),
    "vp": (lambda v, p: jsp.integrate.trapezoid(v, p),),
}  # fmt: skip
TABLE = [(fn, letters) for letters, functions in FUNCTIONS.items() for fn in functions]
KINDS = {"none": None, "auto": AxisType.Auto, "explicit": AxisType.Explicit}
LEVELS = ("run_to_run", "batch", "topology")


def gradient(fn):
    def loss(*args):
        results = [y for y in jax.tree.leaves(fn(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.sin(y.real.astype(jnp.float32))) for y in results)

    def run(*args):
        varied = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.grad(loss, varied)(*args)

    return run


def placed(letters, mesh, kind):
    """Returns (arguments, the same replicated); on a mesh, an even number of rows of the first one is sharded."""
    args = [ARGS[letter] for letter in letters]
    if mesh is None or args[0].shape[0] % 2 or kind is None:
        return args, args
    whole = [jax.device_put(x, jax.NamedSharding(mesh, P())) for x in args]
    return [jax.device_put(args[0], jax.NamedSharding(mesh, P("x"))), *whole[1:]], whole


def types(results):
    return [(x.shape, x.dtype, x.weak_type, x.sharding.spec) for x in jax.tree.leaves(results)]


def traced(fn, args):
    """Returns the types of the results."""
    return types(jax.make_jaxpr(fn)(*args).out_avals)


def check_values(name, want, got):
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        w, g = np.asarray(w).astype(np.complex128), np.asarray(g).astype(np.complex128)
        size = max(1, np.max(np.abs(w), initial=0, where=np.isfinite(w)))
        bound = 0.05 if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((want, got))) else 2e-3
        np.testing.assert_allclose(g, w, rtol=bound, atol=bound * size, err_msg=name)


def name_of(i):
    fn, letters = TABLE[i]
    line = getattr(getattr(fn, "__code__", None), "co_firstlineno", "")
    return f"{i} {getattr(fn, '__name__', fn)}({letters}) {line}"


@pytest.mark.small("values")
@pytest.mark.filterwarnings("ignore:fuse. the bits of these operations of XLA:RuntimeWarning")  # convolutions
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_as_without_fuse(mesh_of, kind, level, part):
    mesh = None if KINDS[kind] is None else mesh_of({"x": 2}, KINDS[kind])
    fuse = functools.partial(jaxmp.fuse, determinism=level)
    faults, programs = [], []
    with jax.set_mesh(mesh) if mesh else jax.default_matmul_precision("default"):
        for i in range(part, len(TABLE), 3):
            fn, letters = TABLE[i]
            for way, run in (("forward", fn), ("gradient", gradient(fn))):
                for args in placed(letters, mesh, kind):
                    try:
                        want = traced(run, args)
                    except Exception:  # JAX does not take these
                        continue
                    name = f"{name_of(i)} {way}"
                    try:
                        got = traced(fuse(run), args)
                        if got != want:
                            faults.append(f"{name}: {got} instead of {want}")
                        programs.append((name, run, args))
                    except NotImplementedError as error:
                        if level == "run_to_run" or not re.search(
                            r"does not hold .* at test_swept_functions\.py:", str(error)
                        ):
                            faults.append(f"{name}: {error!r}")
                        print(name, error)
                    except Exception as error:
                        faults.append(f"{name}: {error!r}")
                    break
        names, runs, args = zip(*programs, strict=True)

        def all_of(wrap):
            return jax.jit(lambda args: [wrap(run)(*each) for run, each in zip(runs, args, strict=True)])

        plain, fused = all_of(lambda run: run)(args), all_of(fuse)(args)
        for name, w, g in zip(names, plain, fused, strict=True):
            try:
                check_values(name, w, g)
            except AssertionError as error:
                faults.append(str(error))
    assert not faults, "\n".join(faults)
