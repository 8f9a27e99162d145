"""Distributed matrix multiplication for JAX."""

import importlib.metadata as _metadata

from jaxmp import distributed, quantize
from jaxmp._src.core import registration as _registration  # noqa: F401  registers the rules of the primitives
from jaxmp._src.core.ops.block_cyclic import BlockCyclicArray, from_block_cyclic, to_block_cyclic
from jaxmp._src.core.ops.collective_matmul import (
    all_gather_matmul,
    block_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxmp._src.core.ops.dot_general import dot_general
from jaxmp._src.core.ops.einsum import einsum
from jaxmp._src.core.ops.gated_mlp import gated_mlp
from jaxmp._src.core.ops.matmul import linear, matmul
from jaxmp._src.core.ops.mlp import mlp
from jaxmp._src.core.ops.moe_mlp import moe_mlp
from jaxmp._src.core.ops.ragged_all_to_all import ragged_all_to_all
from jaxmp._src.core.ops.ragged_dot import ragged_dot
from jaxmp._src.core.ops.ragged_dot_general import ragged_dot_general
from jaxmp._src.core.primitive.primitives import dots_saveable
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.options import CommOptions
from jaxmp._src.core.spec.process_grid import BlockCyclic
from jaxmp._src.fuse.fuse import fuse
from jaxmp._src.platform.hardware.hardware import Hardware
from jaxmp._src.platform.runtime import config as _config
from jaxmp._src.platform.runtime.native import plan_cache_clear, plan_cache_info, register
from jaxmp._src.tools.advise.advise import Advice, advise
from jaxmp._src.tools.advise.program import ProgramAdvice
from jaxmp._src.tools.audit.audit import audit
from jaxmp._src.tools.audit.table import Audit
from jaxmp._src.tools.draw.draw import Drawing, draw
from jaxmp._src.tools.explain.compiled import CompiledExplanation
from jaxmp._src.tools.explain.explain import assert_no_collectives, explain
from jaxmp._src.tools.explain.table import Explanation
from jaxmp._src.tools.profile.profile import Profile, profile
from jaxmp.distributed import DistributedError

__version__ = _metadata.version("jaxmp")

__all__ = [
    "Advice",
    "Audit",
    "BlockCyclic",
    "BlockCyclicArray",
    "CommOptions",
    "CompiledExplanation",
    "DistributedError",
    "Drawing",
    "Epilog",
    "Explanation",
    "Hardware",
    "Profile",
    "ProgramAdvice",
    "Scaling",
    "advise",
    "all_gather_matmul",
    "assert_no_collectives",
    "audit",
    "block_matmul",
    "distributed",
    "dot_general",
    "dots_saveable",
    "draw",
    "einsum",
    "explain",
    "from_block_cyclic",
    "fuse",
    "gated_mlp",
    "linear",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mlp",
    "moe_mlp",
    "plan_cache_clear",
    "plan_cache_info",
    "profile",
    "quantize",
    "ragged_all_to_all",
    "ragged_dot",
    "ragged_dot_general",
    "register",
    "to_block_cyclic",
]

_config.warn_of_unknown(stacklevel=3)
