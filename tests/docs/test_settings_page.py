"""docs/settings.md: its defaults are the schema's, its figures the recipes', its arithmetic the product's."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.config.document import entries
from hwgrpo.migrate.names_here import TRL, VERL
from tests.docs.pages import REPO, blocks, code, page, section, table

PAGE = page("settings.md")
DEFAULTS = {entry.key: entry.default for entry in entries()}


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_every_default_is_the_schemas():
    rows = table(PAGE, "setting", "default")
    assert len(rows) > 20
    for row in rows:
        [key] = code(row["setting"])
        default = DEFAULTS[key]
        shown = re.sub("`", "", row["default"])
        assert shown == default or float(shown) == float(default), row


def test_every_figure_of_a_recipe_is_the_recipes():
    rows = table(PAGE, "recipe", "trains")
    for row in rows:
        [name] = code(row["recipe"])
        config = load_config(str(REPO / "configs" / f"{name}.yaml"), [], data_may_be_missing=True)
        for column, cell in row.items():
            if "." in column:
                assert float(cell) == float(value_of(config, code(column)[0])), (row["recipe"], column)
        rank = config.model.lora.rank
        assert row["trains"].startswith(f"LoRA, rank {rank}" if rank else "all")


@pytest.mark.parametrize("block", blocks(PAGE, "bash"), ids=lambda block: block.splitlines()[0])
def test_a_block_runs_and_prints_what_the_page_shows(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # which has no runs of this recipe
    for line in block.replace("\\\n", " ").splitlines():
        assert main(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out
    text = PAGE[PAGE.index(block) + len(block) :]
    below = re.match(r"```\n\n```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    if below is not None:
        for line in below[1].splitlines():
            assert line in printed


def test_what_equals_trls_arguments():
    rows = table(PAGE, "`per_device_train_batch_size`", "updates per step")
    assert len(rows) == 4
    for row in rows:
        sizes = {code(column)[0] if "`" in column else column: int(cell) for column, cell in row.items()}
        completions = sizes["per_device_train_batch_size"] * sizes["P"]
        step = completions * sizes["steps_per_generation"] / sizes["G"]
        update = completions * sizes["gradient_accumulation_steps"] / sizes["G"]
        assert (sizes["trainer.prompts_per_step"], sizes["trainer.prompts_per_update"]) == (step, update)
        assert sizes["updates per step"] == step / update


def test_what_verls_settings_are_here():
    rows = table(section(PAGE, "From verl"), "verl", "here")
    for row in rows:
        named = [name for name in code(row["verl"]) if name in VERL]
        for name, here in zip(named, code(row["here"]), strict=False):
            assert VERL[name].partition(" | ")[0] in (here.partition("=")[0], "algorithm.kl.coef"), row


def test_what_trls_arguments_are_here():
    rows = table(section(PAGE, "From TRL"), "TRL", "here")
    assert len(rows) == 10
    for row in rows:
        for name in code(row["TRL"]):
            assert TRL[name].partition(" | ")[0] == code(row["here"])[0]


def test_the_share_of_groups_that_teach():
    [text] = re.findall(r"`p` = 0.1 it is ([\d.]+) with `n` = 4, ([\d.]+) with 8 and ([\d.]+) with 16", PAGE)
    assert [float(share) for share in text] == [round(1 - 0.1**n - 0.9**n, 2) for n in (4, 8, 16)]
