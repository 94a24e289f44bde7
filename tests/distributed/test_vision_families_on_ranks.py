"""Vision-language families on two ranks: updates and runs are those of one, and a run resumes bit for bit."""

from pathlib import Path

import pytest

from tests.support.models.vision_families import VISION_FAMILIES
from tests.support.models.vision_ranks import Case, rank_differences, refusals
from tests.support.models.vision_resume import STEPS, resume_differences
from tests.support.numbers.rounding import STEP, drift

ONE_OF_EACH = (
    "Qwen3-VL",
    "Gemma 3",
    "Gemma 4",
    "InternVL",
    "Mistral 3",
    "SmolVLM",
    "LLaVA-OneVision",
    "Kimi K2.5",
    "LFM2-VL",
)
"""A family of each kind of pixels: grids, squares, patches, tiles, sizes, masks, ..."""
AGAIN = STEP * 2**2
"""Of weights after two updates: the second gradient has, beside its own error, the first one's, whose step moved the
weights by as much, times a curvature of about 1."""
FULL = Case("fsdp2", "all", "text alone on one")
OTHERS = (
    Case("ddp", "all", "text alone on one"),
    Case("fsdp2", "none", "images on both"),
    Case("fsdp2", "adapters", "text alone on one"),
    Case("fsdp2, in each pass", "all", "images on both"),
)


def test_updates_on_two_ranks_are_those_of_one(tmp_path: Path):
    kinds = {name: family.pixels.__qualname__ for name, family in VISION_FAMILIES.items()}
    assert {kinds[name] for name in ONE_OF_EACH} == set(kinds.values())
    cases = {name: (FULL, OTHERS[i % len(OTHERS)]) for i, name in enumerate(ONE_OF_EACH)}
    for name, differences in rank_differences(cases, tmp_path).items():
        assert tuple(differences) == cases[name]
        for case, found in differences.items():
            assert found.gradient < STEP, (name, case)
            assert found.weight < STEP, (name, case)
            assert found.after_text < AGAIN, (name, case)
            assert (found.moved == 0) == (case.trained == "none"), (name, case)


def test_a_run_resumes_bit_for_bit_and_two_ranks_train_as_one(tmp_path: Path):
    found = resume_differences(("Qwen3-VL",), tmp_path)["Qwen3-VL"]
    assert found.one_rank == []
    assert found.two_ranks == []
    assert found.metrics < drift(STEPS)
    assert found.weights < drift(STEPS)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_ways_to_split_a_sequence_or_a_tower_over_ranks_are_refused_by_name(name):
    kind = VISION_FAMILIES[name].config().model_type
    for setting, reason in refusals(name).items():
        assert reason.startswith(f"{setting}: model.path='unused' reads images ({kind}), and "), setting
