"""docs/profiling.md: its items are those of scripts/gpu_visit.sh, and its commands are commands."""

import shlex
import sys

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.training.stages.profile import FOLDER
from tests.docs.pages import REPO, blocks, code, page, table

sys.path.insert(0, str(REPO / "scripts"))

import gpu_visit_runner as runner

PAGE = page("profiling.md")
ITEMS = runner.all_items("ABC")


def test_the_table_has_the_items_of_the_visit():
    rows = [(f"`{item.name}`", item.what, str(item.expected), str(item.limit)) for item in ITEMS.values()]
    assert [tuple(row.values()) for row in table(PAGE, "item", "what", "s", "limit")] == rows


def test_the_visits_of_the_page_name_items_and_options():
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines() if "gpu_visit.sh" in line]
    visits = [shlex.split(line, comments=True) for line in lines]
    assert len(visits) == 4
    for words in visits:
        assert words[:2] == ["bash", "scripts/gpu_visit.sh"]
        options = runner.arguments_of(words[2:])
        assert str(options.out) == "OUT"
        assert set(options.items) <= set(ITEMS)


def test_the_command_writes_the_files_that_the_page_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [command] = [line for block in blocks(PAGE, "bash") for line in block.splitlines() if line.startswith("hwgrpo")]
    quick = ["trainer.prompts_per_step=2", "trainer.validate_at_start=false", "data.validation_max_rows=1"]
    assert main([*shlex.split(command)[1:], *quick]) == 0
    named = {name for row in table(PAGE, "file", "what") for name in code(row["file"])}
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("step_*/*")}
    assert named == written
    assert all(f"/{FOLDER}/" in name for name in named)


VENDORS = {
    "nsys": {"--trace": "cuda,nvtx,cublas,cudnn", "--cuda-graph-trace": "node", "--output": "step"},
    "msprof": {"--output": "step", "--msproftx": "on"},
}
"""Profiler -> its options, as NVIDIA's Nsight Systems user guide and Huawei's msprof manual name them."""


def test_the_vendors_profilers_get_their_options_and_a_command_with_right_settings():
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines() if line.split()[0] in VENDORS]
    assert [line.split()[0] for line in lines] == [*VENDORS]
    for tool, *words in map(shlex.split, lines):
        options = dict(word.split("=", 1) for word in words if word.startswith("--"))
        application = shlex.split(options.pop("--application", ""))
        if not application:
            application = words[words.index("hwgrpo") :]
            assert words[0] == "profile"
        assert options == VENDORS[tool]
        assert application[:2] == ["hwgrpo", "train"]
        config = load_config(application[2], application[3:])
        assert config.trainer.max_steps == 3
