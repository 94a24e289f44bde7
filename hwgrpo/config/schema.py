"""Settings of a run: name, type, default, limits, and a docstring with the effect of each.

A recipe states only what differs from these defaults. `hwgrpo config` prints this file as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hwgrpo import catalog
from hwgrpo.config.backend_choices import attention_choices, backend_choices
from hwgrpo.config.fields import (
    LONGEST_TIMEOUT,
    AnyOf,
    Use,
    choice,
    limited,
    none_of,
    off,
    on,
    one_of,
    own_function,
    read_by,
    setting,
)
from hwgrpo.config.optional_settings import (
    STEPS,
    CorrectionConfig,
    DeepspeedConfig,
    DifficultyConfig,
    FilterGroupsConfig,
    Fsdp2Config,
    KernelsConfig,
    KlConfig,
    LoraConfig,
    ObserveConfig,
    ProcessConfig,
    RewardModelConfig,
    RolloutServerConfig,
    SandboxConfig,
    ValidationSamplingConfig,
)
from hwgrpo.config.shipped_files import preset_names

FAILURE_POLICIES = ("raise", "value", "mask_sample", "drop_group")

# Conditions under which settings have an effect, for `used_by`.
_NOT_BUILT_IN = (Use("model.path", (), " to a folder or a hub name", lambda path: not path.startswith("builtin://")),)
_VALIDATION = (
    *on("data.validation"),
    Use(
        "data.train", (), "=task://... or reasoning_gym://...", lambda spec: str(spec).startswith(catalog.TASK_SCHEMES)
    ),
)
_OUTSIDE_ENGINE = none_of("rollout.engine", "local")
_SERVER = one_of("rollout.engine", "auto", "vllm_server", "sglang_server")
_DIVIDED = none_of("algorithm.advantage.std", "none")
_ADAPTIVE_ENTROPY = (on("algorithm.entropy_target", " above 0"),)
_RECORDED = (one_of("rollout.engine", "auto", "local"), off("trainer.deterministic", "=false"))
_REPORTS_FLOORS = none_of("rollout.engine", "vllm", "vllm_server", "sglang_server")
_SAME_DISTRIBUTION = tuple(
    one_of(f"rollout.{key}", off) + _REPORTS_FLOORS for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
)


def _read_by_estimator(setting: str) -> AnyOf:
    return read_by("algorithm.advantage.name", catalog.ADVANTAGES, setting)


def _read_by_loss(setting: str) -> AnyOf:
    return read_by("algorithm.loss.name", catalog.POLICY_LOSSES, setting)


def _names_with_splits(spec: Any) -> bool:
    """Return whether a data source can have splits; a task has its own, and a file is one split."""
    listed = [spec] if isinstance(spec, str) else spec or []
    return any(
        not name.startswith(catalog.TASK_SCHEMES) and not name.endswith((".jsonl", ".json", ".parquet", ".csv", ".tsv"))
        for name in listed
    )


def _splits(key: str) -> tuple[Use, ...]:
    return (Use(key, (), " to a folder or a hub dataset", _names_with_splits),)


@dataclass
class ModelConfig:
    path: str = setting(MISSING, path=True)
    """A local folder, a hub name, a GGUF file, or `builtin://tiny?task=sort` (a small model made and warm-started
    here)."""
    revision: str | None = setting(None, used_by=[_NOT_BUILT_IN])
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = setting(None, path=True)
    """Folder or hub name of the tokenizer; null: the model's."""
    chat_template: str | None = setting(None, path=True)
    """File with a Jinja chat template that replaces the tokenizer's."""
    trust_remote_code: bool = setting(False, used_by=[_NOT_BUILT_IN])
    """Run the Python code of a hub model."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Compute dtype; auto: the backend's default. Trainable parameters are always fp32 master weights."""
    attention: str = choice("auto", attention_choices)
    """Attention implementation; auto: the first of the backend's preferences that is usable."""
    fused_modules: list[str] = field(default_factory=lambda: ["auto"])
    """Modules replaced by the device's fused ones where a self-test finds the same values: names (`rms_norm`, `rotary`,
    `swiglu`), `none`, or `auto`: all on Ascend, none on GPUs, where no whole model has run with them."""
    layout: str = choice("auto", lambda: ("auto", *catalog.LAYOUTS.names()))
    """Layout of a micro-batch: `grouped` (a prompt once, followed by its responses), `padded` (one response per row,
    sorted by length) or `packed` (sequences concatenated); auto: grouped where the model's attention allows it.
    `grouped_masked` is grouped with a dense mask; grouped uses that too where attention cannot be replaced. Under such
    a mask, which grouped has in rows of up to 160 tokens, those with which responses begin alike are computed once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_loss_coef: float = limited(0.0, at_least=0)
    """Factor of the load-balancing loss of mixture-of-experts models, which keeps experts in use; 0 is off. Every token
    contributes to it, so no sequence is skipped. Micro-batches are averaged by their response tokens."""
    quantize: str = choice("none", ("none", "nf4", "int8"))
    """Hold the frozen base model's linear layers but the LM head, and its stacked experts, in 4 bits (nf4, as QLoRA) or
    8; needs adapters."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class FewShotConfig:
    prompt: str = MISSING
    """Message of the user; `data.instruction` is added to it."""
    response: str = MISSING
    """The model's answer."""


