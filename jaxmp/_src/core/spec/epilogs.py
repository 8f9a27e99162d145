"""Epilogs: what the bits of an epilog's number say about its inputs, its outputs and its gradient."""

from __future__ import annotations

import dataclasses
import enum


class Epilog(enum.IntEnum):
    """The operation on `z = alpha * op(a) @ op(b) + beta * c` before it is stored.

    ALLREDUCE is a bit: alone, or with another as in `Epilog.ALLREDUCE | Epilog.BIAS`. It says that the ranks' products
    are summed on every rank. The all-reduce pattern does so with and without the bit; other patterns refuse it.

    BIAS adds the input "bias" (n,) to z. AUX also returns what the gradient reads: "gelu_aux", z (m, n), or "relu_aux",
    its signs as packed bits. DRELU and DGELU multiply z by the derivative of the activation at this input. BGRAD then
    also returns d summed over its rows, (n,); BGRADA op(a) summed over k, (m,); BGRADB op(b) summed over k, (n,).

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


# Bits of an epilog's number, as in cuBLASLt and in csrc/plan/matmul_problem.h.
_BIAS, _BGRAD, _AUX = 4, 16, 128
_ACTIVATIONS, _DERIVATIVES = {2: "relu", 32: "gelu"}, {8: "relu", 64: "gelu"}


@dataclasses.dataclass(frozen=True)
class EpilogRule:
    """The inputs, outputs and gradient of an epilog, read from the bits of its number.

    `activation`: the activation applied to z, "relu" or "gelu"; or None. `aux`: the result that stores z, or its signs:
    "gelu_aux" or "relu_aux"; or None. `with_aux`: the epilog of the same D that also stores it; None without
    activation. `derivative`: z is multiplied by the derivative of this activation, which is computed from the input
    `aux_input`; without it, None and "". `gradient`: the name of the result of BGRAD, BGRADA or BGRADB, or "";
    `without_gradient` is the epilog that omits it. `inputs`, `outputs`: the names of the operands after a, b and c, and
    of the results after d, in order."""

    activation: str | None
    has_bias: bool
    aux: str | None
    with_aux: Epilog | None
    derivative: str | None
    aux_input: str
    gradient: str
    without_gradient: Epilog
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, epilog: Epilog) -> EpilogRule:
        """Returns the rule of `epilog`, which must not have the ALLREDUCE bit: the rule would keep it."""
        activation, derivative = (
            next((name for bit, name in names.items() if epilog & bit), None) for names in (_ACTIVATIONS, _DERIVATIVES)
        )
        aux = f"{activation}_aux" if activation and epilog & _AUX else None
        gradient = {_BGRAD: f"d{derivative}_bgrad", Epilog.BGRADA: "bgrada", Epilog.BGRADB: "bgradb"}
        bit = next((bit for bit in gradient if epilog & bit), 0)
        sums, aux_input = gradient.get(bit, ""), f"{derivative}_aux" if derivative else ""
        with_aux = Epilog(epilog | _AUX) if activation else None
        bias = "bias" if epilog & _BIAS else ""
        inputs, outputs = (tuple(name for name in names if name) for names in ((bias, aux_input), (aux, sums)))
        without = Epilog(epilog & ~bit)
        return cls(activation, bool(bias), aux, with_aux, derivative, aux_input, sums, without, inputs, outputs)


RULES: dict[Epilog, EpilogRule] = {epilog: EpilogRule.of(epilog) for epilog in Epilog if epilog != Epilog.ALLREDUCE}

# Epilogs that sum an operand, and the epilog to use after the operands are exchanged.
TRANSPOSED = {Epilog.BGRADA: Epilog.BGRADB, Epilog.BGRADB: Epilog.BGRADA}


def for_activation(activation: str | None, has_bias: bool) -> Epilog:
    """Returns the epilog without aux that applies `activation` (None, "relu" or "gelu"), with or without a bias."""
    bits = sum(bit for bit, name in _ACTIVATIONS.items() if name == activation)
    return Epilog(bits | _BIAS * has_bias)
