"""The layers `linear`, `mlp` and `gated_mlp`: shapes of their operands, layouts, and values."""

import cases
from jax.sharding import PartitionSpec as P

ALL = ("data", "model")
MESH = cases.BY_NAME["ag-data"].replace(mesh=(("data", 2), ("model", 2)))
SHAPES = {
    "linear": {"x": (6,), "w": (6, 8), "bias": (8,)},
    "mlp": {"x": (6,), "w_in": (6, 8), "b_in": (8,), "w_out": (8, 4), "b_out": (4,)},
    "gated_mlp": {
        **{"x": (6,), "w_gate": (6, 8), "w_up": (6, 8), "w_down": (8, 4)},
        **{"b_gate": (8,), "b_up": (8,), "b_down": (4,)},
    },
}
# Layout: shardings of x, of weights and bias of the first product, of weights and bias of the second one, and of y.
COLUMNS, ROWS = P(None, "model"), P("model", None)
LAYOUTS = {
    "tensor parallel": (P("data", None), COLUMNS, P("model"), ROWS, P(None), P("data", None)),
    "sequence parallel": (P(ALL, None), COLUMNS, P("model"), ROWS, P(None), P(ALL, None)),
    "batch of sequences": (P("data", "model", None), COLUMNS, P("model"), ROWS, P(None), P("data", "model", None)),
    "replicated weights": (P("data", None), P(None, None), P(None), P(None, None), P(None), P("data", None)),
    "FSDP": (P("data", None), P("data", None), P(None), P("data", None), P(None), P("data", None)),
    "FSDP and tensor parallel": (
        *(P("data", None), P("data", "model"), P("model"), P("model", "data"), P("data"), P("data", None)),
    ),
}


def specs_of(layer, layout):
    """Returns (the sharding of each operand and of the loss's weights, by name, the sharding of y)."""
    x, first, bias, second, last, y = LAYOUTS[layout]
    if layer == "linear":  # y has w's column sharding; rows over the same axis are gathered
        rows = (tuple(axis for axis in _axes(entry) if axis != bias[0]) or None for entry in y[:-1])
        y = P(*rows, bias[0])
        return {"x": x, "w": first, "bias": bias, "ct": y}, y
    if layer == "mlp":
        return {"x": x, "w_in": first, "b_in": bias, "w_out": second, "b_out": P(None), "ct": y}, y
    weights = {"w_gate": first, "w_up": first, "w_down": second, "b_gate": bias, "b_up": bias, "b_down": last}
    return {"x": x, **weights, "ct": y}, y


def _axes(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def data(layer, layout, rng, dtype="float32", draw=cases.normal):
    lead = (4, 8) if len(LAYOUTS[layout][0]) == 3 else (64,) if layout.startswith("FSDP") else (8,)
    shapes = {name: (*lead, *shape) if name == "x" else shape for name, shape in SHAPES[layer].items()}
    values = {name: draw(rng, shape, dtype) for name, shape in shapes.items()}
    values |= {f"t_{name}": draw(rng, shape, dtype) for name, shape in shapes.items()}
    return values | {"ct": draw(rng, (*lead, 8 if layer == "linear" else 4), dtype)}


def place(mesh, x, specs):
    return {name: cases.put(v, mesh, specs[name.removeprefix("t_")]) for name, v in x.items()}


def operands_of(x, prefix=""):
    """Returns the operands of the layer with these names, or with a prefix their tangents, in order."""
    names = next(shapes for shapes in SHAPES.values() if shapes.keys() <= x.keys())
    return [x[f"{prefix}{name}"] for name in names]
