"""Settings of the documentation's site: `make docs` builds it into build/docs."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from docutils import nodes

project = "dreamcomm"
author = "the dreamcomm developers"
project_copyright = author
version = release = importlib.metadata.version("dreamcomm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_use_ivar = True  # attributes as a short list

# The public names are imported from where users import them, in the order of the page.
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature shows them
autodoc_default_options = {"members": True}

# A fence without a language is a program's output.
highlight_language = "text"

html_theme = "furo"
html_title = "dreamcomm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def prepare_attributes(
    _app: Any, _what: str, name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Writes lists of attributes as napoleon reads them.

    The docstring of Options, which is written in C++, has no headline. Attributes that share a
    description ("calls, failed: ...") would be taken for one with a type.
    """
    if name.endswith(".Options"):
        first = next(i for i, line in enumerate(lines) if line.startswith("timeout ("))
        lines[first:] = ["Attributes:", *(f"    {line}".rstrip() for line in lines[first:])]
    if "Attributes:" in lines:
        first = lines.index("Attributes:")
        for i, line in enumerate(lines[first:], first):
            names = re.match(r"    (\w+(?:, \w+)+):", line)
            if names:
                lines[i] = line.replace(names[1], names[1].replace(", ", "/"))


def put_drawings_into_the_page(app: Any, doctree: nodes.document) -> None:
    """Makes an SVG file part of the page, where it takes the colours of the reader's theme."""
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir, image["uri"])
        if path.suffix == ".svg":
            html = f'<div class="drawing">\n{path.read_text()}</div>'
            image.parent.replace_self(nodes.raw("", html, format="html"))


def setup(app: Any) -> None:
    """Called by Sphinx. Napoleon's priority is 500."""
    app.connect("doctree-read", put_drawings_into_the_page)
    app.connect("autodoc-process-docstring", prepare_attributes, priority=400)
