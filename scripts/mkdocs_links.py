"""Hook of mkdocs: write a link that leaves docs/ as the path in the repository, which the site does not hold."""

import re

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page's text with its links to other files of the repository replaced."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
