"""Draw the pictures of the benchmarks, from benchmarks/results, and of the patterns.

    python benchmarks/plots.py docs/pictures

Pictures of one machine are of the one with AMX. Each picture is drawn for light and for dark pages.
"""

import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import jax
import matplotlib.pyplot as plt
import numpy as np
import tables
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

RESULTS = tables.load()
AMX = RESULTS["amx"]
OURS, THEIRS, THIRD = "#4878d0", "#d65f5f", "#6acc64"  # told apart by most colour-blind readers, on white and on black
LAYOUT = {"sharex": True, "sharey": True, "layout": "constrained"}  # of panels that share their axes
INKS = {"light": "#202020", "dark": "#d0d0d0"}


def rates():
    """Rates of every row of the sharded products, as shares of the limit, by type and shape."""
    rows = AMX["matmul"]["rows"]
    types = list(dict.fromkeys(row["types"] for row in rows))
    figure, axes = plt.subplots(1, len(types), figsize=(10, 3.4), sharey=True)
    for axis, kind in zip(axes, types, strict=True):
        here = [row for row in rows if row["types"] == kind]
        shapes = list(dict.fromkeys(row["m x k x n"] for row in here))
        for offset, colour, name in ((-0.15, OURS, "jaxmp"), (0.15, THEIRS, "XLA")):
            shares = [share_of_limit(row, name) for row in here]
            places = [shapes.index(row["m x k x n"]) + offset for row in here]
            axis.plot(places, shares, "o", color=colour, markersize=4, alpha=0.8, label=name)
        axis.axhline(1, linewidth=0.8, linestyle="--", color="gray")
        axis.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
        axis.set_title(kind.replace("->", "→"), fontsize=9)
        axis.set_ylim(0, 1.65)
    axes[0].set_ylabel("rate / limit")
    axes[0].legend(loc="lower right", fontsize=8)
    return figure


def share_of_limit(row, name):
    """A row's rate as a share of the better rate of one device."""
    return row[name] / max(row["one dev. XLA"], row["one dev. jaxmp"])


def name_rows(axis, names):
    """Names at the left, and a line where a ratio is 1."""
    axis.axvline(1, linewidth=0.8, linestyle="--", color="gray")
    axis.set_yticks(range(len(names)), names, fontsize=8)


def against_xla():
    """Geometric means of jaxmp's rate to XLA's, by type and size, and the worst rows, on each machine."""
    machines = {
        f"{name}, JAX {sections['matmul']['machine']['versions']['jax']}": sections["matmul"]["means"]
        for name, sections in RESULTS.items()
        if "matmul" in sections
    }
    figure, axes = plt.subplots(1, len(machines), figsize=(10, 4), **LAYOUT)
    for axis, (machine, means) in zip(axes, machines.items(), strict=True):
        rows = means[::-1]
        for i, row in enumerate(rows):
            mean, worst = row["jaxmp / XLA"]
            axis.barh(i, mean, color=OURS, height=0.65)
            axis.plot(worst, i, "|", color=THEIRS, markersize=12, markeredgewidth=2)
            axis.text(mean + 0.05, i, f"{mean:.2f}", va="center", fontsize=8)
        name_rows(axis, [f"{row['types'].replace('->', '→')}, {row['sizes']}" for row in rows])
        axis.margins(x=0.15)
        axis.set_title(machine, fontsize=9)
    figure.supxlabel("jaxmp's rate / XLA's (bar: geometric mean; mark: worst row)", fontsize=9)
    return figure


def models():
    """Plots the time of plain JAX over jaxmp's for layers, a training step and fused models, on each machine."""
    kinds = {
        "layers": ("layer", "gradient"),
        "step": ("step in shard_map", "lax / jaxmp"),
        "fuse": ("model through fuse", "plain / fuse"),
    }
    rows = {
        (machine, row.get(name, name), row.get("type", row.get("types"))): row[ratio]
        for machine, sections in RESULTS.items()
        for section, (name, ratio) in kinds.items()
        for row in sections.get(section, {}).get("means", ())
    }
    return ratios(rows, "time of plain JAX / jaxmp's (point: geometric mean; mark: worst row)")


def jobs():
    """Plots the time of plain JAX over jaxmp's for many devices, processes and two machines."""
    rows = {}
    for machine, sections in RESULTS.items():
        for row in sections.get("devices", {}).get("means", ()):
            mean, worst = row["jaxmp / jnp"]
            rows[machine, "16 to 128 devices", row["types"]] = 1 / mean, 1 / worst
        for row in sections.get("processes", {}).get("means", ()):
            rows[machine, "2 to 8 processes", row["types"]] = row["jnp / jaxmp"]
        for row in sections.get("hosts", {}).get("means", ()):
            rows[machine, f"two machines, {row['link']}", row["types"]] = row["jnp / jaxmp"]
    return ratios(rows, "time of plain JAX / jaxmp's (point: geometric mean; mark: worst row)")


