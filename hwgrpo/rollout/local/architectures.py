"""Architectures that the lean decode step supports, and the check of a model against them.

All are stacks of pre-norm or post-norm blocks of rotary attention and a gated MLP. `unsupported_reason` names any other
module, and the model's own forward decodes instead. Of a model that reads images, the text model is such a stack: its
tower has no part in a decode step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hwgrpo_kernels import fused_modules
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

from hwgrpo.models.frozen_dtype import UpcastEmbedding
from hwgrpo.models.layer_values import smallest_value
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.vision import vision_modules
from hwgrpo.rollout.local import adapted_linear
from hwgrpo.rollout.local.adapted_linear import Concatenated, Projection, read_joined, read_projection
from hwgrpo.rollout.local.packed_weights import CPUINFO, PackedWeights


@dataclass(frozen=True)
class Architecture:
    """Differences of a decoder from Llama's (Touvron et al. 2023)."""

    norms_after: bool = False
    """Norms act on the outputs of attention and MLP, not on their inputs (OLMo 2)."""
    query_key_norm: str = ""
    """"head": queries and keys are normed head by head (Qwen 3); "all": over all heads together (OLMo 2)."""
    norm_offset: float = 0.0
    """Added to every norm's weight (Gemma stores it less 1)."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama.modeling_llama.LlamaForCausalLM": Architecture(),
    "mistral.modeling_mistral.MistralForCausalLM": Architecture(),
    "qwen2.modeling_qwen2.Qwen2ForCausalLM": Architecture(),
    "qwen3.modeling_qwen3.Qwen3ForCausalLM": Architecture(query_key_norm="head"),
    "granite.modeling_granite.GraniteForCausalLM": Architecture(),
    "gemma.modeling_gemma.GemmaForCausalLM": Architecture(norm_offset=1.0),
    "olmo2.modeling_olmo2.Olmo2ForCausalLM": Architecture(norms_after=True, query_key_norm="all"),
}
"""Model class below transformers.models -> architecture."""

TEXT_MODELS: dict[str, Architecture] = {
    "llama.modeling_llama.LlamaModel": Architecture(),
    "mistral.modeling_mistral.MistralModel": Architecture(),
    "qwen2.modeling_qwen2.Qwen2Model": Architecture(),
    "qwen3.modeling_qwen3.Qwen3Model": Architecture(query_key_norm="head"),
    "qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel": Architecture(),
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel": Architecture(),
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel": Architecture(query_key_norm="head"),
}
"""Class of the text model of one of `VISION_MODELS` -> architecture.

Where tokens have positions on three axes, those after the images have the same on all: they are rotated as by one."""

VISION_MODELS = frozenset(
    {
        "idefics3.modeling_idefics3.Idefics3ForConditionalGeneration",
        "internvl.modeling_internvl.InternVLForConditionalGeneration",
        "llava.modeling_llava.LlavaForConditionalGeneration",
        "llava_onevision.modeling_llava_onevision.LlavaOnevisionForConditionalGeneration",
        "mistral3.modeling_mistral3.Mistral3ForConditionalGeneration",
        "qwen2_vl.modeling_qwen2_vl.Qwen2VLForConditionalGeneration",
        "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl.modeling_qwen3_vl.Qwen3VLForConditionalGeneration",
        "smolvlm.modeling_smolvlm.SmolVLMForConditionalGeneration",
    }
)
"""Classes whose logits after a token of text are a linear head of the text model's states."""

PREFIX = "transformers.models."
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone; the others change with the length of the sequence."""

BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""bfloat16 instructions of x86 (two) and Arm."""

PLAIN_MODULES = (*adapted_linear.LINEAR, nn.Embedding, UpcastEmbedding, nn.ModuleList)
PLAIN_PACKAGES = ("transformers.activations", "torch.nn.modules.activation")


