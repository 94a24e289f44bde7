"""docs/models.md says of each family what the code makes of it."""

import ast
import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import reason_model_cannot_use
from hwgrpo.rollout.local.architectures import ARCHITECTURES, predict_fallback
from hwgrpo.training.policy.auto_settings import AttentionSelection, choose_layout
from hwgrpo.training.sequence_checks import check_sequence_parallel
from tests.docs.pages import REPO, blocks, page, section, table
from tests.support.models.families import FALLING_BACK, FAMILIES, SHAPE, config_class, run_settings

PAGE = page("models.md")
ROWS = {row["family"]: row for row in table(section(PAGE, "Compared with transformers"), "family")}
LONGEST = 1024
"""Tokens of a sequence by the default settings."""


def configuration(name: str, *, window: bool) -> Any:
    """Return a family's configuration, its window shorter than a sequence or longer."""
    extra = copy.deepcopy(FAMILIES[name].extra)
    if not window and "sliding_window" in extra:
        extra["sliding_window"] = 4096
    return config_class(name)(**SHAPE | extra)


def test_the_page_has_the_families_that_are_compared():
    assert list(ROWS) == list(FAMILIES)
    known = {name.rpartition(".")[2].removesuffix("ForCausalLM") for name in ARCHITECTURES}
    assert {name for name, row in ROWS.items() if row["decoding"].startswith("lean step")} == known


def test_families_are_on_the_page_as_the_code_treats_them():
    for name in FAMILIES:
        long, short = configuration(name, window=False), configuration(name, window=True)
        attention = "sdpa" if reason_model_cannot_use("sdpa", long) is None else "eager"
        below, beyond = (choose_layout(run_settings(Path("unused")), each, attention).name for each in (long, short))
        layout = FAMILIES[name].layout if below == beyond else f"{below}; {beyond} beyond the window"
        lean, outgrown = predict_fallback(long, LONGEST) is None, predict_fallback(short, LONGEST) is not None
        decoding = "own forward" if not lean else "lean step" + ("; own forward beyond the window" if outgrown else "")
        expected = {"attention": attention, "layout": layout, "decoding": decoding}
        expected["tensor parallelism"] = parallel(long)
        assert {column: ROWS[name][column] for column in expected} == expected, name


def parallel(model_config: Any) -> str:
    """Return whether ranks may shard the layers of a model."""
    two = run_settings(Path("unused"), "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2")
    try:
        check_sequence_parallel(two, model_config, AttentionSelection("sdpa"))
    except ConfigError:
        return "no"
    return "yes"


def test_the_page_has_the_families_that_fall_back_to_padded_rows():
    rows = table(section(PAGE, "Trained in padded rows"), "family", "the layers")
    listed = {row["family"]: row["the layers"] for row in rows}
    assert listed == {name: layers for name, (_, layers) in FALLING_BACK.items()}


def test_every_shape_that_ships_is_of_a_family_of_the_page():
    shapes = sorted((REPO / "configs" / "models").glob("*.json"))
    assert shapes
    for file in shapes:
        settings = transformers.PreTrainedConfig.get_config_dict(str(file))[0]
        [architecture] = settings["architectures"]
        with_images = "vision_config" in settings and f"`{settings['model_type']}`" in page("vision.md")
        assert with_images or architecture.removesuffix("ForCausalLM") in ROWS, file.name


def test_the_command_of_the_page_names_what_a_run_would_do(capsys: pytest.CaptureFixture[str]):
    [command] = blocks(PAGE, "bash")
    assert main(shlex.split(command, comments=True)[1:]) == 0
    printed = capsys.readouterr().out
    assert "grouped layout" in printed
    assert "memory" in printed


def test_each_fault_of_published_tokenizers_names_a_test_that_exists():
    rows = table(section(PAGE, "What published tokenizers and templates do"), "what they do")
    named = [name for row in rows for name in re.findall(r"`(tests/[^`]+)`", row["test"])]
    assert len(named) >= len(rows) - 2, "others name the test of a row above"
    for name in named:
        file, _, function = name.partition("::")
        body = ast.parse((REPO / file).read_text(encoding="utf-8")).body
        assert not function or any(isinstance(each, ast.FunctionDef) and each.name == function for each in body), name
