"""The page about extensions does what it says: each of its files is written and each of its commands run, in order."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from hwgrpo import api, user_code
from hwgrpo.catalog import ENGINES, STRATEGIES
from hwgrpo.cli.main import main

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
MOST_LINES = 30


def written(block: str) -> dict[str, str]:
    """Return the files that a block writes."""
    return dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE))


def commands(block: str) -> list[list[str]]:
    """Return the `hwgrpo` commands of a block, as lists of arguments."""
    joined = block.replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in joined.splitlines() if line.startswith("hwgrpo ")]


def imported_names(code: str) -> set[tuple[str, str]]:
    """Return (module, name) of what code imports from the three packages."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    pairs = {
        (getattr(node, "module", None) or each.name, each.name if isinstance(node, ast.ImportFrom) else "")
        for node in imports
        for each in node.names
    }
    return {pair for pair in pairs if pair[0].startswith("hwgrpo")}


def test_the_page_imports_promised_names_only_and_each_exists():
    pairs = {pair for block in BLOCKS for name, text in written(block).items() for pair in imported_names(text)}
    own = {name for module, name in pairs if module == "hwgrpo.api"}
    assert {module.partition(".")[0] for module, _ in pairs - {("hwgrpo.api", name) for name in own}} <= {
        "hwgrpo_backends",
        "hwgrpo_kernels",
    }
    assert {"scoped", "ENGINES", "Single"} <= own <= {*api.__all__}
    code = {name for text in re.findall(r"`([^`\n]+)`", PAGE) for name in re.findall(r"\w+", text)}
    assert [name for name in api.__all__ if name not in code | own] == []
    assert [name for name in api.__all__ if not hasattr(api, name)] == []


def test_the_promised_names_are_typed_as_they_are_imported():
    source = ast.parse(Path(api.__file__).read_text())
    typed = [node for each in source.body if isinstance(each, ast.If) for node in each.body]
    homes = {node.module: tuple(name.name for name in node.names) for node in typed if isinstance(node, ast.ImportFrom)}
    assert homes == api._HOMES
    assert sorted(name for names in homes.values() for name in names) == sorted(api.__all__)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: next(iter(written(block)), ""))
def test_a_block_runs_and_is_short(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "_plugins", [])
    for registry in (ENGINES, STRATEGIES):  # what a plugin adds is gone with its test
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name, text in written(block).items():
        Path(name).write_text(text)
        assert len(text.splitlines()) < MOST_LINES
    for arguments in commands(block):
        assert main([*arguments, "backend.name=cpu", "observe.progress=none"]) == 0
    steps = [json.loads(line) for path in tmp_path.glob("runs/*/metrics.jsonl") for line in path.open()]
    assert {each["step"] for each in steps} >= {1, 2}
    if "loggers.py" in written(block):
        assert [line.split(",")[0] for line in Path("runs/logger/reward.csv").read_text().splitlines()] == ["1", "2"]
    if "counting.py" in written(block):
        first, second = (each["rollout/sampled"] for each in steps if "rollout/sampled" in each)
        assert second - first == 64 * 8 / 2
    if "metrics.py" in written(block):
        assert sum("repetition/mean" in each for each in steps) == 2
    if "mine.py" in written(block):
        assert any("fade" in name for each in steps for name in each)
