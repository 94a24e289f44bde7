"""The script that runs programs written for TRL, on programs of its forms."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.trl import GRPOConfig, experimental

REPO = Path(__file__).parents[2]
RESULTS = REPO / "benchmarks/results/trl_scripts.md"
SCRIPT = '''"""
python examples/scripts/grpo_short.py \\
    --model_name_or_path org/model --num_generations 4 --per_device_train_batch_size 4
"""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

if __name__ == "__main__":
    args, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("org/rows", split="train[:5%]")
    GRPOTrainer(model.model_name_or_path, lambda completions, **_: [0.0] * len(completions), args, rows).train()
'''
PAGE = """
```python
def make_tool():
    ...
```
```python
trainer = GRPOTrainer(
    ...,
    tools=[make_tool],
)
```
```python
training_args = GRPOConfig(epsilon=10.0, ...)
print(1 / 0)
```
```bash
trl grpo --model_name_or_path org/model --num_processes 2
```
"""


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "trl/examples/scripts"
    scripts.mkdir(parents=True)
    (scripts / "grpo_short.py").write_text(SCRIPT)
    (scripts / "dpo.py").write_text("from trl import DPOTrainer\nif __name__ == '__main__': DPOTrainer()")
    (tmp_path / "trl/page.md").write_text(PAGE)
    cells = ("!pip install trl", "from no_such_package import Tool", "from trl import GRPOTrainer\nTool.use()")
    (tmp_path / "trl/book.ipynb").write_text(notebook(*cells))
    return tmp_path / "trl"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch):
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    return importlib.import_module("run_trl_scripts")


def test_an_error_counts_as_refused_by_its_class(programs):
    refused = programs.trl_script_child.is_refusal
    with pytest.raises(AttributeError) as missing:
        _ = experimental.AsyncGRPOConfig
    with pytest.raises(ImportError) as not_imported:
        exec("from hwgrpo.trl import SFTTrainer")
    assert all(map(refused, (missing.value, not_imported.value, ConfigError("a"))))
    assert not refused(RewardError("a"))
    with pytest.raises(AttributeError) as crash:
        GRPOConfig("o").settings.__func__(None)  # type: ignore[attr-defined]
    assert Path(crash.traceback[-1].path).parent.name == "trl"
    assert not refused(crash.value)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import trl", "trl.GRPOConfig"),
        ("import trl as t", "t.GRPOConfig"),
        ("import trl.trainer", "trl.trainer.GRPOConfig"),
        ("import trl.trainer as t", "t.GRPOConfig"),
        ("import os, trl.trainer, trl.rewards as r", "trl.GRPOConfig"),
        ("if True:\n    import trl  # noqa", "trl.GRPOConfig"),
        ("from trl.trainer import (\n    GRPOConfig,\n)", "GRPOConfig"),
        ("from trl import trainer as t", "t.GRPOConfig"),
    ],
)
def test_a_program_imports_this_package_in_place_of_trl(programs, line: str, name: str):
    found: dict = {}
    exec(programs.with_our_imports(f"{line}\nfound = {name}"), found)
    assert found["found"] is GRPOConfig


def test_other_imports_stay_as_they_are(programs):
    text = "import trlx, os  # trl\nfrom trl_tools import a\nimport numpy as trl"
    assert programs.with_our_imports(text) == text


def test_a_script_has_the_text_files_that_it_names(programs, folder: Path):
    script = folder / "examples/scripts/grpo_short.py"
    script.write_text(SCRIPT.replace("org/rows", "rows.txt"))
    for name in ("rows.txt", "other.txt"):
        (script.parent / name).write_text(name)
    [found] = [each for each in programs.programs(folder) if each.name.endswith("grpo_short.py")]
    assert found.files == {"rows.txt": "rows.txt"}


@pytest.mark.slow
def test_the_table_says_what_became_of_each_program(folder: Path):
    script = REPO / "scripts/run_trl_scripts.py"
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[2] == "`trl`: 4 programs: 1 ran, 1 refused, 2 stopped."
    rows = [re.sub(r" \| \d+ \|", " |", line) for line in lines if line.startswith("| ")][1:]
    stopped = "AttributeError: type object 'Tool' has no attribute 'use'"
    assert rows[0] == f"| book.ipynb | stopped | {stopped} | stand-ins for no_such_package |"
    assert rows[1] == "| examples/scripts/grpo_short.py | ran | 2 updates, loss 0 | rows |"
    assert rows[2].startswith("| page.md, block 1 | refused | ConfigError: tools[0]: make_tool has no JSON schema")
    assert rows[3] == "| page.md, block 2 | stopped | ZeroDivisionError: division by zero |  |"


def test_the_page_of_results_has_the_form_that_the_script_prints():
    text = RESULTS.read_text()
    results = re.findall(r"^\| .+? \| (ran|refused|stopped) \| \S", text, re.MULTILINE)
    counts = ", ".join(f"{results.count(each)} {each}" for each in ("ran", "refused", "stopped"))
    assert f": {len(results)} programs: {counts}." in text.splitlines()[2]
    page = (REPO / "docs/from-trl.md").read_text()
    assert f"Of {len(results)} programs" in page
    assert f"{results.count('ran')} ran at commit" in page
    assert f"and {results.count('refused')} were refused" in page
