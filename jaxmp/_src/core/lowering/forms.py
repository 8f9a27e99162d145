"""The forms of a product for the implementation that `decide` has chosen.

A form is a way to compute a call with a library. Each form is a class; `FORMS` has them in order of preference.
cuBLASMp all-reduces only with op(A) = A^T, op(B) = B and without C, and has epilogs only on one-dimensional layouts and
for real numbers. hostmp declares that it takes more. A call that a library does not take directly is composed of calls
that it takes: `inner` is the call that a form contains.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxmp._src.core.lowering import backend, deferred, faults, ffi_call, fixed_shape, numerics, xla_matmul
from jaxmp._src.core.lowering.backend import Capabilities, Choice, why_no_epilog
from jaxmp._src.core.lowering.ffi_call import custom_call
from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.activations import pack_relu_aux
from jaxmp._src.core.spec.epilogs import Epilog, for_activation
from jaxmp._src.core.spec.extents import axes_text, extents
from jaxmp._src.core.spec.matmul_spec import FLAGS, MatmulSpec, ScaleModes, accumulator
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.core.validation.comm_options import fit_comm_options
from jaxmp._src.core.validation.epilog_checks import check_gathered_scales
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import Operands


class RequestedCall(NamedTuple):
    """The requested product: its spec, and the types of the shards."""

    spec: MatmulSpec
    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class ResolvedCall:
    """One product on one platform, hashable. The class is the form.

    `spec`: the product in this form, for shards converted to the types `a` and `b`. `is_conjugated`: a, b are
    conjugated before it. `implementation`: "host", "cublasmp", "host+xla" or "xla", chosen because of `why`. `library`:
    makes the calls ("host", "cublasmp", or "" for XLA). `form_why`: why the form was chosen. `inner`: the call that the
    form contains; None if the form is the library's call.
    """

    spec: MatmulSpec
    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct
    implementation: str
    why: str
    library: str
    form_why: str = ""
    is_conjugated: tuple[bool, bool] = (False, False)
    inner: ResolvedCall = None  # type: ignore[assignment]  # None in forms that contain no call

    name: ClassVar[str]

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        """Returns why a call takes this form ("" if that needs no reason), or None if it does not."""
        raise NotImplementedError

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall | None:
        """Returns the product of the `inner` call, or None if the form contains no call. Raises NotImplementedError for
        a product that the form refuses."""
        return None

    def emit(self, operands: Operands, **where: Any) -> Operands:
        """Returns the results by name, after conjugating a and b as `is_conjugated` says. `where`: `devices` for
        `ffi_call.call_attributes`; `platform` and `processes` for `xla_matmul.matmul`. `Gathered` needs `platform` and
        passes nothing to its inner call."""
        conjugated = [name for name, is_conjugated in zip("ab", self.is_conjugated, strict=True) if is_conjugated]
        return self.results(operands | {name: lax.conj(operands[name]) for name in conjugated}, **where)

    def results(self, operands: Operands, **where: Any) -> Operands:
        """Returns the results by name for operands that are already conjugated."""
        raise NotImplementedError

    def facts(self) -> tuple[str, int]:
        """Returns (algorithm in words, workspace bytes per rank). The bytes are 0 unless hostmp has a plan. For
        cuBLASMp the algorithm is an expectation: cuBLASMp chooses at run time. `Direct` raises ValueError if the
        library refuses the call."""
        return f"{self.name} ({self.form_why})", 0


class Tiles(ResolvedCall):
    """Computes a local product as many calls of one shape, if the order is fixed and the library does not keep one."""

    name = "fixed_shape_tiles"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        return None if product.spec.contraction.communicates else Gathered.why_taken(product, capabilities)

    def results(self, operands: Operands, **where: Any) -> Operands:
        tile = functools.partial(_on_one_device, library=self.library)
        with jax.named_scope(f"jaxmp {self.spec.level.name} by calls of one shape"):
            return fixed_shape.matmul(operands, self.spec, tile)

    def facts(self) -> tuple[str, int]:
        return fixed_shape.describe(self.spec, self.a.shape, self.b.shape, self.library), 0


class Gathered(ResolvedCall):
    """Gathers the operands of each rank's part of d and multiplies them locally. Takes products of ranks that
    communicate, if the order is fixed and the library does not keep one; `decide` takes it in other cases too. Refuses
    an epilog that sums d over rows that are sharded, and scales that cannot be gathered."""

    name = "gathered"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        has_no_order = product.spec.fixed_reduction_order and not capabilities.fixed_reduction_order
        return "the library promises no order of sums" if has_no_order else None

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall:
        spec, a, b = product
        # The rows of D are sharded over these axes.
        axes = spec.contraction.sharded("d", "m")
        if bias_grad.summed(spec.rule.gradient) == "d" and spec.group.size(axes) > 1:
            raise spec.level.refusal(
                f"has no epilog {spec.epilog.name} where operands are gathered and the rows of the result are sharded "
                f"over {axes_text(axes)}, because XLA would complete {spec.rule.gradient}",
                "take the gradient of a bias",
            )
        if spec.group.nranks > 1:
            check_gathered_scales(spec, f"where operands are gathered over {spec.group.nranks} ranks")
            found = extents(spec, a.shape, b.shape)
            (rows, cols), k = found.d, found.k
            a = a.update(shape=(k, rows) if spec.transpose_a else (rows, k))
            b = b.update(shape=(cols, k) if spec.transpose_b else (k, cols))
        return RequestedCall(fit_comm_options(spec.local()), a, b)

    def results(self, operands: Operands, **where: Any) -> Operands:
        spec, platform = self.spec, where["platform"]
        if spec.group.nranks > 1:
            operands = xla_matmul.gather_for_part(spec, operands, platform)
        operands = operands | {x: operands[x].astype(like.dtype) for x, like in (("a", self.a), ("b", self.b))}
        outputs = self.inner.emit(operands)
        # Each rank over these axes has summed different rows of op(a).
        axes = spec.contraction.sharded("d", "m")
        if spec.rule.gradient == "bgrada" and axes:
            sums = xla_matmul.collective("all_gather", outputs["bgrada"], axes, (0,), platform=platform)
            return outputs | {"bgrada": sums}
        return outputs

    def facts(self) -> tuple[str, int]:
        algorithm, workspace = self.inner.facts()
        gathers = "each rank gathers what its part of d needs; " if self.spec.group.nranks > 1 else ""
        return gathers + algorithm, workspace


class PaddedK(ResolvedCall):
    """Adds zeros along k, if it is 1 and the epilog has an activation's derivative."""

    name = "padded_k"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        spec, a, b = product
        is_thin = spec.rule.derivative and extents(spec, a.shape, b.shape).k == 1
        if not is_thin or why_no_epilog(spec, capabilities):
            return None
        return "cuBLASMp multiplies by an activation's derivative only where k is not 1"

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall:
        spec, a, b = product
        shape_a, shape_b = fixed_shape.with_k(spec, a.shape, b.shape, fixed_shape.PADDED_K)
        return RequestedCall(spec, a.update(shape=shape_a), b.update(shape=shape_b))

    def results(self, operands: Operands, **where: Any) -> Operands:
        return self.inner.emit(fixed_shape.padded_along_k(operands, self.spec), **where)

    def facts(self) -> tuple[str, int]:
        algorithm, workspace = self.inner.facts()
        return f"{self.name} ({self.form_why}); {algorithm}", workspace


