"""The documentation as a site: ``python -m sphinx -W -n -c docs . OUT``, from the root of the repository."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from jax_deepcompile.cli import main as cli

os.environ["COLUMNS"] = "88"  # of the help texts

project = "jax_deepcompile"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "experiments/results/*.md"]
include_patterns += ["experiments/notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "dist", "runs"]

html_theme = "furo"
html_title = project
html_copy_source = False
html_extra_path = ["site"]  # sends the root of the site to its first page
html_static_path = ["static"]
html_css_files = ["tables.css"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are shown as they are kept
nb_output_stderr = "remove"  # what libraries log as they start

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_custom_sections = [("Class attributes", "params_style")]
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|jax|numpy|os|pathlib|typing)\..*"),
    ("py:class", r"(jax_deepcompile\.[\w.]+\.)?[DPR]"),  # type variables
    ("py:class", r"jax_deepcompile\.(?!errors)\w+\..*"),  # fields and results whose classes are no public names
]


class Help(Directive):
    """What a command line says of itself."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        program, *words = self.arguments[0].split()
        assert program == "deepcompile"
        printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*words, "--help"])
        printed.seek(0)
        text = printed.read()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Any) -> None:
    app.add_directive("help", Help)
    app.connect("autodoc-process-docstring", lambda *given: _join_errors(given[-1]), priority=400)  # Napoleon has 500
    app.connect("autodoc-process-docstring", lambda *given: _as_rst(given[-1]))


def _join_errors(lines: list[str]) -> None:
    """Puts names of errors that are described together onto one line."""
    lines[:] = re.sub(r"(?m)(?<=Error,)\n +(?=\w+Error)", " ", "\n".join(lines)).split("\n")


def _as_rst(lines: list[str]) -> None:
    """Lets a plural follow a literal, and attributes that are described together keep their names."""
    text = re.sub(r"(``[^`]+``)(?=(\w)?)", lambda found: found[1] + "\\ " * bool(found[2]), "\n".join(lines))
    text = re.sub(r"(?m)^:ivar (\w+(?:, \w+)+):", lambda found: f":ivar {found[1].replace(' ', '')}:", text)
    lines[:] = text.split("\n")
