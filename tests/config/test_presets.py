"""Presets: what they set, what wins over them, and what is said of them."""

import json
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.config.load import to_tree, to_yaml
from hwgrpo.config.recipe_files import presets
from hwgrpo.config.shipped_files import preset_files, preset_names
from hwgrpo.config.stored_settings import settings_from
from hwgrpo.errors import ConfigError


def value_of(tree: dict, key: str):
    for name in key.split("."):
        tree = tree[name]
    return "null" if tree is None else tree


@pytest.mark.parametrize("recipe", ["tiny_sort", "qwen3_8b_math"])
def test_a_preset_sets_what_its_file_says_and_names_its_source(recipe):
    for preset in presets():
        tree = to_tree(load_config(recipe, [f"algorithm.preset={preset.name}"], data_may_be_missing=True))
        assert len(preset.settings) >= 3, preset.name
        for setting in preset.settings:
            key, _, text = setting.partition("=")
            assert str(value_of(tree, key)) == text, (preset.name, key)
            assert key.startswith("algorithm."), (preset.name, key)
        assert len(preset.source) > 20, preset.name


def recipe(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    base = "model: {path: builtin://tiny}\ndata: {train: task://sort}\nreward: {functions: [exact_match]}\n"
    file.write_text(base + text)
    return file


def test_a_recipes_own_settings_win_over_its_preset_and_an_overrides_preset_wins_over_the_recipe(tmp_path):
    file = recipe(tmp_path, "algorithm: {preset: dapo, loss: {clip_high: 0.3}, advantage: {eps: 1.0e-4}}\n")
    a = load_config(file).algorithm
    assert (a.preset, a.loss.clip_high, a.loss.dual_clip, a.advantage.eps) == ("dapo", 0.3, None, 1e-4)
    a = load_config(file, ["algorithm.preset=gspo"]).algorithm
    assert (a.preset, a.loss.name, a.loss.clip_high, a.advantage.eps) == ("gspo", "gspo", 4e-4, 1e-4)
    assert a.loss.dual_clip == 3.0, "nothing of the recipe's preset is left"
    a = load_config(file, ["algorithm.preset=null"]).algorithm
    assert (a.preset, a.loss.clip_high, a.loss.dual_clip) == (None, 0.3, 3.0)
    a = load_config(file, ["algorithm={preset: gmpo}"]).algorithm
    assert (a.preset, a.loss.name, a.loss.clip_high) == ("gmpo", "gmpo", 0.4)
    for order in (("algorithm.preset=gspo", "algorithm.loss.clip_high=0.1"),):
        for words in (order, order[::-1]):
            assert load_config(file, words).algorithm.loss.clip_high == 0.1


def test_what_a_preset_sets_and_nothing_uses_is_noted_and_not_refused(tmp_path, capsys):
    words = ["algorithm.preset=dapo", "algorithm.loss.name=sapo"]
    assert load_config(recipe(tmp_path, ""), words).algorithm.loss.name == "sapo"
    assert (
        "note: algorithm.loss.clip_high=0.28 has no effect with algorithm.loss.name='sapo'" in capsys.readouterr().err
    )
    file = recipe(tmp_path, "algorithm: {preset: dapo, loss: {name: sapo}}\n")
    assert load_config(file).algorithm.loss.name == "sapo"
    assert "note: algorithm.loss.clip_high=0.28 has no effect" in capsys.readouterr().err


def test_an_unknown_preset_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.preset='dapoo'.*dapo"):
        load_config(recipe(tmp_path, ""), ["algorithm.preset=dapoo"])


def test_stored_settings_are_read_back_as_they_were(tmp_path):
    config = load_config(recipe(tmp_path, ""), ["algorithm.preset=dapo", "algorithm.loss.clip_high=0.5"])
    assert settings_from(to_yaml(config)) == config
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


def test_the_command_lists_every_preset(capsys):
    assert main(["config", "presets"]) == 0
    printed = capsys.readouterr().out
    assert [line.partition("=")[2] for line in printed.splitlines() if line.startswith("algorithm.preset=")] == [
        *preset_names()
    ]
    assert "DeepSeekMath, Shao et al. 2024" in printed
    assert main(["config", "presets", "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == {*preset_files()}
