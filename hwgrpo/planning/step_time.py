"""Seconds of a step on a chip that need not be here, from its peak rates and assumed shares of them.

An estimate: every response has the maximum length, every prompt the same images, work is evenly distributed, nothing
overlaps, and work on the host (rewards, decoding text) is not included. Matrix products run at a share of the chip's
peak. A decode step reads every weight, key and value once, and takes the longer of that and its products. State moves
between devices at the link's rate; a ring moves (devices - 1) / devices of a gathered or reduced tensor (Thakur et al.
2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hwgrpo_backends.peaks import Chip
from transformers import PreTrainedConfig

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config import Config
from hwgrpo.config.derived import has_exact_kl, prompts_per_update, ranks_per_sequence, sequences_at_once
from hwgrpo.config.schema import ModelConfig, RolloutConfig
from hwgrpo.models.loading import auto_class
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.quantization import CODE_BITS
from hwgrpo.models.tower_work import BACKWARD, FORWARD, WEIGHT
from hwgrpo.planning.memory import Work, cache_bytes, encodings, micro_batches, rollout_dtype_of
from hwgrpo.planning.model_shape import ModelShape
from hwgrpo.planning.tower_shape import TowerShape
from hwgrpo.training.strategies.sharding import Sharding
from hwgrpo.training.update.flops import TrainingWork, model_work

DENSE_MFU = 0.4
"""Share of the matrix rate that dense models reach."""
EXPERTS_MFU = 0.3
"""Share that mixtures of experts reach. Published: Qwen3-30B-A3B 0.31 to 0.40 and DeepSeek-V3 0.19 (verl,
docs/perf/dpsk.md); Qwen3-30B-A3B with LoRA 0.15 to 0.28 on 8 H100 (prime-rl, benchmarks/baselines)."""


@dataclass(frozen=True)
class Rates:
    """Assumptions about devices beyond their data sheets."""

    mfu: float | None = None
    """Share of the matrix rate that training, scoring and prefill reach; None: `DENSE_MFU`, or `EXPERTS_MFU`."""
    mbu: float = 0.6
    """Share of the memory bandwidth that decoding and AdamW reach."""
    link: float = 50e9
    """Bytes per second that a device sends to others: one port of 400 Gbit/s each."""
    host_link: float = 25e9
    """Bytes per second between a device and its host: 16 lanes of PCIe 4.0, less protocol."""

    def matrix_share(self, shape: ModelShape) -> float:
        """Return the share of the matrix rate that a model of this shape reaches."""
        if self.mfu is not None:
            return self.mfu
        return EXPERTS_MFU if shape.expert_parameters else DENSE_MFU


def forward_work(config: ModelConfig, settings: PreTrainedConfig) -> TrainingWork | None:
    """Count a model's FLOPs as if it were frozen: forward, and gradients of activations.

    Args:
        config: the run's `model` settings.
        settings: the model's transformers configuration.

    Returns:
        The FLOPs; None if they cannot be counted (`model_work`).
    """
    with torch.device("meta"):
        model = auto_class(settings).from_config(settings, trust_remote_code=config.trust_remote_code)
    model.requires_grad_(False)
    return model_work(model, model)


@dataclass(frozen=True)
class Passes:
    """FLOPs of one device in a step."""

    prefill: float
    decode_token: float
    """FLOPs of one token of one sequence, without attention."""
    scoring: float
    update: float


def passes(config: Config, shape: ModelShape, frozen: TrainingWork, work: Work, *, rescored: bool) -> Passes:
    """Count the FLOPs of one device in a step.

    Args:
        config: the run's settings.
        shape: the model's sizes.
        frozen: from `forward_work`.
        work: the device's work.
        rescored: old log-probs need a separate pass.
    """
    n, prompt, response = work.responses(config.rollout), work.prompt_tokens, config.rollout.max_response_tokens
    forward_share = FORWARD / (FORWARD + BACKWARD)
    per_token, per_head = forward_share * frozen.per_token, forward_share * frozen.per_response_token
    prompts, tokens = _computed(config.rollout, work)
    of_prompt, of_sequence = _pairs(frozen, prompt), _pairs(frozen, prompt + response - 1)
    pairs = prompts * of_prompt + work.prompts * n * (of_sequence - of_prompt)
    layers, head = tokens * per_token + pairs, work.prompts * n * response * per_head
    forward = layers + head
    adapters = uses_lora(config.model.lora)
    own = WEIGHT * shape.trainable * tokens if adapters else WEIGHT / FORWARD * (layers - pairs + head)
    # the backward pass of attention is twice its forward
    update = layers + head + BACKWARD / FORWARD * (layers - pairs + head) + 2 * pairs + own
    if adapters:
        update += 2 * FORWARD * shape.trainable * tokens  # the adapters' own forward, and gradient of their input
    if config.model.gradient_checkpointing:
        update += layers
    references = 1 if config.algorithm.kl.coef and not has_exact_kl(config) else 0
    if has_exact_kl(config):
        update += forward
    return Passes(
        prefill=work.prompts * (prompt * per_token + of_prompt),
        decode_token=per_token + per_head,
        scoring=(references + rescored) * forward,
        update=config.trainer.epochs_per_batch * update,
    )


def _computed(rollout: RolloutConfig, work: Work) -> tuple[int, int]:
    """Return the prompts and the tokens that a device computes in a pass over its batch."""
    n, response = work.responses(rollout), rollout.max_response_tokens
    prompts = work.prompts * (1 if work.shares_prompt else n)  # a prompt that a layout computes once counts once
    return prompts, prompts * work.prompt_tokens + work.prompts * n * (response - 1)


def _pairs(frozen: TrainingWork, length: int) -> float:
    """Return the FLOPs of a sequence's scores and weighted values in the forward."""
    total = 0.0
    for window, flops in frozen.per_pair:
        seen = length if window is None else min(length, window)
        total += flops / 3 * (seen * (seen + 1) / 2 + (length - seen) * seen)  # a forward is a third of the three
    return total