@dataclass
class DataConfig:
    train: str | list[str] = setting(MISSING, path=True)
    """Training prompts: a .jsonl, .json, .parquet, .csv or .tsv file, a dataset folder, a hub name, `task://sort`, or
    `reasoning_gym://chain_sum?size=2000`; or a list of those, e.g. [a.jsonl,b.parquet], which are concatenated."""
    validation: str | list[str] | None = setting(None, path=True)
    """Validation prompts, as `train`; null: where `train` is one task, its own (a tenth of the size, of
    reasoning_gym://), otherwise no validation."""
    split: str = setting("train", used_by=[_splits("data.train")])
    """Split to read where `train` names a hub dataset or a folder with several."""
    validation_split: str = setting("test", used_by=[_splits("data.validation")])
    """Split to read where `validation` names a hub dataset or a folder with several."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    ground_truth_key: str | None = None
    """Column with the answer (dots for nested ones); null tries `reward_model.ground_truth`, `ground_truth`,
    `answer`, `solution`, `target` in this order."""
    response_key: str = "response"
    """Column with the response that `hwgrpo sft` and `reward-model` train on: text, or chat messages."""
    keep: str | None = None
    """Rows that both train on: `correct` (`reward>0.5`), or a column's condition, `reward>=0.8`; null: all."""
    source_key: str = "data_source"
    """Column that names the source of a row; the file name is used where it is missing."""
    max_prompt_tokens: int = limited(512, at_least=1)
    """Longest prompt, in tokens."""
    overlong: str = choice("filter", lambda: catalog.OVERLONG_POLICIES)
    """Policy for longer prompts: drop or truncate them (left or right), which is counted, or raise an error."""
    chat: str = choice("auto", ("auto", "always", "never"))
    """Apply the chat template: to conversations only (auto), to plain text too (as one user message), or never."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    instruction: str | None = None
    """Text put after every prompt: plain text, or the last message of the user, e.g. Answer with the number only."""
    few_shot: list[FewShotConfig] = field(default_factory=list)
    """Examples that precede every prompt's conversation, after its system message."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template, e.g. {enable_thinking: false}."""
    template_date: str | None = None
    """Date that chat templates with a clock write into prompts, e.g. 2026-07-31; null: that of the run's first start,
    which a resumed run and `hwgrpo eval RUN` keep."""
    max_rows: int = limited(0, at_least=0)
    """Use only the first rows of the training data; 0 uses all."""
    validation_max_rows: int = limited(256, at_least=0, used_by=[_VALIDATION])
    """Use only the first rows of the validation data; 0 uses all."""
    shuffle: bool = True
    """Shuffle the rows of each epoch by `trainer.seed`."""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)


