"""The commands of the page on replays run, and its table has the stages that are printed."""

import re
import shlex
from pathlib import Path

from hwgrpo.cli.main import main
from tests.docs.pages import blocks, page
from tests.support.runs import runs

COMMANDS = re.findall(r"^hwgrpo (.*?)(?: +#.*)?$", "".join(blocks(page("replay.md"), "bash")), flags=re.MULTILINE)
SMALL = [each for each in runs.SMALL if each.startswith(("model.path=", "data.train=", "data.max_prompt", "rollout."))]
"""A model that other tests have made, too."""
ROW = r"^(\w[\w ,-]*?) +[\d.e+-]+ +[\d.e+-]+ +[\d.]+(?:  \w+)?$"
TRAIN = (*SMALL, "trainer.prompts_per_step=4", "observe.progress=none")


def test_the_commands_of_the_page_pass_and_print_its_stages(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = []
    for command in COMMANDS:
        arguments = [*shlex.split(command), "backend.name=cpu", "trainer.threads=1"]
        assert main(arguments + [*TRAIN] * (arguments[0] == "train")) == 0, command
        printed.append(capsys.readouterr().out)
    assert [command.split()[0] for command in COMMANDS] == ["train", "replay", "replay", "replay"]
    shown = re.findall(ROW, "".join(blocks(page("replay.md"), "text")), re.MULTILINE)
    stages = re.findall(ROW, printed[1], re.MULTILINE)
    assert [stage for stage in shown if stage != "gradients, layer 2"] == stages, "the small model has one layer"
