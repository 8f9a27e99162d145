"""The forms in which a call reaches its library: one class each, in order of preference in `FORMS`.

cuBLASMp all-reduces with op(A) = A^T, op(B) = B and without C only, and has its epilogs on one-dimensional layouts and
of real numbers only. hostmp declares that it takes more. A call that a library does not take directly is put together
from calls that it takes: `ResolvedCall.inner` is the call that a form contains.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax

from jaxmp._src.lowering import backend, ffi_call, fixed_shape, xla_matmul
from jaxmp._src.lowering.backend import Choice
from jaxmp._src.lowering.ffi_call import custom_call
from jaxmp._src.lowering.legalize import Capabilities, asked_of_library, is_tiled, why_no_epilog
from jaxmp._src.primitive import bias_grad
from jaxmp._src.runtime import native
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec, ScaleModes, accumulator, axes_text, extents
from jaxmp._src.spec.refusal import NotAvailable
from jaxmp._src.validation.comm_options import fit_comm_options
from jaxmp._src.validation.epilog_checks import check_gathered_scales


class Product(NamedTuple):
    """What is asked: a product of shards of these types."""

    spec: MatmulSpec
    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class ResolvedCall:
    """One product on one platform, hashable.

    `spec` is the product in this form, for shards converted to the types `a` and `b`; `is_conjugated` says which of the
    two are conjugated ahead of it. `implementation` is "host", "cublasmp", "host+xla" or "xla", chosen because of
    `why`; `library` makes the calls ("host", "cublasmp", or "" for XLA). `form` is taken because of `form_why`. `inner`
    is the call that the form contains, where it is not the library's call itself.
    """

    spec: MatmulSpec
    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct
    implementation: str
    why: str
    library: str
    form: type[Form]
    form_why: str = ""
    is_conjugated: tuple[bool, bool] = (False, False)
    inner: ResolvedCall | None = None

    @property
    def contained(self) -> ResolvedCall:
        """`inner`, which this form has."""
        assert self.inner is not None, self
        return self.inner

    def emit(self, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        """The results; `where` is `devices` as in `ffi_call.call_attributes`, and for XLA's form `platform` and
        `processes` as in `xla_matmul.matmul`."""
        is_conjugated_a, is_conjugated_b = self.is_conjugated
        a = lax.conj(a) if is_conjugated_a else a
        b = lax.conj(b) if is_conjugated_b else b
        return self.form.emit(self, a, b, *extra, **where)


class Form:
    """How a call reaches its library. By default the form itself makes one call, `inner`, which has another form."""

    name: ClassVar[str]

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        """Why the call takes this form, or None where it does not."""
        raise NotImplementedError

    @staticmethod
    def inner(product: Product) -> Product | None:
        """What the library is asked for instead."""
        return None

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        """The results from operands that are conjugated already."""
        raise NotImplementedError

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        """(algorithm, workspace bytes per rank) for `explain`."""
        return f"{cls.name} ({call.form_why})", 0


class Tiles(Form):
    """A local product as many calls of one shape."""

    name = "fixed_shape_tiles"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        return None if product.spec.contraction.communicates else Gathered.why(product, capabilities)

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        def tile(a: jax.Array, b: jax.Array, *extra: jax.Array, spec: MatmulSpec) -> list[jax.Array]:
            return one_device(spec, a, b, call.library).emit(a, b, *extra)

        with jax.named_scope(f"jaxmp {call.spec.level.name} by calls of one shape"):
            return fixed_shape.matmul(a, b, *extra, spec=call.spec, call=tile)

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        return fixed_shape.describe(call.spec, call.a.shape, call.b.shape, call.library), 0


class Gathered(Form):
    """Each rank gathers what its part of d needs, and multiplies on its own."""

    name = "gathered"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        return _NO_ORDER if is_tiled(product.spec, capabilities) else None

    @staticmethod
    def inner(product: Product) -> Product:
        spec, a, b = product
        # Over these axes the ranks have other rows of D.
        axes = spec.contraction.sharded("d", "m")
        if bias_grad.summed(spec.rule.gradient) == "d" and spec.group.size(axes) > 1:
            raise spec.level.refusal(
                f"has no epilog {spec.epilog.name} where operands are gathered and the rows of the result lie over "
                f"{axes_text(axes)}, for XLA would complete {spec.rule.gradient}",
                "take the gradient of a bias",
            )
        if spec.group.nranks > 1:
            check_gathered_scales(spec, f"where operands are gathered over {spec.group.nranks} ranks")
            found = extents(spec, a.shape, b.shape)
            (rows, cols), k = found.d, found.k
            a = a.update(shape=(k, rows) if spec.transpose_a else (rows, k))
            b = b.update(shape=(cols, k) if spec.transpose_b else (k, cols))
        return Product(fit_comm_options(spec.local()), a, b)

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        spec = call.spec
        if spec.group.nranks > 1:
            a, b = xla_matmul.gather_for_part(spec, a, b)
        outputs = call.contained.emit(a, b, *extra)
        # Over these axes the ranks have summed other rows of op(a).
        axes = spec.contraction.sharded("d", "m")
        if spec.rule.gradient != "bgrada" or not axes:
            return outputs
        return [
            lax.all_gather(x, axes, axis=0, tiled=True) if name == "bgrada" else x
            for name, x in zip(spec.output_names, outputs, strict=True)
        ]

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        algorithm, workspace = facts(call.contained)
        gathers = "each rank gathers what its part of d needs; " if call.spec.group.nranks > 1 else ""
        return gathers + algorithm, workspace


class PaddedK(Form):
    """Zeros are added along k."""

    name = "padded_k"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        spec, a, b = product
        is_thin = spec.rule.derivative and extents(spec, a.shape, b.shape).k == 1
        if not is_thin or why_no_epilog(spec, capabilities):
            return None
        return "cuBLASMp multiplies by an activation's derivative only where k is not 1"

    @staticmethod
    def inner(product: Product) -> Product:
        spec, a, b = product
        shape_a, shape_b = fixed_shape.with_k(spec, a.shape, b.shape, fixed_shape.PADDED_K)
        return Product(spec, a.update(shape=shape_a), b.update(shape=shape_b))

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        return call.contained.emit(*fixed_shape.padded_along_k(a, b, call.spec), *extra, **where)

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        algorithm, workspace = facts(call.contained)
        return f"{cls.name} ({call.form_why}); {algorithm}", workspace


class SeparateEpilog(Form):
    """XLA adds C to the plain product and applies the epilog."""

    name = "separate_epilog"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        spec = product.spec
        if why := why_no_epilog(spec, capabilities):
            return why
        if not spec.contraction.is_reduced:
            return None
        if _copied(product, capabilities) and spec.epilog in (Epilog.BGRADA, Epilog.BGRADB):
            # A copy would be stored so that it cannot be summed.
            return "cuBLASMp all-reduces no product whose operand it sums"
        # If cuBLASMp adds C ahead of the reduction, one rank has to add it; if behind it, each has to.
        if spec.has_c and spec.beta != 0 and spec.group.nranks > 1 and not capabilities.all_reduce_c:
            return "no source says whether cuBLASMp adds c before or after the all-reduce"
        return None

    @staticmethod
    def inner(product: Product) -> Product:
        spec, a, b = product
        out = accumulator(low_precision.operand_type(a.dtype, b.dtype))
        return Product(spec.bilinear(out_dtype=out, scales=ScaleModes(a=spec.scales.a, b=spec.scales.b)), a, b)

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        plain, named = call.contained, dict(zip(call.spec.operand_names, extra, strict=True))
        z = plain.emit(a, b, *(named[name] for name in plain.spec.operand_names), **where)[0]
        return xla_matmul.apply_epilog(z, extra, call.spec.replace(alpha=1.0), a, b)


class TransposedCopy(Form):
    """Operands are copied, so that they are stored as the library wants them."""

    name = "transposed_copy"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        copied = _copied(product, capabilities)
        why = "cuBLASMp all-reduces with a stored (m, k) and b stored (n, k) only"
        return f"{why}; copying {2 * sum(x.size * x.dtype.itemsize for x in copied)} bytes" if copied else None

    @staticmethod
    def inner(product: Product) -> Product:
        spec, a, b = product
        copied = spec.replace(transpose_a=False, transpose_b=True, conjugate_a=False)
        a = a.update(shape=a.shape[::-1]) if spec.transpose_a else a
        return Product(copied, a, b if spec.transpose_b else b.update(shape=b.shape[::-1]))

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        a, b = (a.T if call.spec.transpose_a else a), (b if call.spec.transpose_b else b.T)
        # What a transposition also conjugated still has to be.
        a = lax.conj(a) if call.spec.conjugate_a else a
        return call.contained.emit(a, b, *extra, **where)


class Direct(Form):
    """One call of the library's."""

    name = "direct"

    @staticmethod
    def why(product: Product, capabilities: Capabilities) -> str | None:
        return ""

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        return custom_call(a, b, *extra, spec=call.spec, devices=where.get("devices", ()))

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        plan = native.describe_plan(ffi_call.call_attributes(call.spec, call.a, call.b), call.library)
        if call.library == "cublasmp":
            return f"{plan['library']} {plan['algorithm']}; workspace from its first run on", 0
        workspace = max(d + h for d, h in zip(plan["device_workspace"], plan["host_workspace"], strict=True))
        order = f"; {_ORDER}" if call.spec.fixed_reduction_order else ""
        return f"{plan['library']} {plan['algorithm']} ({plan['kernel']}){order}", workspace


