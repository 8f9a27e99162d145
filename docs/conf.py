"""How Sphinx builds the documents of this folder: `make docs`.

The build reads nothing from a network. Warnings are errors, references that lead nowhere included. The syntax of
links to other sites is checked; whether those pages exist is not.
"""

import hashlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

# Notebooks and drawings run on devices of the processor, also where there is a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or the kernels of the notebooks warn of frozen modules

ROOT = Path(__file__).resolve().parents[1]

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import TypeAliasForwardRef

import jaxmp


def digest_of_jaxmp():
    """Returns a digest of jaxmp's files, so that notebooks run again after a change."""
    extension = Path(importlib.util.find_spec("jaxmp._jaxmp").origin)
    files = [*sorted((ROOT / "jaxmp").rglob("*.py")), extension]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


project = "jaxmp"
author = ""
version = release = jaxmp.__version__
copyright = "the jaxmp authors, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
exclude_patterns = ["_templates", "reports"]

# Markdown and notebooks
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4
myst_url_schemes = ("http", "https", "mailto")
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-notebooks" / digest_of_jaxmp())
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_merge_streams = True

# API
autosummary_generate = True
autodoc_typehints = "signature"
# Signatures show these by name; docs/api.md says what they are.
autodoc_type_aliases = {
    name: name
    for name in (
        *("Activation", "ArrayLike", "AxisName", "Determinism", "DTypeLike", "Implementation", "Mesh", "Precision"),
        *("Scalar", "Sharding", "ShardingPair", "ShardingTriple", "WithResults"),
    )
}
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_param = False
nitpicky = True
# Types of other libraries have no page here.
nitpick_ignore_regex = [(r"py:.*", r"(?!jaxmp\.[a-z]).*"), (r"py:.*", r"jaxmp\._src\..*")]

# Site
html_theme = "sphinx_book_theme"
html_title = "jaxmp"
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_static_path = ["_static"]
html_css_files = ["jaxmp.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "use_fullscreen_button": False,
    "use_download_button": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_persistent": [],  # the search is in the sidebar
}
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False
suppress_warnings = ["config.cache"]  # of hooks below, which need no cache

# Files of the repository that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "GOVERNANCE.md": "governance.md",
    "examples": "examples.md",
}


def links_of_the_site(text: str, folder: Path) -> str:
    """Returns `text`, a file of `folder`, with links to repository files as links to their pages, or as their paths."""

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match.group()  # MyST reports it
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{label}]({PAGES[name]}{anchor or ''})"
        if path.parent == ROOT / "examples":
            return f"[{label}](examples.md#{path.stem})"
        if path.is_relative_to(ROOT / "docs"):
            return f"[{label}]({target.removeprefix('docs/')}{anchor or ''})"
        return f"{label} (`{name}`)"

    return re.sub(r"\[([^\]\n]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)", replaced, text)


def read_page(app, docname, source):
    """Replaces each `include` of a repository file in a page by the text of that file.

    The file's title is left out if the page has a title.
    """
    if Path(app.env.doc2path(docname)).suffix != ".md":
        return
    folder = Path(app.env.doc2path(docname)).parent

    def included(match: re.Match[str]) -> str:
        path = (folder / match.group(1)).resolve()
        app.env.note_dependency(path, docname=docname)
        body = links_of_the_site(path.read_text(), path.parent)
        return re.sub(r"\A# .*\n", "", body) if source[0].startswith("# ") else body

    text = links_of_the_site(source[0], folder)
    source[0] = re.sub(r"^```\{include\} (\S+)\n```$", included, text, flags=re.M)