def step_seconds(
    config: Config,
    shape: ModelShape,
    frozen: TrainingWork | None,
    work: Work,
    sharding: Sharding,
    chip: Chip,
    rates: Rates,
    *,
    devices: int,
    samplers: int,
) -> dict[str, float | None]:
    """Return the seconds of each stage of a step; None where the chip's rate is unknown.

    Args:
        config: the run's settings.
        shape: the model's sizes.
        frozen: from `forward_work`; None if FLOPs cannot be counted.
        work: the work of one device.
        sharding: how state is sharded.
        chip: its rates.
        rates: assumptions about it.
        devices: number of training devices.
        samplers: separate rollout devices, each with a shard of every weight; 0: each training device samples.
    """
    t = config.trainer
    rescored = t.epochs_per_batch > 1 or prompts_per_update(config) != t.prompts_per_step
    rescored |= config.algorithm.kl.in_reward or takes(config.algorithm.advantage, "token_probs")
    rescored &= not work.supervised
    flops = chip.flops.get(str(work.dtype).removeprefix("torch."))
    matrix = None if flops is None else flops * rates.matrix_share(shape)
    memory = None if chip.bandwidth is None else chip.bandwidth * rates.mbu
    of = None if frozen is None else passes(config, shape, frozen, work, rescored=rescored)
    # Rollout devices share the sampling for all training devices.
    shared = devices / samplers if samplers else 1.0
    together = samplers or (config.rollout.tensor_parallel_size if work.beside else 1)  # devices of an engine
    size = rollout_dtype_of(config.rollout, work.dtype).itemsize
    state = shape.parameters * size
    updates = t.prompts_per_step // prompts_per_update(config) * t.epochs_per_batch
    copied = not work.supervised and (samplers or size != 4 or not sharding.keeps_full_parameters)
    held = sharding.stored_elements(shape.sharded_units, sharding.parameters)
    sync = 0.0 if not copied else None if memory is None else 4 * held / memory
    if sync is not None and copied:
        # a ring gathers trained parameters in fp32, and rank 0 sends the weights to separate rollout devices
        shard = 4 * sharding.stored_elements(shape.trained_units, sharding.parameters)
        sync += ((sharding.gather_ranks - 1) * shard + (state if samplers else 0)) / rates.link
    stepped = sharding.stored_elements(shape.trained_units, sharding.optimizer_states)
    # parameter, gradient and two optimizer states are read, all but the gradient written; fp32
    optimizer = _quotient(updates * 28.0 * stepped, memory)
    _, number, _ = micro_batches(config, work)  # of an update
    if optimizer is not None and t.offload != "none" and work.device_type != "cpu":
        # two states go to the device and back; fp32 sums of gradients too in each pass, and to the device for the step
        crossing = 2 * (2 if config.optim.name == "adamw_8bit" else 8)
        crossing += 8 * number + 4 if t.offload == "gradients" else 0
        optimizer += updates * crossing * stepped / rates.host_link
    quantize = config.model.quantize
    # each pass over a micro-batch dequantizes every matrix, and checkpointing passes the layers again
    moved = number * _dequantized_bytes(quantize, shape, work.dtype.itemsize)
    dequantized = _quotient(moved, memory) if moved else 0.0
    training = updates * (3 if config.model.gradient_checkpointing else 2)
    if has_exact_kl(config):
        training += updates
    references = bool(config.algorithm.kl.coef) and not has_exact_kl(config)
    scoring = t.prompts_per_step // prompts_per_update(config) * (references + rescored)
    generations = [] if work.supervised else [config.rollout]
    if takes(config.algorithm.advantage, "greedy_S"):  # one greedy response to each prompt, after the others
        generations.append(replace(config.rollout, n=1))
    encoded = image_flops(config, shape.tower, work, rescored=rescored, copied=bool(copied) or work.beside)
    decode: float | None = 0.0
    for each in generations:
        given = each, quantize, shape, of, work, matrix, memory, size
        decode = _sum(decode, _decode(*given, shared=shared, together=together))
    return {
        **({} if encoded is None else {"images": _quotient(encoded, matrix)}),
        "prefill": _quotient(of and of.prefill * shared * len(generations), matrix),
        "decode": decode,
        "scoring": _sum(_quotient(of and of.scoring, matrix), dequantized and scoring * dequantized),
        "update": _sum(_quotient(of and of.update, matrix), dequantized and training * dequantized),
        "optimizer": optimizer,
        "exchange": (
            _exchanged(shape, work, sharding, number, updates, devices)
            + _tokens_exchanged(config, shape, work, sharding, rescored=rescored)
        )
        / rates.link,
        "sync": sync,
    }


