"""Run by torchrun: models put together by ranks that each get a part of them; what each rank held and has.

torchrun --nproc-per-node 2 loading_worker.py OUT BACKEND '{"CASE": ["OVERRIDE", ...], ...}'

OUT/CASE-RANK.json says how much memory loading took at its peak and what is wrong with the models, if anything is.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hwgrpo_backends
import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device
from hwgrpo_kernels.fused_modules import is_fused
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hwgrpo.catalog import STRATEGIES
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.loading import load_model_config, load_tokenizer
from hwgrpo.models.lora import TRAINED_ADAPTER
from hwgrpo.models.meta_device import non_parameter_tensors
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.training.model_setup import Models, build_models
from hwgrpo.training.policy.auto_settings import attention_of, choose_layout
from hwgrpo.training.shared_setup import load_trainable, prepare_process
from hwgrpo.training.strategies.deepspeed import Deepspeed
from hwgrpo.training.strategies.strategy import Strategy
from tests.support.models.tiny import settings
from tests.support.numbers import npu_reference_ops


def make(folder: Path, *, tied: bool, hidden: int = 32, layers: int = 2, dtype: torch.dtype = torch.float32) -> int:
    """Write a Qwen3 with random weights in a dtype, and a tokenizer; return the bytes of its weights in fp32."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
        )
    )
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return size


def free_at_once() -> None:
    """Let malloc return what is freed from now on to the system, so that the resident set is what is held."""
    m_mmap_threshold = -3  # mallopt(3)
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)


def resident_peak(again: bool = False) -> int:
    """Return the most bytes that this process had in memory; `again` counts from now on (proc(5), clear_refs)."""
    if again:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def loaded(words: Sequence[str], backend: Backend) -> dict[str, Any]:
    """Put the models of a run together; return what is to be known of them."""
    config = settings("trainer.threads=1", *words)
    rank = int(os.environ["LOCAL_RANK"])
    device = prepare_process(config, backend, rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    strategy: Strategy = STRATEGIES.load(config.trainer.strategy).make(device.torch_device, device.comm_backend)
    strategy.prepare(config)
    attention = attention_of(config, device)
    layout = choose_layout(config, load_model_config(config.model), attention.loaded_as)
    tokenizer = load_tokenizer(config.model)
    free_at_once()
    before = resident_peak(again=True)
    device.reset_peak()
    held: dict[str, Any] = {}
    if isinstance(strategy, Deepspeed):  # what it makes as it starts, beside the weights, is another matter
        start = strategy._initialize_engine
        strategy._initialize_engine = lambda *a: (held.setdefault("host", resident_peak() - before), start(*a))[1]
    models = build_models(config, device, strategy, tokenizer, attention, layout)
    held = {"host": resident_peak() - before, "device": device.memory().peak} | held
    base = models.policy.base
    taken = [name for name, module in base.named_modules() if is_fused(module)] + [base.config._attn_implementation]
    wrong = faults(config, models, strategy, device.torch_device)
    return held | {"rank": strategy.rank, "fused": taken, "faults": wrong}


def faults(config: Config, models: Models, strategy: Strategy, device: torch.device) -> list[str]:
    """Compare the models with one that is loaded unsharded; every rank must call this."""
    expected = load_trainable(config)
    fresh = "lora_A" if config.model.lora.rank and not config.model.lora.adapter else "none"
    weights = dict(expected.named_parameters())
    found = {name: weight.cpu().clone() for name, weight in strategy.gather_full_parameters()}
    model = models.policy.model
    parts = [("policy", found)]
    if models.replica is not None:
        parts.append(("replica", {name: p.detach().cpu() for name, p in models.replica.named_parameters()}))
    if models.reference is not None and models.reference.policy is not models.policy:
        named = models.reference.policy.model.named_parameters()
        parts.append(("reference", {name: joined(p, strategy) for name, p in named}))
    wrong = []
    for what, held in parts:
        wrong += [f"{what} lacks or adds {name}" for name in held.keys() ^ weights.keys()]
        wrong += [
            f"{what}: {name} is another"
            for name, weight in held.items()
            if fresh not in name and not torch.equal(weight, weights[name])
        ]
        drawn = [weight for name, weight in held.items() if fresh in name]
        everywhere = strategy.gather_objects([float(weight.double().sum()) for weight in drawn])
        if everywhere[0] != everywhere[-1] or (drawn and not any(everywhere[0])):
            wrong.append(f"{what}: ranks differ in their new adapters, or they are empty")
    modules = [("policy", model)] + ([("replica", models.replica)] if models.replica is not None else [])
    for what, each in modules:
        beside, own = non_parameter_tensors(expected), non_parameter_tensors(each)
        wrong += [f"{what}: {place}" for place in beside if not torch.equal(own[place], beside[place])]
        wrong += [f"{what}: {name} is on {b.device}" for name, b in each.named_buffers() if b.device != device]
        base = each.get_base_model() if hasattr(each, "get_base_model") else each
        tied = base.lm_head.weight is base.model.embed_tokens.weight
        if tied != expected.config.tie_word_embeddings:
            wrong.append(f"{what}: tied is {tied}")
    if [p.requires_grad for p in model.parameters()] != [p.requires_grad for p in expected.parameters()]:
        wrong.append("other parameters are trained")
    if config.model.lora.adapter and model.active_adapter != TRAINED_ADAPTER:
        wrong.append(f"the active adapter is {model.active_adapter}")
    return wrong


def joined(parameter: Any, strategy: Strategy) -> torch.Tensor:
    """Gather a frozen parameter, which FSDP2 shards by rows and ZeRO-3 by elements."""
    assert not parameter.requires_grad
    mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter.ds_tensor
    runs = torch.cat(strategy.gather_objects(mine.cpu()))
    return runs if isinstance(parameter, DTensor) else runs[: parameter.ds_numel].view(parameter.ds_shape)


def main() -> None:
    out, backend, cases = Path(sys.argv[1]), hwgrpo_backends.get(sys.argv[2]), json.loads(sys.argv[3])
    Device(backend, int(os.environ["LOCAL_RANK"])).set_device()
    torch.distributed.init_process_group(backend.comm)
    with npu_reference_ops.registered() if backend.modules else nullcontext():
        for case, words in cases.items():
            rank = torch.distributed.get_rank()
            try:
                values = loaded([word.replace("RANK", str(rank)) for word in words], backend)
            except (ConfigError, RunError) as error:
                values = {"rank": rank, "error": f"{type(error).__name__}: {error}"}
            (out / f"{case}-{values['rank']}.json").write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