class SeparateEpilog(ResolvedCall):
    """Has XLA add C to the plain product and apply the epilog, if the library does not have it."""

    name = "separate_epilog"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        return (product.spec.epilog and why_no_epilog(product.spec, capabilities)) or None

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall:
        spec, a, b = product
        out = accumulator(low_precision.operand_type(a.dtype, b.dtype), spec.out_dtype)
        return RequestedCall(spec.bilinear(out_dtype=out, scales=ScaleModes(a=spec.scales.a, b=spec.scales.b)), a, b)

    def results(self, operands: Operands, **where: Any) -> Operands:
        plain = self.inner.emit({name: operands[name] for name in self.inner.spec.names}, **where)
        return numerics.apply_epilog(plain["d"], operands, self.spec.replace(alpha=1.0))


class MaskOfResult(ResolvedCall):
    """Makes the mask of RELU from d, because cuBLASMp's is wrong (`faults.of_mask`)."""

    name = "mask_of_result"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        return None if capabilities.as_documented else faults.of_mask(product.spec) or None

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall:
        spec = product.spec
        return product._replace(spec=spec.replace(epilog=for_activation("relu", spec.rule.has_bias)))

    def results(self, operands: Operands, **where: Any) -> Operands:
        outputs = self.inner.emit(operands, **where)
        return outputs | {"relu_aux": pack_relu_aux(outputs["d"] > 0)}