def image_flops(config: Config, tower: TowerShape | None, work: Work, *, rescored: bool, copied: bool) -> float | None:
    """Return the FLOPs of encoding images of one device in a step; None: prompts are text.

    What is frozen encodes the images of a prompt once, and remembers them; what is trained encodes them in sampling and
    in each micro-batch of each pass.

    Args:
        config: the run's settings.
        tower: of the model; None: it reads text alone.
        work: the device's work.
        rescored: old log-probs need a separate pass.
        copied: a copy of the policy samples, which encodes for itself.
    """
    if tower is None or not work.images:
        return None
    once, trains = tower.forward.of(work.images), tower.trained != "none"
    adapters, kl = uses_lora(config.model.lora), bool(config.algorithm.kl.coef)
    total = work.prompts * once * (1 + (copied and not trains) + (kl and not adapters))
    if trains:
        updates = config.trainer.prompts_per_step // prompts_per_update(config)
        passed = updates * encodings(config, work)
        epochs = config.trainer.epochs_per_batch
        recomputed = once if config.model.gradient_checkpointing and tower.trained == "all" else 0.0
        forwards = rescored + (kl and adapters) * (epochs if has_exact_kl(config) else 1)
        total += passed * (epochs * (tower.both.of(work.images) + recomputed) + forwards * once)
    return total


def _quotient(amount: float | None, rate: float | None) -> float | None:
    return None if amount is None or rate is None else amount / rate


def _sum(seconds: float | None, more: float | None) -> float | None:
    return None if seconds is None or more is None else seconds + more


