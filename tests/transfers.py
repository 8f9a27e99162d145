"""Law 7: the transfers that `explain` prints are the collectives of the compiled program, by kind, mesh axes and bytes.
Values cannot show a difference: a program with an unexpected collective is right, and slow."""

from collections import Counter
from unittest import mock

import jaxmp
from jaxmp._src.platform.jax_internals import jax_compiled
from jaxmp._src.tools.explain.hlo import COLLECTIVES


def check(program, *args):
    """Compiles `program` once and compares; returns (the rows of `explain`, the compiled program)."""
    recompile, programs = jax_compiled.recompile, []

    def keep(*given):
        programs.append(recompile(*given))
        return programs[-1]

    with mock.patch.object(jax_compiled, "recompile", keep):
        explanation = jaxmp.explain(program, quiet=True, compiled=True)(*args)
    differ = differences(explanation)
    assert not differ, f"(kind, axes): bytes that explain says, and that the program receives: {differ}"
    return explanation.calls.rows, programs[-1]


def differences(explanation):
    """Returns the bytes that a device receives, by kind and axes, if `explain` and the compiled program disagree. XLA
    merges equal collectives, such as in a forward pass and in its recomputation."""
    rows, said, once, done = set(), Counter(), Counter(), Counter()
    for row in explanation.calls.rows:
        for each in row.transfers if row.implementation != "host" else ():  # "host": ranks read each other's operands
            key, nbytes = (each.kind.replace("_", "-"), tuple(sorted(each.axes))), row.count * each.nbytes
            said[key] += nbytes
            once[key] += nbytes * ((key, nbytes) not in rows)
            rows.add((key, nbytes))
    for row in explanation.rows:
        if row.kind in COLLECTIVES:
            done[row.kind, tuple(sorted(row.axes))] += row.nbytes * (row.count or 1)
    return {key: (said[key], done[key]) for key in said | done if not once[key] <= done[key] <= said[key]}
