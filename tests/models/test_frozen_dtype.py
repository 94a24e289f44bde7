"""A frozen base model in the compute dtype: the same gradients as in fp32, and no second copy to sample with."""

import gc
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.models.frozen_dtype import cast_frozen, castable_parameters
from hwgrpo.models.lm_head import detect_head
from hwgrpo.models.loading import load_model
from hwgrpo.models.saving import save_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import build_reference
from hwgrpo.training.shared_setup import load_policy
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.models.steps import gradients, update_of
from tests.support.models.tiny import ragged_batch, settings, tiny_llama, tiny_qwen3

TOKENIZER = character_tokenizer("")
LORA = ("model.dtype=bfloat16", "model.lora.rank=2")
FP32, BF16 = "model.lora.base_dtype=float32", "model.lora.base_dtype=bfloat16"


def published(model, folder: Path, dtype: torch.dtype = torch.bfloat16) -> str:
    """Save a model with values that are exact in bf16, in files of a dtype; return the setting that loads it."""
    model.bfloat16().to(dtype).save_pretrained(folder)
    return f"model.path={folder}"


MODELS = {
    "tied": (True, torch.bfloat16),
    "untied": (False, torch.bfloat16),
    "untied, in fp32 files": (False, torch.float32),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def path(request, tmp_path_factory) -> str:
    tied, dtype = request.param
    return published(tiny_qwen3(vocab=len(TOKENIZER), tied=tied), tmp_path_factory.mktemp("model"), dtype)


def policy_of(*overrides: str) -> PolicyModel:
    """Load a policy whose new adapters change its outputs."""
    torch.manual_seed(5)
    policy = load_policy(settings(*overrides), Device(BACKEND), TOKENIZER)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def dtypes(policy: PolicyModel) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in policy.model.named_parameters()}


def test_matrices_and_embeddings_are_held_in_bf16_and_norms_and_adapters_in_fp32(path):
    for name, dtype in dtypes(policy_of(path, *LORA)).items():
        is_matrix = any(part in name for part in ("_proj", "lm_head", "embed")) and "lora" not in name
        assert dtype == (torch.bfloat16 if is_matrix else torch.float32), name


def test_loss_and_gradients_equal_those_of_a_base_in_fp32_bit_for_bit(path):
    batch = ragged_batch(old=True, ref=True)
    results = []
    for words in ([FP32], []):
        config = settings(path, *LORA, "algorithm.kl.coef=0.1", *words)
        results.append(gradients(update_of(policy_of(path, *LORA, *words), config), batch))
    (loss, expected, sums), (own_loss, own, own_sums) = results
    assert loss == own_loss
    assert {name: float(value) for name, value in sums.items()} == {n: float(v) for n, v in own_sums.items()}
    assert len(expected) == 28
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(own[name], gradient), name


