"""What the site is made of besides its pages: notebooks, and mathematics as MathML.

Hooks of MkDocs. Nothing here is fetched when a page is read.
"""

import html
import pathlib
import re
from typing import Any

import latex2mathml.converter
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebooks, which stand beside docs/, as pages with what they showed."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        del notebook.cells[0]  # which installs
        text, resources = MarkdownExporter().from_notebook_node(notebook)
        for picture, data in resources["outputs"].items():
            name = f"notebooks/{path.stem}_{picture}"
            number = int(picture.split("_")[1])  # output_CELL_OUTPUT.png
            alt = notebook.cells[number].metadata["alt"]
            described = f"![{alt}]({path.stem}_{picture})"
            text = text.replace(f"![png]({picture})", described)
            files.append(File.generated(config, name, content=data))
        text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
        text = text.replace("](../docs/", "](../")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """Questions come first in a search, before pages that name the word in passing."""
    if page.file.src_uri == "faq.md":
        page.meta["search"] = {"boost": 2}


def on_page_content(content: str, **_: Any) -> str:
    """Formulas that pymdownx.arithmatex has marked, as browsers show them unaided."""

    def formula(match: re.Match[str]) -> str:
        block = match["open"] == "\\["
        source = html.unescape(match["formula"])
        return latex2mathml.converter.convert(
            source, display="block" if block else "inline"
        )

    marked = r'<(span|div) class="arithmatex">(?P<open>\\[(\[])(?P<formula>.*?)\\[)\]]</\1>'
    return re.sub(marked, formula, content, flags=re.S)
