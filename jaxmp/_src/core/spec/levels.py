"""The demands of each level of determinism on a call. docs/determinism.md has the promises; other modules ask here.

`fixed_order` ("batch", "topology"): every element of D is one sum over k in one order, and its epilog is the library's
own arithmetic. So

- kernels are jaxmp's own; calls of a library that promises no order all have one shape (`lowering/fixed_shape`), and
  k is never split between them (`lowering/forms.Gathered`);
- XLA moves operands and results, but neither multiplies nor adds, and applies no epilog: not to a product that is
  computed transposed, not after alpha and beta that are arrays, not to the results of an activation or a batch;
- operands are not gathered along k, nor before a call, if that would change the sums of their gradients.

`global_order` ("topology"): calls also make the sums over ranks, over axes in the order of the global array. So
gradients are such calls too (`primitive/row_order`), and a sum that XLA would make is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from jaxmp._src.core.spec.refusal import InvalidValue, NotAvailable

Determinism = Literal["run_to_run", "batch", "topology"]


@dataclasses.dataclass(frozen=True)
class Level:
    """The name of a level, and what it demands (module docstring)."""

    name: Determinism
    fixed_order: bool = False
    global_order: bool = False

    def __str__(self) -> str:
        return f"determinism={self.name!r}"

    @property
    def asked(self) -> str:
        """The argument as a user writes it."""
        return f'determinism="{self.name}"'

    @functools.cached_property
    def option(self) -> dict[str, Any]:
        """The level as an argument of a public function, and as a field of a spec."""
        return {"determinism": self.name}

    def refusal(self, text: str, remedy: str = "") -> NotAvailable:
        """Returns, but does not raise, the error for a call that no fixed order allows; `text` says why. Advises
        `remedy`, if there is one, or to pass "run_to_run"."""
        return NotAvailable(f"{self} {text}; {remedy + ', or ' if remedy else ''}pass {ANY_ORDER.asked}")

    def mesh_refusal(self, text: str, remedy: str) -> NotAvailable:
        """Returns, but does not raise, the error for a call that the order of the global array does not allow; `text`
        says why. Advises `remedy` or to pass "batch"."""
        return NotAvailable(f"{self.asked} {text}; {remedy}, or pass {ANY_MESH_ORDER.asked}")


ANY_ORDER = Level("run_to_run")
ANY_MESH_ORDER = Level("batch", fixed_order=True)
GLOBAL_ORDER = Level("topology", fixed_order=True, global_order=True)
_LEVELS = {level.name: level for level in (ANY_ORDER, ANY_MESH_ORDER, GLOBAL_ORDER)}


def parse(name: Any) -> Level:
    """Returns the level of this name. Raises ValueError if there is none."""
    names = tuple(_LEVELS)  # any value can be compared with them, also one without a hash
    if name not in names:
        raise InvalidValue(f"determinism must be one of {names}, got {name!r}")
    return _LEVELS[name]
