"""Limits of time steps, which transformers applies in a full forward and not in a step with a cache."""

import pytest
import torch
from transformers import DynamicCache

from hwgrpo.models.loading import load_model
from hwgrpo.models.time_steps import UNLIMITED, time_step_note
from tests.support.models.families import FALLING_BACK, make, run_settings
from tests.support.numbers.rounding import STEP

LIMITED = {"FalconH1": (0.01, 0.1), "NemotronH": None, "Zamba2": None, "Mamba2": (0.01, 0.1)}
"""Families -> a limit that a configuration sets; None: their own, a smallest time step of 0.001."""


def gap_of_steps(model) -> float:
    """Return the largest difference of logits between decoding token by token and a full forward."""
    ids = (torch.arange(48) * 7 + 3)[None] % model.config.vocab_size
    argument = "cache_params" if type(model).__name__ == "Mamba2ForCausalLM" else "past_key_values"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        decoded = [
            model(input_ids=ids[:, t : t + 1], position_ids=torch.tensor([[t]]), use_cache=True, **{argument: cache})
            for t in range(ids.shape[1])
        ]
    return float((torch.cat([output.logits for output in decoded], 1) - expected).abs().max())


@pytest.mark.parametrize("name", LIMITED)
def test_a_loaded_model_has_the_time_steps_that_decoding_has(name, tmp_path, monkeypatch):
    limit = LIMITED[name]
    if limit is not None:
        monkeypatch.setitem(FALLING_BACK, name, (FALLING_BACK[name][0] | {"time_step_limit": limit}, ""))
    model = make(name, tmp_path).eval()
    plain = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert time_step_note(plain) is None
    assert gap_of_steps(plain) > 30 * STEP, "transformers has mended it: the limits may stay"
    assert gap_of_steps(model) < 10 * STEP
    described = "[0.001, inf]" if limit is None else "[0.01, 0.1]"
    assert described in (time_step_note(model) or "")
    assert model.config.to_dict().get("time_step_limit") == plain.config.to_dict().get("time_step_limit")


def test_a_model_without_limits_is_left_as_it_is_and_has_no_note(tmp_path):
    model = make("Bamba", tmp_path)
    limits = [module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")]
    assert limits
    assert {tuple(limit) for limit in limits} == {UNLIMITED}
    assert time_step_note(model) is None


def test_ranks_without_weights_lift_the_limits_too(tmp_path):
    make("NemotronH", tmp_path)
    model = load_model(run_settings(tmp_path).model, attention="sdpa", on_meta_device=True)
    assert time_step_note(model)
