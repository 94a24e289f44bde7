"""`hwgrpo compare-runs` from the shell, as its page shows it."""

import json
import re
import shlex

from tests.docs.pages import blocks, page
from tests.support.runs import runs

COMMANDS = re.findall(r"^hwgrpo (.*?)(?: +#.*)?$", "".join(blocks(page("compare-runs.md"), "bash")), flags=re.MULTILINE)
SMALL = (
    "backend.name=cpu",
    *(word for word in runs.SMALL if not word.startswith(("observe.", "optim.", "trainer.max"))),
)


def test_the_commands_of_the_page_run(hwgrpo):
    commands = [shlex.split(line) for line in COMMANDS]
    assert [words[0] for words in commands] == ["train", "train", *["compare-runs"] * 3]
    for words in commands[:2]:
        done = hwgrpo(*words, *SMALL)
        assert done.returncode == 0, done.stderr
    compared = [hwgrpo(*words) for words in commands[2:]]
    assert not any(done.stderr for done in compared)
    shown, full, document = (done.stdout for done in compared)
    assert shown.splitlines()[:-1] != full.splitlines()[:-1]
    assert max(map(len, full.splitlines())) <= 100
    [comparison] = json.loads(document)["comparisons"]
    assert {done.returncode for done in compared} == {1 if comparison["verdict"] == "parts" else 0}
    assert [each["name"] for each in comparison["differences"]] == ["optim.lr"]
    assert comparison["headline"] in " ".join(shown.split())
