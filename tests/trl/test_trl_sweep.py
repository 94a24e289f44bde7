"""The script that imports every GRPO configuration of a folder."""

import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "scripts/sweep_trl_configs.py"))["main"]

RECIPE = "model_name_or_path: m\ndataset_name: d\nnum_generations: 4\nlearning_rate: 1e-6\n"


def test_a_line_per_configuration_says_what_became_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, text in (
        ("a.yaml", RECIPE),
        ("b.yaml", RECIPE + "reward_funcs: [tag_count]\n"),
        ("c.yml", RECIPE + "per_device_batch: 2\n"),
        ("sft.yaml", "learning_rate: 1e-6\n"),
    ):
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "| a.yaml | imported |  |"
    assert lines[1].startswith("| b.yaml | refused | `reward_funcs`: tag_count")
    assert lines[2].startswith("| c.yml | stopped | unknown key of TRL 'per_device_batch'")
    assert len(lines) == 3
    assert main([str(tmp_path), "num_generations=3"]) == 0
    assert "must be divisible by num_generations=3" in capsys.readouterr().out
    assert main([]) == 2