class Xla(Form):
    """XLA computes everything but, on CPUs of several processes, the local product."""

    name = "xla"

    @staticmethod
    def emit(call: ResolvedCall, a: jax.Array, b: jax.Array, *extra: jax.Array, **where: Any) -> list[jax.Array]:
        product = _host_product if call.library == "host" else None
        platform, processes = where.get("platform", "cpu"), where.get("processes")
        return xla_matmul.matmul(
            a, b, *extra, spec=call.spec, platform=platform, local_product=product, processes=processes
        )

    @classmethod
    def facts(cls, call: ResolvedCall) -> tuple[str, int]:
        if call.implementation in ("host", "cublasmp"):
            return call.form_why, 0
        if call.library:
            return "hostmp local Matmul and lax collectives", 0
        return ("lax.dot_general and lax collectives" if call.spec.group.nranks > 1 else "lax.dot_general"), 0


# The forms of a library's calls, in order of preference.
FORMS: tuple[type[Form], ...] = (Tiles, Gathered, PaddedK, SeparateEpilog, TransposedCopy, Direct)

_NO_ORDER = "the library promises no order of sums"
# What a fixed order is.
_ORDER = "each element is one sum over k in ascending order, in fixed K blocks, then its epilog"


def find(product: Product, capabilities: Capabilities) -> tuple[type[Form], str]:
    """(the first form in which a library takes the call, why)."""
    return next((form, why) for form in FORMS if (why := form.why(product, capabilities)) is not None)


