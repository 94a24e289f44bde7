"""Putting a run together from its settings: the cheap and fallible parts first, the model last."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hwgrpo_kernels
import torch
import transformers
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

import hwgrpo
from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.validate import prompts_per_update
from hwgrpo.data.prompts import PromptDataset, build_dataset
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import check_vocabulary, load_model, load_tokenizer
from hwgrpo.models.lora import apply_lora, uses_lora
from hwgrpo.observe.observer import Observer
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout import ENGINES
from hwgrpo.rollout.engine import Engine, Sampling
from hwgrpo.training import STRATEGIES, checkpoints, rng
from hwgrpo.training.choices import choose_attention, choose_dtype, choose_layout, choose_strategy
from hwgrpo.training.evaluate import scores
from hwgrpo.training.loop import Run
from hwgrpo.training.optimizer import build_optimizer
from hwgrpo.training.policy import HeadOptions, PolicyModel
from hwgrpo.training.prompts import PromptSource
from hwgrpo.training.reference import build_reference
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update import PolicyUpdate


def build_run(config: Config, backend: Backend, local_rank: int, local_world_size: int) -> Run:
    """Make every part of a run, restoring the newest checkpoint where `trainer.resume` asks for it.

    Args:
        config: checked settings.
        backend: the chosen device family.
        local_rank: which of this host's devices is ours.
        local_world_size: processes of this run on this host.

    Raises:
        ConfigError, DataError, CheckpointError: naming what is wrong and what to do.
    """
    t = config.trainer
    device = _prepare_process(config, backend, local_rank, local_world_size)
    strategy: Strategy = STRATEGIES.load(choose_strategy(config))(device.torch_device, device.comm_backend)
    output = Path(t.output_dir)
    checkpoint, problems = _find_checkpoint(config, output)

    tokenizer = load_tokenizer(config.model)
    training_data = build_dataset(config.data, tokenizer, "train")
    assert training_data is not None
    validation_data = build_dataset(config.data, tokenizer, "validation")
    rewards = build_rewards(config, training_data)
    total_steps = t.max_steps or max(1, t.epochs * len(training_data) // t.prompts_per_step)

    policy = load_policy(config, device, tokenizer)
    reference = build_reference(policy, config)
    optimizer = build_optimizer(policy, config.optim)
    source = PromptSource(
        training_data,
        PromptSampler(len(training_data), t.seed, config.data.shuffle),
        t.prompts_per_step,
        prompts_per_update(config),
        strategy.rank,
        strategy.world_size,
    )
    update = PolicyUpdate(
        config=config,
        strategy=strategy,
        policy=policy,
        optimizer=optimizer,
        device=device.torch_device,
        layout=choose_layout(config),
        total_updates=total_steps * (t.prompts_per_step // prompts_per_update(config)) * t.epochs_per_batch,
    )
    if checkpoint is not None:
        checkpoints.restore(checkpoint, policy.model, optimizer)
        source.restore(checkpoint.manifest["state"]["sampler"])
        update.updates_done = checkpoint.manifest["state"]["updates_done"]
        saved = checkpoints.load_rng(checkpoint, strategy.rank)
        if saved is not None:
            rng.restore(saved, device)
    start = checkpoint.step if checkpoint else 0
    strategy.wrap(policy)
    engine = build_engine(config, policy, tokenizer, device)
    engine.update_weights(start)

    observer = Observer(config.observe, output, total_steps=total_steps, is_main=strategy.rank == 0)
    if strategy.rank == 0:
        _describe(output, config, device, total_steps)
    observer.resume_from(start)
    for problem in problems:
        observer.note(f"passed over a checkpoint: {problem}")
    for name, data in (("training", training_data), ("validation", validation_data)):
        if data is not None and (data.filtered or data.truncated):
            observer.note(
                f"{name} prompts longer than data.max_prompt_tokens={config.data.max_prompt_tokens}: "
                f"{data.filtered} dropped, {data.truncated} cut, {len(data)} kept"
            )
    observer.note(
        f"{device.name} ({backend.name}, {update.policy.compute_dtype}), "
        f"{sum(p.numel() for p in policy.parameters() if p.requires_grad):,} trainable parameters, "
        f"{len(training_data):,} prompts, {'continuing after' if start else 'starting from'} step {start}"
    )

    def save(step: int) -> None:
        state = {"sampler": source.state(), "updates_done": update.updates_done, "config": to_yaml(config)}
        folder = checkpoints.save(
            output / "checkpoints",
            step,
            module=policy.model,
            optimizer=optimizer,
            rng=rng.capture(device),
            state=state,
            strategy=strategy,
            keep=t.keep_checkpoints,
        )
        observer.note(f"saved {folder}")

    return Run(
        config=config,
        strategy=strategy,
        prompts=source,
        engine=engine,
        sampling=sampling_of(config),
        rewards=rewards,
        update=update,
        reference=reference,
        validation=validation_data,
        observer=observer,
        watch=Stopwatch(device.synchronize),
        save=save,
        memory=lambda: _memory_metrics(device),
        tokenizer=tokenizer,
        start_step=start,
        total_steps=total_steps,
    )


@dataclass(frozen=True)
class Evaluation:
    """A model, prompts and rewards, ready to be measured."""

    engine: Engine
    dataset: PromptDataset
    rewards: RewardPipeline
    sampling: Sampling

    def greedy(self) -> torch.Tensor:
        """Return the rewards [prompts, 1] of greedy responses."""
        return self._scores(greedy=True, n=1)

    def sampled(self, n: int) -> torch.Tensor:
        """Return the rewards [prompts, n] of sampled responses."""
        return self._scores(greedy=False, n=n)

    def _scores(self, **changes: Any) -> torch.Tensor:
        sampling = replace(self.sampling, **changes)
        return scores(self.engine, self.dataset, self.rewards, sampling, range(len(self.dataset)))[0]


def build_evaluation(config: Config, backend: Backend, local_rank: int) -> Evaluation:
    """Make what is needed to measure a model, and nothing that is needed to train it.

    Raises:
        ConfigError: there are no validation prompts.
    """
    device = _prepare_process(config, backend, local_rank, 1)
    tokenizer = load_tokenizer(config.model)
    dataset = build_dataset(config.data, tokenizer, "validation")
    if dataset is None:
        raise ConfigError("data.validation is not set; name the prompts to measure on, e.g. data.validation=test.jsonl")
    rewards = build_rewards(config, dataset)
    engine = build_engine(config, load_policy(config, device, tokenizer), tokenizer, device)
    return Evaluation(engine, dataset, rewards, sampling_of(config))


def load_policy(config: Config, device: Device, tokenizer: Any) -> PolicyModel:
    """Load the model with fp32 trainable parameters, add adapters, and put it on the device."""
    dtype = choose_dtype(config, device)
    model: Any = load_model(config.model, attention=choose_attention(config, device.backend, dtype))
    check_vocabulary(model, tokenizer)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if uses_lora(config.model.lora):
        model = apply_lora(model, config.model.lora)
    model.to(device.torch_device)
    logits = config.kernels.logits_dtype
    options = HeadOptions(
        temperature=config.rollout.temperature,
        chunk_rows=config.kernels.chunk_rows,
        logits_dtype=None if logits == "auto" else getattr(torch, logits),
    )
    return PolicyModel(model, compute_dtype=dtype, options=options)


def build_engine(config: Config, policy: PolicyModel, tokenizer: Any, device: Device) -> Engine:
    """Return the rollout engine of the configuration."""
    return ENGINES.load(config.rollout.engine)(
        policy.model,
        tokenizer,
        device=device.torch_device,
        compute_dtype=policy.compute_dtype,
        max_sequences=config.rollout.max_sequences,
    )


def build_rewards(config: Config, dataset: PromptDataset) -> RewardPipeline:
    """Load the reward functions and check that the data has the columns they read."""
    context = {"max_response_tokens": config.rollout.max_response_tokens}
    return RewardPipeline(config.reward, context=context, columns=dataset.columns)


def sampling_of(config: Config) -> Sampling:
    """Return how responses are drawn in training."""
    r = config.rollout
    return Sampling(
        n=r.n,
        max_response_tokens=r.max_response_tokens,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
        seed=config.trainer.seed,
    )


def _prepare_process(config: Config, backend: Backend, local_rank: int, local_world_size: int) -> Device:
    transformers.utils.logging.disable_progress_bar()  # our own panel shows progress
    device = Device(backend, local_rank)
    device.set_device()
    threads = config.trainer.threads
    if threads or local_world_size > 1:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_world_size))
    device.manual_seed(config.trainer.seed)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    hwgrpo_kernels.configure(pins=dict(config.kernels.pins), preference=backend.kernels, strict=config.kernels.strict)
    return device


def _find_checkpoint(config: Config, output: Path) -> tuple[checkpoints.Checkpoint | None, list[str]]:
    resume = config.trainer.resume
    if resume == "auto":
        return checkpoints.newest(output / "checkpoints")
    if resume == "never":
        if (output / "checkpoints").exists() or (output / "metrics.jsonl").exists():
            raise ConfigError(
                f"trainer.resume='never' and trainer.output_dir={str(output)!r} holds another run; "
                "name another folder, remove this one, or use trainer.resume=auto to go on"
            )
        return None, []
    return checkpoints.verify(Path(resume)), []


def _describe(output: Path, config: Config, device: Device, total_steps: int) -> None:
    """Write what the run is: its settings, and the machine and versions it runs on."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    environment = {
        "hwgrpo": hwgrpo.__version__,
        "backend": device.backend.name,
        "device": device.name,
        "arch": device.arch,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "total_steps": total_steps,
    }
    (output / "environment.json").write_text(json.dumps(environment, indent=1), encoding="utf-8")


def _memory_metrics(device: Device) -> dict[str, float]:
    memory = device.memory()
    if memory.peak is None:
        return {}
    return {"perf/max_memory_allocated_gb": memory.peak / 2**30}
