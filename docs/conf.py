"""How Sphinx builds the site: ``make docs``.

The sources are the repository's own documents, which must read well where they lie, too: so the
root of the sources is the repository, and links between files are the same there and here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx.application import Sphinx

import pipedream2bw as pd2
from pipedream2bw import extras, options
from pipedream2bw.__main__ import main
from pipedream2bw.optimizer import options as optimizer_options
from pipedream2bw.rules import shown
from pipedream2bw.schedules.small_picture import timeline_html

os.environ |= {"COLUMNS": "90", "NO_COLOR": "1"}  # for the commands' help

project = "pipedream2bw"
author = "The pipedream2bw authors"
copyright = author
release = version = pd2.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "examples/*.md",
    "benchmarks/**.md",
]
exclude_patterns = ["build", ".venv", "benchmarks/results/**"]
highlight_language = "text"
nitpicky = True
nitpick_ignore_regex = [
    # Types in signatures that have no page here: other libraries' (a site that is built without a
    # network cannot look them up), and those of inner rooms that no user makes.
    ("py:class", r"(torch|transformers|collections\.abc|contextlib|dataclasses|os)\..+"),
    # StageWeights: Sphinx reads Update's fields, as those of a NamedTuple, without their module.
    ("py:class", "StageWeights"),
    ("py:class", r"pipedream2bw\.(_C|json_document|[a-z_.]+)\.\w+"),
]

html_theme = "furo"
html_title = f"pipedream2bw {release}"
html_extra_path = ["site"]  # index.html, which leads to the front page
html_show_sourcelink = False

myst_heading_anchors = 4  # the same as GitHub's
# A broken example is a broken site. Output of a kernel is the same wherever it is built.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars, of which a page has the last state only

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
python_maximum_signature_line_length = 80


class Simulated(Directive):
    """Draws schedules as the package simulates them: text in the page, no file."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {  # noqa: RUF012
        "stages": directives.positive_int,
        "microbatches": directives.positive_int,
        "batches": directives.positive_int,
    }

    def run(self) -> list[nodes.Node]:
        simulations = {
            name: pd2.simulate(
                name,
                num_stages=self.options.get("stages", 4),
                num_microbatches=self.options.get("microbatches", 8),
                num_batches=self.options.get("batches", 3),
                update=0.2,
            )
            for name in self.arguments[0].split()
        }
        span = max(simulation.makespan for simulation in simulations.values())
        return [
            nodes.raw("", timeline_html(found.events, title, span=span), format="html")
            for name, found in simulations.items()
            for title in [f"{name}: idle for {100 * max(found.bubbles):.0f} % of a steady batch"]
        ]


class CommandHelp(Directive):
    """The help of a command, as the command prints it."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*self.arguments[0].split(), "--help"])
        return [nodes.literal_block(printed.getvalue(), printed.getvalue(), language="text")]


def table(rows: Sequence[Sequence[str]], code: Collection[int] = ()) -> nodes.table:
    """A table whose first row is its head; ``code``: the columns whose cells are code."""

    def cell(text: str, is_code: bool) -> nodes.entry:
        inline = nodes.literal(text=text) if is_code and text else nodes.Text(text)
        return nodes.entry("", nodes.paragraph("", "", inline))

    columns = range(len(rows[0]))
    head = nodes.row("", *(cell(text, False) for text in rows[0]))
    body = [
        nodes.row("", *(cell(text, column in code) for column, text in enumerate(row)))
        for row in rows[1:]
    ]
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in columns), cols=len(columns))
    group += [nodes.thead("", head), nodes.tbody("", *body)]
    return nodes.table("", group)


OPTION_TABLES = {
    "PipelineModule": options.Options,
    "PipelineOptimizer": optimizer_options.OptimizerOptions,
}


class Options(Directive):
    """A table of the options of a class, by the name of their own class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        rows = [("option", "what it may be", "default", "same on all ranks", "in checkpoints")]
        for field in dataclasses.fields(OPTION_TABLES[self.arguments[0]]):
            kind, default = field.metadata["kind"], field.default
            told = str(field.type).replace("object", "Any") if kind is None else kind.words
            marks = ["x" if field.metadata[each] else "" for each in ("agreed", "saved")]
            rows.append((field.name, told, shown(default), *marks))
        return [table(rows, code=(0, 1, 2))]


class Exclusions(Directive):
    """What does not go together: a matrix of numbers, and below it the rule of each number."""

    def run(self) -> list[nodes.Node]:
        kinds: list[type[pd2.Extension]] = [pd2.Extension]
        assert extras  # whose extensions bring their own
        for kind in kinds:  # which grows
            kinds += kind.__subclasses__()
        rules = [
            *options.PLANNED_EXCLUSIONS,
            *options.EXCLUSIONS,
            *optimizer_options.EXCLUSIONS,
            *(rule for kind in kinds for rule in kind.excludes),
        ]
        names = sorted({name for rule in rules for name in rule.values})
        matrix = [["", *names]]
        for one in names:
            cells = [
                [str(i) for i, rule in enumerate(rules, 1) if {one, other} <= rule.values.keys()]
                for other in names
            ]
            marks = ["" if names[i] == one else ", ".join(cell) for i, cell in enumerate(cells)]
            matrix.append([one, *marks])
        listed = [("", "what", "why", "what to do")]
        for number, rule in enumerate(rules, 1):
            what = ", ".join(f"{name}: {values.words}" for name, values in rule.values.items())
            listed.append((str(number), what, rule.why, rule.instead))
        return [table(matrix, code=(0,)), table(listed, code=(1,))]


def find_public_name(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Resolves what docstrings call by a name that ``pipedream2bw`` or ``errors`` has."""
    domain, last = env.get_domain("py"), node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py":
        return None
    for place in ("pipedream2bw", "pipedream2bw.PipelineModule", "pipedream2bw.errors"):
        name = f"{place}.{last}"
        if name in domain.objects:
            document = node["refdoc"]
            return domain.resolve_xref(env, document, app.builder, "obj", name, node, content)
    return None


def before_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: Any) -> None:
    """Keeps Napoleon from taking for a type what a first line says before a colon."""
    if what in ("property", "attribute"):
        lines[:0] = ["..", ""]  # an empty comment


def after_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: Any) -> None:
    """Makes one name of the names of fields that are described together, or the first is a type."""
    lines[:] = [re.sub(r"(?<=\w), (?=[\w, ]*:)", ",", s) if s[:6] == ":ivar " else s for s in lines]


def setup(app: Sphinx) -> None:
    """Adds what this site has of its own."""
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.add_directive("simulated", Simulated)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("options", Options)
    app.add_directive("exclusions", Exclusions)
    app.connect("missing-reference", find_public_name)