class TransposedCopy(ResolvedCall):
    """Copies operands of an all-reduce so that they are stored in the form that the library takes."""

    name = "transposed_copy"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        spec, a, b = product
        if not spec.contraction.is_reduced or capabilities.all_reduce_any_transposition:
            return None
        copied = [x for x, is_wrong in ((a, spec.transpose_a), (b, not spec.transpose_b)) if is_wrong]
        why = "cuBLASMp all-reduces with a stored (m, k) and b stored (n, k) only"
        return f"{why}; copying {2 * sum(x.size * x.dtype.itemsize for x in copied)} bytes" if copied else None

    @staticmethod
    def asked(product: RequestedCall) -> RequestedCall:
        spec, a, b = product
        copied = spec.replace(transpose_a=False, transpose_b=True, conjugate_a=False)
        a = a.update(shape=a.shape[::-1]) if spec.transpose_a else a
        return RequestedCall(copied, a, b if spec.transpose_b else b.update(shape=b.shape[::-1]))

    def results(self, operands: Operands, **where: Any) -> Operands:
        a = operands["a"].T if self.spec.transpose_a else operands["a"]
        b = operands["b"] if self.spec.transpose_b else operands["b"].T
        # The library conjugates only operands that it transposes, so the copy is conjugated here.
        a = lax.conj(a) if self.spec.conjugate_a else a
        return self.inner.emit(operands | {"a": a, "b": b}, **where)


class Direct(ResolvedCall):
    """Calls the library once."""

    name = "direct"

    @staticmethod
    def why_taken(product: RequestedCall, capabilities: Capabilities) -> str | None:
        return ""

    def results(self, operands: Operands, **where: Any) -> Operands:
        return custom_call(operands, self.spec, where.get("devices", ()))

    def facts(self) -> tuple[str, int]:
        plan = native.describe_plan(ffi_call.call_attributes(self.spec, self.a, self.b), self.library)
        if self.library == "cublasmp":
            return f"{plan['library']} {plan['algorithm']}; workspace from its first run on", 0
        workspace = max(d + h for d, h in zip(plan["device_workspace"], plan["host_workspace"], strict=True))
        order = "; each element is one sum over k in ascending order, in fixed K blocks, then its epilog"
        order = order if self.spec.fixed_reduction_order else ""
        return f"{plan['library']} {plan['algorithm']} ({plan['kernel']}){order}", workspace


class Xla(ResolvedCall):
    """Has XLA compute everything, except that hostmp multiplies locally on CPUs of several processes."""

    name = "xla"

    def results(self, operands: Operands, **where: Any) -> Operands:
        product = _host_product if self.library == "host" else None
        platform, processes = where.get("platform", "cpu"), where.get("processes")
        return xla_matmul.matmul(operands, self.spec, platform, product, processes)

    def chunks(self) -> deferred.Chunks | None:
        """Returns the chunks of a product between processes, or None if it is not cut."""
        count = chunks_of(self)
        if count == 1:
            return None
        # Placeholder extents: the extents of a chunk do not affect its form.
        product = RequestedCall(_local(self.spec, self.a.dtype), self.a, self.b)
        local = in_library(product, Choice("host", "a chunk"), "host")
        assert isinstance(local, Direct), local
        return deferred.Chunks(count, self.spec, local.spec, local.is_conjugated)

    def facts(self) -> tuple[str, int]:
        if self.implementation in ("host", "cublasmp"):
            return self.form_why, 0
        if self.library:
            count = chunks_of(self)
            chunks = f" in {count} chunks, each multiplied during the collective of another" if count > 1 else ""
            return f"hostmp local Matmul and lax collectives{chunks}", 0
        return ("lax.dot_general and lax collectives" if self.spec.group.nranks > 1 else "lax.dot_general"), 0


# The forms of a library's calls, in order of preference.
FORMS: tuple[type[ResolvedCall], ...] = (Tiles, Gathered, PaddedK, SeparateEpilog, MaskOfResult, TransposedCopy, Direct)


def choose(product: RequestedCall, capabilities: Capabilities) -> tuple[type[ResolvedCall], str]:
    """Returns (the first of FORMS that a library takes for the call, why)."""
    return next((form, why) for form in FORMS if (why := form.why_taken(product, capabilities)) is not None)


