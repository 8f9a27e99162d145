"""The measurements of machines, as JSON with a row a line, and the tables of the pages that show them.

`benchmarks/results/<machine>.json` has for each benchmark the machine and the date, the means of its groups, and every
row; the first line of a table names its columns. Only Python's library is needed to read it and to write the pages.
"""

import json
import math
import re
import statistics
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
PAGES = [
    ROOT / name
    for name in ("README.md", "paper/paper.md", "docs/performance.md", "docs/determinism.md", "docs/benchmarks.md")
]
PROCESSORS = {"amx": "Intel with AMX", "avx512": "AMD with AVX512_BF16", "avx512-intel": "Intel with AVX-512"}
TYPES = {"float32": "f32", "bfloat16": "bf16 -> bf16"}
PARTS = ("means", "rows")


def geometric_mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def means(rows, by, ratios, across=None):
    """For each group of rows, told by the columns `by`: the geometric mean and the worst of each ratio.

    `ratios` says for each column whether `min` or `max` is the worst. The first ratio also has a cell for each value of
    the column `across`.
    """
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in by), []).append(row)
    found = []
    for key, group in groups.items():
        first, *others = ratios
        values = dict.fromkeys(row[across] for row in group) if across else ()
        parts = {first: group} | {value: [row for row in group if row[across] == value] for value in values}
        cells = {name: cell(part, first, ratios[first]) for name, part in parts.items()}
        cells |= {ratio: cell(group, ratio, ratios[ratio]) for ratio in others}
        found.append(dict(zip(by, key, strict=True)) | cells)
    return found


def cell(group, ratio, worst):
    values = [row[ratio] for row in group]
    return [geometric_mean(values), worst(values)] if len(values) > 1 else values[0]


def save(folder, about, sections):
    """Put what was measured into the file of this machine, in place of what was there of the same name."""
    path = folder / f"{machine_name(about)}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, section in sections.items():
        tables = {part: [list(section[part][0]), *(list(row.values()) for row in section[part])] for part in PARTS}
        found[name] = {"machine": about, "note": section.get("note", "")} | rounded(tables)
    path.write_text(text_of(found) + "\n")


def machine_name(about):
    """By what decides which kernels run."""
    kinds = [kind for kind in ("amx", "avx512", "avx2") if any(x.startswith(kind) for x in about["extensions"])]
    kind = next(iter(kinds), "portable")
    return "avx512-intel" if kind == "avx512" and "Intel" in about["processor"] else kind


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def text_of(value, indent="\n"):
    """JSON with a line for each row of a table."""
    deeper = indent + " "
    if isinstance(value, dict) and len(indent) < 3:
        lines = [f"{json.dumps(key)}: {text_of(each, deeper)}" for key, each in value.items()]
        return "{" + deeper + f",{deeper}".join(lines) + indent + "}"
    if isinstance(value, list):
        return "[" + deeper + f",{deeper}".join(json.dumps(row, ensure_ascii=False) for row in value) + indent + "]"
    return json.dumps(value, ensure_ascii=False)


def load(folder=RESULTS):
    """By machine and section, with each row as a dict."""
    found = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        found[path.stem] = json.loads(path.read_text())
        for section in found[path.stem].values():
            for part in PARTS:
                columns, *rows = section[part]
                section[part] = [dict(zip(columns, row, strict=True)) for row in rows]
    return found


def page(path, folder=RESULTS):
    """Returns the page with new tables, each after a comment that names its section."""
    results = load(folder)

    def rows(section):
        if section == "machines":
            return [description(*each) for each in results.items()]
        if section in ("rates", "models"):
            return list({"rates": rates, "models": models}[section](results))
        measured = {name: sections[section] for name, sections in results.items() if section in sections}
        return [
            {"machine": name, "JAX": table["machine"]["versions"]["jax"]} | row
            for name, table in measured.items()
            for row in table["means"]
        ]

    table = re.compile(r"(<!-- (\w+) -->)\n*(\|.*\n)*\n*")
    text = table.sub(lambda match: "\n\n".join([match[1], *markdown(rows(match[2])), ""]), path.read_text())
    return text.rstrip() + "\n"


def rates(results):
    """For each processor and type: the rate over XLA's of sharded products of 1024 and above."""
    for machine, processor in PROCESSORS.items():
        for name, types in TYPES.items():
            for table, row in found(results, machine, "matmul", types=types, sizes="1024 and above"):
                mean, worst = row["jaxmp / XLA"]
                yield {"Types": name, "Processor": processor, "Mean": mean, "Worst row": worst} | table


def models(results):
    """For each processor: the rate over plain JAX's of loss and gradients of models and layers."""
    for machine, processor in PROCESSORS.items():
        for section, ratio, model, of in (
            ("fuse", "plain / fuse", "models of two blocks through `fuse`", {}),
            ("layers", "gradient", "MLP with FSDP and tensor parallelism", {"layer": "MLP, FSDP + TP"}),
        ):
            cells = {name: list(found(results, machine, section, type=name, **of)) for name in TYPES}
            if all(cells.values()):
                means = {name: row[ratio][0] for name, [(_, row)] in cells.items()}
                yield {"Model": model, "Processor": processor} | means | cells["float32"][0][0]


def found(results, machine, section, **of):
    """The means of a section with these values, each with the JAX of its measurement."""
    table = results.get(machine, {}).get(section)
    for row in table["means"] if table else ():
        if of.items() <= row.items():
            yield {"JAX": table["machine"]["versions"]["jax"]}, row


def description(name, sections):
    abouts = sorted((section["machine"] for section in sections.values()), key=lambda about: about["date"])
    newest, dates = abouts[-1], dict.fromkeys((abouts[0]["date"], abouts[-1]["date"]))
    versions = dict.fromkeys(about["versions"]["jax"] for about in abouts)
    about = {"processor": newest["processor"], "cores": newest["cores"], "JAX": ", ".join(versions)}
    return {"machine": name} | about | {"date": " to ".join(dates)}


def markdown(rows):
    """Returns a table in a list, or nothing where nothing has been measured."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[shown(row.get(column, "")) for column in columns] for row in rows]
    table = [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells]]
    return ["\n".join(table)] if rows else []


def shown(value):
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
