"""The LM head of architectures that do something of their own between hidden states and logits."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from hwgrpo.errors import ConfigError
from hwgrpo.models.lm_head import detect_head
from hwgrpo.models.loading import load_model
from tests.support.models.families import EXPERTS, SHAPE, plain_logprobs, reference_of, run_settings
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, sharpened, tiny_llama
from tests.support.numbers.rounding import STEP, assert_gradients_close, assert_values_close

PADDED_BY = 5


def build(kind: str, **extra):
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**SHAPE | extra))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


HEADS = {
    "a factor": ("Cohere", {"logit_scale": 0.25}),
    "a divisor": ("Granite", {"logits_scaling": 4.0}),
    "a factor that others divide by": ("HyperCLOVAX", {"logits_scaling": 4.0}),
    "a factor of another name": (
        "FalconH1",
        {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "a factor that transformers does not use": ("Mpt", {"logit_scale": 0.25, "d_model": 32, "n_heads": 4}),
    "a factor in words": ("Mpt", {"logit_scale": "inv_sqrt_d_model", "d_model": 32, "n_heads": 4}),
    "a soft-cap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16, "attn_logit_softcapping": None}),
    "a soft-cap of another name": ("RecurrentGemma", {"logits_soft_cap": 2.0, "lru_width": 32, "head_dim": 8}),
    "a bias": ("Phi", {}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "untied": ("Qwen2", {"tie_word_embeddings": False}),
    "rows that pad the vocabulary": (
        "Inkling",
        {
            "unpadded_vocab_size": SHAPE["vocab_size"] - PADDED_BY,
            "logits_mup_width_multiplier": 3.0,
            "n_routed_experts": 4,
            **EXPERTS,
        },
    ),
}


@pytest.mark.parametrize("what", HEADS)
def test_logprobs_and_gradient_are_those_of_the_models_own_logits(what):
    kind, extra = HEADS[what]
    model = build(kind, **extra)
    model.set_attn_implementation("eager")
    reference = reference_of(model)
    batch = ragged_batch(prompts=2, n=2, old=True)
    update = updater(model, "rollout.temperature=0.8")
    assert_values_close(update.score(batch), plain_logprobs(reference, batch))
    loss, ours, _ = gradients(update, batch)
    expected, theirs = reference_gradients(reference, update.config, batch)
    assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
    theirs = {name: gradient for name, gradient in theirs.items() if gradient is not None}
    assert len(theirs) > 8
    assert_gradients_close({name: ours[name] for name in theirs}, theirs)


def test_a_head_that_would_be_misread_only_a_little_is_read_by_its_setting():
    model = build("RecurrentGemma", logits_soft_cap=30.0, lru_width=32, head_dim=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.02)  # logits so small that a soft-cap of 30 hardly shows in them
    assert detect_head(model).softcap == 30.0


def test_a_model_with_its_weights_unchanged_reads_the_same_twice_and_keeps_its_mode():
    model = tiny_llama()
    for training in (True, False):
        model.train(training)
        assert detect_head(model) == detect_head(model)
        assert model.training is training


class Shifted(torch.nn.Linear):
    """A head that does more than its weight and bias say."""

    def forward(self, input):
        return super().forward(input) + input.sum(-1, keepdim=True) * torch.arange(self.out_features) * 1e-3


def test_a_step_between_states_and_logits_that_is_not_known_is_refused():
    model = tiny_llama()
    model.lm_head = Shifted(32, model.config.vocab_size, bias=False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM: its logits differ from hidden states times LM head by"):
        detect_head(model)


def test_logits_that_are_no_numbers_are_refused():
    model = tiny_llama()
    model.lm_head.weight.data[0] = float("nan")
    with pytest.raises(ConfigError, match="its logits differ"):
        detect_head(model)


def test_a_layer_between_states_and_head_is_refused():
    torch.manual_seed(0)
    config = transformers.ElectraConfig(**SHAPE | {"embedding_size": 16, "is_decoder": True, "pad_token_id": 0})
    with pytest.raises(ConfigError, match="its LM head has input size 16, its hidden states have size 32"):
        detect_head(transformers.ElectraForCausalLM(config))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ConfigError, match="LlamaModel has no output embeddings with a weight"):
        detect_head(tiny_llama().model)


def test_lora_on_the_head_is_refused_with_the_remedy():
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["lm_head"], r=2))
    with pytest.raises(ConfigError, match=r"remove the head from model\.lora\.target_modules"):
        detect_head(model)


def test_noise_in_training_that_is_no_dropout_layer_is_refused():
    model = build("Mixtral", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.2)
    sharpened(model)
    with pytest.raises(ConfigError, match=r"its hidden states in training differ .* config\.json"):
        detect_head(model)
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.0
    assert detect_head(model).scale == 1.0


def test_the_noise_of_dropout_layers_is_left_to_the_ratio():
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert detect_head(model).softcap is None


def test_a_backbone_of_another_name_than_its_class_says_is_found():
    model = build("Llama4", num_local_experts=2, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48)
    batch = ragged_batch(prompts=2, n=2)
    found = updater(copy.deepcopy(model), "rollout.temperature=0.8").score(batch)
    assert_values_close(found, plain_logprobs(model.eval(), batch))


def test_an_embedding_table_longer_than_the_tokenizer_is_part_of_the_vocabulary(tmp_path):
    build("Qwen2", vocab_size=SHAPE["vocab_size"] + PADDED_BY).save_pretrained(tmp_path)
    model = load_model(run_settings(tmp_path).model, attention="sdpa")
    assert detect_head(model).weight(model.lm_head).shape[0] == SHAPE["vocab_size"] + PADDED_BY
