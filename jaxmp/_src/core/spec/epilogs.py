"""One table: for each epilog, its inputs, its outputs, and the epilog that also stores what the gradient needs."""

from __future__ import annotations

import dataclasses
import enum
import functools


class Epilog(enum.IntEnum):
    """The operation on `z = alpha * op(a) @ op(b) + beta * c` before it is stored.

    ALLREDUCE is a bit: alone, or with another as in `Epilog.ALLREDUCE | Epilog.BIAS`. It says that the ranks' products
    are summed on every rank. The all-reduce pattern does so with and without the bit; other patterns refuse it.

    Names and numbers are as in `cublasMpMatmulEpilogue_t` (cublasmp.h 0.10); NONE is its DEFAULT.
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

    `with_aux`: the epilog that computes the same D and also stores `aux`, which the gradient reads; None if the
    gradient needs nothing. `derivative`: z is multiplied by the derivative of this activation. `gradient`: the name of
    the bias gradient, a further result, or empty; `without_gradient` is the epilog that omits it.
    """

    activation: str | None = None
    has_bias: bool = False
    aux: str | None = None
    with_aux: Epilog | None = None
    derivative: str | None = None
    gradient: str = ""
    without_gradient: Epilog = Epilog.NONE

    @functools.cached_property
    def aux_input(self) -> str:
        """The aux output of the forward call that a derivative reads, or nothing."""
        return f"{self.derivative}_aux" if self.derivative else ""

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands that the epilog adds to a, b and c, in order."""
        names = ("bias" if self.has_bias else "", self.aux_input)
        return tuple(name for name in names if name)

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results that the epilog adds to d, in order."""
        return tuple(name for name in (self.aux, self.gradient) if name)


# By epilog without the ALLREDUCE bit.
RULES = {
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
    Epilog.DRELU: EpilogRule(derivative="relu"),
    Epilog.DRELU_BGRAD: EpilogRule(derivative="relu", gradient="drelu_bgrad", without_gradient=Epilog.DRELU),
    Epilog.DGELU: EpilogRule(derivative="gelu"),
    Epilog.DGELU_BGRAD: EpilogRule(derivative="gelu", gradient="dgelu_bgrad", without_gradient=Epilog.DGELU),
    Epilog.BGRADA: EpilogRule(gradient="bgrada"),
    Epilog.BGRADB: EpilogRule(gradient="bgradb"),
}

# Epilogs that sum an operand, and the epilog to use after the operands are exchanged.
TRANSPOSED = {Epilog.BGRADA: Epilog.BGRADB, Epilog.BGRADB: Epilog.BGRADA}


def for_derivative(activation: str, has_gradient: bool) -> Epilog:
    """The epilog that multiplies by the derivative of `activation`, with or without the bias gradient."""
    return next(e for e, row in RULES.items() if row.derivative == activation and bool(row.gradient) == has_gradient)


def for_activation(activation: str | None, has_bias: bool) -> Epilog:
    """The epilog without aux that applies `activation` (None, "relu" or "gelu"), with or without a bias."""
    return next(
        epilog
        for epilog, row in RULES.items()
        if row.activation == activation and row.has_bias == has_bias and row.aux is None
    )
