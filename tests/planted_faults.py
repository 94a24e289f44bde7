"""Faults to plant into the trainer, one at a time, each with the tests that must fail then.

`python -m tests.planted_faults` plants all of them into a copy of the sources, `... ppo top_p` those whose names
contain one of the words. It exits with 1 if tests still pass, or fail without the fault. That takes minutes, so the
tests only check that every fault can be planted. Faults of kernels and of plug-in backends are planted by tests of
theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "hwgrpo",
    "backends",
    "kernels",
    "configs",
    "scripts",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
)
FAILED = (1, 2)
"""Exit codes of pytest where tests failed, or could not be collected."""


class Fault(NamedTuple):
    """A fault: `text` of a file of `hwgrpo` is replaced by `planted`."""

    name: str
    file: str
    text: str
    planted: str
    tests: str
    """Arguments of pytest, below tests/."""


FAULTS = (
    Fault(
        "ppo without a bound",
        "algorithms/surrogates.py",
        "torch.maximum(unclipped",
        "torch.minimum(unclipped",
        "algorithms",
    ),
    Fault(
        "ppo's bounds exchanged",
        "algorithms/surrogates.py",
        "ratio.clamp(1 - config.clip_low, 1 + config.clip_high)",
        "ratio.clamp(1 - config.clip_high, 1 + config.clip_low)",
        "algorithms",
    ),
    Fault(
        "k3 with the other sign",
        "algorithms/kl.py",
        "x = ref_logprob_N - logprob_N",
        "x = logprob_N - ref_logprob_N",
        "algorithms",
    ),
    Fault("k3+ with the other gradient", "algorithms/kl.py", "+ slope_N *", "- slope_N *", "algorithms"),
    Fault("population std", "algorithms/groups.py", "(self.size_G - correction)", "self.size_G", "algorithms"),
    Fault(
        "invalid samples count", "algorithms/groups.py", "self.valid_S & (self.signal_G", "(self.signal_G", "algorithms"
    ),
    Fault(
        "token means by the mean length",
        "algorithms/aggregation.py",
        "lengths_S.clamp(min=1)",
        "lengths_S.mean().clamp(min=1)",
        "algorithms",
    ),
    Fault(
        "a mask that keeps large weights",
        "algorithms/correction.py",
        "weight_N == _truncate",
        "weight_N >= _truncate",
        "algorithms",
    ),
    Fault(
        "normalized by the rank's own tokens",
        "training/update/policy_update.py",
        "tokens, filled = self.strategy.sum(count(lengths))",
        "tokens, filled = count(lengths)",
        "distributed/test_strategies.py -k ddp-2",
    ),
    Fault(
        "gradients averaged, not summed",
        "training/update/policy_update.py",
        "weights = weights * self.strategy.world_size",
        "weights = weights * 1",
        "distributed/test_strategies.py -k ddp-2",
    ),
    Fault(
        "gradients summed, not averaged",
        "training/strategies/ddp.py",
        "flat /= self.world_size",
        "flat /= 1",
        "distributed/test_strategies.py -k ddp-2",
    ),
    Fault(
        "zero advantages skipped in spite of a KL term",
        "training/update/policy_update.py",
        "return not any(coefficients) and",
        "return True and",
        "training/update",
    ),
    Fault(
        "hidden states of the target itself",
        "training/policy/micro_batch.py",
        "prompt_end_S[of] - 1)",
        "prompt_end_S[of])",
        "training/update/test_step_gradient.py",
    ),
    Fault(
        "responses see each other",
        "training/policy/row_members.py",
        "& (owner[:, :, None] <= last[:, None, :])",
        "& (owner[:, :, None] >= 0)",
        "training/policy/test_layouts.py",
    ),
    Fault(
        "a token that only some responses begin with shared by all",
        "training/policy/row_members.py",
        'within[differs], "amin")',
        'within[differs] + 1, "amin")',
        "training/update/test_step_gradient.py",
    ),
    Fault(
        "a shared token hidden from all but the first response",
        "training/policy/micro_batch.py",
        'number_S[of[within > 0]], "amax")',
        'number_S[of[within > 0]], "amin")',
        "training/policy/test_layouts.py",
    ),
    Fault(
        "plans imported by every run",
        "planning/strategy_choice.py",
        "from hwgrpo.rollout.engine_kind import engine_kind",
        "import hwgrpo.planning.scale_plan\nfrom hwgrpo.rollout.engine_kind import engine_kind",
        "cli/test_env.py -k imports_nothing_unused",
    ),
    Fault(
        "a micro-batch that no prompt fills with its responses on a CPU",
        "training/policy/auto_settings.py",
        "CPU_MICRO_BATCH, min(group, CPU_LONGEST_ROW))",
        "CPU_MICRO_BATCH)",
        "training/policy/test_layouts.py",
    ),
    Fault(
        "a row not filled to the budget",
        "training/policy/layouts.py",
        "filled + responses[s] > budget",
        "filled + responses[s] >= budget",
        "training/policy/test_layouts.py",
    ),
    Fault(
        "an engine that stays awake during updates",
        "training/loop.py",
        "raise_on_all_ranks(run.strategy, run.engine.sleep)",
        "pass",
        "rollout/vllm/test_sleep.py",
    ),
    Fault(
        "an engine whose cache wakes up before its weights are loaded",
        "rollout/vllm/engine.py",
        'self._llm.wake_up(tags=["weights"])',
        'self._llm.wake_up(tags=["kv_cache"])',
        "rollout/vllm/test_sleep.py",
    ),
    Fault(
        "torch's cached memory kept from an engine that wakes up",
        "rollout/vllm/engine.py",
        "self._parts.device.empty_cache()",
        "pass",
        "rollout/vllm/test_sleep.py",
    ),
    Fault(
        "the base below an adapter dropped by a sleeping engine",
        "rollout/vllm/vllm_settings.py",
        "return 2 if adapter is None else 1",
        "return 2",
        "rollout/vllm/test_sleep.py",
    ),
    Fault(
        "an engine whose sleep frees nothing put to sleep",
        "rollout/vllm/engine.py",
        "self._sleeps = freed >= LEAST_FREED * (free - awake)",
        "self._sleeps = True",
        "rollout/vllm/test_sleep.py",
    ),
    Fault(
        "requests answered by a server that sleeps",
        "rollout/vllm_plugin/hwgrpo_vllm/guard.py",
        """                if self._asleep:
                    raise""",
        """                if False:
                    raise""",
        "rollout/server/test_vllm_plugin.py",
    ),
    Fault(
        "a server whose cache stays asleep",
        "rollout/vllm_plugin/hwgrpo_vllm/guard.py",
        'await state.engine_client.wake_up(["kv_cache"])',
        "pass",
        "rollout/server/test_vllm_plugin.py",
    ),
    Fault(
        "torch's cached memory kept from a server that wakes up",
        "rollout/server/engine.py",
        "self._parts.device.empty_cache()",
        "pass",
        "rollout/server/test_engine.py",
    ),
    Fault(
        "the share of an engine that stays awake planned without updates",
        "planning/engine_share.py",
        "if work.sleeps else alone.update_peak",
        "if True else alone.update_peak",
        "planning/test_engine_share.py",
    ),
    Fault(
        "responses with the same newest token decoded as one",
        "rollout/local/distinct_rows.py",
        "self._row_of * self._vocab + token_B.numpy()",
        "0 * self._row_of + token_B.numpy()",
        "rollout/local/test_distinct_rows.py",
    ),
    Fault(
        "responses that part keep the cache of another",
        "rollout/local/distinct_rows.py",
        "self._rows.select(parents)",
        "self._rows.select(np.arange(len(parents)) % self._count)",
        "rollout/local/test_distinct_rows.py",
    ),
    Fault(
        "few keys attended to without the mask",
        "models/shared_prefix_masks.py",
        "scores = torch.add(mask, scores,",
        "scores = torch.add(0 * mask, scores,",
        "models/test_shared_prefix_masks.py",
    ),
    Fault(
        "columns of padding in the sampler's softmax",
        "rollout/local/shared_prefix_attention.py",
        "scores[..., width + length :] = -torch.inf",
        "scores[..., width + length :] = 0.0",
        "rollout/local/test_lean_step.py",
    ),
    Fault(
        "a reference with its adapters on",
        "training/policy/reference_model.py",
        "with self.policy.model.disable_adapter():",
        "if True:",
        "training/test_parts.py",
    ),
    Fault(
        "rounding of a frozen base unnoticed",
        "models/frozen_dtype.py",
        "if not round_values and not all(",
        "if False and not all(",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "computed tensors in bf16",
        "models/stored_dtype.py",
        "any(tensor.dtype == dtype for",
        "any(False for",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "files of mixed dtypes loaded in one",
        "models/stored_dtype.py",
        "_dtypes(file) == {NAMES[dtype]}",
        "_dtypes(file) >= {NAMES[dtype]}",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "adapters drawn in bf16",
        "models/frozen_dtype.py",
        ".expand(*shape)",
        ".to(parameter.dtype).expand(*shape)",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "rows of embeddings in bf16",
        "models/frozen_dtype.py",
        "return rows.float() if",
        "return rows if",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "embeddings that scale in their own dtype in bf16",
        "models/frozen_dtype.py",
        "type(owner) is nn.Embedding",
        "isinstance(owner, nn.Embedding)",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "a quantized base's file mapped for its embeddings",
        "models/frozen_dtype.py",
        "(replaced and parameter.is_floating_point())",
        "False",
        "models/test_frozen_dtype.py -k mapped",
    ),
    Fault(
        "an LM head that is copied for each prompt",
        "rollout/local/decode_rows.py",
        "return self._forward(torch.tensor([self._ids.shape[1] - 1], device=self._device))",
        "return self._forward()",
        "rollout/local/test_engine.py -k head_sees",
    ),
    Fault(
        "a plan with a second copy of frozen matrices",
        "planning/memory.py",
        "shared = count_elements(castable) if",
        "shared = 0 if",
        "planning/test_memory.py -k frozen_base",
    ),
    Fault(
        "adapters merged into a rounded base",
        "models/saving.py",
        '"cpu", torch.float32 if parameter.is_floating_point() else None, copy=True',
        '"cpu", copy=True',
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "a base's file mapped for its embeddings",
        "training/shared_setup.py",
        "        release_files(model)\n",
        "",
        "models/test_frozen_dtype.py -k mapped",
    ),
    Fault(
        "quantized codes in the wrong half of a byte",
        "../kernels/hwgrpo_kernels/nf4_torch.py",
        "table.repeat_interleave(16), table.repeat(16)",
        "table.repeat(16), table.repeat_interleave(16)",
        "kernels/test_implementations.py -k nf4",
    ),
    Fault(
        "quantized weights scaled by a neighbour",
        "../kernels/hwgrpo_kernels/nf4_triton.py",
        "scales + byte // BYTES_PER_SCALE",
        "scales + (byte + 1) // BYTES_PER_SCALE",
        "interpreter/test_nf4.py",
    ),
    Fault(
        "gradients of a quantized layer's unrounded weight",
        "models/quantization.py",
        "ctx.layer.dequantized(gradient.dtype)",
        "ctx.layer.dequantized().mul(1.001).to(gradient.dtype)",
        "models/test_quantization.py",
    ),
    Fault(
        "int8 codes dequantized all at once",
        "models/quantization.py",
        "rows = max(1, CHUNK // columns)",
        "rows = len(scales)",
        "models/test_quantization.py -k chunks",
    ),
    Fault(
        "values of 4 bits that are bytes under torch.compile",
        "../kernels/hwgrpo_kernels/library.py",
        "    return packed.new_empty(size, dtype=dtype)",
        "    return packed.new_empty(size)",
        "kernels/test_logprob.py -k dequantizes",
    ),
    Fault(
        "tokens sampled with another weight than the dequantized one",
        "rollout/local/adapted_linear.py",
        "else self.dequantized(dtype)",
        "else 1.01 * self.dequantized(dtype)",
        "models/test_quantization.py -k sampler",
    ),
    Fault(
        "quantized weights that fsdp2 shards",
        "training/strategies/fsdp2.py",
        "    return {parameter for parameter in module.parameters() if not parameter.is_floating_point()}",
        "    return set()",
        "models/test_quantization.py -k fsdp2",
    ),
    Fault(
        "quantized weights that a sharded policy's sampler has again",
        "training/policy/rank0_weights.py",
        "        self._missing = {p: name for name, p in model.named_parameters() if p.is_floating_point()}",
        "        self._missing = {p: name for name, p in model.named_parameters()}",
        "models/test_quantization.py -k sharded_policy",
    ),
    Fault(
        "quantized matrices planned as if they were sharded",
        "planning/model_shape.py",
        "unit.where(lambda parameter: not parameter.is_quantized) for unit in self.units",
        "unit for unit in self.units",
        "planning/test_memory.py -k quantized",
    ),
    Fault(
        "the table of 4-bit values on another device",
        "../kernels/hwgrpo_kernels/nf4_torch.py",
        "torch.tensor(TABLE, dtype=dtype, device=device)",
        "torch.tensor(TABLE, dtype=dtype)",
        "simulated_npu/test_on_device.py -k test_runs",
    ),
    Fault(
        "codes of quantized weights cast for the sampler",
        "rollout/local/engine.py",
        "if not parameter.is_floating_point() or (share and parameter.dtype == dtype)",
        "if share and parameter.dtype == dtype",
        "models/test_quantization.py",
    ),
    Fault(
        "experts multiplied in the dtype of their weights",
        "models/experts.py",
        "dtype = torch.get_autocast_dtype(device)",
        "dtype = weight.dtype if weight.is_floating_point() else torch.get_autocast_dtype(device)",
        "models/test_experts.py -k bf16",
    ),
    Fault(
        "tokens sent to the experts after theirs",
        "models/experts.py",
        "chosen.device), right=True",
        "chosen.device), right=False",
        "models/test_experts.py -k transformers",
    ),
    Fault(
        "adapters of experts without their scaling",
        "models/experts.py",
        "out + adapter.scaling * _grouped_mm",
        "out + _grouped_mm",
        "models/test_experts.py -k adapters",
    ),
    Fault(
        "adapters of experts that another implementation leaves out",
        "models/adapted_experts.py",
        "if not runs_here(base):",
        "if False:",
        "models/test_experts.py -k another",
    ),
    Fault(
        "gradients of quantized experts' unrounded weights",
        "models/experts.py",
        "ctx.codes.dequantized(weight, gradient.dtype), ctx",
        "ctx.codes.dequantized(weight).mul(1.001).to(gradient.dtype), ctx",
        "models/test_experts.py -k quantized_experts",
    ),
    Fault(
        "dequantized experts stored for the backward pass",
        "models/experts.py",
        "    if codes:\n        out = _DequantizedProduct.apply(rows, weight, ends, codes, experts.is_transposed)\n",
        "    if codes:\n        values = _from_inputs(codes.dequantized(weight, dtype), experts.is_transposed)\n"
        "        out = _grouped_mm(rows, values, ends)\n",
        "models/test_experts.py -k stored",
    ),
    Fault(
        "stacked experts left as they are, unsaid",
        "models/quantization.py",
        "            elif _is_stacked(name, module, parameter):",
        "            elif False:",
        "models/test_experts.py -k refused",
    ),
    Fault(
        "stacked experts planned in 16 bits under model.quantize",
        "planning/model_shape.py",
        "quantized = set(quantizable_weights(model).values()) if",
        "quantized = {p for p in quantizable_weights(model).values() if p.dim() < 3} if",
        "planning/test_memory.py -k quantized",
    ),
    Fault(
        "an LM head detected with rounded logits",
        "models/lm_head.py",
        "if casts and type(head) is nn.Linear",
        "if False",
        "models/test_frozen_dtype.py",
    ),
    Fault(
        "adapters frozen at FSDP2's first forward",
        "training/policy/reference_model.py",
        "parameter.requires_grad_(True)",
        "pass",
        "distributed/test_frozen_base.py",
    ),
    Fault(
        "decayed norms",
        "training/strategies/optimizer.py",
        "len(full_shape(p)) >= 2]",
        "len(full_shape(p)) >= 1]",
        "training/test_parts.py",
    ),
    Fault(
        "offloaded states not written back",
        "training/strategies/held_adamw.py",
        "if held.data_ptr() != values.data_ptr():",
        "if held.device != values.device:",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "states of 8 bits scaled by the wrong sign",
        "training/strategies/held_adamw.py",
        "scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).view(-1)",
        "scales = blocks.abs().amax(1)",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "positive second moments rounded to zero",
        "training/strategies/held_adamw.py",
        "codes.clamp_(min=1).mul_(values > 0)",
        "pass",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "one step counted for each chunk",
        "training/strategies/held_adamw.py",
        '[state["step"].clone()]',
        '[state["step"]]',
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "restored states of 8 bits forgotten",
        "training/strategies/replicated.py",
        "refresh_states(self.optimizer)",
        "pass",
        "resume/test_resume.py -k bitwise",
    ),
    Fault(
        "states on the host saved as zeros",
        "training/strategies/held_adamw.py",
        "def read(self) -> Tensor:\n        return self._values",
        "def read(self) -> Tensor:\n        return torch.zeros_like(self._values)",
        "resume/test_resume.py -k bf16",
    ),
    Fault(
        "states of 8 bits rounded before a step",
        "training/strategies/held_adamw.py",
        "return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)])",
        "return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)]).bfloat16().float()",
        "training/strategies/test_held_adamw.py -k decoded",
    ),
    Fault(
        "decoded states copied again for a checkpoint",
        "training/strategies/param_shard.py",
        'if key == "parameter" or not shard.in_8_bits',
        "if key",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "decoded states not planned",
        "planning/memory.py",
        "expanded = 8 * stepped if in_8_bits else 0",
        "expanded = 0",
        "planning/test_memory.py",
    ),
    Fault(
        "gradients on the host of the last pass only",
        "training/strategies/host_gradients.py",
        "if parameter in self._summed:",
        "if not parameter.requires_grad:",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "gradients on the host that outlive an update",
        "training/strategies/host_gradients.py",
        "self._summed.clear()",
        "pass",
        "training/strategies/test_held_adamw.py",
    ),
    Fault(
        "gradients on the host that ranks do not average",
        "training/strategies/stepping.py",
        "return gradient_of(self.optimizer, parameter)",
        "return parameter.grad",
        "distributed/test_strategies.py -k gradients",
    ),
    Fault(
        "gradients planned on the device",
        "planning/memory.py",
        "host if sharding.offloads_gradients else always",
        "host if sharding.offloads_parameters else always",
        "planning/test_memory.py",
    ),
    Fault(
        "offloaded state not counted on a CPU",
        "planning/memory.py",
        'host = always if work.device_type == "cpu" else dict[str, int]()',
        "host = dict[str, int]()",
        "planning/test_memory.py -k offloads",
    ),
    Fault(
        "a pinned block for each size",
        "training/strategies/pinned_memory.py",
        "max(1 << (left.bit_length() - 1), 1 << (size - 1).bit_length())",
        "1 << (size - 1).bit_length()",
        "training/strategies/test_pinned_memory.py",
    ),
    Fault(
        "pinned tensors that overlap",
        "training/strategies/pinned_memory.py",
        "used[block] += size",
        "used[block] += size - ALIGNED",
        "training/strategies/test_pinned_memory.py",
    ),
    Fault(
        "no warm-up",
        "training/strategies/optimizer.py",
        "optim.lr * (update + 1) / (optim.warmup_steps + 1)",
        "optim.lr",
        "training/test_parts.py",
    ),
    Fault(
        "temperature ignored",
        "rollout/local/token_sampling.py",
        "logits_SV = logits_SV / temperature",
        "pass",
        "rollout/local/test_token_sampling.py",
    ),
    Fault(
        "top_p without the token that reaches it",
        "rollout/local/token_sampling.py",
        "[:, :-1] >= top_p",
        "[:, 1:] >= top_p",
        "rollout/local/test_token_sampling.py",
    ),
    Fault(
        "the same uniforms for every sample",
        "rollout/counter_rng.py",
        "np.asarray(samples, dtype=np.uint64)",
        "np.zeros(len(samples), dtype=np.uint64)",
        "rollout/local",
    ),
    Fault(
        "only a token that is every end token ends a response",
        "rollout/stopping.py",
        "== self._end_ids).any(axis=1)",
        "== self._end_ids).all(axis=1)",
        "rollout/test_stopping.py",
    ),
    Fault(
        "a token drawn from logits that are not finite",
        "rollout/local/token_sampling.py",
        "logprob_S > -torch.inf",
        "logprob_S != -torch.inf",
        "rollout/local/test_token_sampling.py",
    ),
    Fault(
        "a reward that is no plain number believed to be one",
        "rewards/failure_policy.py",
        "if type(result) is float",
        "if isinstance(result, object)",
        "rewards/test_combine.py",
    ),
    Fault(
        "stop strings in the text",
        "rollout/stopping.py",
        "text = text[: min(cuts)] if cuts else text",
        "pass",
        "rollout/test_stopping.py",
    ),
    Fault(
        "stale weights sampled with",
        "rollout/local/engine.py",
        "            stale.copy_(current)",
        "            pass",
        "rollout/local/test_engine.py",
    ),
    Fault(
        "responses one version too old",
        "training/feed/prefetcher.py",
        "> self._max_staleness\n\n    def _wait(",
        "> self._max_staleness + 1\n\n    def _wait(",
        "training/feed",
    ),
    Fault(
        "a resumed order of the first epoch",
        "data/sampler.py",
        'state["position"]\n        self._order = self._permutation(self.epoch)',
        'state["position"]',
        "data/test_sampler.py",
    ),
    Fault(
        "the other groups dropped",
        "rewards/failure_policy.py",
        "prompt_index != self.completions",
        "prompt_index == self.completions",
        "rewards/test_combine.py",
    ),
    Fault(
        "a strategy by plan without the plan",
        "planning/scale_plan.py",
        "return room is None or self.memory(",
        "return True or self.memory(",
        "planning/test_strategy_choice.py",
    ),
    Fault(
        "quantized weights without FLOPs",
        "training/update/flops.py",
        "shape = quantized.get(id(parameter), full_shape(parameter))",
        "shape = full_shape(parameter)",
        "training/update/test_flops.py",
    ),
    Fault(
        "a variant without the other settings",
        "planning/planned_sharding.py",
        "return changed_settings(trainer, {",
        "return changed_settings(TrainerConfig(), {",
        "planning/test_alternatives.py",
    ),
    Fault(
        "alternatives that a run rejects",
        "planning/alternatives.py",
        "            check_strategy(each.config)\n",
        "",
        "planning/test_alternatives.py",
    ),
    Fault(
        "ddp planned with its gradients always there",
        "training/strategies/strategy_kind.py",
        'offloads_optimizer=trainer.offload != "none", offloads_gradients',
        'keeps_gradients=devices > 1, offloads_optimizer=trainer.offload != "none", offloads_gradients',
        "planning/test_sharding.py",
    ),
    Fault(
        "a run that ends with its plan",
        "planning/strategy_choice.py",
        "except Exception as error:",
        "except ConfigError as error:",
        "planning/test_strategy_choice.py",
    ),
    Fault(
        "no device left to the server",
        "cli/launch.py",
        "if args.devices is None and not visible:",
        "if False:",
        "cli/test_launch.py -k server",
    ),
    Fault(
        "states in host memory moved for nothing",
        "planning/step_time.py",
        't.offload != "none" and work',
        "False and work",
        "planning/test_step_time.py",
    ),
    Fault(
        "training on codes as fast as on weights",
        "planning/step_time.py",
        "dequantized = _quotient(moved, memory) if moved else 0.0",
        "dequantized = 0.0",
        "planning/test_step_time.py",
    ),
    Fault(
        "another strategy after a resume",
        "planning/strategy_choice.py",
        'if trainer.strategy == "auto" and strategy != "auto":',
        "if False:",
        "planning/test_strategy_choice.py",
    ),
    Fault(
        "ranks with different strategies",
        "training/strategies/process_group.py",
        "if len(set(settings)) > 1:",
        "if False:",
        "planning/test_strategy_choice.py",
    ),
    Fault(
        "gradients of an update never reduced",
        "training/strategies/fsdp2.py",
        "module.set_requires_gradient_sync(last, recurse=False)",
        "module.set_requires_gradient_sync(False, recurse=False)",
        "distributed/test_strategies.py -k each",
    ),
    Fault(
        "unreduced gradients kept after a discard",
        "training/strategies/fsdp2.py",
        "if not self._syncs_once:\n            return\n",
        "return\n",
        "distributed/test_strategies.py -k each",
    ),
    Fault(
        "gradients of ZeRO-2 kept against the plan",
        "training/strategies/deepspeed.py",
        'self._reduces_once = settings.stage == 1 or (settings.stage == 2 and settings.sync_every == "update")',
        "self._reduces_once = settings.stage < 3",
        "distributed/test_strategies.py -m slow -k zero-2-2",
    ),
    Fault(
        "gradients of ZeRO-2 never reduced",
        "training/strategies/deepspeed.py",
        "coalesced, self._coalesced = self._coalesced, None",
        "return",
        "distributed/test_strategies.py -m slow -k zero-2-2",
    ),
    Fault(
        "gradients of ZeRO-2 until the end of an update not planned",
        "training/strategies/strategy_kind.py",
        'deepspeed.stage == 2 and deepspeed.sync_every == "update"',
        "False",
        "planning/test_sharding.py",
    ),
    Fault(
        "the cast head kept while the optimizer steps",
        "training/strategies/replicated.py",
        "self._head_operand.release()  # the step makes it stale, and needs memory of its own\n",
        "pass\n",
        "training/policy/test_head_operand.py",
    ),
    Fault(
        "the head cast in every pass",
        "training/policy/head_operand.py",
        "if self._operand is None or self._source != source:",
        "if True:",
        "training/policy/test_head_operand.py",
    ),
    Fault(
        "a cast head kept over a resume",
        "training/strategies/replicated.py",
        "def refresh_from_shards(self) -> None:\n        self._head_operand.release()",
        "def refresh_from_shards(self) -> None:\n        pass",
        "training/policy/test_head_operand.py",
    ),
    Fault(
        "the cast of the head planned for one layer's share of it",
        "planning/memory.py",
        "size * (cast + head)",
        "size * cast",
        "planning/test_memory.py -k under_adapters",
    ),
    Fault(
        "a file mapped beside stacked experts",
        "models/frozen_dtype.py",
        "torch.uint8 in dtypes or any(parameter.dim() == 3 for parameter in frozen)",
        "torch.uint8 in dtypes",
        "models/test_frozen_dtype.py -k beside_stacked",
    ),
    Fault(
        "gradients of the only pass kept until its end",
        "planning/memory.py",
        "sharding.syncs_once and (passes > 1 or sharding.gathered_units is None)",
        "sharding.syncs_once",
        "planning/test_sharding.py -k only_pass",
    ),
    Fault(
        "casts of all layers planned beside all gradients",
        "planning/memory.py",
        'rest["weights as cast"] = size * (shape.largest_layer + shape.vocab * shape.hidden)',
        "pass",
        "planning/test_memory.py -k casts_the_weights",
    ),
    Fault(
        "intermediate values of AdamW larger than any parameter",
        "planning/memory.py",
        "(STREAMS if copies_states else 1) * min(CHUNK, largest)",
        "(STREAMS if copies_states else 1) * CHUNK",
        "planning/test_memory.py -k states_in_8_bits_or",
    ),
    Fault(
        "compiled products planned on a host that compiles none",
        "planning/memory.py",
        "(in_16_bits and compiles_products())",
        "in_16_bits",
        "planning/test_memory.py -k compiled_products",
    ),
    Fault(
        "a broken promise of final gradients accepted",
        "../kernels/hwgrpo_kernels/precomputed_gradients.py",
        "if ctx.are_final and is_known and not is_one:",
        "if False:",
        "kernels/test_token_loss.py -k promise",
    ),
    Fault(
        "a broken promise of final gradients unseen on a device",
        "../kernels/hwgrpo_kernels/precomputed_gradients.py",
        "factor = torch.where(grad_output == 1.0, 1.0, torch.nan)",
        "factor = torch.ones_like(grad_output)",
        "kernels/test_token_loss.py -k promise",
    ),
    Fault(
        "wrong fp32 products used",
        "../kernels/hwgrpo_kernels/head.py",
        "return _difference(product, exact)",
        "return None",
        "kernels/test_head.py -k probe",
    ),
    Fault(
        "wrong fp32 sums used",
        "../kernels/hwgrpo_kernels/head.py",
        "return _difference(total, exact + 1) is None",
        "return True",
        "kernels/test_head.py -k sum_in_fp32",
    ),
    Fault(
        "ROCm excluded by name",
        "../kernels/hwgrpo_kernels/head.py",
        "return None if torch.version.hip is None else probe_fp32_products(torch.device(device_type), dtype)",
        'return None if torch.version.hip is None else "ROCm"',
        "backends/test_simulated_rocm.py -k head",
    ),
    Fault(
        "blocks of a row read one after the other",
        "../kernels/hwgrpo_kernels/rows_triton.py",
        "return tile.stages if align > 1 and squash == 0.0 and ref_logits is None else 1",
        "return 1",
        "compile/test_binaries.py -k next_block",
    ),
    Fault(
        "damaged files restored",
        "training/checkpoint/restore.py",
        'if fingerprint != manifest["files"][path.name]:',
        "if False:",
        "training/checkpoint",
    ),
    Fault(
        "a level raised by one step with a gap",
        "algorithms/gap_guard.py",
        "if state.above >= RAISE_AFTER:",
        "if state.above >= 1:",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a level raised by steps with a gap that are not in a row",
        "algorithms/gap_guard.py",
        "state.above + 1 if is_bad else 0",
        "state.above + is_bad",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a level lowered just within the threshold of the gap",
        "algorithms/gap_guard.py",
        ".severity, LOWER_SHARE)",
        ".severity)",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a gap that is not a number is none",
        "algorithms/gap_guard.py",
        "if not abs(value - each.equal) <= limit * share:",
        "if abs(value - each.equal) > limit * share:",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a configured correction of the gap weakened",
        "algorithms/gap_guard.py",
        'if correction.name == "none" else (correction.low, correction.high)',
        "if True else (correction.low, correction.high)",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a mask of the gap withdrawn by the bound of staleness",
        "algorithms/gap_guard.py",
        "return (corrections or [None])[-1]",
        "return steps[level - 1].correction if level else None",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a growing gap taken for another temperature",
        "algorithms/gap_causes.py",
        "if now < GROWTH * first.k3_kl:",
        "if True:",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "a gap along any line taken for another temperature",
        "algorithms/gap_causes.py",
        "median(gap.r2 for gap in gaps) >= LINE_R2 and",
        "",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "a jump of the gap taken for growth",
        "algorithms/gap_causes.py",
        "if jump is not None:",
        "if False:",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "the slope of the gap with the other sign",
        "algorithms/correction.py",
        "return cov / var_x,",
        "return -cov / var_x,",
        "algorithms/test_correction.py",
    ),
    Fault(
        "the worst token of the gap on the first rank only",
        "training/update/step_metrics.py",
        "worst = max((each for _, each in ranks if each is not None)",
        "worst = max((each for _, each in ranks[:1] if each is not None)",
        "training/update/test_step_metrics.py",
    ),
    Fault(
        "the gap judged by each rank's own tokens",
        "training/update/step_metrics.py",
        "mismatch_metrics(torch.tensor(strategy.sum(sums.tolist()), dtype=torch.float64))",
        "mismatch_metrics(sums)",
        "training/update/test_step_metrics.py",
    ),
    Fault(
        "no rollout log-probs for the gap's correction",
        "training/update/policy_update.py",
        "rollout=self.loss_fn.algorithm.correction.name",
        "rollout=self.config.algorithm.correction.name",
        "training/test_rollout_guard.py -k in_force",
    ),
    Fault(
        "the gap's guard forgets its level on resume",
        "training/setup.py",
        '"guard": guard.state(),',
        '"guard": None,',
        "training/test_rollout_guard.py -k resumed_at",
    ),
    Fault(
        "the gap's correction not applied after a resume",
        "training/rollout_guard.py",
        "if self._acts and self._state.level:",
        "if False:",
        "training/test_rollout_guard.py -k resumed_at",
    ),
    Fault(
        "the gap's correction not applied",
        "training/rollout_guard.py",
        "algorithm = replace(algorithm, correction=correction)",
        "pass",
        "training/test_rollout_guard.py -k in_force",
    ),
    Fault(
        "a warning about the gap that acts",
        "training/rollout_guard.py",
        'self._acts = self._watches and r.guard == "act"',
        "self._acts = self._watches",
        "training/test_rollout_guard.py -k warning_states",
    ),
    Fault(
        "a gap too large for all measures goes on",
        "training/rollout_guard.py",
        'if measure.severity == "stop":',
        "if False:",
        "training/test_rollout_guard.py -k damaged_layer",
    ),
    Fault(
        "the gap of truncated sampling judged",
        "training/rollout_guard.py",
        " and (r.top_k, r.top_p, r.min_p) == (0, 1.0, 0.0)",
        "",
        "training/test_rollout_guard.py -k truncated",
    ),
    Fault(
        "fresher weights against the gap not asked for",
        "training/rollout_guard.py",
        "if isinstance(self._source, AdjustableSource):",
        "if False:",
        "training/test_rollout_guard.py -k fresher",
    ),
    Fault(
        "fresher weights against the gap not waited for",
        "training/feed/prefetcher.py",
        "self._version >= step - 1 - self._bound(step)",
        "self._version >= step - 1 - self._max_staleness",
        "training/feed/test_response_source.py -k lower_bound",
    ),
)


def fails(tests: str, fault: Fault | None = None) -> bool:
    """Return whether tests fail in a copy of the sources, with a fault or without."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            subprocess.run(["cp", "-r", str(ROOT / name), folder], check=True)
        (ROOT / "build").mkdir(exist_ok=True)
        (copy / "build").symlink_to(ROOT / "build")  # packages that slow tests have fetched
        if fault is not None:
            path = copy / "hwgrpo" / fault.file
            path.write_text(path.read_text().replace(fault.text, fault.planted))
        paths = os.pathsep.join(str(copy / each) for each in (".", "backends", "kernels"))
        first, *more = tests.split()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", f"tests/{first}", *more]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode in FAILED


def main(words: list[str]) -> int:
    """Plant the faults whose names contain one of the words, all if there are none; return the exit code."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    broken = {tests for tests in dict.fromkeys(fault.tests for fault in chosen) if fails(tests)}
    red = 0
    for fault in chosen:
        outcome = "fails without" if fault.tests in broken else "red" if fails(fault.tests, fault) else "SURVIVED"
        red += outcome == "red"
        print(f"{outcome:<13} {fault.name} ({fault.file}; tests/{fault.tests})", flush=True)
    print(f"{red} of {len(chosen)} red")
    return int(red < len(chosen) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
