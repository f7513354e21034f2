"""The site: `make docs` builds it from the pages of this repository into build/site.

Pages are those of docs/; the first one is README.md. Relative links are written for the repository;
`localise` turns them into the site's. A link to a file that is no page, such as CONTRIBUTING.md,
becomes a copy of the file.

Python's names come from their docstrings (docstrings.py). minifloat is imported without its native
library, so that the pages alone need no build.
"""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

os.environ["COLUMNS"] = "90"  # of the command's help
sys.path[:0] = [str(ROOT / "python"), str(DOCS), str(ROOT)]
with mock(["minifloat._native", "torch.utils.flop_counter"]):  # the latter registers native ops
    import minifloat
    from minifloat import cli

    from tests.support.public_names import public_names

project = "minifloat"
version = release = minifloat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings"]
exclude_patterns = ["images"]
nitpicky = True  # but for names of Python, of torch and of the package's inside
nitpick_ignore_regex = [("py:.*", rf"(?!minifloat\.({'|'.join(public_names())})$).*")]
suppress_warnings = ["misc.highlighting_failure"]  # `…` in an example
smartquotes_action = "D"  # dashes alone
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"minifloat {version}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False

add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
napoleon_use_ivar = True

# ---- Links ---------------------------------------------------------------------------------------
LINK = re.compile(r"(!?\[([^\]]*)\])\((?![a-z]+:)([^)\s#]*)(#[^)\s]*)?\)")

PAGES = {"README.md": "index.md"}  # of files above docs/


def localise(text: str, file: Path) -> str:
    """Returns the text of a Markdown file with the site's links for relative ones."""

    def replace(link: re.Match[str]) -> str:
        label, words, path, anchor = link.groups(default="")
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (target == file and target.is_relative_to(DOCS)):
            return link[0]
        if target.is_dir():  # which is neither a page nor a file to copy
            return words
        name = target.relative_to(ROOT).as_posix()
        place = PAGES.get(name, os.path.relpath(target, DOCS))
        if target.suffix == ".md" and name not in PAGES and not target.is_relative_to(DOCS):
            return f"{label}(path:/{place})"  # a copy
        return f"{label}(/{place}{anchor})"

    return LINK.sub(replace, text)


def read_page(app: Sphinx, page: str, text: list[str]) -> None:
    text[0] = localise(text[0], DOCS / f"{page}.md")


def read_included(app: Sphinx, path: Path, page: str, text: list[str]) -> None:
    text[0] = localise(text[0], (DOCS / path).resolve())


# ---- The command line ----------------------------------------------------------------------------
class CommandHelp(SphinxDirective):
    """{command-help} COMMAND: what `minifloat COMMAND --help` prints."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
            cli.run_command([*self.arguments, "--help"])
        return [nodes.literal_block(output.getvalue(), output.getvalue(), language="text")]


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.add_directive("command-help", CommandHelp)