def ratios(rows, label):
    """Plots a pair of mean and worst for each (machine, name, type), with a panel for each machine."""
    machines = list(dict.fromkeys(machine for machine, _, _ in rows))
    names = list(dict.fromkeys((name, narrow_name(kind)) for _, name, kind in rows))[::-1]
    figure, axes = plt.subplots(1, len(machines), figsize=(10, 0.9 + 0.24 * len(names)), **LAYOUT)
    for axis, machine in zip(axes, machines, strict=True):
        for (of, name, kind), (mean, worst) in rows.items():
            if of == machine:
                i = names.index((name, narrow_name(kind)))
                axis.plot([mean, worst], [i, i], color="gray", linewidth=1)
                axis.plot(mean, i, "o", color=OURS)
                axis.plot(worst, i, "|", color=THEIRS, markersize=12, markeredgewidth=2)
        name_rows(axis, [", ".join(name) for name in names])
        axis.set_xscale("log")
        axis.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axis.set_title(machine, fontsize=9)
    figure.supxlabel(label, fontsize=9)
    return figure


def narrow_name(kind):
    """Returns the short name of a type: the tables of some benchmarks write it out."""
    return {"float32": "f32", "bfloat16": "bf16", "bf16 -> bf16": "bf16"}.get(kind, kind)


def determinism():
    """Plots geometric means of each level's time over run_to_run's, and the worst rows."""
    rows = [(level, row) for level in ("topology", "batch") for row in AMX["determinism"]["means"][::-1]]
    figure, axis = plt.subplots(figsize=(8, 3.2))
    for i, (level, row) in enumerate(rows):
        mean, worst = row[level]
        axis.plot([mean, worst], [i, i], color="gray", linewidth=1)
        axis.plot(mean, i, "o", color=OURS)
        axis.plot(worst, i, "|", color=THEIRS, markersize=12, markeredgewidth=2)
    name_rows(axis, [f'"{level}", {row["type"]}, {row["sizes"]}' for level, row in rows])
    axis.set_xlabel('time / time of "run_to_run" (point: geometric mean; mark: worst row)')
    return figure


def memory():
    """Peak memory beyond the operands."""
    rows = AMX["memory"]["rows"]
    figure, axis = plt.subplots(figsize=(8, 3))
    places = np.arange(len(rows))
    columns = (("size of D", "size of D", THIRD), ("jaxmp", "jaxmp", OURS), ("XLA", "XLA", THEIRS))
    for i, (column, name, colour) in enumerate(columns):
        axis.bar(places + 0.27 * (i - 1), [row[column] for row in rows], 0.25, color=colour, label=name)
    axis.set_xticks(places, [f"{row['pattern']}, {row['types'].replace('->', '→')}" for row in rows], fontsize=8)
    axis.set_ylabel("MiB beyond the operands")
    axis.legend(fontsize=8)
    return figure


def eager():
    """Times of eager calls of small products."""
    rows = AMX["eager"]["rows"]
    figure, axis = plt.subplots(figsize=(8, 3))
    places = np.arange(len(rows))
    for i, (column, name, colour) in enumerate((("jaxmp µs", "jaxmp", OURS), ("jnp µs", "jnp", THEIRS))):
        axis.bar(places + 0.36 * (i - 0.5), [row[column] for row in rows], 0.34, color=colour, label=name)
    axis.set_yscale("log")
    axis.set_xticks(places, [row["product"] for row in rows], fontsize=7, rotation=25, ha="right")
    axis.set_ylabel("µs per eager call")
    axis.legend(fontsize=8)
    return figure


PLOTS = {
    "against-xla": against_xla,
    "rates": rates,
    "models": models,
    "jobs": jobs,
    "determinism": determinism,
    "memory": memory,
    "eager": eager,
}

# For each pattern its name in `explain`, and the shardings of a, b and d on a mesh of 4 or of 2 x 2 devices.
PATTERNS = {
    "all-gather": ("all_gather", P("x", None), P(None, "x"), P(None, "x")),
    "reduce-scatter": ("reduce_scatter", P(None, "x"), P("x", None), P("x", None)),
    "all-reduce": ("all_reduce", P(None, "x"), P("x", None), P(None, None)),
    "grid": ("grid", P("x", "y"), P("x", "y"), P("x", "y")),
    "fsdp": ("grid", P("x", None), P("x", None), P("x", None)),
    "local": ("local", P("x", None), P(None, None), P("x", None)),
}


def pattern(name):
    """The SVG of one product of a pattern; more rows than columns, as a batch has, so that FSDP gathers the weight."""
    expected, a, b, d = PATTERNS[name]
    axes = {"x": 2, "y": 2} if name == "grid" else {"x": 4}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    operands = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 32), a), ((32, 48), b))
    )

    def product(a, b):
        return jaxmp.matmul(a, b, out_sharding=d)

    with jax.sharding.use_abstract_mesh(mesh):
        drawing = jaxmp.draw(product)(*operands)
    (row,) = drawing.rows
    if row.pattern != expected:
        raise ValueError(f"{name} is drawn as {row.pattern}")
    return re.sub(r"plots\.py:\d+ ", "", drawing.svg)


def draw(folder):
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme, ink in INKS.items():
        colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        settings = dict.fromkeys(colours, ink) | {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.fonttype": "none",  # text as text: found by a search, and small
            "svg.hashsalt": "jaxmp",  # the same file in every run
            "font.family": "sans-serif",
        }
        for name, plot in PLOTS.items():
            with mpl.rc_context(settings):
                figure = plot()
                path = folder / f"{name}-{theme}.svg"
                figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
                plt.close(figure)
    for name in PATTERNS:
        (folder / f"pattern-{name}.svg").write_text(pattern(name))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
