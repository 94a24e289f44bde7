"""One update of a fixed batch, by one process and by ranks that share its sequences.

torchrun --nproc-per-node 4 sequence_cases.py OUT '[["zero-1", 2], ...]' '["padded", ...]'

does what `run_all` says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.catalog import STRATEGIES
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.config.schema import AlgorithmConfig
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.tensor_parallel import TensorParallel
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.reference_model import build_reference
from hwgrpo.training.policy.sequence_shard import SequenceGroup, join_sequence_group, shard_micro_batch
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import loss_signals, with_weights
from tests.distributed.strategy_worker import gradients, share
from tests.support.models.tiny import VOCAB, ragged_batch, settings, sharpened, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import BF16, STEP

TENSOR = "tensor"
"""Value instead of a strategy's name: fsdp2 with tensor parallelism."""
CUTS = {1: [0, 4], 2: [0, 1, 4], 4: [0, 0, 1, 2, 4]}
"""Where each number of ranks cuts the prompts: none has as many as another, and one may have nothing."""


def windowed(key_heads: int = 1) -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
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


def with_biases() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        attention_bias=True,
        mlp_bias=True,
    )
    model = sharpened(LlamaForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


@dataclass(frozen=True)
class Case:
    """What is trained, laid out how."""

    layout: Layout = PADDED
    model: Callable[[], Any] = tiny_qwen3
    words: tuple[str, ...] = ()
    alone: Layout = PADDED
    """Layout in which one process computes what is to be found."""
    on_policy: bool = False
    tolerance: float = STEP


STRATEGY = {"ddp": ("ddp",), "fsdp2": ("fsdp2",), TENSOR: ("fsdp2",)}
STRATEGY |= {
    f"zero-{stage}": ("deepspeed", "trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}")
    for stage in (1, 2, 3)
}
"""What ways name -> a strategy and its settings."""
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
    "window, two key heads": Case(BRANCHED, partial(windowed, 2)),
    "layers recomputed": Case(BRANCHED, words=("model.gradient_checkpointing=true",)),
    "LoRA": Case(BRANCHED, words=LORA),
    "autocast": Case(BRANCHED, words=("model.dtype=bfloat16",), alone=BRANCHED, tolerance=BF16),
    "biases": Case(model=with_biases),
    "router loss": Case(model=with_experts, words=("model.router_loss_coef=0.1",)),
}


def run_case(
    strategy: Strategy, case: Case, size: int, more: Sequence[str] = (), *, tensor: bool = False
) -> dict[str, torch.Tensor]:
    """Return the results of one update of this rank's prompts, in groups of `size`, possibly tensor-parallel, ranks.

    `grad.*` and the `norm` of the gradient, `loss`, `sum.*` of the metrics, the log-probs [R] that the update met and
    those `scored` by the reference before it and by the policy after it, with sums of `squares`, and the `weight.*`
    then. `tokens fed` [ranks] is what the embeddings of each rank met in the update.
    """
    torch.set_num_threads(1)
    longest = ("data.max_prompt_tokens=8", "rollout.max_response_tokens=8")
    regular = ("model.dtype=float32", "algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", "optim.eps=1e-2")
    config = settings(*longest, *regular, *case.words, *more)
    setattr(config.trainer, f"{'tensor' if tensor else 'sequence'}_parallel_size", size)
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
    policy = PolicyModel(model, compute_dtype=getattr(torch, config.model.dtype), options=HeadOptions())
    strategy.prepare(config)
    assert strategy.has_collectives_in_passes == (size > 1 or isinstance(strategy, Fsdp2))
    assert strategy.sequence_group.size == size
    reference = build_reference(policy, config.algorithm.kl, config.model.lora)
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
    fed: list[int] = []
    hook = policy.base.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(given[0].numel()))
    loss, sums = update.accumulate_gradients(batch, range(len(batch)), met)
    hook.remove()
    result = gradients(strategy)
    result["tokens fed"] = torch.tensor(strategy.gather_objects(sum(fed)))
    result |= {f"sum.{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    result["loss"] = torch.tensor(loss, dtype=torch.float64)
    result["norm"] = torch.as_tensor(strategy.clip_gradients(0.0)).clone()
    strategy.step(0.05)
    some = [s for s in range(len(batch)) if s % 3]
    squares = torch.zeros(len(batch.tokens))
    scored = update.score(batch, square_sums=squares)
    for name, values in (
        ("reference", batch.ref_logprobs),
        ("met", met),
        ("scored", scored),
        ("squares", squares),
        ("some scored", update.score(batch, sequences=some)),
    ):
        result[name] = torch.cat(strategy.gather_objects(values))
    return result | {f"weight.{name}": weight.clone() for name, weight in strategy.gather_full_parameters()}


def run_all(out: Path, ways: Sequence[tuple[str, int]], titles: Sequence[str]) -> None:
    """Run cases on this rank, with each of STRATEGY and size of groups; rank 0 writes OUT/STRATEGY SIZE CASE."""
    dist.init_process_group("gloo")
    for name, size in ways:
        for title in titles:
            registered, *words = STRATEGY[name]
            strategy = STRATEGIES.load(registered).make(torch.device("cpu"), "gloo")
            values = run_case(strategy, CASES[title], size, words, tensor=name == TENSOR)
            if strategy.rank == 0:
                save_file({k: v.contiguous() for k, v in values.items()}, out / f"{name} {size} {title}")
    dist.destroy_process_group()


def cut_policy(group: SequenceGroup, model: Any = None) -> PolicyModel:
    """Return a policy with tensor-parallel layers, as fsdp2 shards them first."""
    policy = PolicyModel(model or tiny_qwen3(), compute_dtype=torch.float32, options=HeadOptions())
    layers = TensorParallel(policy.base, group.size, group.rank, group.device_group)
    for layer in decoder_layers(policy.base):
        layers.shard(layer)
    return policy


def kept_bytes(size: int, rank: int = 0, *, tensor: bool = False) -> int:
    """Return the bytes that a forward pass over one long sequence keeps for its backward, weights left out."""
    policy = PolicyModel(tiny_qwen3(), compute_dtype=torch.float32, options=HeadOptions())
    batch = ragged_batch(prompts=1, n=1)
    tokens = batch.tokens[:1].repeat(120)
    batch = replace(batch, tokens=tokens, offsets=torch.tensor([0, len(tokens)]), logprobs=torch.zeros(120))
    batch = with_weights(batch, [0], torch.ones(1))
    micro = build_micro_batch(batch, [[0]], loss_signals(batch, rollout=False), PADDED, multiple=size)
    group = join_sequence_group(size, "gloo", tensor=tensor)
    assert group.rank == rank
    if tensor:
        policy = cut_policy(group)
    kept = {p.untyped_storage().data_ptr(): 0 for p in policy.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    loss_fn = build_loss(AlgorithmConfig())
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy(shard_micro_batch(micro, group, full_sequences=False), loss_fn)
    return sum(kept.values())


if __name__ == "__main__":
    with ended_as_rank():
        run_all(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
