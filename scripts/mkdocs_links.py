"""Hook of mkdocs: replace a link to a file outside of docs/, which the site lacks, by its path in the repository."""

import posixpath
import re
from typing import Any

UPWARDS = re.compile(r"\[([^\]]*)\]\((\.\./[^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Replace the links of a page to files outside of docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def shown(link: re.Match[str]) -> str:
        path = posixpath.normpath(f"{folder}/{link[2]}")
        if path.startswith("docs/"):
            return link[0]
        return f"`{path}`" if link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    return UPWARDS.sub(shown, markdown)