@dataclass
class RolloutConfig:
    engine: str = choice("local", lambda: catalog.ENGINES.names())
    """Rollout engine: `local` samples with the training model, `vllm` is vLLM in the training process, `vllm_server` is
    `vllm serve` in a separate process, possibly of another environment, `sglang_server` is the same with SGLang (not
    tested with a real server yet). auto: the first of the backend's engines that is installed, supports the settings
    and has room; a resumed run keeps it."""
    source: str = choice("auto", lambda: ("auto", *catalog.RESPONSE_SOURCES.names()), files=True)
    """Source of a step's responses: `on_demand` collects them in the step (`filtered` is an older name of it),
    `prefetch` while earlier steps are trained (`max_staleness` above 0), or `path/to/file.py:function` of
    `SourceParts`."""
    workflow: str = choice("single_turn", lambda: catalog.WORKFLOWS.names(), files=True)
    """How the responses to a prompt come about: `single_turn`, or `path/to/file.py:function` of the prompt and a
    sampler (docs/extend.md), for several turns with tokens that the policy did not sample, as a tool's reply."""
    n: int = limited(8, at_least=1)
    """Samples per prompt: the group size."""
    max_response_tokens: int = limited(512, at_least=1)
    """Longest response, in tokens, the stop token included."""
    temperature: float = limited(1.0, at_least=0.01, at_most=100)
    """Sampling temperature; the policy's log-probs use the same one."""
    final_temperature: float | None = limited(None, at_least=0.01, at_most=100)
    """Temperature of the last step, to which it changes by equal amounts from step to step; null: it does not."""
    top_k: int = limited(0, at_least=0)
    """Sample from the k most likely tokens only; 0 is off."""
    top_p: float = limited(1.0, above=0, at_most=1)
    """Sample from the most likely tokens that together have this probability; 1 is off. As with top_k and min_p, the
    trainer normalizes over the same tokens with the local engine; with others over all, and rollout_corr/* shows the
    gap."""
    min_p: float = limited(0.0, at_least=0, below=1)
    """Drop tokens less likely than this times the most likely one; 0 is off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; the text is cut before them, their tokens stay in the response."""
    stop_token_ids: list[int] = limited(list, at_least=0)
    """Token ids that end a response, in addition to the tokenizer's and the generation config's end-of-sequence."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of the text that rewards and stop strings see, as verl and TRL do. false: only those
    of end, padding, beginning and unknown; markers such as `<think>` stay where a tokenizer has them as special
    tokens."""
    max_sequences: int = limited(1024, at_least=1)
    """Sequences decoded at once; a larger batch is split."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Dtype of the sampler's weights; auto: the compute dtype. Another one needs a copy of the weights, and widens the
    gap between the rollout's log-probs and the trainer's, which rollout_corr/* shows."""
    group_timeout: float | None = limited(None, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds for all responses to a prompt, time in the engine's queue included. A group that takes longer is
    requested again once, with the same seed, then dropped: the step goes on without it (docs/faults.md). null: none."""
    max_staleness: int = limited(0, at_least=0)
    """Most weight versions by which responses may be older than the policy trained on them. 0: rollout and training
    alternate. 1: the next step's responses are sampled while this one is trained (one-step-off policy). More: rollout
    prefetches up to that many steps. Above 0 the engine has its own copy of the weights, and `algorithm.correction`
    must be on."""
    guard: str = choice("warn", ("off", "warn", "act"), used_by=_SAME_DISTRIBUTION)
    """What a large gap between the rollout engine's and the trainer's log-probs does. `warn`: a note with the numbers,
    the likely cause and the remedy. `act`: the run applies importance weights, then rejects tokens, then samples with
    fresher weights, then ends, and goes back step by step when the gap is small again (docs/rollout.md)."""
    partial: bool = setting(
        False, used_by=[on("rollout.max_staleness", " of 1 or more"), one_of("rollout.engine", "auto", "local")]
    )
    """Update weights in the middle of responses instead of after them (partial rollouts): their tokens then have
    several versions. At which token the weights change depends on the speed of the machine: neither a second run nor a
    resumed one gives the same numbers. Needs `max_staleness` above 0."""
    probe_every: int = limited(10, at_least=0)
    """Weight versions after which engine and trainer score a few fixed sequences, as they do at the start. The run ends
    if they differ by more than rounding, as when new weights were not applied. 0: never. Without effect where the local
    engine samples with the policy's own weights, and with SGLang."""
    graphs: bool | None = setting(None, used_by=_RECORDED, accepted_unused=(False,))
    """Record the local engine's decode step as a device graph, not with deterministic algorithms: their indexed writes
    synchronize with the device. null: where this has run on hardware (cuda); after a failed recording the run goes on
    without. true: also elsewhere (rocm: never run); a failed recording ends the run. A self-test at the start turns it
    off where its logits differ from the model's. vLLM and SGLang record on their own, see `enforce_eager`."""
    gpu_memory_utilization: float | None = limited(None, above=0, at_most=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: share of the device's memory for weights, keys and values. null: what the plan leaves beside the
    trainer, or 0.9 of devices of its own."""
    sleep_mode: str = choice(
        "auto", ("auto", "always", "never"), used_by=[none_of("rollout.engine", "local", "sglang_server")]
    )
    """vLLM: free weights, keys and values while the policy is trained. auto: on the training devices, in the training
    process or in a server that the run starts without naming devices for it. `always`: also in other servers. Not with
    `max_staleness`."""
    kv_cache_gb: float | None = limited(
        None, above=0, at_most=1e6, used_by=[none_of("rollout.engine", "local", "sglang_server")]
    )
    """vLLM: GiB for keys and values; null: what gpu_memory_utilization leaves, or 2 on a CPU."""
    max_model_len: int | None = limited(None, at_least=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: longest prompt and response together; null: data.max_prompt_tokens + max_response_tokens."""
    enforce_eager: bool | None = setting(None, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: neither compile nor record graphs; null: on a CPU only."""
    tensor_parallel_size: int = limited(1, at_least=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: devices that share one copy of the model. With `vllm` they are those of so many consecutive ranks
    of a host, which then sample together; neither with `max_staleness` nor with `group_timeout`."""
    engine_kwargs: dict[str, Any] = setting(dict, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: further arguments of the engine, e.g. {block_size: 32}; they override those that hwgrpo sets. An
    engine of your own: its settings (docs/extend.md)."""
    server: RolloutServerConfig = setting(RolloutServerConfig, used_by=[_SERVER])


@dataclass
class RewardFunctionConfig:
    name: str = setting(MISSING, path=True)
    """A registered reward, or `path/to/file.py:function` (verl's or TRL's signature)."""
    weight: float = limited(1.0)
    """Factor of this reward in the sum."""
    gate: bool = False
    """Where this reward is not above 0, the sum has those of the gates only, whatever the other functions return."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""
    on_error: str = choice("raise", FAILURE_POLICIES)
    """When the function raises, or does not return a reward for each step where it returns a list: stop the run, use
    `failure_value`, drop the sample, or drop its group."""
    on_nan: str = choice("raise", FAILURE_POLICIES)
    """The same when it returns NaN, None or an infinite number."""
    timeout: float | None = limited(None, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds per response (verl's signature) or per batch (TRL's). With a limit the function runs in a separate
    process, which is killed when it takes longer, even inside C code. null: no limit."""
    on_timeout: str = choice("raise", FAILURE_POLICIES, used_by=[on(".timeout")])
    """The same when it takes longer than that."""
    workers: int = limited(0, at_least=0)
    """Processes that call it, per rank; with verl's signature each scores one response at a time. 0 calls it in the
    trainer, or in one process if there is a timeout. Processes do not share the function's variables."""
    failure_value: float = limited(
        0.0, used_by=[(*one_of(".on_error", "value"), *one_of(".on_nan", "value"), *one_of(".on_timeout", "value"))]
    )
    """The reward under the policy `value`."""


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Reward functions, summed by weight. An entry may be just a name."""
    shuffle: bool = False
    """Permute rewards within a batch, or with filter_groups a group: a control run, in which nothing can be learned."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@dataclass
class AdvantageConfig:
    name: str = choice("grpo", lambda: catalog.ADVANTAGES.names(), files=True)
    """Advantage estimator: a registered one, or `path/to/file.py:function` (see docs/extend.md)."""
    eps: float = limited(1e-6, at_least=0, at_most=1, used_by=[_read_by_estimator("eps"), _DIVIDED])
    """Added to the standard deviation (verl 1e-6, TRL 1e-4, OpenRLHF 1e-9)."""
    std: str = choice("group", ("group", "batch", "none"), used_by=[_read_by_estimator("std")])
    """Standard deviation by which the centred reward is divided; `none` is Dr. GRPO."""
    std_correction: int = limited(1, at_least=0, at_most=1, used_by=[_read_by_estimator("std_correction"), _DIVIDED])
    """1: unbiased standard deviation (n - 1), as verl and TRL; 0: biased."""
    singleton: str = choice("zero", ("zero", "raw", "error"), used_by=[_read_by_estimator("singleton")])
    """Advantage of a group with one valid sample: zero, its raw reward (verl), or an error (TRL)."""
    clip: float | None = limited(None, above=0)
    """Advantages are kept within plus or minus this; null: not at all."""
    kwargs: dict[str, Any] = setting(
        dict, used_by=[(*own_function("algorithm.advantage.name"), *_read_by_estimator("kwargs"))]
    )
    """Further keyword arguments of the estimator (docs/grpo.md), or of a function of your own."""


@dataclass
class LossConfig:
    name: str = choice("ppo_clip", lambda: catalog.POLICY_LOSSES.names(), files=True)
    """Policy loss: a registered one, or `path/to/file.py:function` (see docs/extend.md)."""
    clip_low: float = limited(0.2, at_least=0, at_most=1, used_by=[_read_by_loss("clip_low")])
    """Lower clip: the ratio is clamped at 1 - clip_low."""
    clip_high: float = limited(0.2, above=-1, used_by=[_read_by_loss("clip_high")])
    """Upper clip: the ratio is clamped at 1 + clip_high; negative with cispo only (TRL's absolute cap c is c - 1)."""
    dual_clip: float | None = limited(3.0, above=1, used_by=[_read_by_loss("dual_clip")])
    """With a negative advantage the loss is at most this times -advantage; null turns dual clip off."""
    delta: float | None = limited(None, above=1, used_by=[_read_by_loss("delta")])
    """Cap of the ratio with a negative advantage, where it is not clipped, and with a positive one if it is below
    1 + clip_high (TRL's delta, INTELLECT-2's two-sided clip); null: none."""
    log_ratio_clamp: float | None = limited(20.0, above=0, used_by=[_read_by_loss("log_ratio_clamp")])
    """Clamp of the log-ratio, plus or minus, before exp, as in verl; null: none, as in TRL."""
    tau_pos: float = limited(1.0, above=0, used_by=[_read_by_loss("tau_pos")])
    """Temperature of sapo's gate where the advantage is positive."""
    tau_neg: float = limited(1.05, above=0, used_by=[_read_by_loss("tau_neg")])
    """Temperature of sapo's gate where it is not."""
    kwargs: dict[str, Any] = setting(dict, used_by=[(*own_function("algorithm.loss.name"), *_read_by_loss("kwargs"))])
    """Further keyword arguments of the loss (docs/grpo.md), or of a function of your own."""


@dataclass
class AggregationConfig:
    name: str = choice("token-mean", lambda: catalog.AGGREGATIONS.names())
    """Aggregation of token losses, with counts over the entire update."""
    norm_length: int | None = limited(
        None, at_least=1, used_by=[one_of("algorithm.aggregation.name", "seq-mean-token-sum-norm")]
    )
    """Divisor of `seq-mean-token-sum-norm`; null: rollout.max_response_tokens."""


@dataclass
class AlgorithmConfig:
    preset: str | None = choice(None, preset_names)
    """Settings of a published method, of which any can be set otherwise (`hwgrpo config presets` lists them). In an
    override it wins over the recipe, in a recipe the recipe's other settings win over it."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    process: ProcessConfig = setting(ProcessConfig, used_by=[STEPS])
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    entropy_coef: float = limited(0.0, at_least=0)
    """Weight of the entropy bonus; with a target the first one."""
    entropy_target: float | None = limited(None, above=0)
    """Entropy, nats per token, up to which the bonus applies. After each update in which the entropy was up to it the
    coefficient rises by `entropy_coef_delta`, else it falls (TRL's use_adaptive_entropy); null: fixed."""
    entropy_coef_delta: float = limited(0.005, above=0, used_by=_ADAPTIVE_ENTROPY)
    """Step of an adapted entropy coefficient, per update."""
    entropy_coef_min: float = limited(0.0, at_least=0, used_by=_ADAPTIVE_ENTROPY)
    """Lower bound of an adapted entropy coefficient."""
    entropy_coef_max: float = limited(1.0, at_least=0, used_by=_ADAPTIVE_ENTROPY)
    """Upper bound of an adapted entropy coefficient."""
    mask_truncated: bool = False
    """Leave responses that reached the length limit out of the update: DAPO's overlong filter, TRL's
    mask_truncated_completions. Their rewards count in the statistics of their group."""
    top_entropy_share: float = limited(1.0, above=0, at_most=1)
    """Share of an update's tokens, those of the highest entropy, to which the policy loss and the entropy bonus are
    limited (TRL's top_entropy_quantile). Below 1 it takes a scoring pass before each update."""
    m2po_threshold: float | None = limited(None, above=0)
    """Limit the policy loss to tokens over which the mean squared log-ratio of trainer and rollout engine stays below
    this; the largest are left out (M2PO). Takes a scoring pass before each update; null: no limit."""
    old_logprobs: str = choice("trainer", ("trainer", "rollout", "interpolated"))
    """Whose log-probs the ratio is against: those of the trainer at the start of the update; those that the rollout
    engine reported, which takes no pass of its own and no correction (verl's bypass_mode); or values between these and
    the current ones, by the age of the response, which take no pass either (AReaL's loglinear)."""
    off_policy_threshold: float | None = limited(None, at_least=0)
    """Leave responses with a negative advantage out of the policy loss whose mean log-ratio of rollout engine to policy
    is above this: the off-policy sequence mask of DeepSeek-V3.2, TRL's off_policy_mask_threshold; null: none."""


@dataclass
class OptimConfig:
    name: str = choice("adamw", ("adamw", "adamw_8bit", "muon"))
    """AdamW; adamw_8bit holds its states in 2 bytes per parameter instead of 8, rounded after each update. muon: Muon
    for the matrices of the decoder layers, AdamW for the rest, under strategies single and ddp."""
    lr: float = limited(1e-6, above=0)
    """Peak learning rate; Muon's updates are scaled to the size of AdamW's."""
    betas: list[float] = limited(lambda: [0.9, 0.999], at_least=0, below=1)
    """AdamW's decay rates."""
    eps: float = limited(1e-8, at_least=1e-30, at_most=1)
    """AdamW's epsilon."""
    momentum: float = limited(0.95, at_least=0, below=1, used_by=[one_of("optim.name", "muon")])
    """Muon's momentum."""
    weight_decay: float = limited(0.0, at_least=0)
    """Decoupled weight decay; norms and biases are exempt."""
    schedule: str = choice("constant", ("constant", "linear", "cosine"))
    """Learning rate after the warm-up, over the updates of the run."""
    warmup_steps: int = limited(0, at_least=0)
    """Updates over which the learning rate rises linearly from 0."""
    warmup_ratio: float = limited(0.0, at_least=0, below=1)
    """The same as a share of the run's updates, rounded up; instead of warmup_steps."""
    min_lr_ratio: float = limited(0.0, at_least=0, at_most=1, used_by=[one_of("optim.schedule", "linear", "cosine")])
    """Learning rate at the end of linear and cosine schedules (one update past the last), as a share of `lr`."""
    grad_clip: float = limited(1.0, at_least=0)
    """Maximum gradient norm; 0: no clipping."""


@dataclass
class TrainerConfig:
    output_dir: str = setting("runs/default", path=True, home=True)
    """Folder for checkpoints, logs, the resolved config and the final model."""
    prompts_per_step: int = limited(32, at_least=1)
    """Prompts per step over all ranks; each is sampled `rollout.n` times."""
    prompts_per_update: int | None = limited(None, at_least=1)
    """Prompts per optimizer update; null: prompts_per_step (one update per batch)."""
    epochs_per_batch: int = limited(1, at_least=1)
    """Passes over each batch of samples."""
    stages: list[str] = field(default_factory=list)
    """Stages of your own, `path/to/file.py:Class` each: further work in every step (docs/extend.md)."""
    tokens_per_micro_batch: int | None = limited(None, at_least=1)
    """Tokens (prompt, response, padding) of one forward and backward pass on one device; null: 16384 on an accelerator,
    1024 on a CPU, there up to 4096 for a prompt with its responses, or a device's share of the longest sequence if that
    is more."""
    max_steps: int = limited(0, at_least=0)
    """Steps to train; 0 derives it from `epochs`."""
    epochs: int = limited(1, at_least=1, used_by=[off("trainer.max_steps", "=0")])
    """Passes over the training data where `max_steps` is 0."""
    seed: int = limited(0, at_least=0, at_most=2**32 - 1)
    """Seed of the data order, of sampling and of new adapter weights."""
    strategy: str = choice("auto", lambda: ("auto", *catalog.STRATEGIES.names()))
    """Data-parallel strategy, with one process per device. `single`: one process. `ddp`: replicas, gradients are
    averaged. `fsdp2`: weights, gradients and optimizer states are sharded (fully_shard). `deepspeed`: ZeRO, in stages;
    an optional package: pip install "hwgrpo[deepspeed]". auto: single in one process; in several ddp if its plan fits
    into a device's memory, else fsdp2. A resumed run keeps the strategy of its checkpoint."""
    sequence_parallel_size: int = limited(1, at_least=1)
    """Sequence parallelism (Ulysses) over this many consecutive ranks, for training and scoring: each has its share of
    a sequence's tokens, and of the heads in attention, so that responses may be this many times as long. Must divide
    the ranks and the model's attention heads; works with every strategy of several processes."""
    tensor_parallel_size: int = limited(1, at_least=1)
    """Tensor parallelism over this many consecutive ranks, by transformers' plan for the model: each computes with its
    share of every decoder layer's heads and intermediate units, and has its share of the tokens between layers. With
    strategy fsdp2 only, which shards each part further over the groups; must divide the ranks and key-value heads."""
    offload: str = choice("none", ("none", "optimizer", "gradients"))
    """optimizer: hold its states in host memory, where a CPU has them anyway, and a part on the device in an update.
    gradients: these too; each backward pass adds to them. With fsdp2, sync_every is then `micro_batch`."""
    fsdp2: Fsdp2Config = setting(Fsdp2Config, used_by=[one_of("trainer.strategy", "fsdp2")])
    deepspeed: DeepspeedConfig = setting(DeepspeedConfig, used_by=[one_of("trainer.strategy", "deepspeed")])
    resume: str = setting("auto", path=True, home=True)
    """`auto`: from the newest checkpoint in output_dir; `never`: from step 0 (a used folder is refused); or the folder
    of a checkpoint."""
    save_every: int = limited(0, at_least=0)
    """Steps between checkpoints; 0 writes one at the end and on a signal."""
    save_async: bool = setting(True, used_by=[on("trainer.save_every", " of 1 or more")])
    """Write checkpoints in the background, from a copy of the trainable parameters and optimizer states in host memory
    (12 bytes per parameter, over all ranks). Those at the end and on a signal need no copy."""
    keep_checkpoints: int = limited(2, at_least=1)
    """Number of newest checkpoints to keep."""
    max_skipped_updates: int = limited(3, at_least=0)
    """Consecutive updates that may be skipped because their gradient is not finite; one more ends the run."""
    validate_every: int = limited(0, at_least=0, used_by=[_VALIDATION])
    """Steps between validations; 0 validates at the start and at the end."""
    validate_at_start: bool = setting(True, used_by=[_VALIDATION])
    """Validate before the first step, so that the summary can show what training changed."""
    validation_n: int = limited(4, at_least=0, used_by=[_VALIDATION])
    """Samples per validation prompt, in addition to the greedy one; 0: none."""
    validation_sampling: ValidationSamplingConfig = setting(ValidationSamplingConfig, used_by=[_VALIDATION])
    save_final_model: bool = True
    """Write the trained model to output_dir/final in Hugging Face format."""
    final_dtype: str = choice("auto", catalog.FINAL_DTYPES)
    """dtype of the weights in output_dir/final: auto (that of the weights in model.path), float32, bfloat16 or float16.
    It also holds for reward models that are trained within the run, where auto is that of their own base. The fp32
    weights that are trained stay in the checkpoint. An adapter is fp32 with auto, since rounding it would lose small
    updates when it is trained further."""
    deterministic: bool = False
    """Use deterministic algorithms of torch and the backend's libraries (slower on accelerators); an operation without
    one is an error. `hwgrpo env --deterministic` shows the variables."""
    process_group_timeout: float = limited(7200.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds that a rank waits for the others, e.g. while rank 0 reads or writes a large model, and that its main
    thread waits for the threads that generate and write checkpoints; after that the run ends with an error."""
    threads: int = limited(0, at_least=0, at_most=1024)
    """CPU threads per process; 0: torch's default, divided among the ranks of this host."""


@dataclass
class BackendConfig:
    name: str = choice("auto", backend_choices)
    """Device family; auto: the one that this host can use; two usable ones are an error."""


@dataclass
class Settings:
    """The settings of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    plugins: list[str] = field(default_factory=list)
    """Python files, or modules of this environment, that are imported before the settings are checked; settings can
    name the components that they register (see docs/extend.md)."""