def architecture_of(model: Any) -> Architecture | None:
    """Return the entry of exactly this class; a subclass may compute something else."""
    base = causal_lm(model)
    return _table(type(base)).get(_below_prefix(_deciding(base)))


def describe_fallback(reason: str) -> str:
    """Return the note about a fallback from the lean decode step."""
    return f"rollout decodes with the model's own forward: {reason}"


def slow_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a note if sampling in a dtype would be slower than in fp32, else None.

    None, too, where the processor's features cannot be read.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or not CPUINFO.exists():
        return None
    if BF16_FEATURES & set(re.findall(r"\w+", CPUINFO.read_text())):
        return None
    return (
        "sampling in bfloat16 on a processor without bfloat16 instructions (AMX, AVX512-BF16) is several times slower "
        "than in float32; set rollout.dtype=float32"
    )


def predict_fallback(config: Any, length: int) -> str | None:
    """Return why the lean step will not decode such sequences, by the configuration alone, or None."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), type(config))
    if reads_images(config):
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), kind)
    text = config.get_text_config()
    deciding: Any = MODEL_MAPPING.get(type(text), type(text)) if _below_prefix(kind) in VISION_MODELS else kind
    return _beyond(text, length) if _below_prefix(deciding) in _table(kind) else _unknown(deciding)


def _table(kind: type) -> dict[str, Architecture]:
    """Return the architectures among which is that of a model of this class, if it is supported."""
    return TEXT_MODELS if _below_prefix(kind) in VISION_MODELS else ARCHITECTURES


def _deciding(base: Any) -> type:
    """Return the class by which a model's architecture is known."""
    return type(base.get_decoder() if _below_prefix(type(base)) in VISION_MODELS else base)


def _unknown(kind: type) -> str:
    return f"{kind.__name__} is not one of the supported architectures"


def _beyond(config: Any, length: int) -> str | None:
    """Return why the lean step would differ from the model at some position of a sequence, or None."""
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPE_TYPES:
        return f"its rotary embedding is of type {rope!r}"
    window = smallest_value(config, "sliding_window")
    if window is not None and length > window:
        return f"a sequence can be {length} tokens long, its attention sees {window}"
    return None


def unsupported_reason(model: Any, length: int) -> str | None:
    """Return why the lean step must not decode a model, or None.

    Args:
        model: a causal language model, with LoRA adapters or without.
        length: longest sequence in tokens, prompt and response.
    """
    base = causal_lm(model)
    if base is not model and _name(type(model.base_model)) != adapted_linear.LORA_MODEL:
        return f"its adapters ({type(model).__name__}) are not LoRA"
    if architecture_of(base) is None:
        return _unknown(_deciding(base))
    homes = {type(base).__module__, _deciding(base).__module__}
    seeing = vision_modules(base, "all") if reads_images(base.config) else set()
    if _global_forward_hooks or _global_forward_pre_hooks:
        return "a forward hook is registered on all modules"
    adapted: tuple[str, ...] = ()
    for name, module in base.named_modules():
        kind = type(module)
        if module in seeing:
            continue
        if module._forward_hooks or module._forward_pre_hooks:
            return f"a forward hook is registered on {name or 'the model'}"
        if "forward" in vars(module) and not fused_modules.is_fused(module):
            return f"the forward of {name or 'the model'} was replaced"
        if adapted_linear.is_adapted(module):
            reason = adapted_linear.unsupported_reason(module)
            if reason is not None:
                return f"{name} {reason}"
            adapted += (f"{name}.",)
        elif name.startswith(adapted):
            continue
        elif kind not in PLAIN_MODULES and kind.__module__ not in homes and kind.__module__ not in PLAIN_PACKAGES:
            return f"{name} is a {kind.__name__}"
    text_model = (base.get_decoder(), base.get_output_embeddings())
    kinds = {type(parameter) for part in text_model for parameter in part.parameters()} - {nn.Parameter}
    if kinds:
        return f"its parameters are {kinds.pop().__name__}s"
    return _beyond(base.config.get_text_config(), length)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _below_prefix(kind: type) -> str:
    return _name(kind).removeprefix(PREFIX)


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm (Zhang, Sennrich 2019) over the last dimension."""

    weight: torch.Tensor
    """[size]; [heads, size] where each head has its own."""
    eps: float
    kernel: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None
    """`StepKernels.norm`, for a weight [size]."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel(hidden, self.weight, self.eps)
        if self.weight.dim() == 1:
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return nn.functional.rms_norm(hidden, self.weight.shape[-1:], None, self.eps).mul_(self.weight)


