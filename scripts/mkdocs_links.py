"""Hook of mkdocs: replace a link to a file outside of docs/, which the site lacks, by its path in the repository."""

import re

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the links of a page to files outside of docs/."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