def _dequantized_bytes(method: str, shape: ModelShape, size: int) -> float:
    """Return the bytes read as codes, and written as values of `size` bytes, to dequantize all matrices once."""
    quantized = sum(unit.copies * p.count for unit in shape.units for p in unit.parameters if p.is_quantized)
    return quantized * (size + CODE_BITS.get(method, 0) / 8)


def _decode(
    rollout: RolloutConfig,
    quantize: str,
    shape: ModelShape,
    of: Passes | None,
    work: Work,
    matrix: float | None,
    memory: float | None,
    size: int,
    *,
    shared: float,
    together: int,
) -> float | None:
    """Return the seconds of all decode steps: each is bound by its memory reads or by its products."""
    if of is None or matrix is None or memory is None:
        return None
    sequences = work.prompts * rollout.n * max(1, round(shared * together))
    at_once = min(sequences, sequences_at_once(rollout))
    waves = -(-sequences // at_once)
    cache = cache_bytes(
        shape,
        prompts=-(-at_once // rollout.n),
        sequences=at_once,
        prompt_tokens=work.prompt_tokens,
        response_tokens=rollout.max_response_tokens // 2,  # on average over the steps
        itemsize=size,
        compressed=not work.samples,
    )
    # a layer reads the experts that any of the tokens activates
    met = 1 - (1 - shape.expert_share) ** at_once
    weights = size * (
        shape.parameters - shape.vision_parameters - shape.other_parameters - shape.expert_parameters * (1 - met)
    )
    weights += _dequantized_bytes(quantize, shape, size)
    read = (weights + cache) / together / memory
    computed = at_once * of.decode_token / together / matrix
    return waves * rollout.max_response_tokens * max(read, computed)


def _exchanged(
    shape: ModelShape, work: Work, sharding: Sharding, micro_batch_count: int, updates: int, devices: int
) -> float:
    """Return the bytes of state that a device sends in a step of some updates with some micro-batches each."""
    if sharding.gathered_units is not None:
        gathers = 1 if sharding.gathered_units == "all" else 2  # for the forward and for the backward
        weights = gathers * work.dtype.itemsize * sharding.stored_elements(shape.sharded_units, sharding.parameters)
        scattered = 4 * sharding.stored_elements(shape.trained_units, sharding.gradients)
        # in a ring each sends a shard, padding included, to all others
        syncs = updates * (1 if sharding.syncs_once else micro_batch_count)
        return float(syncs * (sharding.gather_ranks - 1) * (weights + scattered))
    gradients = 4.0 * shape.trainable * (devices - 1) / devices
    # All-reduce is a reduce-scatter and an all-gather. ZeRO-1 and -2 also all-reduce (DeepSpeed 0.19), after every
    # micro-batch if gradients are sharded by then, and then gather the new weights.
    reductions = micro_batch_count if sharding.gradients > 1 and not sharding.syncs_once else 1
    gathered = gradients if sharding.optimizer_states > 1 else 0.0
    return updates * (2 * reductions * gradients + gathered)


def _tokens_exchanged(config: Config, shape: ModelShape, work: Work, sharding: Sharding, *, rescored: bool) -> float:
    """Return the bytes that a device sends in passes under sequence or tensor parallelism.

    Sequence parallelism exchanges heads for tokens: queries, keys, values and outputs. Tensor parallelism gathers and
    reduces hidden states, for attention and for the feed-forward part.
    """
    size = ranks_per_sequence(config)
    if sharding.tensor > 1:
        sent = 4 * shape.hidden * (size - 1)
    else:
        heads, keys = shape.heads, math.lcm(shape.kv_heads, size)
        sent = (heads + keys) * (shape.head_dim + shape.value_dim) * (size - 1) / size
    _, tokens = _computed(config.rollout, work)
    recomputed = 1 if config.model.gradient_checkpointing else 0
    references = config.trainer.epochs_per_batch if has_exact_kl(config) else bool(config.algorithm.kl.coef)
    passes = config.trainer.epochs_per_batch * (2 + recomputed) + rescored + references
    return passes * tokens * shape.layers * sent * work.dtype.itemsize
