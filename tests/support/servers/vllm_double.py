"""A double of vLLM in the training process: a transformers model with vLLM's rules of sleep, which counts bytes.

Rules are those of vLLM 0.32's sources, whose places stand beside them. What vLLM would ignore, answer with garbage or
crash on raises `Misuse`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hwgrpo_backends.device import Device
from peft import PeftModel
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hwgrpo.rollout.local.engine import score
from hwgrpo.rollout.vllm import engine as vllm_engine
from hwgrpo.training.policy.policy_model import PolicyModel

WEIGHTS, CACHE = "weights", "kv_cache"
SLACK = 0.5
"""Bytes for batches and the like, as a share of the weights."""


class Misuse(BaseException):
    """A call that vLLM does not survive, or ignores."""


@dataclass
class Memory:
    """The device's memory in bytes, and what happened.

    It has room for the trainer's parameters and states, and beside them for vLLM's weights and cache, or for an update,
    whose activations and gradients take as much.
    """

    states: float
    """Optimizer states that will be there, as a share of vLLM's weights; infinity: there is room for anything."""
    capacity: float = math.inf
    sizes: dict[str, int] = field(default_factory=dict)
    """vLLM's allocations by tag."""
    asleep: set[str] = field(default_factory=set)
    cached: int = 0
    """Freed bytes that torch's allocator keeps from the device."""
    host: int = 0
    """Bytes of weights in host memory."""
    events: list[Any] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the last `LLM`."""
    own: set[int] = field(default_factory=set)
    """Addresses of vLLM's tensors."""

    @property
    def resident(self) -> int:
        """Bytes of vLLM on the device."""
        return sum(size for tag, size in self.sizes.items() if tag not in self.asleep)

    def trainer(self) -> int:
        """Return the bytes of all other live tensors that were made since `installed`."""
        storages = {}
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu":  # a DTensor's shard is one
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(size for address, size in storages.items() if address not in self.own)

    def require(self, purpose: str, size: int = 0) -> None:
        """Check that `size` more bytes are free on the device."""
        held = {"trainer": self.trainer(), "torch's cache": self.cached, "vLLM": self.resident, purpose: size}
        if sum(held.values()) > self.capacity:
            raise Misuse(f"out of memory, of {self.capacity:,} bytes: {held}")

    def note(self, event: str) -> None:
        """Record an event, with vLLM's bytes after it."""
        self.events.append([event, self.resident])


class SharedMemory:
    """Of the ranks of an engine on a CPU: v1/worker/cpu_worker.py calls it so for the init method env://."""

    @staticmethod
    def make_group_name(communicator: Any) -> str:
        return "-tp:0-[0-1]-cpushm"


