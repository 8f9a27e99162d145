"""Chooses the implementation of a call: the rule for `implementation=None`, and the calls that a library or a card
cannot compute in any form (`forms` has the forms of the other calls). A level is a value of `determinism`. "In a fixed
order" means a level at which every sum over k has one order (`spec.level.fixed_order`)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxmp._src.core.lowering import faults
from jaxmp._src.core.spec import low_precision, precisions
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import INTEGERS, MatmulSpec, accumulator
from jaxmp._src.core.spec.refusal import NotAvailable, NotInstalled
from jaxmp._src.platform.runtime import native

# From this many multiplications and additions per product on, hostmp one by one is no slower than XLA's batched dot.
LARGE_IN_BATCH = 2**25


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The calls that a library takes beyond cuBLASMp's documented ones, declared in csrc/cublasmp/api_table.h."""

    all_reduce_any_transposition: bool = False
    grid_any_shape: bool = False
    grid_epilogs: bool = False
    complex_epilogs: bool = False
    fixed_reduction_order: bool = False
    precise_gelu: bool = False
    as_documented: bool = False

    def of_tiles(self) -> Capabilities:
        """Returns the capabilities for tiles at a level: the library's gelu counts as precise (bits before digits)."""
        return dataclasses.replace(self, precise_gelu=True)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of a call, and the rule that chose it."""

    implementation: str
    why: str


def choose_implementation(
    spec: MatmulSpec, platform: str, unshared_reason: str, operands: tuple[np.dtype, ...] = ()
) -> Choice:
    """Chooses the implementation of a call: the one that the spec asks for, or by default "cublasmp" on GPUs that have
    it, "host" for CPU devices that share calls or multiply alone, and "host+xla" for other CPU devices. The default is
    "xla" on other platforms, for integers other than int8, and for calls that the library does not take.

    `unshared_reason`: why CPU devices of a group share no call, or "" (see `process_barrier`). `operands`: the types of
    a and b, because a card does not take all of them; without them no type is tested.

    Raises:
      NotImplementedError: the implementation that is asked for cannot compute the call, or the order is fixed on a
        platform other than CPUs and the choice is not cuBLASMp.
      RuntimeError: cuBLASMp was asked for and cannot be opened.
    """
    if operands and low_precision.is_mixed(*operands):  # other libraries than hostmp convert to this type
        operands = (low_precision.operand_type(*operands),) * 2
    choice = _choose(spec, platform, unshared_reason, operands)
    if spec.fixed_reduction_order and platform != "cpu" and choice.implementation != "cublasmp":
        raise spec.level.refusal(
            f"is not available on platform {platform!r} with implementation={choice.implementation!r} ({choice.why}), "
            "where the compiler chooses the order of sums",
            'pass implementation="cublasmp"' if (platform, spec.implementation) == ("cuda", "xla") else "",
        )
    return choice


def choose_for_batch(
    spec: MatmulSpec, platform: str, unshared_reason: str, operands: tuple[np.dtype, ...], work: int
) -> tuple[Choice, bool]:
    """Returns (the choice, True) if the whole batch is one product, or (the choice, False) if its products run one by
    one. `work`: the multiplications and additions of one product; a symbolic number counts as small. Raises as
    `choose_implementation` does.

    One by one: products between CPU devices that share no call, next to collectives of the whole batch; products from
    LARGE_IN_BATCH on that hostmp multiplies between ranks or with scaled fp8 or fp4; and products by cuBLASMp of two
    operands of 8 bits or fewer, which XLA widens. hostmp multiplies the batch as one product, after XLA has gathered it
    if there are several ranks ("host+xla"), if it would multiply one, `work` is a number, and the operands are narrower
    than their sums and not scaled fp8 or fp4. XLA multiplies all other batches as one product.
    """
    choice = choose_implementation(spec, platform, unshared_reason, operands)
    wide = low_precision.operand_type(*operands)
    is_narrow = accumulator(wide) != wide or low_precision.is_mixed(*operands)
    if platform == "cpu" and unshared_reason and spec.group.nranks > 1:
        return choice, False
    if choice.implementation == "xla":
        return choice, True
    is_shared, is_low_precision = spec.group.nranks > 1, low_precision.is_low_precision(wide)
    is_known = isinstance(work, int)
    is_large = is_known and work >= LARGE_IN_BATCH
    is_together = is_known and is_narrow and not (spec.scales.are_of_factors and low_precision.is_scaled(wide))
    if choice.implementation == "host" and is_together and not (is_shared and is_large):
        why = "both operands have a batch: one product for all of it"
        return Choice("host+xla" if is_shared else "host", why), True
    gains = (is_large and (is_shared or is_narrow)) if choice.implementation == "host" else is_low_precision
    if gains:
        return dataclasses.replace(choice, why=f"{choice.why}; a batch, one call per index"), False
    return Choice("xla", "both operands have a batch: XLA computes it by one dot and one collective"), True


def _choose(spec: MatmulSpec, platform: str, unshared_reason: str, operands: tuple[np.dtype, ...]) -> Choice:
    """Chooses for operands of one type. Raises as `choose_implementation` does, but does not refuse a fixed order."""
    if spec.implementation == "xla":
        return Choice("xla", "asked for")
    name = np.dtype(operands[0]).name if operands else ""
    if name in INTEGERS:
        why = f"only XLA multiplies {name}"
        if spec.implementation:
            raise NotAvailable(
                f'implementation={spec.implementation!r}: {why}; pass implementation=None or "xla", or convert the '
                "operands"
            )
        return Choice("xla", why)
    if platform == "cuda" and spec.implementation != "host":
        return _choose_on_cuda(spec, operands)
    if spec.implementation == "cublasmp":
        raise NotAvailable(
            f'implementation="cublasmp" is not available on platform {platform!r}, it serves CUDA devices; '
            'pass implementation=None, "host" or "xla"'
        )
    if platform == "cpu" and (not unshared_reason or spec.group.nranks == 1):
        why = why_unsupported(spec, capabilities_of("host")) if spec.contraction.is_grid else ""
        if why and spec.implementation:
            raise NotAvailable(f'implementation="host": {why}; pass implementation=None or "xla"')
        if why:
            return Choice("xla", why)
        return Choice("host", "asked for" if spec.implementation else "CPU devices of one process")
    if spec.implementation == "host":
        where = f" where {unshared_reason}" if platform == "cpu" else ""
        raise NotAvailable(
            f'implementation="host" serves the CPU devices of one process, not platform {platform!r}{where}; '
            'pass implementation=None or "xla"'
        )
    if platform == "cpu":
        return Choice("host+xla", f"{unshared_reason}: each multiplies on its own")
    return Choice("xla", f"no fused implementation for platform {platform!r}")


def _choose_on_cuda(spec: MatmulSpec, operands: tuple[np.dtype, ...]) -> Choice:
    """Chooses "cublasmp", or "xla" if cuBLASMp cannot compute the call or be opened; raises instead if cuBLASMp is
    asked for. A process without GPUs chooses XLA unless cuBLASMp is asked for. Every process chooses the same, because
    all have equal calls, cards of one kind, and equal libraries (`distributed.initialize` compares them)."""
    is_asked = spec.implementation == "cublasmp"
    why = why_unsupported(spec, capabilities_of("cublasmp")) or why_not_cublasmp(spec, operands)
    why = why or why_card_refuses(spec, operands, native.card_capability())
    if why and is_asked:
        raise NotAvailable(f'implementation="cublasmp": {why}; pass implementation=None or "xla"')
    if why:
        return Choice("xla", why)
    if not native.cuda_devices():  # a program for another machine
        if is_asked:
            return Choice("cublasmp", "asked for; whether it is installed shows where the program runs")
        remedy = 'pass implementation="cublasmp" to have it called'
        return Choice("xla", f"lowered without a GPU, where cuBLASMp cannot be looked for; {remedy}")
    why = native.why_no_cublasmp()
    if why and is_asked:
        raise NotInstalled(f'implementation="cublasmp": {why}')
    return (
        Choice("xla", why) if why else Choice("cublasmp", "asked for" if is_asked else "CUDA devices, cuBLASMp is open")
    )


@functools.cache
def capabilities_of(library: str) -> Capabilities:
    """Returns the capabilities of "host" or "cublasmp"."""
    return Capabilities(**(native.capabilities("cublasmp") if library == "cublasmp" else native.capabilities()))


# Calls that are not taken ---------------------------------------------------------------------------------------


def why_unsupported(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Returns why the library takes the call in no form, or "". One reason is a fixed order with an epilog that the
    library does not have; without a fixed order XLA applies such an epilog. The other is a grid of contiguous shards
    that is not square, unless the library takes it or the call is computed as tiles of a fixed shape."""
    # Calls of one shape are local products in every pattern.
    has_tiles = spec.fixed_reduction_order and not capabilities.fixed_reduction_order
    why = why_no_epilog(*((spec.ungrouped(), capabilities.of_tiles()) if has_tiles else (spec, capabilities)))
    if why and spec.fixed_reduction_order:
        return f"{why}, and XLA's would not keep {spec.level}"
    if has_tiles:
        return ""
    is_free = spec.distributions or capabilities.grid_any_shape
    if is_free or not spec.contraction.is_grid:
        return ""
    nrow, ncol = spec.group.shape
    return "" if nrow == ncol else f"cuBLASMp multiplies contiguous shards on square grids only, not {nrow}x{ncol}"


