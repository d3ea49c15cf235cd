"""Settings of Sphinx for the documentation as a site. Sources are the documents as they are in the repository.

The root of the repository is the source folder, so that links between the documents work in both places. Two pages are
made from the code: the settings (`reference.py`) and the Python interface (Sphinx's autodoc).
"""

import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from reference import format_interface, format_settings  # noqa: E402  # found by the line above

project = "omnidraft"
author = "the contributors of omnidraft"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/notes/*.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "benchmarks")]

html_theme = "furo"
html_title = "omnidraft"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "index.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 4  # as GitHub makes them
smartquotes_action = "D"  # dashes only

default_role = "code"  # docstrings are Markdown
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
# The changelog quotes what a shell or a log shows; not all of that can be highlighted.
suppress_warnings = ["misc.highlighting_failure"]

NOTES = sorted(f"benchmarks/notes/{page.stem}" for page in (ROOT / "benchmarks" / "notes").glob("*.md"))
# The navigation: documents by what a reader wants to do.
NAVIGATION = {
    "Start": ("docs/quickstart", "docs/settings", "docs/models", "docs/glossary"),
    "How it works": ("docs/path-of-a-prompt", "docs/exactness", "docs/learning"),
    "Look at runs": ("docs/dashboards", "docs/log", "docs/versions"),
    "Use it elsewhere": ("docs/serve", "docs/python", "docs/vllm", "docs/ray", "docs/operate"),
    "Measurements": ("benchmarks/README", *NOTES),
    "Project": ("CONTRIBUTING", "CHANGELOG"),
}
GENERATED = {"docs/settings": format_settings, "docs/python": format_interface}
IN_REPOSITORY = "<!-- The site has the reference here. -->\n"


def add_generated_parts(_app: Any, name: str, content: list[str]) -> None:
    """Append the navigation to the first page, and the reference to the pages that have one."""
    if name == root_doc:
        for caption, documents in NAVIGATION.items():
            entries = "\n".join(f"/{document}" for document in documents)
            content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    if name in GENERATED:
        content[0] = content[0].replace(IN_REPOSITORY, GENERATED[name]())


def mark_code(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Mark blocks of code in a docstring, which Markdown indents, in the way of reStructuredText."""
    paragraphs = "\n".join(lines).split("\n\n")
    for index, paragraph in enumerate(paragraphs[1:], 1):
        before = paragraphs[index - 1].splitlines()[-1:]
        if paragraph.startswith("    ") and before and not before[0].startswith(" "):
            paragraphs[index] = f"::\n\n{textwrap.indent(textwrap.dedent(paragraph), '    ')}"
    lines[:] = "\n\n".join(paragraphs).split("\n")


def hide_made_signature(_app: Any, what: str, _name: str, value: Any, *_: Any) -> tuple[str, None] | None:
    """Leave out the arguments of classes whose `__init__` is made from their fields."""
    return ("", None) if what == "class" and (is_dataclass(value) or hasattr(value, "model_fields")) else None


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx's events."""
    app.connect("source-read", add_generated_parts)
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", hide_made_signature)
