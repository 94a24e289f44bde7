"""The startup comparison of decoding with full forward passes, at the rounding of the model."""

import pytest
import torch
import transformers

from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.local.lean_step import LeanRows
from tests.support.models.families import TOKENIZER, make
from tests.support.models.steps import CPU
from tests.support.models.tiny import tiny_llama, tiny_qwen3

DRIFT = "decoded one by one"


def drift_of(model, dtype=torch.float32, longest: int | None = 64) -> list[str]:
    engine = LocalEngine(model, TOKENIZER, device=CPU, compute_dtype=dtype, max_sequences=4, longest=longest)
    return [note for note in engine.notes if DRIFT in note]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longest", [None, 2, 64])
def test_decoding_that_differs_by_rounding_has_no_note(dtype, longest):
    torch.manual_seed(0)
    assert drift_of(tiny_qwen3(), dtype, longest) == []


def test_states_that_decoding_updates_a_little_otherwise_are_named_with_the_gap(tmp_path):
    model = make("NemotronH", tmp_path)
    assert drift_of(model) == []
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.001, float("inf"))  # as in transformers, in the full forward alone
    [note] = drift_of(model)
    assert "logits of NemotronHForCausalLM differ by" in note
    assert "is rounding" in note


def test_a_lean_step_that_is_a_little_off_is_named_too(monkeypatch):
    model = tiny_llama()
    torch.manual_seed(0)
    assert drift_of(model) == []
    compute = LeanRows.compute
    monkeypatch.setattr(LeanRows, "compute", lambda rows, token_B: compute(rows, token_B) * 1.0005)
    [note] = drift_of(model)
    assert "logits of LlamaForCausalLM differ by 0.0005" in note


def test_a_model_of_few_positions_is_compared_within_them():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_positions=12, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    assert drift_of(transformers.GPT2LMHeadModel(config), longest=None) == []