def why_not_cublasmp(spec: MatmulSpec, operands: tuple[np.dtype, ...]) -> str:
    """Returns why cuBLASMp cannot compute the call for operands of these types and its precision, or ""."""
    if precisions.sums_in_16_bits(spec.precision):
        return f"precision={spec.precision} sums in 16 bits, which jaxmp does not ask of cuBLASMp"
    if any(np.dtype(dtype).name == low_precision.INT8 for dtype in operands):
        return "cuBLASMp multiplies int8 to float32 only, not to int32"
    return ""


# The lowest compute capabilities with cuBLASMp's float8 products (cublasmp.h 0.10, cublasMpMatmul; its scale modes
# begin at 8.9) and with its scales of blocks (cublasMpMatmulMatrixScale_t), and the only one with the other modes.
_FLOAT8_CARD, _BLOCK_CARD, _HOPPER = (9, 0), (10, 0), (9, 0)
_HOPPER_MODES = (low_precision.OUTER_VEC, low_precision.VEC128, low_precision.BLK128)


def why_card_refuses(spec: MatmulSpec, operands: tuple[np.dtype, ...], capability: tuple[int, int] | None) -> str:
    """Returns why a card of this compute capability does not multiply float8 or float4 operands with the spec's scales.
    "" if it does, for other types, and if `capability` is None (the program is for another machine)."""
    names = [np.dtype(dtype).name for dtype in operands]
    if capability is None or not any(name in low_precision.SCALED for name in names):
        return ""
    modes = {spec.scales.a, spec.scales.b}
    has = f"this card has {capability[0]}.{capability[1]}"
    if modes & {low_precision.VEC16, low_precision.VEC32} or low_precision.FLOAT4 in names:
        kind = "NVFP4" if low_precision.FLOAT4 in names else "MXFP8"
        return "" if capability >= _BLOCK_CARD else f"{kind} needs compute capability 10.0 or later, {has}"
    if hopper := sorted(modes.intersection(_HOPPER_MODES)):
        return "" if capability == _HOPPER else f"scales of {hopper[0]} need compute capability 9.0, {has}"
    return "" if capability >= _FLOAT8_CARD else f"{names[0]} needs compute capability 9.0 or later, {has}"


def why_no_epilog(spec: MatmulSpec, capabilities: Capabilities) -> str:
    """Returns why the library lacks the spec's epilog (complex numbers, a grid, a fault). "" if it has the epilog or
    for NONE."""
    if spec.epilog == Epilog.NONE:
        return ""
    # From the table of types of cublasLtMatmul (cuBLAS 13 documentation), which computes the local products.
    if np.issubdtype(np.dtype(spec.out_dtype), np.complexfloating) and not capabilities.complex_epilogs:
        return "cuBLASMp has no epilogs of complex numbers"
    if spec.contraction.is_grid and not capabilities.grid_epilogs:
        return "cuBLASMp has no epilogs on 2-D grids"
    why = "" if capabilities.precise_gelu else faults.of_gelu(spec)
    return why or ("" if capabilities.as_documented else faults.of_epilog(spec))
