"""That links lead somewhere, and words find their page: hooks of MkDocs after a build.

MkDocs itself checks the links of Markdown, but neither those of included files and HTML nor
the search. Whatever is wrong is a warning, which ends a build with ``--strict``.
"""

import html.parser
import json
import logging
import pathlib
import re
import urllib.parse

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

log = logging.getLogger("mkdocs.hooks.checks")

#: What people type into the search, and the page that has the answer.
SEARCHES = {
    "adagrad does not learn": "faq/",
    "apple silicon": "faq/",
    "compile time": "faq/",
    "deterministic": "faq/",
    "early stopping": "faq/",
    "ema": "faq/",
    "evaluation": "faq/",
    "faiss": "faq/",
    "fbgemm": "moving/",
    "first step slow": "faq/",
    "gradient norm": "faq/",
    "hashing trick": "recipes/",
    "logging": "faq/",
    "loss does not fall": "faq/",
    "macos": "faq/",
    "multi gpu": "faq/",
    "nearest neighbors": "faq/",
    "nearest neighbours": "faq/",
    "negative sampling": "faq/",
    "padding": "faq/",
    "popularity": "recipes/",
    "pretrained embeddings": "faq/",
    "pytorch checkpoint": "moving/",
    "ragged": "recipes/",
    "recall": "faq/",
    "reproducible": "faq/",
    "resume training": "faq/",
    "several gpus": "faq/",
    "delta file": "checkpoints/",
    "unigram": "recipes/",
    "variable length": "faq/",
    "windows": "faq/",
}


class Page(html.parser.HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


@event_priority(-100)  # when everything is written
def on_post_build(config: MkDocsConfig) -> None:
    site = pathlib.Path(config.site_dir)
    for message in [*dead_links(site), *lost_searches(site)]:
        log.warning(message)


def dead_links(site: pathlib.Path) -> list[str]:
    """Links within the site to files or anchors that are not there."""
    files = [file for file in site.rglob("*.html") if file.name != "404.html"]
    pages = {file.resolve(): Page(file.read_text()) for file in files}
    dead = []
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = file.parent / parts.path if parts.path else file
            target = (target / "index.html" if target.is_dir() else target).resolve()
            anchor, there = urllib.parse.unquote(parts.fragment), pages.get(target)
            if not target.exists() or (anchor and there and anchor not in there.anchors):
                dead.append(f"dead link on {file.relative_to(site.resolve())}: {link}")
    return dead


def lost_searches(site: pathlib.Path) -> list[str]:
    """What is typed, and whose page is not among the first three.

    As the theme ranks: a word, or the beginning of one, counts a thousand times as much in
    the title of a section as in its text, and a section with all words most.
    """
    index = json.loads((site / "search" / "search_index.json").read_text())
    between = re.compile(index["config"]["separator"])

    def words(text: str) -> set[str]:
        return {*between.split(re.sub(r"<[^>]*>", " ", html.unescape(text)).lower())}

    sections = [
        (doc["location"].partition("#")[0], words(doc["title"]), words(doc["text"]))
        for doc in index["docs"]
    ]
    lost = []
    for typed, wanted in SEARCHES.items():
        terms, best = typed.split(), dict[str, float]()
        for page, title, text in sections:
            in_title, in_text = (
                {term for term in terms if any(word.startswith(term) for word in part)}
                for part in (title, text)
            )
            share = len(in_title | in_text) / len(terms)
            score = (1000 * len(in_title) + len(in_text)) * (1 + share**2)
            best[page] = max(score, best.get(page, 0))
        first = sorted(best, key=lambda page: -best[page])[:3]
        if not best.get(wanted) or wanted not in first:
            lost.append(f"{typed!r} does not find {wanted}, but {', '.join(first)}")
    return lost
