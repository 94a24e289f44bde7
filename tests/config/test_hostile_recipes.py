"""Recipes that a stranger wrote to exhaust time or memory are refused in words; others are read as before."""

import itertools
import time

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError

WRAPPED = (
    "model: {{path: a}}\ndata: {{train: 'task://sort'}}\nreward: {{functions: [{{name: x.py:f, kwargs: {{{}}}}}]}}\n"
)
HERE = "reward.functions.0.kwargs"
RECIPES = {
    "doubled": WRAPPED.format("a0: x, " + ", ".join(f"a{i}: '${{.a{i - 1}}}${{.a{i - 1}}}'" for i in range(1, 60))),
    "doubled by whole names": WRAPPED.format(
        "a0: x, " + ", ".join(f"a{i}: '${{{HERE}.a{i - 1}}}${{{HERE}.a{i - 1}}}'" for i in range(1, 60))
    ),
    "a chain": WRAPPED.format("a0: x, " + ", ".join(f"a{i}: '${{.a{i - 1}}}'" for i in range(1, 1500))),
    "names of names": WRAPPED.format(
        "z: 1, a0: x, " + ", ".join(f"a{i}: '${{.a${{{HERE}.z}}}}'" for i in range(1, 40))
    ),
    "nested": WRAPPED.format("a: '" + "${" * 3000 + "}" * 3000 + "'"),
    "open": WRAPPED.format("a: '" + "${" * 100_000 + "'"),
    "many": WRAPPED.format("a: '" + "${model.path}" * 30_000 + "'"),
    "sections": WRAPPED.format(
        "b: {" + ", ".join(f"k{i}: xxxxxxxx" for i in range(300)) + "}, "
        + ", ".join(f"a{i}: '${{.b}}'" for i in range(900))
    ),
    "all of itself": WRAPPED.format(", ".join(f"a{i}: '${{reward}}'" for i in range(300))),
    "itself": WRAPPED.format(f"a: '${{{HERE}.a}}'"),
    "keys": WRAPPED.format(", ".join(f"k{i}: 1" for i in range(60_000))),
    "a long value": WRAPPED.format("a: " + "x" * 2_000_000),
    "a long number": WRAPPED.format("a: " + "9" * 100_000),
    "deep": "a: " + "[" * 100_000,
    "anchors": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")),
    "merged anchors": "a: &a {" + ", ".join(f"k{i}: 1" for i in range(99)) + "}\n"
    + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in itertools.pairwise("abcdefghij")),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_recipe_is_refused_in_bounds(name, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPES[name])
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "recipe.yaml", data_may_be_missing=True)
    assert time.process_time() - start < 20  # most take 0.1, and what is not bounded takes minutes
    assert len(str(error.value)) < 2000


def test_settings_given_as_a_mapping_have_the_same_bounds():
    kwargs = {"a0": "x"} | {f"a{i}": f"${{.a{i - 1}}}${{.a{i - 1}}}" for i in range(1, 60)}
    settings = {"model.path": "a", "data.train": "b", "reward.functions": [{"name": "exact_match", "kwargs": kwargs}]}
    with pytest.raises(ConfigError, match="refer to each other so often or so deep"):
        load_config(settings, data_may_be_missing=True)


def test_interpolations_of_a_recipe_are_read_as_before(tmp_path, capsys):
    text = (
        "model: {path: a, revision: '${trainer.output_dir}-${.path}'}\ntrainer: {output_dir: 'runs/${model.path}'}\n"
        "data: {train: 'task://sort'}\nreward: {functions: [exact_match]}\nobserve: {kwargs: {}}\n"
    )
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_config(tmp_path / "recipe.yaml").model.revision == "runs/a-a"
    assert main(["train", str(tmp_path / "recipe.yaml"), "--print-config"]) == 0
    assert "revision: runs/a-a" in capsys.readouterr().out
