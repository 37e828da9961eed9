"""Docstrings as the site shows them: Sphinx' roles become links, ``::`` becomes code.

An extension of Griffe, which mkdocstrings reads docstrings with. In them stand Google's
sections, Sphinx' roles (``:func:`jslices.grad```), literal blocks after ``::``, and
paragraphs that begin with ``Cost:`` or ``Source:``; ``help()`` shows them as they are.
"""

import logging
import pathlib
import re
import tomllib
from typing import Any

import griffe

log = logging.getLogger("mkdocs.docstrings")
ROOT = pathlib.Path(__file__).parent.parent
PAGES = ROOT / "docs" / "api"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Repository"
]
PARAGRAPHS = "Cost|Source|Untouched rows|Reference"


def listed() -> dict[str, str]:
    """Where a name is documented: ``{"adam": "jslices.adam", ...}``."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.M):
            head, _, last = path.rpartition(".")
            # Griffe takes ``jslices.optim.adam`` for the module, so pages repeat the name.
            short = head if head.endswith(f".{last}") else path
            for name in (path, short, short.replace(".optim.", "."), last):
                found.setdefault(name, path)
    return found


NAMES = listed()


def link(match: re.Match[str], owner: str) -> str:
    """The link that a role stands for, or the name as code if no page has it."""
    role, path = match.groups()
    shown = path.removeprefix("jslices.")
    head, _, last = path.rpartition(".")
    if path in NAMES:
        return f"[`{shown}`][{NAMES[path]}]"
    if role in ("meth", "attr"):
        target = f"{NAMES.get(head or owner, '')}.{last}"
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
    return f"`{shown}`"


def fenced(text: str) -> str:
    """Literal blocks as fenced ones."""
    lines, out, at = text.splitlines(), [], 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.rstrip().endswith("::"):
            out.append(line)
            continue
        margin = len(line) - len(line.lstrip())
        end = at
        while end < len(lines) and (
            not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > margin
        ):
            end += 1
        block = "\n".join(lines[at:end]).strip("\n").rstrip()
        inner = min(len(x) - len(x.lstrip()) for x in block.splitlines() if x.strip())
        out += [line.rstrip()[:-1], "", " " * margin + "```python"]
        out += [" " * margin + x[inner:] for x in block.splitlines()]
        out += [" " * margin + "```", ""]
        at = end
    return "\n".join(out)


def source_of(obj: griffe.Object) -> str:
    """The lines that define a name, a link where the package has an address."""
    path = pathlib.Path(str(obj.filepath)).relative_to(ROOT)
    if not REPOSITORY:
        return f"`{path}:{obj.lineno}`{{.source}}"
    lines = f"{path}#L{obj.lineno}-L{obj.endlineno}"
    return f"[[source]]({REPOSITORY}/blob/main/{lines}){{.source}}"


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        owner = obj.name if obj.is_class or obj.parent is None else obj.parent.name
        text = fenced(obj.docstring.value)
        text = re.sub(r":(\w+):`([\w.]+)`", lambda match: link(match, owner), text)
        text = re.sub(rf"^({PARAGRAPHS}): ", r"**\1:** ", text, flags=re.M)
        text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
        if not obj.is_module:
            text += f"\n\n{source_of(obj)}"
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Document names that are assigned, ``name = module.name``, like imported ones."""
        for module in (pkg["tf1"], *pkg["tf1"].modules.values()):
            for name, member in [*module.members.items()]:
                value = None if member.is_alias else getattr(member, "value", None)
                if isinstance(value, griffe.ExprAttribute | griffe.ExprName):
                    alias = griffe.Alias(name, value.canonical_path, parent=module)
                    module.set_member(name, alias)
        for path in {*NAMES.values()}:
            if not pkg[path.removeprefix("jslices.")].docstring:
                log.warning("%s has no docstring that the site can show", path)
