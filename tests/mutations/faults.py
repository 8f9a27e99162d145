"""The seeded faults: each stands in place of one function, and some test has to notice it. `seeded` puts a Python fault
in place of `module:name` when the module is imported; the fault gets the original and its arguments. `CPP` names the
function of each fault of faults.cc. Both name the tests that show the fault: a file of tests, one test of it, or `cpp:`
and a C++ test. Faults that no test can see (another order of equal work, a slower way) do not belong here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """`replace` stands in place of the function `name` of `module`; a fault of C++ has none, and `name` begins the
    function's signature."""

    module: str
    name: str
    tests: tuple[str, ...]
    replace: Callable[..., Any] | None = None


PYTHON: dict[str, Fault] = {}


def seeded(target: str, *tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    module, name = target.split(":")

    def add(replace: Callable[..., Any]) -> Callable[..., Any]:
        PYTHON[replace.__name__] = Fault(f"jaxmp._src.{module}", name, tests, replace)
        return replace

    return add


@seeded("core.contraction.moves:entry", "core/product/test_drawn_contractions.py")
def a_gathered_operand_has_no_sum_in_its_gradient(original, *args):
    dims, gathers = original(*args)
    return dims, tuple(gather._replace(varies=not gather.varies) for gather in gathers)


@seeded("core.contraction.moves:received", "core/product/test_grids_along_k.py", "core/product/test_hlo.py")
def nothing_costs_to_move(original, *args):
    return 0


@seeded(
    "core.contraction.contraction:Contraction.dimension",
    "core/product/test_batches.py",
    "core/product/test_dot_general.py",
)
def rows_behind_a_batch_are_gathered_as_the_batch(original, contraction):
    return 0


@seeded(
    "core.contraction.contraction:Contraction.columns",
    "core/product/test_dot_general.py",
    "core/product/test_drawn_contractions.py",
)
def shared_columns_do_not_come_first(original, contraction):
    return contraction.cols


@seeded(
    "core.contraction.planner:_divides",
    "core/product/test_any_sharding.py::test_axes_that_do_not_divide_a_dimension_do_not_split_it",
)
def axes_need_not_divide_a_dimension(original, call, extents, mesh):
    return True


@seeded(
    "core.primitive.collectives:all_gather", "core/product/test_drawn_contractions.py", "core/product/test_table.py"
)
def two_axes_gather_in_the_wrong_order(original, x, axes, **options):
    return original(x, axes[::-1], **options)


@seeded("core.spec.process_grid:BlockCyclic.indices", "core/product/test_block_cyclic.py")
def the_first_process_of_a_grid_is_always_the_first(original, layout, shape, dimension):
    return original(dataclasses.replace(layout, first=(0, 0)), shape, dimension)


@seeded("core.lowering.xla_matmul:without_padding", "core/product/test_block_cyclic.py")
def what_lies_in_the_padding_of_c_reaches_d(original, spec, d):
    return d


@seeded("core.spec.wire:swizzle", "core/product/test_quantize.py", "core/product/test_low_precision.py")
def scales_of_blocks_lie_row_by_row(original, scales):
    swizzled = original(scales)
    return swizzled.reshape(-1, 32, 16).swapaxes(1, 2).reshape(-1)


@seeded("core.ops.einsum:_permuted", "core/product/test_einsum.py")
def operands_that_change_places_leave_their_shardings(original, *args):
    return args[1]


@seeded("core.primitive.transpose:cotangent_of_a", "core/product/test_table.py")
def a_cotangent_ignores_conjugation(original, ct, a, b, *, spec):
    return original(ct, a, b, spec=spec.replace(conjugate_b=False))


@seeded("core.primitive.transpose:reduced_cotangent", "core/product/test_table.py", "core/product/test_transforms.py")
def without_types_a_cotangent_of_a_sum_is_of_one_rank(original, spec, ct):
    return ct


@seeded("core.primitive.jvp:_widened", "core/product/test_low_precision_transforms.py")
def a_derivative_ignores_the_scale_of_an_operand(original, operands, spec):
    return original({name: x for name, x in operands.items() if name != "scale_b"}, spec)


@seeded("core.primitive.batching:_front", "core/product/test_batches.py")
def vmap_takes_the_first_dimension(original, x, dim):
    return x


@seeded("core.primitive.batching:_crosses_blocks", "core/product/test_table.py", "core/product/test_batches.py")
def a_batch_of_blocks_becomes_columns(original, *args):
    return False


@seeded("core.primitive.bias_grad:bias_gradient", "core/product/test_table.py")
def a_bias_gradient_has_the_sums_of_one_rank(original, name, spec, x):
    return original(name, spec.ungrouped(), x)


@seeded("core.sharding.shard_local:_sum_over_data", "core/product/test_table.py")
def a_bias_gradient_is_not_summed_over_data(original, spec, outputs, axes):
    return outputs


@seeded("core.spec.activations:unpack_relu_aux", "core/product/test_epilogs.py", "core/product/test_table.py")
def a_mask_is_read_from_the_other_end_of_a_byte(original, aux, n):
    import jax.numpy as jnp

    return jnp.unpackbits(aux, axis=-1, count=n).astype(bool)


@seeded("core.spec.activations:_constants", "core/product/test_table.py")
def gelu_is_off_in_the_fifth_digit(original, z):
    first, second = original(z)
    return first, second * 1.001


@seeded("core.spec.low_precision:encode", "core/product/test_low_precision_results.py", "core/product/test_quantize.py")
def large_results_do_not_saturate(original, x, dtype):
    return x.astype(dtype)


@seeded("core.ops.activated:activate", "core/product/test_layers.py")
def a_gated_layer_activates_the_other_product(original, f, zs):
    return original(f, tuple(part[::-1] for part in zs))


@seeded("core.lowering.ffi_call:_transposition", "core/product/test_table.py")
def a_call_forgets_conjugation(original, is_transposed, is_conjugated):
    return original(is_transposed, False)


@seeded("core.lowering.ffi_call:_aliases", "core/product/test_in_place.py")
def c_is_copied_for_d(original, spec):
    return {}


@seeded("core.primitive.row_order:unfolded", "core/determinism/test_determinism_meshes.py")
def gathered_rows_are_summed_rank_after_rank(original, spec, x, dimension):
    return x


@seeded("core.primitive.row_order:_is_contiguous", "core/determinism/test_determinism_meshes.py")
def interleaved_rows_count_as_contiguous(original, layout):
    return True


@seeded("core.primitive.batching:may_batch", "core/determinism/test_determinism.py", "core/product/test_batches.py")
def a_batch_under_a_level_may_go_to_xla(original, spec, *operands):
    return original(dataclasses.replace(spec, determinism="run_to_run"), *operands)


@seeded("core.lowering.process_barrier:numbered", "jobs/test_products.py")
def ranks_count_from_the_other_end(original, axes, names):
    ranks = original(axes, names)
    return ranks.max() - ranks


@seeded("platform.jax_internals.jax_lowering:next_index", "jobs/test_products.py")
def calls_of_a_program_share_one_number(original, ctx, key):
    return 0


@seeded("core.sharding.ragged:bounds_of", "core/product/test_ragged_dot.py::test_sizes")
def negative_sizes_count(original, sizes, *rest):
    return original(abs(sizes), *rest)


@seeded("core.sharding.ragged:_split", "core/product/test_ragged_dot_meshes.py::test_a_level_on_a_mesh")
def a_sum_under_a_level_is_split(original, *shardings, keeps_k):
    return original(*shardings, keeps_k=False)


@seeded("core.ops.moe_mlp:_permuted", "core/product/test_moe_layers.py::test_published_forms")
def tokens_are_not_sorted(original, x, order):
    return x


@seeded("core.sharding.ragged:shared_axes", "fuse/test_groups_of_rows.py::test_automatic_axes")
def experts_gather_their_rows(original, spec, mesh, rows, groups):
    return ()


CPP = {
    name: Fault("", f"jaxmp::{function}", tuple(tests))
    for name, function, *tests in (
        ("alpha_of_ordered_sums", "hostmp::SimdGemm", "cpp:hostmp_kernels"),
        ("other_half_on_its_first_row", "hostmp::TileStore::Mirror", "cpp:hostmp_symmetric"),
        ("few_columns_keep_the_last_block", "hostmp::SimdSmallNGemm", "cpp:hostmp_kernels"),
        (
            "bf16_is_cut",
            "hostmp::Downconvert(float const*, jaxmp::hostmp::BFloat16*, long)",
            "core/product/test_table.py",
        ),
        ("large_is_encoded_as_zero", "hostmp::Encode", "cpp:hostmp_narrow"),
        ("scale_of_decoded_numbers", "hostmp::Decode(…, jaxmp::hostmp::BFloat16*)", "cpp:hostmp_narrow"),
        ("half_byte_that_begins_a_row", "hostmp::Unpack", "core/product/test_mixed_types.py"),
        ("amax_behind_the_scale", "hostmp::DownconvertTile", "core/product/test_low_precision_results.py"),
        ("slope_of_gelu", "hostmp::GeluSlope(float*, long)", "cpp:hostmp_products"),
        ("padding_of_aux", "hostmp::FinishTile", "cpp:hostmp_products"),
        ("last_piece_of_a_bias_gradient", "hostmp::SumPiece", "cpp:hostmp_products"),
        ("ranks_agree_on_anything", "hostmp::CheckAgreement", "cpp:hostmp_agreement"),
        ("order_of_segments", "hostmp::MakeTiling", "core/determinism/test_determinism_meshes.py"),
        ("first_process_of_d", "MakeDistribution", "cpp:plan_layout"),
        ("fields_are_not_compared", "Prepare(jaxmp::CallSignature)", "cpp:process_barrier"),
        ("ranks_in_another_order", "RunCollective", "cpp:shared_memory"),
    )
}

FAULTS = PYTHON | CPP