@dataclass(frozen=True)
class Block:
    """Parts and factors of a decoder layer; parameters are the model's own."""

    query_key_value: Projection | Concatenated
    key_size: int
    """Keys of a token, all heads together; there are as many values."""
    output: Projection
    gate_up: Projection | Concatenated
    down: Projection
    activation: nn.Module
    scaling: float
    """Factor of the attention scores."""
    attention_norm: Norm
    mlp_norm: Norm
    query_norm: Norm | None
    """Over all queries of a token."""
    key_norm: Norm | None
    """Over all keys of a token."""
    head_norm: Norm | None
    """Over each head of queries, then keys."""

    def normed_by(self, kernel: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Block:
        """Return the block with norms of all of a token's values by a kernel."""
        norms = ("attention_norm", "mlp_norm", "query_norm", "key_norm")
        held: dict[str, Norm | None] = {name: getattr(self, name) for name in norms}
        return replace(self, **{name: replace(norm, kernel=kernel) for name, norm in held.items() if norm is not None})

    def by_packed(self, packed: PackedWeights) -> Block:
        """Return the block with products by packed weights, where these are faster."""
        return replace(
            self,
            query_key_value=self.query_key_value.by_packed(packed),
            output=self.output.by_packed(packed),
            gate_up=self.gate_up.by_packed(packed),
            down=self.down.by_packed(packed),
        )


def read_norm(module: Any, architecture: Architecture) -> Norm:
    """Return the norm of a module."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight + architecture.norm_offset if architecture.norm_offset else module.weight, eps)


def read_norms(layer: Any, architecture: Architecture) -> dict[str, Norm | None]:
    """Return the norms of a decoder layer under the names that `Block` has for them; the weights of some are copies."""
    attention = layer.self_attn
    after, normed = architecture.norms_after, architecture.query_key_norm
    head_norm = None
    if normed == "head":
        query, key = attention.q_norm, attention.k_norm
        weight = torch.cat(
            [
                norm.weight.expand(projection.out_features // attention.head_dim, -1)
                for norm, projection in ((query, attention.q_proj), (key, attention.k_proj))
            ]
        )
        head_norm = Norm(weight, query.variance_epsilon)
    return {
        "attention_norm": read_norm(layer.post_attention_layernorm if after else layer.input_layernorm, architecture),
        "mlp_norm": read_norm(
            layer.post_feedforward_layernorm if after else layer.post_attention_layernorm, architecture
        ),
        "query_norm": read_norm(attention.q_norm, architecture) if normed == "all" else None,
        "key_norm": read_norm(attention.k_norm, architecture) if normed == "all" else None,
        "head_norm": head_norm,
    }


def read_block(layer: Any, architecture: Architecture) -> Block:
    """Return the block of a supported model's decoder layer."""
    attention, mlp = layer.self_attn, layer.mlp
    norms: dict[str, Any] = read_norms(layer, architecture)
    return Block(
        query_key_value=read_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        key_size=attention.k_proj.out_features,
        output=read_projection(attention.o_proj),
        gate_up=read_joined(mlp.gate_proj, mlp.up_proj),
        down=read_projection(mlp.down_proj),
        activation=mlp.act_fn,
        scaling=attention.scaling,
        **norms,
    )