class Llm:
    """`vllm.LLM`, as far as the engine uses it."""

    memory: Memory
    """Of the process; set by `installed`."""

    def __init__(self, **arguments: Any) -> None:
        self.memory.arguments = arguments
        shared_by = arguments.get("tensor_parallel_size", 1)
        self.ranks = dist.new_subgroups(shared_by, backend="gloo")[0] if shared_by > 1 else None
        if self.ranks is not None:  # csrc/cpu/shm.cpp: "create shm in SHMManager failed", and it stays
            Path("/dev/shm", f"{SharedMemory.make_group_name(self)}_{dist.get_rank(self.ranks)}").open("x").close()
            dist.barrier(self.ranks)
        config = AutoConfig.from_pretrained(arguments["model"])
        self.model = AutoModelForCausalLM.from_config(config).eval()
        if arguments["load_format"] == "auto":
            self.model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32).eval()
        else:
            self._forget()
        self.memory.own |= {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self.memory.sizes = {WEIGHTS: weights, CACHE: 2 * weights}
        trainer = self.memory.trainer() + self.memory.states * weights
        self.memory.capacity = trainer + 3 * weights + SLACK * weights
        self.memory.note("start")
        self.version = "none"
        self.adapters: dict[int, Any] = {}
        self.backup: dict[str, torch.Tensor] = {}
        core = SimpleNamespace(shutdown=lambda: self.memory.note("shutdown"))
        self.llm_engine = SimpleNamespace(
            set_weight_version=self.set_version, engine_core=core, remove_lora=self.remove_lora
        )

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        # v1/executor/abstract.py Executor.sleep: "Executor is already sleeping.", and it returns
        self._check(not self.memory.asleep, "sleep of an engine that sleeps already")
        if level == 1:  # device_allocator/cumem.py CuMemAllocator.sleep: tags to offload are copied to the host
            self.backup = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.memory.own |= {value.untyped_storage().data_ptr() for value in self.backup.values()}
            self.memory.host = self.memory.sizes[WEIGHTS]
        self._forget()
        self.memory.asleep = {WEIGHTS, CACHE}
        self.memory.note(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        wanted = set(tags or (WEIGHTS, CACHE))
        # v1/executor/abstract.py Executor.wake_up: "Tag %s is not in sleeping tags %s", and it returns
        self._check(wanted <= self.memory.asleep, f"wake_up({tags}), while {self.memory.asleep} sleep")
        # device_allocator/cumem.py wake_up: create_and_map allocates from the device
        self.memory.require("waking up", sum(self.memory.sizes[tag] for tag in wanted))
        self.memory.asleep -= wanted
        if WEIGHTS in wanted and self.backup:  # level 2 leaves them as they are: zeros on ROCm, else anything
            self.model.load_state_dict(self.backup)
            self.backup, self.memory.host = {}, 0
        self.memory.note(f"wake {' '.join(sorted(wanted))}")
        return not self.memory.asleep  # v1/engine/core.py EngineCore.wake_up: only then is scheduling resumed

    def collective_rpc(self, method: Any, args: tuple = ()) -> None:
        runner = SimpleNamespace(reload_weights=self._reload, get_model=lambda: self.model)
        method(SimpleNamespace(device=torch.device("cpu"), model_runner=runner), *args)

    def reset_prefix_cache(self) -> None:
        self.memory.note("reset")

    def set_version(self, version: str) -> None:
        self.version = version
        self.memory.note(f"version {version}")

    def remove_lora(self, number: int) -> None:
        # lora/worker_manager.py: the slot's tensors were allocated with the weights
        self._check(WEIGHTS not in self.memory.asleep, "remove_lora while the weights sleep")
        self.adapters.pop(number, None)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool = True, lora_request: Any = None
    ) -> list[Any]:
        # v1/engine/core.py EngineCore.wake_up resumes scheduling only when nothing sleeps: requests would wait for ever
        self._check(not self.memory.asleep, f"generate while {self.memory.asleep} sleep")
        if self.ranks is not None:
            asked: list[Any] = [None] * self.ranks.size()
            dist.all_gather_object(asked, (prompts, params), group=self.ranks)
            # v1/executor/uniproc_executor.py ExecutorWithExternalLauncher: every rank schedules by itself, and they
            # compute layers together, so that they need the same requests
            self._check(asked == asked[:1] * len(asked), f"ranks of one engine ask for different responses: {asked}")
        model = self.model if lora_request is None else self._adapted(lora_request)
        if hasattr(params[0], "prompt_logprobs"):
            self.memory.note("probe")
            return [self._scores(model, prompt) for prompt in prompts]
        self.memory.note("generate")
        return [self._responses(model, *each) for each in zip(prompts, params, strict=True)]

    def _adapted(self, request: Any) -> Any:
        if request.lora_int_id not in self.adapters:
            base = AutoModelForCausalLM.from_config(self.model.config).eval()
            base.load_state_dict(self.model.state_dict())
            self.adapters[request.lora_int_id] = PeftModel.from_pretrained(base, request.lora_path).eval()
            self.memory.own |= {p.untyped_storage().data_ptr() for p in self.adapters[request.lora_int_id].parameters()}
        return self.adapters[request.lora_int_id]

    def _scores(self, model: Any, prompt: dict[str, Any]) -> Any:
        tokens = prompt["prompt_token_ids"]
        entries = zip(tokens[1:], score(model, [tokens])[0], strict=True)
        return SimpleNamespace(prompt_logprobs=[None, *({t: SimpleNamespace(logprob=value)} for t, value in entries)])

    def _responses(self, model: Any, prompt: dict[str, Any], asked: Any) -> Any:
        drawn = []
        for index in range(asked.n):
            generator = torch.Generator().manual_seed(asked.seed + index)
            tokens, logprobs, reason = list(prompt["prompt_token_ids"]), [], "length"
            for _ in range(asked.max_tokens):
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
                scores = (logits / (asked.temperature or 1.0)).log_softmax(-1)
                draws = bool(asked.temperature) and bool(scores.isfinite().all())  # NaN comes back as a log-prob
                token = int(torch.multinomial(scores.exp(), 1, generator=generator) if draws else scores.argmax())
                tokens.append(token)
                logprobs.append({token: SimpleNamespace(logprob=float(scores[token]))})
                if token in asked.stop_token_ids:
                    reason = "stop"
                    break
            drawn.append(
                SimpleNamespace(
                    index=index,
                    token_ids=tokens[len(prompt["prompt_token_ids"]) :],
                    logprobs=logprobs,
                    finish_reason=reason,
                    weight_versions=[SimpleNamespace(version=self.version)],
                )
            )
        return SimpleNamespace(outputs=drawn)

    @torch.no_grad()
    def _reload(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        # v1/worker/gpu_worker.py: copies into tensors whose memory is unmapped while they sleep
        self._check(WEIGHTS not in self.memory.asleep, "weights are loaded while their memory sleeps")
        state, missing = self.model.state_dict(), set(dict(self.model.named_parameters()))
        # gathered weights and those being packed, for which there is no room with the cache
        self.memory.require("weights on their way", self.memory.sizes[WEIGHTS])
        for name, tensor in weights_iterator:
            state[name].copy_(tensor)
            missing.discard(name)
        self._check(not missing, f"weights that were never loaded: {missing}")
        self.memory.note("load")

    @torch.no_grad()
    def _forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.fill_(torch.nan)

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Misuse(problem)


@contextmanager
def installed(memory: Memory) -> Iterator[Memory]:
    """Let the engine `vllm` use the double in this process, on a device of the memory."""
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=0))
    vllm = SimpleNamespace(
        LLM=type("OfMemory", (Llm,), {"memory": memory}),
        SamplingParams=lambda **settings: SimpleNamespace(**settings),
        sampling_params=kinds,
        __version__="0.32 (double)",
    )
    modules = SimpleNamespace(
        LoRARequest=lambda name, number, path: SimpleNamespace(lora_int_id=number, lora_path=path),
        _CPUSHMDistributed=SharedMemory,
    )
    gc.collect()
    gc.freeze()  # what is there already is not counted
    forward, empty_cache = PolicyModel.forward, Device.empty_cache

    def watched(self: PolicyModel, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            size = sum(memory.sizes.values())
            memory.cached = 0  # torch uses what it keeps
            memory.require("an update", size)
            memory.cached = size
            if memory.events[-1][0] != "update":
                memory.note("update")
        return forward(self, *arguments, **named)

    def emptied(self: Device) -> None:
        memory.cached = 0
        empty_cache(self)

    patches: list[tuple[Any, str, Any]] = [
        (vllm_engine, "_load", lambda config, device: vllm),
        (vllm_engine, "check_installed", lambda config: "vllm 0.32"),
        (vllm_engine, "importlib", SimpleNamespace(import_module=lambda name: modules)),
        (PolicyModel, "forward", watched),
        (Device, "empty_cache", emptied),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield memory
    finally:
        gc.unfreeze()
        for owner, name, value in before:
            setattr(owner, name, value)
