"""One update of a fixed batch, by one process and by ranks that share its sequences; run by torchrun for the latter.

torchrun --nproc-per-node RANKS sequence_cases.py OUT '[["STRATEGY", SIZE], ...]'

OUT/STRATEGY SIZE CASE.safetensors, written by rank 0, is what resulted: see `run_case`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from strategy_worker import gradients, share
from tiny import VOCAB, ragged_batch, settings, sharpened, tiny_llama, tiny_qwen3
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hwgrpo.models.lora import apply_lora
from hwgrpo.training import STRATEGIES
from hwgrpo.training.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.policy import HeadOptions, PolicyModel
from hwgrpo.training.reference import build_reference
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update import PolicyUpdate

CUTS = {1: [0, 4], 2: [0, 1, 4], 4: [0, 0, 1, 2, 4]}
"""Where each number of ranks cuts the prompts: none has as many as another, and one may have nothing."""


def windowed() -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=4,
        max_position_embeddings=128,
    )
    return sharpened(MistralForCausalLM(config))


def with_experts() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    return sharpened(Qwen3MoeForCausalLM(config))


@dataclass(frozen=True)
class Case:
    """What is trained, laid out how."""

    layout: Layout = PADDED
    model: Callable[[], Any] = tiny_qwen3
    words: tuple[str, ...] = ()
    alone: Layout = PADDED
    """Layout in which one process computes what is to be found."""
    on_policy: bool = False


LORA = ("model.lora.rank=4", "model.lora.dropout=0")
CASES = {
    "padded": Case(),
    "packed": Case(PACKED),
    "grouped": Case(GROUPED),
    "branched": Case(BRANCHED),
    "masked groups, untied head": Case(GROUPED_MASKED, tiny_llama),
    "one micro-batch for each row": Case(words=("trainer.tokens_per_micro_batch=16",)),
    "a loss of sequences": Case(BRANCHED, words=("algorithm.loss.name=gspo",)),
    "on policy": Case(BRANCHED, on_policy=True),
    "window": Case(model=windowed),
    "window, branched": Case(BRANCHED, windowed),
    "layers recomputed": Case(BRANCHED, words=("model.gradient_checkpointing=true",)),
    "LoRA": Case(BRANCHED, words=LORA),
    "router loss": Case(model=with_experts, words=("model.router_loss_coef=0.1",)),
}


def run_case(strategy: Strategy, case: Case, size: int) -> dict[str, torch.Tensor]:
    """Return what one update of this rank's prompts gives, with groups of `size` ranks.

    `grad.*` and the `norm` of the gradient, `loss`, `sum.*` of the metrics, the log-probs [R] that the update met and
    those `scored` by the reference before it and by the policy after it, and the `weight.*` then.
    """
    torch.set_num_threads(1)
    longest = ("data.max_prompt_tokens=8", "rollout.max_response_tokens=8")
    regular = ("algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", "optim.eps=1e-2")
    config = settings(*longest, *regular, *case.words)
    config.trainer.sequence_parallel_size = size
    model = case.model()
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.model.lora.rank:
        model = apply_lora(model, config.model.lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.manual_seed(0)
                    parameter.normal_(std=0.1)
    policy = PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
    strategy.prepare(config)
    reference = build_reference(policy, config)
    assert reference is not None
    strategy.wrap(policy, config)
    if reference.policy is not policy:
        strategy.wrap_reference(reference.policy)
    layout = case.layout if size > 1 else case.alone
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), layout, total_updates=1)
    cut = CUTS[strategy.world_size]
    batch = share(ragged_batch(old=True, ref=True, empty=True), cut[strategy.rank], cut[strategy.rank + 1])
    if case.on_policy:
        batch = replace(batch, old_logprobs=None)
    batch = update.with_ref_logprobs(batch, reference)
    assert batch.ref_logprobs is not None
    met = torch.zeros(len(batch.tokens))
    loss, sums = update.accumulate_gradients(batch, range(len(batch)), met)
    result = gradients(strategy)
    result |= {f"sum.{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    result["loss"] = torch.tensor(loss, dtype=torch.float64)
    result["norm"] = torch.as_tensor(strategy.clip_gradients(0.0)).clone()
    strategy.step(0.05)
    some = [s for s in range(len(batch)) if s % 3]
    for name, values in (
        ("reference", batch.ref_logprobs),
        ("met", met),
        ("scored", update.score(batch)),
        ("some scored", update.score(batch, sequences=some)),
    ):
        result[name] = torch.cat(strategy.gather_objects(values))
    return result | {f"weight.{name}": weight.clone() for name, weight in strategy.whole()}


if __name__ == "__main__":
    out, ways = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    for name, size in ways:
        for title, case in CASES.items():
            strategy = STRATEGIES.load(name)(torch.device("cpu"), "gloo")
            values = run_case(strategy, case, size)
            if strategy.rank == 0:
                save_file({k: v.contiguous() for k, v in values.items()}, out / f"{name} {size} {title}.safetensors")
    dist.destroy_process_group()
