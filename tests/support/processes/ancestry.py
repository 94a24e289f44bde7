"""Whether a commit led to the state of a repository, as far as that can be told there."""

import subprocess
from pathlib import Path
from typing import Literal, NamedTuple


class Ancestry(NamedTuple):
    """`unknown` where git or its history is not here, which is no proof either way."""

    state: Literal["ancestor", "stranger", "unknown"]
    reason: str


def ancestry(repository: Path, commit: str) -> Ancestry:
    """Tell whether `commit` is HEAD of `repository` or one of its ancestors."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True)

    if not (repository / ".git").exists():  # a folder inside of some other repository is none
        return Ancestry("unknown", f"{repository} is not a git checkout")
    try:
        head = git("rev-parse", "HEAD")
    except OSError as error:
        return Ancestry("unknown", f"git cannot be run: {error}")
    if head.returncode:
        return Ancestry("unknown", f"git does not read {repository}: {head.stderr.strip()}")
    if git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
        return Ancestry("ancestor", head.stdout.strip())
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        return Ancestry("unknown", f"{repository} is a shallow clone: its history does not reach back to {commit}")
    return Ancestry("stranger", f"{commit} is no ancestor of {head.stdout.strip()}")


def short_head() -> str:
    """Return the commit that this file's checkout is at, or `unknown` where git cannot say."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
