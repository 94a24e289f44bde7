"""Whole small runs with torch-npu's fused modules, whose ops the host computes as their documents define them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.npu import BACKEND as NPU
from hwgrpo_kernels.fused_modules import is_fused

from hwgrpo.errors import ConfigError
from hwgrpo.training.run_parts import Run
from hwgrpo.training.setup import build_run
from tests.support.numbers import npu_reference_ops
from tests.support.numbers.rounding import GENTLE, LOGITS, drift
from tests.support.runs import runs

WORDS = ("model.dtype=float32", "trainer.max_steps=3", *GENTLE)
SHOWN = "observe.progress=plain"
TAKEN = {"rms_norm": 5, "rotary": 1, "swiglu": 1, "attention": 1}


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = [line for line in runs.metrics(folder) if "actor/grad_norm" in line]
    return [(line["actor/pg_loss"], line["actor/grad_norm"]) for line in lines]


def environment(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "environment.json").read_text())


@pytest.mark.parametrize("more", [(), ("model.lora.rank=4",)], ids=["full", "lora"])
def test_a_run_takes_every_module_and_has_the_losses_of_the_cpu(tmp_path: Path, more: tuple[str, ...], capsys):
    runs.run(tmp_path / "cpu", *WORDS, *more)
    with npu_reference_ops.registered():
        runs.run(tmp_path / "npu", *WORDS, *more, SHOWN, backend=NPU)
        assert set(npu_reference_ops.calls) == set(npu_reference_ops.OPS)
        assert min(npu_reference_ops.calls.values()) > 20, "the trial alone called them"
    taken = environment(tmp_path / "npu")["fused_modules"]["replaced"]
    assert {name: len(of) for name, of in taken.items()} == TAKEN
    assert environment(tmp_path / "npu")["attention"]["selected"] == "npu_fusion_attention"
    ours, theirs = losses(tmp_path / "npu"), losses(tmp_path / "cpu")
    assert len(ours) == len(theirs) == 3
    for (loss, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, abs=drift(3), rel=drift(3))
        assert norm == pytest.approx(expected_norm, abs=drift(3), rel=drift(3) * LOGITS)
    shown = "".join(capsys.readouterr())
    assert "layout padded" not in shown, "grouped rows are built on the fused attention"
    assert "fused modules: rms_norm: 5, rotary: 1, swiglu: 1, attention: 1" in shown
    assert "attention npu_fusion_attention" in shown


def test_the_final_model_and_the_checkpoints_are_those_of_a_plain_run(tmp_path: Path):
    words = (*WORDS, "trainer.save_every=3")
    runs.run(tmp_path / "plain", *words, "model.fused_modules=[none]", backend=NPU)
    with npu_reference_ops.registered():
        runs.run(tmp_path / "fused", *words, backend=NPU)
    plain, fused = (
        {path.relative_to(folder) for path in folder.rglob("*") if {"final", "checkpoints"} & set(path.parts)}
        for folder in (tmp_path / "plain", tmp_path / "fused")
    )
    assert plain == fused != set()
    configs = [json.loads((tmp_path / each / "final" / "config.json").read_text()) for each in ("plain", "fused")]
    assert configs[0] == configs[1]
    # a run without the ops goes on from the checkpoint of one with them
    runs.run(tmp_path / "fused", *WORDS[:1], "trainer.max_steps=4", backend=NPU)
    assert len(losses(tmp_path / "fused")) == 4


def test_without_the_ops_auto_takes_none_and_says_why(tmp_path: Path, capsys):
    assert runs.run(tmp_path / "run", *WORDS[:1], "trainer.max_steps=1", SHOWN, backend=NPU) == "completed"
    reason = "this torch-npu has no npu_rms_norm, or is not imported"
    record = environment(tmp_path / "run")
    assert not any(record["fused_modules"]["replaced"].values())
    assert record["fused_modules"]["skipped"]["rms_norm"] == {"": reason}
    assert record["attention"] == {
        "selected": "sdpa",
        "skipped": dict.fromkeys(
            ("npu_fusion_attention", "flash_attention_2"),
            "this torch-npu has no npu_fusion_attention, or is not imported",
        ),
    }
    shown = "".join(capsys.readouterr())
    assert f"fused modules: rms_norm: none ({reason})" in shown
    assert "attention sdpa (npu_fusion_attention: this torch-npu has no" in shown


@pytest.fixture
def failing_attention(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason that the trial of attention gives."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("EZ9999: inner error")

    monkeypatch.setitem(npu_reference_ops.OPS, "npu_fusion_attention", fails)
    return "it fails (RuntimeError: EZ9999: inner error)"


def test_attention_asked_for_by_name_and_left_by_its_trial_ends_the_run(tmp_path: Path, failing_attention: str):
    says = re.escape(f"model.attention='npu_fusion_attention': attention replaces no module: {failing_attention}")
    with npu_reference_ops.registered(), pytest.raises(ConfigError, match=says):
        runs.run(tmp_path / "run", *WORDS, "model.attention=npu_fusion_attention", backend=NPU)


def built(folder: Path, *words: str) -> Run:
    """Return the parts of a run that is not started."""
    with npu_reference_ops.registered():
        parts = build_run(runs.small(folder, *WORDS, *words), NPU, 0, 1)
    parts.observer.close()
    parts.engine.close()
    assert parts.lock is not None
    parts.lock.close()
    return parts


def test_the_reference_scores_by_the_modules_that_train(tmp_path: Path):
    parts = built(tmp_path / "run", "algorithm.kl.coef=0.01")
    assert parts.reference is not None
    for policy in (parts.update.policy, parts.reference.policy):
        assert sum(is_fused(each) for each in policy.modules()) == sum(TAKEN.values()) - 1
        assert policy.base.config._attn_implementation == "sdpa_branched_npu_fusion_attention"


def test_attention_that_its_trial_left_is_not_recorded_as_taken(tmp_path: Path, failing_attention: str, capsys):
    with npu_reference_ops.registered():
        runs.run(tmp_path / "run", *WORDS[:1], "trainer.max_steps=1", SHOWN, backend=NPU)
    record = environment(tmp_path / "run")
    assert record["attention"] == {"selected": "sdpa", "skipped": {"npu_fusion_attention": failing_attention}}
    assert f"attention sdpa (npu_fusion_attention: {failing_attention})" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words,says",
    [
        (
            "model.fused_modules=[swiglu]",
            r"model.fused_modules=\['swiglu'\]: swiglu replaces no module: this torch-npu has",
        ),
        ("model.attention=npu_fusion_attention", "model.attention='npu_fusion_attention': this torch-npu has no"),
    ],
)
def test_what_is_asked_for_by_name_and_cannot_be_had_ends_the_run(tmp_path: Path, words: str, says: str):
    with pytest.raises(ConfigError, match=says):
        runs.run(tmp_path / "run", *WORDS, words, backend=NPU)


def test_one_module_named_is_the_only_one_taken(tmp_path: Path):
    words = (*WORDS[:1], "trainer.max_steps=1", "model.fused_modules=[swiglu]", "model.attention=sdpa")
    with npu_reference_ops.registered():
        runs.run(tmp_path / "run", *words, backend=NPU)
        assert set(npu_reference_ops.calls) == {"npu_swiglu"}


def test_bf16_takes_every_module(tmp_path: Path):
    with npu_reference_ops.registered():
        runs.run(tmp_path / "run", "model.dtype=bfloat16", "trainer.max_steps=1", backend=NPU)
    taken = environment(tmp_path / "run")["fused_modules"]["replaced"]
    assert {name: len(of) for name, of in taken.items()} == TAKEN


def test_the_trial_computes_in_the_dtype_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = npu_reference_ops.OPS["npu_swiglu"]

    def no_bf16(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no bf16 here")
        return plain(x, dim)

    monkeypatch.setitem(npu_reference_ops.OPS, "npu_swiglu", no_bf16)
    with npu_reference_ops.registered():
        runs.run(tmp_path / "run", "model.dtype=bfloat16", "trainer.max_steps=1", backend=NPU)
    assert environment(tmp_path / "run")["fused_modules"]["replaced"]["swiglu"] == []
