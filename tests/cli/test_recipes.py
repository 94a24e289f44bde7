"""`hwgrpo recipes` lists every recipe that ships, with what its own file says."""

import json
import re
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config.shipped_recipes import shipped_recipes

ROOT = Path(__file__).parents[2]


def test_every_recipe_that_ships_has_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes"]) == 0
    head, *lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert re.split(r"\s{2,}", head) == ["recipe", "model", "method", "data", "planned for"]
    cells = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in lines}
    assert set(cells) == {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    lora = ["Qwen/Qwen3-8B", "grpo, LoRA of rank 32 over nf4", "data/math/train.parquet", "1 x 16 GiB"]
    assert cells["qwen3_8b_math_qlora"] == lora
    assert cells["qwen2_5_7b_gsm8k_full"][1:] == ["grpo, all parameters", "data/gsm8k/train.parquet", "8 x 26 GiB"]
    assert cells["smollm2_135m_arithmetic"][2] == "reasoning_gym://basic_arithmetic"
    assert cells["tiny_sort"][-1] == "any device, or a CPU"


def test_devices_and_memory_are_those_of_the_table_of_recipes(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    planned = {name: (int(devices.partition(",")[0]), int(memory)) for name, _, _, _, devices, memory, *_ in rows}
    assert {each.name: (each.devices, each.memory_gib) for each in shipped_recipes() if each.memory_gib} == planned
    main(["recipes", "--json"])
    names = {each["name"] for each in json.loads(capsys.readouterr().out)}
    assert {name for name in names if not name.startswith("tiny_")} == {*planned}
