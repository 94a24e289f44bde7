"""The parts that training and evaluation share: process, model, engine, and the copy of the policy that samples."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import hwgrpo_kernels
import numpy as np
import torch
import transformers
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.config.schema import KernelsConfig, RolloutConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.observed_images import ObservedImages
from hwgrpo.errors import ConfigError
from hwgrpo.models.frozen_dtype import as_fp32, hold_base_in, prepare_base, release_files
from hwgrpo.models.lm_head import HeadSpec, causal_lm
from hwgrpo.models.loading import check_vocabulary, image_sample, load_image_prompts, load_model
from hwgrpo.models.lora import apply_lora, initialize_dora, uses_lora, without_weights
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.quantization import quantize, quantized_weights
from hwgrpo.models.router import check_router, check_router_loss
from hwgrpo.models.to_device import move_to_device
from hwgrpo.models.vision import freeze_vision
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.local.frozen_copy import copy_frozen
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import ModuleWeights, PolicyWeights
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.vllm.vllm_settings import remove_stale_weights
from hwgrpo.rollout.workflow import MakeWorkflow
from hwgrpo.rollout.workflow_engine import with_workflow
from hwgrpo.support.free_cores import FreeCoreThreads
from hwgrpo.training.policy.auto_settings import attention_of, choose_dtype
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights


def prepare_process(config: Config, backend: Backend, local_rank: int, local_world_size: int) -> Device:
    """Open the device, divide the host's threads, seed every generator, and configure kernels.

    Raises:
        ConfigError: a pinned kernel does not exist.
        BackendError: there is no such device.
    """
    transformers.utils.logging.disable_progress_bar()  # our own panel shows progress
    remove_stale_weights()
    device = Device(backend, local_rank)
    device.set_device()
    threads = config.trainer.threads
    if threads == "free":
        FreeCoreThreads().settle()
    elif threads or local_world_size > 1:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_world_size))
    seed_everything(device, config.trainer.seed)
    device.set_deterministic(config.trainer.deterministic)
    choose_kernels(config.kernels, backend)
    return device


def follow_free_cores(config: Config) -> FreeCoreThreads | None:
    """Return what sets the threads of each step, with `trainer.threads=free`; call it before `prepare_process`."""
    return FreeCoreThreads() if config.trainer.threads == "free" else None


def seed_everything(device: Device, seed: int) -> None:
    """Seed torch's generators, Python's and numpy's (users' reward functions may draw from those)."""
    device.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def choose_kernels(kernels: KernelsConfig, backend: Backend) -> None:
    """Configure the kernels by the settings and the backend's preferences.

    Raises:
        ConfigError: `kernels.pins` names an op or an implementation that does not exist.
    """
    try:
        hwgrpo_kernels.configure(pins=dict(kernels.pins), preference=backend.kernels, strict=kernels.strict)
    except ValueError as error:
        raise ConfigError(f"kernels.pins={dict(kernels.pins)}: {error}") from error


def load_policy(config: Config, device: Device, tokenizer: Any) -> PolicyModel:
    """Load the model with fp32 trainable parameters, add adapters, and put it on the device."""
    dtype = choose_dtype(config.model.dtype, device)
    model = load_checked(config, attention_of(config, device).loaded_as, tokenizer, compute_dtype=dtype)
    move_to_device(model, device.torch_device)
    return policy_of(config, device, model, tokenizer)


def load_checked(
    config: Config, attention: str, tokenizer: Any, *, compute_dtype: torch.dtype, on_meta_device: bool = False
) -> Any:
    """Load as `load_trainable` does, and check that the model fits the tokenizer and the settings."""
    model = load_trainable(config, attention, compute_dtype=compute_dtype, on_meta_device=on_meta_device)
    check_vocabulary(model, tokenizer)
    check_router_loss(config.model.router_loss_coef, causal_lm(model).config)
    return model


def policy_of(config: Config, device: Device, model: Any, tokenizer: Any, head: HeadSpec | None = None) -> PolicyModel:
    """Return the policy of a model.

    Args:
        config: the run's settings.
        device: this rank's device.
        model: from `load_checked`.
        tokenizer: the model's.
        head: how it forms its logits, detected by another rank; None: detect it, and check the model's router.
    """
    logits = config.kernels.logits_dtype
    options = HeadOptions(
        temperature=config.rollout.temperature,
        chunk_rows=config.kernels.chunk_rows,
        logits_dtype=None if logits == "auto" else getattr(torch, logits),
    )
    policy = PolicyModel(model, compute_dtype=choose_dtype(config.model.dtype, device), options=options, head=head)
    if policy.images is not None:
        policy.images.sample = image_sample(config.model, policy.base.config, tokenizer)
    if head is None:
        with policy.autocast(policy.base.get_input_embeddings().weight.device):
            check_router(config.model.router_loss_coef, policy.base)
    return policy


def load_trainable(
    config: Config, attention: str = "sdpa", *, compute_dtype: torch.dtype = torch.float32, on_meta_device: bool = False
) -> Any:
    """Load the untrained model with its adapters into host memory; trainable parameters are fp32.

    Args:
        config: the run's settings.
        attention: transformers' name of the attention implementation.
        compute_dtype: dtype of the model's products; `model.lora.base_dtype` may hold a frozen base in it.
        on_meta_device: make the same model on the meta device instead, without weights.
    """
    adapted = uses_lora(config.model.lora)
    dtype = compute_dtype if adapted and config.model.lora.base_dtype != "float32" else torch.float32
    model = load_model(config.model, attention=attention, dtype=dtype, on_meta_device=on_meta_device)
    return make_trainable(config, model, compute_dtype=compute_dtype, on_meta_device=on_meta_device)


def make_trainable(config: Config, model: Any, *, compute_dtype: torch.dtype, on_meta_device: bool) -> Any:
    """Add what the settings train to a loaded model; see `load_trainable`.

    Returns:
        The model, wrapped by peft if it has adapters.
    """
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _without_embedding_hook(model)
    if reads_images(model.config):
        freeze_vision(model, config.model.train_vision)
    if uses_lora(config.model.lora):
        quantize(model, config.model.quantize)
        castable = prepare_base(model)
        shapes = {parameter: parameter.shape for parameter in castable}
        shapes |= {parameter: codes.size for parameter, codes in quantized_weights(model).items()}
        with as_fp32(shapes), without_weights() if on_meta_device else nullcontext():
            model = apply_lora(model, config.model.lora, moving_reference=config.algorithm.kl.sync_every > 0)
        initialize_dora(model, config.model.lora)
        _without_embedding_hook(model)
        hold_base_in(config.model.lora.base_dtype, castable, compute_dtype)
        release_files(model)
    return model


def _without_embedding_hook(model: Any) -> None:
    """Remove the hook that makes embeddings require a gradient: only reentrant checkpointing needs it.

    transformers and peft each register one under gradient checkpointing, and the lean decode step does not support
    models with hooks.
    """
    causal_lm(model).disable_input_require_grads()


def build_engine(
    config: Config,
    policy: PolicyModel,
    tokenizer: Any,
    device: Device,
    replica: Any = None,
    gate: Gate | None = None,
    weights: PolicyWeights | None = None,
    run_id: str | None = None,
    workflow: MakeWorkflow | None = None,
) -> Engine:
    """Return the rollout engine of the configuration.

    Args:
        config: the run's settings.
        policy: the policy to sample from.
        tokenizer: decodes the responses.
        device: the policy's device.
        replica: the local engine's copy of the policy, if its weights are sharded or trained during sampling.
        gate: gate at which an engine that generates in its own thread pauses for new weights.
        weights: the policy's weights for other engines; None: they are unsharded on this rank.
        run_id: the run's id on rank 0, by which a server recognizes the resumed run.
        workflow: makes the workflow in place of `rollout.workflow`.
    """
    parts = EngineParts(
        config=config,
        model=policy.model,
        weights=ModuleWeights(policy.model) if weights is None else weights,
        tokenizer=tokenizer,
        device=device,
        compute_dtype=_sampler_dtype(config.rollout, policy),
        replica=replica,
        run_id=run_id,
        gate=gate,
        image_sample=None if policy.images is None else policy.images.sample,
    )
    engine = engine_kind(config.rollout).make(parts)
    limit = config.trainer.process_group_timeout
    turns = turn_template(config, policy.model.generation_config, tokenizer, causal_lm(policy.model).config)
    return with_workflow(engine, config.rollout.workflow, tokenizer, limit, turns, config, workflow)


def turn_template(config: Config, generation_config: Any, tokenizer: Any, settings: Any = None) -> TurnTemplate | None:
    """Return the chat template between the turns of a workflow, with the options that prompts get.

    Args:
        config: the run's settings.
        generation_config: the model's; None: the tokenizer alone has tokens that end a turn.
        tokenizer: has the chat template.
        settings: the model's configuration; None reads it.

    Returns:
        None where it has none.
    """
    if tokenizer.chat_template is None:
        return None
    place = f"rollout.workflow={config.rollout.workflow}"
    render = partial(apply_template, config=config.data, tokenizer=tokenizer, place=place)
    ends = end_token_ids(tokenizer, generation_config, config.rollout.stop_token_ids)
    prompts = load_image_prompts(config.model, tokenizer, settings)
    images = None if prompts is None else ObservedImages(prompts, config.data.images)
    return TurnTemplate(render, tokenizer, ends, images)


def make_replica(config: Config, policy: PolicyModel, weights: Rank0Weights | None) -> Any:
    """Return an unsharded copy of a policy's model on this rank's device, for the local engine to sample with.

    Args:
        config: the run's settings.
        policy: not wrapped by a strategy.
        weights: the copy's weights, if the policy is on the meta device.
    """
    pairs = None if weights is None else weights.broadcast_all(policy.model)
    return copy_frozen(policy.model, _sampler_dtype(config.rollout, policy), pairs)


def needs_replica(config: Config, shards: bool) -> bool:
    """Return whether the engine samples with a separate copy of the policy in this process.

    Args:
        config: the run's settings.
        shards: whether the strategy shards the policy's weights.
    """
    return engine_kind(config.rollout).samples_with_policy and (shards or config.rollout.max_staleness > 0)


def _sampler_dtype(rollout: RolloutConfig, policy: PolicyModel) -> torch.dtype:
    """Return the dtype that responses are sampled in."""
    wanted = rollout.dtype
    return policy.compute_dtype if wanted == "auto" else getattr(torch, wanted)
