"""Windows of attention: which a run can outgrow, and checks at its start that do outgrow them."""

import re

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, MistralConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hwgrpo.catalog import LAYOUTS
from hwgrpo.errors import ConfigError
from hwgrpo.models.rounding import Excess
from hwgrpo.models.windows import WINDOWS, shorten_windows, windows_below
from hwgrpo.rollout.local import decode_rows
from hwgrpo.rollout.local.decode_rows import check_cache
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.auto_settings import choose_layout
from hwgrpo.training.policy.layout_check import select_supported_layout
from hwgrpo.training.policy.layouts import PADDED
from tests.support.models.families import SHAPE, TOKENIZER, run_settings
from tests.support.models.steps import updater
from tests.support.models.tiny import sharpened

CPU = torch.device("cpu")
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip


def build(kind: str, **extra):
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | extra)
    return sharpened(getattr(transformers, f"{kind}ForCausalLM")(config)).eval()


def layout_of(model, *overrides: str):
    config = run_settings("unused", *overrides)
    update = updater(model)
    return select_supported_layout(config, update.policy, choose_layout(config, model.config, "sdpa"))


REACHED = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=25")  # 65 tokens at most
NOT_REACHED = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=24")


def test_a_mask_that_padding_changes_beyond_a_window_is_refused_where_a_sequence_can_outgrow_it():
    model = build("Doge", keep_window_size=64)  # of all keys alike it keeps any 64, as the row happens to be wide
    with pytest.raises(
        ConfigError, match=r"DogeForCausalLM: .* padding follows it once .* keep_window_size=64: keep .* at 64 or"
    ):
        layout_of(model, *REACHED)
    assert layout_of(model, *NOT_REACHED)[0].name in LAYOUTS.names()
    with pytest.raises(ConfigError, match=r"rollout.engine='local' cannot sample .* keep_window_size=64; keep"):
        check_cache(model, CPU, 65)
    assert check_cache(model, CPU, 64)


@pytest.mark.parametrize(
    ("kind", "extra", "name"),
    [
        ("GlmMoeDsa", LATENT | {"index_topk": 64}, "index_topk"),
        ("DeepseekV32", LATENT | {"index_topk": 64}, "index_topk"),
        ("Moshi", {"sliding_window": 64, "ffn_dim": 48}, "sliding_window"),
    ],
)
def test_a_cache_that_is_wrong_beyond_a_window_is_refused_where_a_sequence_can_outgrow_it(kind, extra, name):
    model = build(kind, **extra)
    with pytest.raises(ConfigError, match=f"with its cache, logits differ .* longer than {name}=64"):
        LocalEngine(model, TOKENIZER, device=CPU, compute_dtype=torch.float32, max_sequences=4, longest=65)
    assert check_cache(model, CPU, 64)


def test_a_window_within_a_buffer_keeps_rows_of_several_sequences_away():
    layers = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    config = transformers.GPTNeoConfig(**SHAPE | layers, window_size=64)
    assert choose_layout(run_settings("unused", *REACHED), config, "eager") is PADDED
    assert choose_layout(run_settings("unused", *NOT_REACHED), config, "eager").name == "grouped_masked"


def test_windows_are_as_they_were_after_a_check_and_hold_within_it():
    model = build("Mistral", sliding_window=64)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        with shorten_windows(model, windows_below(model.config, None)):
            assert not torch.allclose(model(ids).logits, before, atol=1e-3)
        assert torch.equal(model(ids).logits, before)


def test_a_window_that_no_layer_has_is_none():
    for config in (
        transformers.Qwen2Config(sliding_window=8, use_sliding_window=False),
        transformers.Gemma3TextConfig(sliding_window=8, layer_types=["full_attention"] * 26),
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=64),
    ):
        assert windows_below(config, 64) == {}
    assert windows_below(MistralConfig(sliding_window=64), 65) == windows_below(MistralConfig(sliding_window=64), None)


NO_WINDOWS = (
    "chunk_size_feed_forward", "max_window_layers", "use_sliding_window", "sliding_window_pattern",
    "_sliding_window_pattern", "prefix_dense_sliding_window_pattern", "mamba_chunk_size", "chunk_size", "block_size",
    "chunk_size_lm_head", "local_num_chunks_before", "local_num_chunks_after", "lsh_num_chunks_before",
    "lsh_num_chunks_after", "local_attn_chunk_length", "lsh_attn_chunk_length", "chunkwise_kernel",
    "max_inference_chunksize", "index_block_size", "index_local_blocks", "num_random_blocks",
)  # fmt: skip
"""Feed-forward parts, kernels of states (the same numbers in any chunks), patterns of layers, and encoders."""


def test_every_window_of_the_causal_models_of_transformers_is_known():
    unknown = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind.startswith("musicgen"):
            continue  # is made of three configurations
        text = CONFIG_MAPPING[kind]().get_text_config()
        names = {
            name for name in vars(text) if re.search(r"window|chunk|index_topk|local_attention$|index_.*block", name)
        }
        if rest := names - {*WINDOWS, *NO_WINDOWS}:
            unknown[kind] = rest
    assert not unknown


def test_beyond_a_window_prompts_of_one_length_must_be_decoded_right_too(monkeypatch):
    model = build("Mistral", sliding_window=64)
    wrong = decode_rows.EQUAL_LENGTH_PROMPTS
    monkeypatch.setattr(
        decode_rows, "_logit_excess", lambda model, prompts, device: Excess(1.0, 0.0) if prompts is wrong else None
    )
    assert check_cache(model, CPU, 64)
    with pytest.raises(ConfigError, match="with its cache, logits differ"):
        check_cache(model, CPU, 65)