def in_library(product: Product, choice: Choice, library: str) -> ResolvedCall:
    """The call in the form that the library takes."""
    asked = product.spec
    found = extents(asked, product.a.shape, product.b.shape)
    if library == "host" and max(found.m, found.n, found.k) >= 2**31:
        why = f"hostmp counts in 32 bits, and the group's product has m={found.m}, n={found.n}, k={found.k}"
        if option := asked_of_library(asked):
            raise NotAvailable(
                f"{option} is not available here: {why}; shard the operands further, or leave it out to have XLA "
                "multiply"
            )
        return in_form(Xla, "", product, Choice("xla", why))
    if asked.rule.gradient and 0 in found.d:
        return in_form(Xla, "nothing to multiply, but sums to be written", product, choice)
    capabilities = backend.capabilities_of(library)
    # The sum of one rank is its product, which cuBLASMp takes as it is stored.
    if asked.contraction.is_reduced and asked.group.nranks == 1 and not capabilities.all_reduce_any_transposition:
        asked = fit_comm_options(asked.ungrouped().replace(asks_all_reduce=False))
    # cuBLASMp conjugates only what it transposes, and sums only what it does not conjugate.
    spec = asked
    if asked.conjugate_a or asked.conjugate_b:
        spec = asked.replace(
            conjugate_a=asked.conjugate_a and asked.transpose_a and asked.epilog != Epilog.BGRADA,
            conjugate_b=asked.conjugate_b and asked.transpose_b,
        )
    is_conjugated = asked.conjugate_a != spec.conjugate_a, asked.conjugate_b != spec.conjugate_b
    product = product._replace(spec=spec)
    form, why = find(product, capabilities)
    return in_form(form, why, product, choice, library, is_conjugated)


def in_form(
    form: type[Form],
    why: str,
    product: Product,
    choice: Choice,
    library: str = "",
    is_conjugated: tuple[bool, bool] = (False, False),
) -> ResolvedCall:
    """The call in this form."""
    asked = form.inner(product)
    inner = in_library(asked, choice, library) if asked else None
    return ResolvedCall(*product, choice.implementation, choice.why, library, form, why, is_conjugated, inner)


def facts(call: ResolvedCall) -> tuple[str, int]:
    """(algorithm, workspace bytes per rank) of the plan that serves a call.

    Which of its algorithms cuBLASMp takes, and its workspace, show when it runs; this is what it is expected to do.
    """
    return call.form.facts(call)


def one_device(spec: MatmulSpec, a: jax.Array, b: jax.Array, library: str) -> ResolvedCall:
    """One of the calls of one shape that a local product comes to."""
    shards = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b))
    return in_library(Product(spec, *shards), Choice(library, "a tile of a fixed shape"), library)


def _host_product(a: jax.Array, b: jax.Array, spec: MatmulSpec) -> jax.Array:
    """One device's product in the accumulator's type, through the custom call."""
    local = MatmulSpec(
        accumulator(a.dtype),
        transpose_a=spec.transpose_a,
        transpose_b=spec.transpose_b,
        conjugate_a=spec.conjugate_a,
        conjugate_b=spec.conjugate_b,
        precision=spec.precision,
    )
    return one_device(local, a, b, "host").emit(a, b)[0]


def _copied(product: Product, capabilities: Capabilities) -> list[jax.ShapeDtypeStruct]:
    """The operands that are not stored as an all-reduced product wants them, which in JAX's order is (m, k), (n, k)."""
    spec, a, b = product
    if not spec.contraction.is_reduced or capabilities.all_reduce_any_transposition:
        return []
    return [x for x, is_wrong in ((a, spec.transpose_a), (b, not spec.transpose_b)) if is_wrong]
