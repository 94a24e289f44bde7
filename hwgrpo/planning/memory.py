"""A run's memory per device, estimated from its settings and the model's sizes.

Responses are assumed to have the maximum length. For an accelerator, memory cached by its allocator, kernel workspaces
and libraries are not included. For a host both are: a constant for libraries, and fragmentation in glibc's malloc. It
returns blocks of 32 MiB and more when they are freed (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX); smaller ones stay in its
heap. Freed gradients lie there between optimizer states, and the next activations fragment them, so that the next
gradients need additional memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from hwgrpo_backends.device import fuses_adamw
from hwgrpo_kernels.chunks import chunk_rows_for
from hwgrpo_kernels.head import logits_buffers

from hwgrpo.config import Config
from hwgrpo.config.derived import has_exact_kl, prompts_per_update, ranks_per_sequence, sequences_at_once
from hwgrpo.config.schema import KernelsConfig, KlConfig, LoraConfig, RolloutConfig
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.quantization import quantized_bytes
from hwgrpo.models.vision import MOST_REMEMBERED
from hwgrpo.planning.model_shape import ModelShape
from hwgrpo.planning.reward_model_memory import add_reward_models
from hwgrpo.planning.tower_shape import FULL, TowerShape
from hwgrpo.rollout.local.packed_weights import MOST_BYTES, packed_weights
from hwgrpo.rollout.local.slot_scheduler import PREFILL_AHEAD, most_kept_tokens, most_prompts
from hwgrpo.rollout.vllm.vllm_settings import HOST_CACHE_GB
from hwgrpo.training.strategies.held_adamw import BLOCK, STREAMS
from hwgrpo.training.strategies.host_gradients import CHUNK
from hwgrpo.training.strategies.parameter_shapes import ParameterUnit, count_elements
from hwgrpo.training.strategies.sharding import Sharding

UNSHARDED = Sharding()
SMALL = 32 * 2**20
"""Smallest tensor in bytes whose block malloc returns to the system when it is freed."""
COPY = "copy that samples"
ENGINE = "weights of the engine"
PACKED = "frozen matrices packed for sampling, at most"
SENT = "weights last sent to the server, on rank 0"
LIBRARIES = 40 * 2**20
"""Bytes that libraries load on a host once work begins, as measured (benchmarks/results/memory_cpu.md)."""
EXPANDED = "states in fp32 while a checkpoint is read or written"
FOR_ADAPTERS = 20 * 2**20
"""Bytes more on a host with LoRA, as measured: peft, and blocks too small to be freed."""
PRODUCTS_IN_16_BITS = 90 * 2**20
"""Bytes more where oneDNN multiplies in 16 bits, as measured: it compiles and keeps a product for each shape."""
EXPERTS_IN_16_BITS = 190 * 2**20
"""Bytes more there with experts, as measured after six steps: no two of their products have the same shape."""
LOGITS = "a chunk of logits"
UNIT = "unsharded gradients of a unit"
KEPT_FREE = "freed gradients that malloc keeps, at most"


@dataclass(frozen=True)
class Work:
    """The work of one device in a step."""

    dtype: torch.dtype
    """Compute dtype."""
    device_type: str
    """torch's device type."""
    prompts: int
    """Prompts of a step on this device."""
    prompt_tokens: int
    """Longest prompt."""
    micro_batch_tokens: int
    """Token budget of a micro-batch."""
    shares_prompt: bool = False
    """The layout has a group's prompt once."""
    branched: bool = False
    """Its attention splits rows: each response attends to a copy of its prompt's keys and values."""
    samples: bool = True
    """The local engine samples on this device."""
    beside: bool = False
    """An engine with its own weights samples on this device."""
    sleeps: bool = False
    """It frees its memory while the policy is trained."""
    sent_copies: int = 0
    """Copies of the weights for a rollout server in rank 0's host memory."""

    supervised: bool = False
    """Responses are given, one to each prompt: nothing samples."""
    images: tuple[int, ...] = ()
    """Tokens of each image of a prompt; (): prompts are text."""
    known_prompts: int | None = None
    """Prompts of the data, each of which is encoded once where nothing of the tower is trained; None: not known."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether responses are sampled on other devices."""
        return not (self.samples or self.beside or self.supervised)

    def responses(self, rollout: RolloutConfig) -> int:
        """Return the responses to each prompt."""
        return 1 if self.supervised else rollout.n


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by component. Rollout, scoring by reward models, update and AdamW's step take turns."""

    always: dict[str, int]
    rollout: dict[str, int]
    update: dict[str, int]
    step: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    """Bytes in the host's memory instead, per device; for rank 0 where a name says so."""
    loading: dict[str, int] = field(default_factory=dict)
    """Bytes while the model is being sharded, if it is; not in the peaks below, which are those of a running step."""
    rewards: dict[str, int] = field(default_factory=dict)
    """Bytes while reward models score."""

    @property
    def rollout_peak(self) -> int:
        """Peak while generating."""
        return sum(self.always.values()) + sum(self.rollout.values())

    @property
    def update_peak(self) -> int:
        """Peak while training."""
        return sum(self.always.values()) + max(sum(self.update.values()), sum(self.step.values()))

    @property
    def rewards_peak(self) -> int:
        """Peak while reward models score."""
        return sum(self.always.values()) + sum(self.rewards.values())

    @property
    def peak(self) -> int:
        """Peak of a step."""
        return max(self.rollout_peak, self.rewards_peak, self.update_peak)