def restructured(text: str) -> str:
    """Returns `text` with code in backticks as reStructuredText, and public names as references to their pages."""

    def replaced(match: re.Match[str]) -> str:
        code, rest = match.groups()
        name = code.removeprefix("jaxmp.")
        known = name in jaxmp.__all__ and name not in ("distributed", "quantize")
        return (f":py:obj:`{code} <jaxmp.{name}>`" if known else f"``{code}``") + ("\\ " if rest else "")

    parts = re.split(r"(`[^`\n]+`)", text)
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
    pages = re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", "".join(parts))
    return re.sub(r"(?<![:\w])`([^`\n]+)`(?=(\w?))", replaced, pages)


def read_docstring(app, what, name, obj, options, lines):
    """Converts docstrings (Markdown with Google's sections) to reStructuredText; indented tables stay as they are."""
    section, is_doctest, made = False, False, []
    for i, line in enumerate(lines):
        if re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            section = True
        elif line and not line.startswith(" "):
            section = False
        starts = line.startswith("    ") and not section and (i == 0 or not lines[i - 1].strip())
        if starts:
            made += ["::", ""]
        is_doctest = bool(line.strip()) and (is_doctest or line.lstrip().startswith(">>>"))
        is_code = is_doctest or (line.startswith("    ") and not section)
        made.append(line if is_code else restructured(line))
    lines[:] = made


# Patterns of values and types in signatures that Python prints, and what the sources have.
SHORTER = {
    r"'(\w+ \| None|None)'": r"\1",
    r"~(?:\w+\.)+(\w+)": r"\1",
    r"\bjax\.Array\b": "Array",
    r"<factory>": "{}",
    r"\b1073741824\b": "2**30",
    r"\b_E4M3\b": "jnp.float8_e4m3fn",
}


def read_signature(app, what, name, obj, options, signature, returns):
    """Prints types by their names in the sources, and for a layer the arguments of its constructor."""
    if what == "class" and signature and signature.startswith("(*args"):
        of_init = inspect.signature(obj.__init__)
        parameters = list(of_init.parameters.values())[1:]
        signature, returns = str(of_init.replace(parameters=parameters, return_annotation=of_init.empty)), None
        signature = re.sub(r": '([^']+)'", r": \1", signature)  # annotations that are not evaluated

    def shortened(text: str | None) -> str | None:
        for pattern, shorter in SHORTER.items():
            text = text and re.sub(pattern, shorter, text)
        return text

    return shortened(signature), shortened(returns)


def without_overloads(analyze):
    """Wraps `ModuleAnalyzer.analyze` so that a function has the signature of its definition, not of its overloads."""

    def analyzed(self):
        analyze(self)
        self.overloads = {}

    return analyzed


def break_names(app, pagename, templatename, context, doctree):
    """Lets long names in titles and table cells break after a separator, and keeps pairs of types on one line."""

    def broken(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return start + re.sub(r"(::|[/_.(=])(?=\w|&quot;)", r"\1<wbr>", name) + end if len(name) > 20 else match.group()

    def of_cell(match: re.Match[str]) -> str:
        cell = re.sub(r'(<span class="pre">)([^<]+)(</span>)', broken, match.group())
        return re.sub(r"\w+ -&gt; \w+", r'<span class="unbroken">\g<0></span>', cell)

    body = re.sub(r"<td>.*?</td>", of_cell, context.get("body", ""), flags=re.S)
    context["body"] = re.sub(r"(<h1>)(jaxmp\.[\w.]+)()", broken, body)


def setup(app):
    """Draw the pictures, and register the hooks above."""
    # In a separate process, because this one may fork, and JAX has threads.
    subprocess.run([sys.executable, ROOT / "benchmarks" / "plots.py", ROOT / "docs" / "pictures"], check=True)
    ModuleAnalyzer.analyze = without_overloads(ModuleAnalyzer.analyze)
    TypeAliasForwardRef.__repr__ = lambda self: self.name  # as in `autodoc_type_aliases`
    app.connect("source-read", read_page)
    app.connect("html-page-context", break_names)
    app.connect("autodoc-process-signature", read_signature)
    app.connect("autodoc-process-docstring", read_docstring, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
