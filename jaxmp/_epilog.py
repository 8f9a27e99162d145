"""One table: epilog to its inputs, its outputs and the form that keeps what its gradient needs."""

from __future__ import annotations

import dataclasses
import enum


class Epilog(enum.IntEnum):
    """What is done to `z = alpha * op(a) @ op(b) + beta * c` before it is stored.

    Names and numbers are those of `cublasMpMatmulEpilogue_t` (cublasmp.h 0.10); NONE is its DEFAULT.
    """

    NONE = 0
    DEFAULT = 0
    ALLREDUCE = 1
    RELU = 2
    RELU_AUX = 130
    BIAS = 4
    RELU_BIAS = 6
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    GELU = 32
    GELU_AUX = 160
    GELU_BIAS = 36
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADA = 256
    BGRADB = 512


@dataclasses.dataclass(frozen=True)
class EpilogRule:
    """A row of the table.

    `with_aux` is the epilog that computes the same D and also stores `aux`, which the gradient reads;
    None where the gradient needs nothing.
    """

    activation: str | None = None
    has_bias: bool = False
    aux: str | None = None
    with_aux: Epilog | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands that the epilog adds to a, b and c, in order."""
        return ("bias",) if self.has_bias else ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results that the epilog adds to d, in order."""
        return (self.aux,) if self.aux else ()


_RULES = {
    Epilog.NONE: EpilogRule(),
    Epilog.BIAS: EpilogRule(has_bias=True),
    Epilog.RELU: EpilogRule("relu", with_aux=Epilog.RELU_AUX),
    Epilog.RELU_AUX: EpilogRule("relu", aux="relu_aux", with_aux=Epilog.RELU_AUX),
    Epilog.RELU_BIAS: EpilogRule("relu", True, with_aux=Epilog.RELU_AUX_BIAS),
    Epilog.RELU_AUX_BIAS: EpilogRule("relu", True, "relu_aux", Epilog.RELU_AUX_BIAS),
    Epilog.GELU: EpilogRule("gelu", with_aux=Epilog.GELU_AUX),
    Epilog.GELU_AUX: EpilogRule("gelu", aux="gelu_aux", with_aux=Epilog.GELU_AUX),
    Epilog.GELU_BIAS: EpilogRule("gelu", True, with_aux=Epilog.GELU_AUX_BIAS),
    Epilog.GELU_AUX_BIAS: EpilogRule("gelu", True, "gelu_aux", Epilog.GELU_AUX_BIAS),
}


def rule(epilog: Epilog) -> EpilogRule:
    """The table's row for `epilog`; NotImplementedError names those that are not there yet."""
    if epilog not in _RULES:
        have = ", ".join(e.name for e in _RULES)
        raise NotImplementedError(f"epilog {epilog.name} is not implemented; implemented are {have}")
    return _RULES[epilog]


def for_activation(activation: str | None, has_bias: bool) -> Epilog:
    """The epilog without aux that applies `activation` (None, "relu" or "gelu"), with or without a bias."""
    for epilog, row in _RULES.items():
        if row.activation == activation and row.has_bias == has_bias and row.aux is None:
            return epilog
    raise ValueError(f'activation must be None, "relu" or "gelu", got {activation!r}')