def test_embeddings_that_scale_their_rows_stay_in_fp32_and_gradients_are_equal(tmp_path):
    shape = {"vocab_size": len(TOKENIZER), "hidden_size": 40, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    scaled = Gemma3TextConfig(**shape, head_dim=8, num_attention_heads=2, num_key_value_heads=1)
    path = published(Gemma3ForCausalLM(scaled), tmp_path)
    policies = [policy_of(path, *LORA, *words) for words in ([FP32], [])]
    held = dtypes(policies[1])
    assert {dtype for name, dtype in held.items() if "embed" in name} == {torch.float32}
    assert {dtype for name, dtype in held.items() if "base_layer" in name} == {torch.bfloat16}
    batch = ragged_batch(old=True)
    (loss, expected, _), (own_loss, own, _) = (
        gradients(update_of(policy, settings(path, *LORA)), batch) for policy in policies
    )
    assert loss == own_loss
    assert all(torch.equal(own[name], gradient) for name, gradient in expected.items())


def test_the_reference_scores_as_with_a_base_in_fp32(path):
    batch, scores = ragged_batch(), []
    for words in ([FP32], []):
        config = settings(path, *LORA, "algorithm.kl.coef=0.1", *words)
        policy = policy_of(path, *LORA, *words)
        update = update_of(policy, config)
        reference = build_reference(policy, config.algorithm.kl, config.model.lora)
        scores.append(update.with_ref_logprobs(batch, reference).ref_logprobs)
        assert not torch.equal(scores[-1], update.score(batch)), "the adapters change the log-probs"
    assert torch.equal(*scores)


def test_a_frozen_copy_of_a_fully_trained_policy_scores_as_in_fp32_from_matrices_in_bf16(path):
    config = settings(path, "model.dtype=bfloat16", "algorithm.kl.coef=0.1")
    policy = policy_of(path, "model.dtype=bfloat16")
    assert set(dtypes(policy).values()) == {torch.float32}
    reference = build_reference(policy, config.algorithm.kl, config.model.lora)
    assert reference is not None
    assert torch.bfloat16 in dtypes(reference.policy).values()
    update, batch = update_of(policy, config), ragged_batch()
    assert torch.equal(update.with_ref_logprobs(batch, reference).ref_logprobs, update.score(batch))


def test_values_that_bf16_would_round_stay_in_fp32_unless_the_setting_rounds_them(tmp_path):
    model = tiny_qwen3(vocab=len(TOKENIZER))
    path = published(model, tmp_path, torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1 + 2**-10
    model.save_pretrained(tmp_path)
    assert set(dtypes(policy_of(path, *LORA)).values()) == {torch.float32}
    for words, dtype in (((), torch.bfloat16), (("model.dtype=float32",), torch.float32)):
        rounded = policy_of(path, *LORA, BF16, *words).base.model.layers[1].mlp.up_proj.base_layer.weight
        assert rounded.dtype == dtype, "the compute dtype"
        assert rounded[3, 4] == 1.0


def test_a_model_is_loaded_in_bf16_only_if_that_rounds_nothing(tmp_path):
    def loaded(folder: Path) -> torch.dtype:
        return load_model(settings(f"model.path={folder}").model, attention="sdpa", dtype=torch.bfloat16).dtype

    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        published(tiny_llama(), tmp_path / name, dtype)
    assert loaded(tmp_path / "bf16") == torch.bfloat16
    assert loaded(tmp_path / "fp32") == torch.float32

    mixed = load_file(tmp_path / "bf16" / "model.safetensors")
    mixed["model.norm.weight"] = mixed["model.norm.weight"].float() + 2**-12
    save_file(mixed, tmp_path / "bf16" / "model.safetensors", {"format": "pt"})
    assert loaded(tmp_path / "bf16") == torch.float32, "config.json names bf16, and a weight is in fp32"

    shape = {"vocab_size": 64, "hidden_size": 40, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    scaled = Gemma3ForCausalLM(Gemma3TextConfig(**shape, num_attention_heads=2, num_key_value_heads=1))
    published(scaled, tmp_path / "scaled")
    model = load_model(settings(f"model.path={tmp_path}/scaled").model, attention="sdpa", dtype=torch.bfloat16)
    assert model.get_input_embeddings().embed_scale == torch.tensor(40**0.5), "which bf16 would round"
    assert model.dtype == torch.float32


def test_all_matrices_are_cast_or_none_and_no_trainable_one():
    model = tiny_llama().requires_grad_(False)
    castable = castable_parameters(model)
    assert len(castable) == 2 * 7 + 2
    assert not cast_frozen(castable, torch.bfloat16, round_values=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.lm_head.weight.requires_grad_(True)
    assert cast_frozen(castable, torch.bfloat16, round_values=True)
    assert model.lm_head.weight.dtype == torch.float32, "a trainable one"
    assert sum(p.dtype == torch.bfloat16 for p in model.parameters()) == 15


def test_the_merged_model_is_that_of_a_base_in_fp32_bit_for_bit(path, tmp_path):
    for name, words in (("fp32", [FP32]), ("bf16", [])):
        save_model(policy_of(path, *LORA, *words).model, TOKENIZER, tmp_path / name, merge=True)
    merged, own = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "bf16"))
    assert merged.keys() == own.keys()
    for name, weight in merged.items():
        assert weight.dtype == own[name].dtype == torch.float32
        assert torch.equal(weight, own[name]), name


def engine_of(policy: PolicyModel) -> LocalEngine:
    return LocalEngine(
        policy.model, TOKENIZER, device=torch.device("cpu"), compute_dtype=torch.bfloat16, max_sequences=16
    )


def test_the_local_engine_shares_the_matrices_and_its_responses_are_those_of_a_copy_of_everything(path):
    prompts = PromptBatch((Prompt("0", "sort 312=", tuple(TOKENIZER("sort 312=").input_ids), "123", {}),))
    sampling = Sampling(n=4, max_response_tokens=8, seed=1)
    responses = []
    for words in ([FP32], []):
        policy = policy_of(path, *LORA, *words)
        engine = engine_of(policy)
        assert engine.decode_path == "lean"
        first = engine.generate(prompts, sampling)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05)
        engine.update_weights(1)
        responses.append((first.tokens, engine.generate(prompts, sampling).tokens))
        own = list(policy.model.parameters())
        copied = {p.data_ptr() for p in engine._sampler.parameters()} - {p.data_ptr() for p in own}
        assert len(copied) == sum(p.dtype == torch.float32 for p in own)
    (before, after), (own_before, own_after) = responses
    assert torch.equal(before, own_before)
    assert torch.equal(after, own_after)
    assert not torch.equal(before, after), "new weights show in the responses"


def test_the_head_of_a_base_in_bf16_is_detected_as_that_of_one_in_fp32(tmp_path):
    for softcap in (None, 30.0):
        model = tiny_llama().requires_grad_(False)
        model.config.final_logit_softcapping = softcap  # which Llama does not use
        expected = detect_head(model)
        cast_frozen(castable_parameters(model), torch.bfloat16, round_values=True)
        assert detect_head(model, torch.bfloat16) == expected
        assert expected.softcap is None


def mixture_of(folder: Path, *overrides: str) -> PolicyModel:
    """Load a policy of stacked experts, of a file with a matrix for each expert."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return policy_of(published(Qwen3MoeForCausalLM(config), folder), *LORA, *overrides)


def test_stacked_experts_are_held_in_bf16_and_routers_in_fp32(tmp_path):
    held = dtypes(mixture_of(tmp_path))
    base = {name.replace("base_layer.", ""): dtype for name, dtype in held.items() if "lora" not in name}
    assert {dtype for name, dtype in base.items() if "experts" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in base.items() if "mlp.gate.weight" in name} == {torch.float32}


def test_no_file_stays_mapped_for_what_is_beside_stacked_experts(tmp_path):
    """All of the file stayed mapped for the weights that are not experts."""
    policy = mixture_of(tmp_path, "model.lora.target_modules=[q_proj,v_proj]")
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert policy.model is not None


@pytest.mark.parametrize(
    ("words", "dtype"),
    [((BF16,), torch.float32), (("model.quantize=nf4",), torch.float32), (("model.quantize=nf4",), torch.bfloat16)],
)
def test_no_file_stays_mapped_for_what_was_not_cast(tmp_path, words, dtype):
    """All of the file stayed mapped for the embeddings of a frozen base."""
    path = published(tiny_qwen3(vocab=len(TOKENIZER)), tmp_path, dtype)
    policy = policy_of(path, *LORA, *words)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.float32 in dtypes(policy).values()
