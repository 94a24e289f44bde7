"""Tiny models of several families, and what their log-probs and gradients are."""

from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EVERY = {"rms_norm", "rotary", "swiglu", "attention"}
FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "qwen2": ("Qwen2", {}, EVERY),
    "qwen3": ("Qwen3", {}, EVERY),
    "llama": ("Llama", {}, EVERY),
    "mistral": ("Mistral", {"sliding_window": 4}, EVERY),
    "qwen2 with a window in one layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        EVERY,
    ),
    "glm4": ("Glm4", {}, {"rms_norm", "swiglu", "attention"}),
    "gemma": ("Gemma", {}, {"rotary", "attention"}),
    "olmo2": ("Olmo2", {}, EVERY),
    "cohere": ("Cohere", {}, {"swiglu", "attention"}),
    "llama with gelu": ("Llama", {"hidden_act": "gelu"}, {"rms_norm", "rotary", "attention"}),
}


def tiny(family: str, **more: Any) -> Any:
    """Return a tiny random causal LM whose norms are no identity."""
    name, extra, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **extra, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(padding: str = "none") -> dict[str, torch.Tensor]:
    """Return two rows of 11 tokens, the second padded or not."""
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 11, dtype=torch.long)
    if padding == "right":
        mask[1, 7:] = 0
    if padding == "left":
        mask[1, :4] = 0
    return {"input_ids": ids} if padding == "none" else {"input_ids": ids, "attention_mask": mask}


def losses_and_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs of tokens that are no padding, and the gradients of a weighted sum of them."""
    logits = model(**inputs, use_cache=False).logits.float()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    logprobs = logprobs[mask[:, 1:] & mask[:, :-1]]
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    weights = torch.linspace(-1, 1, len(logprobs))
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(trained.values()))
    return logprobs.detach(), dict(zip(trained, gradients, strict=True))
