"""A training step with the row kernels in Triton against fp64, and mistakes in them at their stage."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hwgrpo_kernels import rows_triton

from hwgrpo.cli.main import main
from hwgrpo.parity import fixed_step
from hwgrpo.parity.families import FAMILIES, save_family
from tests.support.numbers.row_cases import NARROW, ROW_OPS

PINS = ", ".join(f"{op.name}: interpreted" for op in ROW_OPS)
ARGUMENTS = ("parity", "backend.name=cpu", "trainer.threads=1", f"kernels.pins={{{PINS}}}", "--json")


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes milliseconds here. All prompts have more tokens of which a model is sure."""
    for name in ("PROMPTS", "RESPONSES"):
        monkeypatch.setattr(fixed_step, name, getattr(fixed_step, name)[:3])


def parity(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Return the report of a comparison with fp64."""
    code = main([*ARGUMENTS, *arguments])
    (report,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert code == (0 if report["passed"] else 1)
    assert any(note.startswith("row_grad -> interpreted") for note in report["notes"])
    return report


@pytest.mark.usefixtures("few_prompts")
def test_rounding_explains_every_difference_in_16_bits(interpreted, capsys):
    report = parity(capsys, "model.dtype=bfloat16")
    assert report["passed"], report


def test_rounding_explains_every_difference_in_rows_of_several_blocks(interpreted, tmp_path, capsys, monkeypatch):
    """Of a model that is sure of some tokens: their log-probs are near 0, where kernels take other formulas."""
    monkeypatch.setattr(rows_triton, "_tile", lambda *args: NARROW)
    monkeypatch.setitem(FAMILIES["granite"], "vocab_size", 2 * NARROW.block + 44)
    monkeypatch.setitem(FAMILIES["granite"], "logits_scaling", 0.8)  # as sure as among more tokens
    save_family("granite", tmp_path)
    report = parity(capsys, "model.dtype=float32", f"model.path={tmp_path}")
    assert report["passed"], report


def scaled(index: int, factor: float) -> Callable[[Any], Any]:
    """Return a mutant of a kernel, one of whose results is a factor too large."""

    def change(result: Any) -> Any:
        (result if isinstance(result, tuple) else (result,))[index].mul_(factor)
        return result

    return change


@pytest.mark.usefixtures("few_prompts")
@pytest.mark.parametrize(
    ("kernel", "change", "stage"),
    [
        ("row_stats", scaled(0, 1.001), "log-probs"),
        ("row_grad", scaled(0, 1.001), "gradients, head"),
    ],
    ids=["log-probs", "gradient"],
)
def test_a_mistake_of_a_kernel_is_found_at_its_stage(kernel, change, stage, interpreted, capsys, monkeypatch):
    right = getattr(rows_triton, kernel)
    monkeypatch.setattr(rows_triton, kernel, lambda *args: change(right(*args)))
    assert parity(capsys, "model.dtype=float32")["first_difference"] == stage
