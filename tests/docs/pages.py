"""Pages of the documentation as tests read them: text, headings, tables, fenced blocks, links."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)


def page(name: str) -> str:
    """Return the text of docs/<name>."""
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return what stands below the heading `title`, up to the next heading of any level."""
    [found] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return found


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return every table as rows, each a dict of its cells by column title."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if previous.startswith("|"):
                found[-1].append(cells)
            else:
                found.append([cells])
        previous = line
    return [[dict(zip(header, row, strict=True)) for row in rows] for header, _, *rows in found]


def table(text: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of all tables that have these columns."""
    return [row for rows in tables(text) if rows and set(columns) <= rows[0].keys() for row in rows]


def code(cell: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def links(text: str) -> list[str]:
    """Return the targets of a page's links, those with a scheme left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]