def estimate(config: Config, shape: ModelShape, work: Work, sharding: Sharding = UNSHARDED) -> Memory:
    """Estimate the memory of one device.

    Args:
        config: the run's settings.
        shape: the model's sizes.
        work: the device's work.
        sharding: how state is sharded.
    """
    adapters = shape.trainable if uses_lora(config.model.lora) else 0
    rollout_dtype = rollout_dtype_of(config.rollout, work.dtype)
    size = work.dtype.itemsize
    stored = work.dtype if sharding.in_compute_dtype else torch.float32
    castable = [unit.where(lambda p: p.is_castable and not p.is_adapter) for unit in shape.units]
    frozen = frozen_dtype(config.model.lora, shape, work.dtype) if adapters and stored == torch.float32 else stored
    matrices = sharding.stored_elements(castable, sharding.parameters) if frozen != stored else 0
    quantized = _Quantized.of(config.model.quantize, shape, work.dtype)
    others = sharding.stored_elements(shape.sharded_units, sharding.parameters) - matrices
    parameters = {f"parameters ({_named(stored)})": stored.itemsize * others}
    if matrices:
        parameters[f"frozen matrices ({_named(frozen)})"] = frozen.itemsize * matrices
    stepped = sharding.stored_elements(shape.trained_units, sharding.optimizer_states)
    in_8_bits = config.optim.name == "adamw_8bit"
    # two states per element, in fp32 or as codes with a scale for each block
    optimizer_states = {"optimizer states (AdamW)": 8 * stepped}
    if in_8_bits:
        optimizer_states = {"optimizer states (AdamW, 8 bits)": 2 * stepped + 8 * stepped // BLOCK}
    if config.optim.name == "muon":
        layers = [unit.where(lambda p: len(p.shape) == 2) for unit in shape.trained_units if unit.is_layer]
        momenta = sharding.stored_elements(layers, sharding.optimizer_states)  # one state per element
        optimizer_states = {"optimizer states (Muon, AdamW)": 8 * stepped - 4 * momenta}
    if sharding.masters is not None:
        optimizer_states["masters (fp32)"] = 4 * sharding.stored_elements(shape.trained_units, sharding.masters)
    gradients = {"gradients (fp32)": 4 * sharding.stored_elements(shape.trained_units, sharding.gradients)}
    always, update = dict[str, int](), dict[str, int]()
    host = always if work.device_type == "cpu" else dict[str, int]()  # a CPU's memory is the host's
    (host if sharding.offloads_parameters else always).update(parameters)
    codes = {f"frozen matrices ({config.model.quantize})": quantized.bytes} if quantized.count else {}
    always.update(codes)  # on every device
    (host if sharding.offloads_optimizer else always).update(optimizer_states)
    has_reference = bool(config.algorithm.kl.coef) and not adapters
    if has_reference:
        reference = {"reference model": 4 * sharding.stored_elements(shape.units, sharding.parameters)}
        if sharding.keeps_full_parameters and not config.algorithm.kl.sync_every:
            saved = 4 - frozen_dtype(config.model.lora, shape, work.dtype).itemsize
            reference["reference model"] -= saved * count_elements(castable)
        (host if sharding.offloads_parameters else always).update(reference)
    if adapters and (config.model.lora.adapter or config.algorithm.kl.sync_every):
        copied = stored.itemsize * sharding.stored_elements(shape.trained_units, sharding.parameters)
        (host if sharding.offloads_parameters else always)["frozen copy of the adapter"] = copied
    if work.samples and not (sharding.keeps_full_parameters and rollout_dtype == frozen == stored):
        shared = count_elements(castable) if sharding.keeps_full_parameters and rollout_dtype == frozen else 0
        always[COPY] = rollout_dtype.itemsize * (shape.parameters + adapters - shared - quantized.count)
    # where the engine copies all of the model, the merged weights are among these
    copies_all = sharding.keeps_full_parameters and rollout_dtype != frozen
    if work.samples and config.rollout.merge_adapters and not copies_all:
        in_layers = count_elements([unit for unit in castable if unit.is_layer])
        always["copy with merged adapters"] = rollout_dtype.itemsize * in_layers
    packs = work.samples and packed_weights(work.device_type, rollout_dtype) is not None
    if packs and (adapters or COPY in always) and not shape.expert_parameters:
        always[PACKED] = min(MOST_BYTES, rollout_dtype.itemsize * _packed_elements(shape))
    images = _image_bytes(config, shape.tower, work, encoders=1 + (COPY in always) + has_reference)
    always.update(images.always)
    host.update(images.host)
    update |= images.update
    held = host if sharding.offloads_gradients else always if sharding.keeps_gradients else update
    held.update(gradients)
    largest = max(p.count for unit in shape.trained_units for p in unit.parameters)
    if sharding.offloads_gradients and sharding.gathered_units is None:
        update["gradient of a parameter (fp32)"] = 4 * (largest + (host is not always) * min(CHUNK, largest))
    tokens, passes, second = micro_batches(config, work)

    def activations_of(count: int) -> dict[str, int]:
        size = activation_bytes(
            replace(shape, kv_heads=math.lcm(shape.kv_heads, config.trainer.sequence_parallel_size)),
            count,
            work.dtype,
            config.model.gradient_checkpointing,
            copied_keys=_keys_per_token(config.rollout, work) if work.branched else None,
            gathered_by=sharding.tensor,
        )
        return {f"activations of {count:,} tokens, about": size}

    activations = activations_of(tokens)
    update |= activations | {LOGITS: _logits_bytes(config.kernels, shape, work, tokens, exact_kl=has_exact_kl(config))}
    if has_exact_kl(config):
        update["hidden states and head of the reference"] = _reference_bytes(
            config.algorithm.kl, shape, sharding, size, tokens, adapters=bool(adapters)
        )
    if not adapters:
        update["gradient of the LM head (fp32)"] = 4 * shape.vocab * shape.hidden
    if sharding.gathered_units is not None:
        update["weights gathered"] = size * _gathered(shape, sharding)
        # in the compute dtype from the backward, and a padded fp32 copy to be summed over ranks
        update[UNIT] = max(_unsharded_gradients(unit, sharding, size) for unit in shape.trained_units)
    elif work.dtype != torch.float32:
        # the head's cast stays from pass to pass; autocast caches others until the end of a pass, under checkpointing
        # those of frozen weights until the end of a layer
        head = 0 if frozen == work.dtype and shape.has_castable_head else shape.vocab * shape.hidden
        cast = shape.parameters - quantized.count - head
        if frozen == work.dtype:
            cast = adapters
        elif adapters and config.model.gradient_checkpointing:
            cast = adapters + shape.largest_layer
        update["weights as cast"] = size * (cast + head)
    if sharding.syncs_once and (passes > 1 or sharding.gathered_units is None):
        # the only pass of an update reduces those of a layer as soon as they are complete
        update["unsharded gradients (fp32)"] = 4 * sum(
            unit.copies * sharding.computed_elements(unit) for unit in shape.trained_units
        )
    update |= quantized.work
    expanded = 8 * stepped if in_8_bits else 0  # fp32 states while a checkpoint is read, or written in the foreground
    if config.trainer.save_async and config.trainer.save_every:
        owned = 12 * sharding.stored_elements(shape.trained_units, sharding.ranks)  # fp32 parameters and states
        host["copy for a checkpoint being written"] = max(owned, expanded)
        expanded = 0  # at other times
    if expanded and host is not always:
        host[EXPANDED] = expanded
    if work.sent_copies:
        host[SENT] = work.sent_copies * rollout_dtype.itemsize * shape.parameters
    if work.device_type == "cpu":
        in_16_bits = work.dtype != torch.float32 or (work.samples and rollout_dtype != torch.float32)
        always["libraries, about"] = LIBRARIES + bool(adapters) * FOR_ADAPTERS
        if in_16_bits and compiles_products():
            always["libraries, about"] += PRODUCTS_IN_16_BITS + bool(shape.expert_parameters) * EXPERTS_IN_16_BITS
        if held is update:
            small = 4 * sharding.stored_elements(_small(shape.trained_units), sharding.gradients)
            update[KEPT_FREE] = min(small, next(iter(activations.values())))
    step = dict(gradients) if held is update else {}
    copies_states = config.trainer.offload != "none" and host is not always
    if copies_states or in_8_bits:
        # two states in fp32 and what computes or codes them, and a gradient from the host, a chunk at a time
        at_once = (STREAMS if copies_states else 1) * min(CHUNK, largest)
        copies = (6 if in_8_bits else 3) + (copies_states and sharding.offloads_gradients)
        step["intermediate values of AdamW"] = 4 * copies * min(at_once, stepped)
    elif not fuses_adamw(work.device_type) and not sharding.offloads_optimizer:
        step["intermediate values of AdamW"] = 4 * stepped
    if expanded and work.device_type == "cpu":
        step = max(step, {EXPANDED: expanded}, key=lambda parts: sum(parts.values()))
    if second < tokens and held is update and sharding.gathered_units in (None, "all"):
        # In the first pass activations and gathered weights are freed as gradients appear: they never exist in full
        # together. From the second on they do.
        kept = {name: size for name, size in update.items() if name not in gradients}
        layer = {"activations of a layer, about": next(iter(activations.values())) // shape.layers}
        rest = {name: size for name, size in kept.items() if name not in activations}
        if "weights as cast" in rest and config.model.gradient_checkpointing and not adapters:
            # the backward pass casts the weights of a layer when it recomputes the layer
            rest["weights as cast"] = size * (shape.largest_layer + shape.vocab * shape.hidden)
        if "weights gathered" in rest:
            rest["weights gathered"] = size * _gathered(shape, replace(sharding, gathered_units=2))
        first = max(kept, gradients | rest | layer, key=lambda parts: sum(parts.values()))
        later = {name: size for name, size in update.items() if name not in activations} | activations_of(second)
        update = max(first, later if second else {}, key=lambda parts: sum(parts.values()))
    if sharding.gathered_units not in (None, "all"):
        update = _largest_moment(update, shape, sharding, size, activations)
    loading = {}
    if not sharding.keeps_full_parameters:
        unit = 4 * max(unit.count for unit in shape.sharded_units)
        loading = {name: size for name, size in always.items() if name in (*parameters, *codes, COPY)}
        loading |= {"a layer or the rest (fp32), being sharded": unit}
    rollout = {}
    if work.samples:
        rollout = _rollout(config.rollout, shape, work, rollout_dtype) | quantized.work | images.rollout
    frees = work.beside and work.sleeps and host is not always
    if work.beside:
        (rollout if frees else always).update(_beside(config.rollout, shape, work, rollout_dtype))
    if frees and adapters:
        host["weights of the engine, asleep"] = rollout[ENGINE]
    rewards = add_reward_models(config, work.prompts, always, host)
    return Memory(always, rollout, update, step, {} if host is always else host, loading, rewards)


def _packed_elements(shape: ModelShape) -> int:
    """Return the elements of linear layers; that small ones are not packed makes no difference."""
    matrices = [unit.where(lambda p: p.is_castable and not p.is_adapter and len(p.shape) == 2) for unit in shape.units]
    tables = [p for unit in matrices for p in unit.parameters if p.shape == (shape.vocab, shape.hidden)]
    embeddings = shape.vocab * shape.hidden * (len(tables) - 1)  # one is the LM head
    return count_elements(matrices) - embeddings


def compiles_products() -> bool:
    """Return whether oneDNN multiplies in 16 bits on this host: on x86 with AVX-512; torch's own code compiles none."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def frozen_dtype(lora: LoraConfig, shape: ModelShape, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which frozen matrices are held, if the model's values are what its configuration says."""
    wanted = lora.base_dtype
    casts = wanted == "bfloat16" or (wanted == "auto" and shape.published == compute_dtype)
    return compute_dtype if casts else torch.float32


@dataclass(frozen=True)
class _Quantized:
    """The matrices that `model.quantize` applies to."""

    count: int = 0
    bytes: int = 0
    work: dict[str, int] = field(default_factory=dict)
    """A dequantized matrix at a time."""

    @classmethod
    def of(cls, method: str, shape: ModelShape, dtype: torch.dtype) -> _Quantized:
        found = [(unit.copies, p) for unit in shape.units for p in unit.parameters if p.is_quantized]
        if not found:
            return cls()
        return cls(
            sum(copies * p.count for copies, p in found),
            sum(copies * quantized_bytes(method, *p.shape) for copies, p in found),
            {"a matrix being dequantized": dtype.itemsize * max(p.count for _, p in found)},
        )


def _largest_moment(
    update: dict[str, int], shape: ModelShape, sharding: Sharding, size: int, activations: Iterable[str]
) -> dict[str, int]:
    """Return what is there at once of an update whose weights are gathered and gradients reduced a layer at a time."""
    layers = [_unsharded_gradients(unit, sharding, size) for unit in shape.trained_units if unit.is_layer]
    of_rest = {"weights gathered": size * _gathered(shape, replace(sharding, gathered_units=0))}
    moments = (
        _without(update, UNIT),  # at the LM head
        _without(update | {UNIT: max(layers, default=0)}, LOGITS),  # in a layer
        _without(update | of_rest, LOGITS, *activations),  # at the end, when the rest is reduced
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def _without(parts: dict[str, int], *names: str) -> dict[str, int]:
    return {name: size for name, size in parts.items() if name not in names}


def _unsharded_gradients(unit: ParameterUnit, sharding: Sharding, size: int) -> int:
    """Return the bytes of a unit's gradients on a device while they are reduced."""
    return size * sharding.computed_elements(unit) + 4 * sharding.gathered_elements(unit)


def _gathered(shape: ModelShape, sharding: Sharding) -> int:
    """Return the elements of gathered parameters on a device at a time, padding included."""
    units = shape.sharded_units
    layers = [sharding.gathered_elements(unit) for unit in units if unit.is_layer for _ in range(unit.copies)]
    rest = sum(sharding.gathered_elements(unit) for unit in units if not unit.is_layer)
    at_once = len(layers) if sharding.gathered_units == "all" else sharding.gathered_units
    return rest + sum(sorted(layers, reverse=True)[:at_once])


def _small(units: Sequence[ParameterUnit]) -> list[ParameterUnit]:
    """Return units with only those parameters whose fp32 blocks malloc keeps when they are freed."""
    return [replace(unit, parameters=tuple(p for p in unit.parameters if 4 * p.count < SMALL)) for unit in units]


def _rollout(rollout: RolloutConfig, shape: ModelShape, work: Work, dtype: torch.dtype) -> dict[str, int]:
    """Return the memory of generating: that of prefill, or of the last decode step, whichever is more.

    Where more responses wait than there are slots, prompts are prefilled while the cache is full.
    """
    responses = work.prompts * rollout.n
    sequences = min(responses, sequences_at_once(rollout))
    first = -(-sequences // rollout.n)
    together = min(work.prompts, first + -(-sequences // (PREFILL_AHEAD * rollout.n)))  # prompts prefilled at once

    def cache(prompts: int, response_tokens: int) -> int:
        return cache_bytes(
            shape,
            prompts=prompts,
            sequences=sequences,
            prompt_tokens=work.prompt_tokens,
            response_tokens=response_tokens,
            itemsize=dtype.itemsize,
        )

    held = min(work.prompts, most_prompts(sequences, rollout.n))
    # Logits have the dtype of the weights, are cast to fp32, divided by the temperature, and become probabilities.
    divided = rollout.temperature != 1.0 or rollout.final_temperature not in (None, 1.0)
    copies = 4 * (1 + (dtype != torch.float32 or divided))
    held_cache = f"key-value cache of {sequences:,} sequences"
    decode = {
        held_cache: cache(held, rollout.max_response_tokens),
        "logits of a decode step": sequences * shape.vocab * (dtype.itemsize + copies),
    }
    # The gated feed-forward part has three vectors of its width, beside the residual and its update.
    tokens = together * work.prompt_tokens
    prefill = {
        **({held_cache: decode[held_cache]} if responses > sequences else {}),
        f"key-value cache of {together:,} prompts": cache(together, 0),
        "a layer's work on the prompts": tokens * dtype.itemsize * (3 * shape.intermediate + 2 * shape.hidden),
    }
    parts = max(decode, prefill, key=lambda parts: sum(parts.values()))
    if rollout.workflow == "single_turn":
        return parts
    # a turn may go on with what is kept of every response's earlier ones
    longest = work.prompt_tokens + rollout.max_response_tokens
    token = cache_bytes(shape, prompts=1, sequences=0, prompt_tokens=1, response_tokens=0, itemsize=dtype.itemsize)
    every = work.prompts * work.prompt_tokens + responses * rollout.max_response_tokens
    return parts | {"key-value cache of earlier turns": token * min(every, most_kept_tokens(sequences, longest, token))}


def _beside(rollout: RolloutConfig, shape: ModelShape, work: Work, dtype: torch.dtype) -> dict[str, int]:
    """Return the memory that an engine with its own weights needs; with a larger cache fewer sequences wait."""
    cache = cache_bytes(
        shape,
        prompts=1,
        sequences=rollout.n,
        prompt_tokens=work.prompt_tokens,
        response_tokens=rollout.max_response_tokens,
        itemsize=dtype.itemsize,
        compressed=True,
    )
    if rollout.kv_cache_gb is not None or work.device_type == "cpu":
        cache = int((rollout.kv_cache_gb or HOST_CACHE_GB) * 2**30)
    weights = dtype.itemsize * shape.parameters
    parts = {ENGINE: weights, f"cache of the engine, for {rollout.n} sequences or more": cache}
    return {name: size // rollout.tensor_parallel_size for name, size in parts.items()}


def rollout_dtype_of(rollout: RolloutConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sampler's weights."""
    return compute_dtype if rollout.dtype == "auto" else getattr(torch, rollout.dtype)


def micro_batches(config: Config, work: Work) -> tuple[int, int, int]:
    """Return a device's tokens in the largest micro-batch, micro-batches per update, and tokens in the second of them.

    Responses have the maximum length. An update in one pass has no second micro-batch: 0.

    Devices that share sequences compute the micro-batches of all of them, each some of the tokens.
    """
    row, rows, at_once, _ = _rows(config, work)
    left = min(at_once, rows - at_once)
    shared_by = ranks_per_sequence(config)
    return -(-row * at_once // shared_by), -(-rows // at_once), -(-row * left // shared_by)


def prompts_at_once(config: Config, work: Work) -> int:
    """Return the prompts in a micro-batch."""
    _, _, at_once, of_prompt = _rows(config, work)
    return -(-at_once // of_prompt)


def encodings(config: Config, work: Work) -> int:
    """Return the prompts in all micro-batches of an update: one whose rows are in several counts in each of them."""
    _, rows, at_once, of_prompt = _rows(config, work)
    ends = -(-rows // at_once) + rows // of_prompt - (rows - 1) // math.lcm(at_once, of_prompt)
    return ends - 1


def _rows(config: Config, work: Work) -> tuple[int, int, int, int]:
    """Return the tokens of a row, the rows of an update, those in a micro-batch, and those of a prompt."""
    n, prompt = work.responses(config.rollout), work.prompt_tokens
    response = config.rollout.max_response_tokens - 1  # the last token predicts nothing
    shared_by = ranks_per_sequence(config)
    prompts = max(1, work.prompts * shared_by * prompts_per_update(config) // config.trainer.prompts_per_step)
    budget = work.micro_batch_tokens * shared_by
    if work.shares_prompt:
        # a row is a prompt and as many of its responses as fit into the budget
        responses = min(n, max(1, (budget - prompt) // max(1, response)))
        row, of_prompt = prompt + responses * response, -(-n // responses)
    else:
        row, of_prompt = prompt + response, n
    rows = prompts * of_prompt
    return row, rows, min(rows, max(1, budget // row)), of_prompt


def cache_bytes(
    shape: ModelShape,
    *,
    prompts: int,
    sequences: int,
    prompt_tokens: int,
    response_tokens: int,
    itemsize: int,
    compressed: bool = False,
) -> int:
    """Return the bytes of keys and values at the given response length; a prompt's are stored once.

    With `compressed`, a model with latent attention (DeepSeek-V2, section 2.1) caches only the latents of keys and
    values, as servers do; the local engine caches full keys and values.
    """
    tokens = prompts * prompt_tokens + sequences * response_tokens
    width = shape.latent if compressed and shape.latent else shape.kv_heads * (shape.head_dim + shape.value_dim)
    return itemsize * shape.layers * width * tokens


@dataclass(frozen=True)
class _ImageBytes:
    """Bytes that encoding images needs, by component."""

    always: dict[str, int] = field(default_factory=dict)
    rollout: dict[str, int] = field(default_factory=dict)
    update: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)


def _image_bytes(config: Config, tower: TowerShape | None, work: Work, *, encoders: int) -> _ImageBytes:
    """Return the memory of encoding images.

    Args:
        config: the run's settings.
        tower: of the model; None: it reads text alone.
        work: the device's work.
        encoders: models that encode images: the policy, and copies of it that sample or are a reference.
    """
    if tower is None or not work.images:
        return _ImageBytes()
    images, dtype = work.images, rollout_dtype_of(config.rollout, work.dtype)
    host = {"pixels of a step's prompts": work.prompts * tower.pixel_bytes(images, FULL)}
    remembering = encoders - (tower.trained != "none")  # copies are frozen
    features = tower.feature_bytes(images, max(dtype.itemsize, work.dtype.itemsize))
    most = MOST_REMEMBERED + features  # the last is there before the first is forgotten
    if work.known_prompts is not None:
        most = min(most, remembering * work.known_prompts * features)
    always = {"features of images, at most": most} if remembering else {}
    layer = "a layer of the tower on a prompt's images"
    rollout, update = {layer: tower.layer_bytes(images, dtype)}, dict[str, int]()
    encodes_then = encoders > 1 or not work.samples  # else the only encoder has encoded, and remembers
    if tower.trained == "projector" or (tower.trained == "none" and encodes_then):
        update = {layer: tower.layer_bytes(images, work.dtype)}
    if tower.trained != "none":
        at_once = prompts_at_once(config, work)
        size = at_once * tower.activation_bytes(images, work.dtype, recomputed=config.model.gradient_checkpointing)
        update[f"activations of {at_once * tower.patches_in(images):,} patches of images, about"] = size
    return _ImageBytes(always, rollout, update, host)


def _keys_per_token(rollout: RolloutConfig, work: Work) -> float:
    """Return the keys that branched attention reads per token of a row, with a copy of the prompt's per response."""
    n, response = work.responses(rollout), rollout.max_response_tokens - 1
    return n * (work.prompt_tokens + response) / (work.prompt_tokens + n * response)


def _logits_bytes(kernels: KernelsConfig, shape: ModelShape, work: Work, tokens: int, *, exact_kl: bool) -> int:
    wanted = kernels.logits_dtype
    dtype = work.dtype if wanted == "auto" else getattr(torch, wanted)
    if work.device_type == "cpu":
        dtype = torch.float32  # a CPU computes in fp32, whatever the buffer's dtype
    buffers = logits_buffers(work.dtype, dtype, work.device_type) + exact_kl
    rows = kernels.chunk_rows or chunk_rows_for(shape.vocab, dtype, work.device_type, buffers)
    return min(rows, tokens) * buffers * shape.vocab * dtype.itemsize


def _reference_bytes(
    kl: KlConfig, shape: ModelShape, sharding: Sharding, size: int, tokens: int, *, adapters: bool
) -> int:
    """Return the bytes that a pass has of the reference beside its stored weights: hidden states, and its own head."""
    hidden = size * tokens * shape.hidden
    if adapters:
        return hidden
    if sharding.gathered_units is not None:
        return hidden + size * _gathered(shape, replace(sharding, gathered_units=0))
    casts = bool(kl.sync_every) and size != 4
    return hidden + casts * size * shape.vocab * shape.hidden


def _named(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    dtype: torch.dtype,
    recomputed: bool,
    copied_keys: float | None = None,
    gathered_by: int = 1,
) -> int:
    """Estimate the activations that the layers store for the backward pass.

    Counted on Llama-like layers with fused attention: per token, norms store input and normed input in fp32, those of
    queries and keys too; linear layers their inputs (cast once for each under autocast); attention its operands and
    output; the gated feed-forward part four vectors of its width.

    Args:
        shape: the model's sizes.
        tokens: tokens of a micro-batch.
        dtype: compute dtype.
        recomputed: gradient checkpointing stores each layer's input, and all activations of one layer at a time.
        copied_keys: keys that branched attention copies per token; it stores its operands before and after splitting
            rows. None: attention does not split rows.
        gathered_by: tensor-parallel size: linear layers read the tokens of all its devices.
    """
    h, size = shape.hidden, dtype.itemsize
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs, values = shape.heads * shape.value_dim, shape.kv_heads * shape.value_dim
    attention = queries + outputs + keys + values
    if copied_keys is not None:
        attention += queries + outputs + int((keys + values) * copied_keys)
    norms = 2 * 4 * (shape.norms * h + (queries + keys if shape.head_norms else 0))
    inputs = 2 * h * gathered_by if dtype == torch.float32 or gathered_by > 1 else 5 * h
    layer = norms + size * (inputs + attention + 4 * shape.intermediate)
    kept = 4 * h * shape.layers + layer if recomputed else layer * shape.layers
    return kept * tokens