def in_library(
    product: RequestedCall, choice: Choice, library: str, capabilities: Capabilities | None = None
) -> ResolvedCall:
    """Returns the call in the first of FORMS that the library ("host" or "cublasmp") takes. Conjugates a and b before
    the call where the library does not. The form is `Xla` for a bias gradient of a d without elements, for
    `faults.of_operands`, and for hostmp if an extent is 2^31 or more. Such an extent raises NotImplementedError if the
    caller asks for a library or a fixed order. Raises also as the form's `asked`. `capabilities`: by default the
    library's."""
    asked = product.spec
    found = extents(asked, product.a.shape, product.b.shape)
    if library == "host" and max(found.m, found.n, found.k) >= 2**31:
        why = f"hostmp counts in 32 bits, and the group's product has m={found.m}, n={found.n}, k={found.k}"
        if asked.asked_of_library:
            raise NotAvailable(
                f"{asked.asked_of_library} is not available here: {why}; shard the operands further, or leave it out "
                "to have XLA multiply"
            )
        return in_form(Xla, "", product, Choice("xla", why))
    if asked.rule.gradient and 0 in found.d:
        return in_form(Xla, "nothing to multiply, but sums to be written", product, choice)
    capabilities = capabilities or backend.capabilities_of(library)
    # A level uses local calls, which have no faults.
    is_level = asked.fixed_reduction_order and not capabilities.fixed_reduction_order
    if not capabilities.as_documented and not is_level and (why := faults.of_operands(asked)):
        return in_form(Xla, why, product, choice)
    # The sum of one rank is its product, and cuBLASMp takes the operands of a local product in any transposition.
    if asked.contraction.is_reduced and asked.group.nranks == 1 and not capabilities.all_reduce_any_transposition:
        asked = fit_comm_options(asked.ungrouped().replace(asks_all_reduce=False))
    # cuBLASMp conjugates only operands that it transposes, and sums only operands that it does not conjugate.
    spec = asked
    if asked.conjugate_a or asked.conjugate_b:
        spec = asked.replace(
            conjugate_a=asked.conjugate_a and asked.transpose_a and asked.epilog != Epilog.BGRADA,
            conjugate_b=asked.conjugate_b and asked.transpose_b,
        )
    is_conjugated = asked.conjugate_a != spec.conjugate_a, asked.conjugate_b != spec.conjugate_b
    product = product._replace(spec=spec)
    form, why = choose(product, capabilities)
    return in_form(form, why, product, choice, library, is_conjugated=is_conjugated, capabilities=capabilities)


def in_form(
    form: type[ResolvedCall],
    why: str,
    product: RequestedCall,
    choice: Choice,
    library: str = "",
    *,
    is_conjugated: tuple[bool, bool] = (False, False),
    capabilities: Capabilities | None = None,
) -> ResolvedCall:
    """Returns the call in this form, taken because of `why`, with its inner call. Raises as `form.asked` does, and as
    `in_library` does with the inner call. `capabilities`: of the inner call."""
    asked = form.asked(product)
    inner: Any = in_library(asked, choice, library, capabilities) if asked else None
    return form(*product, choice.implementation, choice.why, library, why, is_conjugated, inner)


def _on_one_device(operands: Operands, spec: MatmulSpec, library: str) -> Operands:
    """Computes a local product, one of many of a fixed shape, by one call of the library."""
    shards = (jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in "ab")
    capabilities = backend.capabilities_of(library).of_tiles()
    choice = Choice(library, "a tile of a fixed shape")
    return in_library(RequestedCall(spec, *shards), choice, library, capabilities).emit(operands)


def _host_product(a: jax.Array, b: jax.Array, spec: MatmulSpec) -> jax.Array:
    """Returns op(a) @ op(b) on one device, without alpha and epilog, in the accumulator's type by hostmp's call."""
    return _on_one_device({"a": a, "b": b}, _local(spec, a.dtype), "host")["d"]


def _local(spec: MatmulSpec, dtype: np.dtype) -> MatmulSpec:
    return MatmulSpec(accumulator(dtype), **{name: getattr(spec, name) for name in (*FLAGS, "precision")})


def chunks_of(call: ResolvedCall) -> int:
    """Returns the number of chunks of a call; 1 unless hostmp multiplies and XLA's collectives communicate."""
    is_cut = isinstance(call, Xla) and call.library == "host"
    return deferred.chunks_of(call.spec, call.a, call.b) if is_cut else 1
