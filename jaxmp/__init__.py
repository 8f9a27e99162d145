"""Distributed matrix multiplication for JAX."""

import importlib.metadata as _metadata

from jaxmp import _autodiff as _autodiff
from jaxmp import _batching as _batching
from jaxmp import _config as _config
from jaxmp import _lowering as _lowering
from jaxmp import _partitioning as _partitioning
from jaxmp import distributed as distributed
from jaxmp import quantize as quantize
from jaxmp import reference as reference
from jaxmp._api import all_gather_matmul as all_gather_matmul
from jaxmp._api import block_matmul as block_matmul
from jaxmp._api import linear as linear
from jaxmp._api import matmul as matmul
from jaxmp._api import matmul_all_reduce as matmul_all_reduce
from jaxmp._api import matmul_reduce_scatter as matmul_reduce_scatter
from jaxmp._api import mlp as mlp
from jaxmp._block_cyclic import BlockCyclicArray as BlockCyclicArray
from jaxmp._block_cyclic import from_block_cyclic as from_block_cyclic
from jaxmp._block_cyclic import to_block_cyclic as to_block_cyclic
from jaxmp._dot_general import dot_general as dot_general
from jaxmp._einsum import einsum as einsum
from jaxmp._epilog import Epilog as Epilog
from jaxmp._explain import Explanation as Explanation
from jaxmp._explain import explain as explain
from jaxmp._layout import BlockCyclic as BlockCyclic
from jaxmp._narrow import Scales as Scales
from jaxmp._native import plan_cache_clear as plan_cache_clear
from jaxmp._native import plan_cache_info as plan_cache_info
from jaxmp._native import register as register
from jaxmp._primitive import dots_saveable as dots_saveable
from jaxmp._scaled_matmul import scaled_matmul as scaled_matmul
from jaxmp.distributed import DistributedError as DistributedError

__version__ = _metadata.version("jaxmp")

_config.warn_of_unknown(stacklevel=3)
