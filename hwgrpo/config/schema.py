"""Every setting of a run: its name, its default, what is allowed, and (in the docstring under it) what it does.

A recipe states only what differs from these defaults. `hwgrpo config` prints this file as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hwgrpo import catalog
from hwgrpo.config.fields import Use, choice, holds, limited, none_of, off, on, one_of, own_function, setting

FAILURE_POLICIES = ("raise", "value", "mask_sample", "drop_group")
LONGEST_TIMEOUT = 1e7
"""Seconds, about 115 days: operating systems count longer ones wrong."""

# What makes settings effective, beside which they are declared with `used_by`.
_ADAPTERS = on("model.lora.rank", " above 0")
_NOT_BUILT_IN = (Use("model.path", (), " to a folder or a hub name", lambda path: not path.startswith("builtin://")),)
_VALIDATION = (
    *on("data.validation"),
    Use("data.train", (), "=task://...", lambda spec: str(spec).startswith("task://")),
)
_OUTSIDE_ENGINE = none_of("rollout.engine", "local")
_SERVER = one_of("rollout.engine", "vllm_server", "sglang_server")
_OWN_SERVER = off("rollout.server.url")
_RUNNING_SERVER = on("rollout.server.url")
_SCALED = none_of("algorithm.advantage.name", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
_DIVIDED = (_SCALED, none_of("algorithm.advantage.std", "none"))
_CLIPPED = none_of("algorithm.loss.name", "sapo", "gpg")
_KL_ON = on("algorithm.kl.coef", " above 0")
_CLAMPED_KL = (_KL_ON, one_of("algorithm.kl.estimator", *catalog.CLAMPED_KL_ESTIMATORS))
_CORRECTED = none_of("algorithm.correction.name", "none")
_SERVICE = holds("observe.loggers", "wandb", "trackio", "swanlab")


def _names_with_splits(spec: Any) -> bool:
    """Return whether what a data setting names can have splits: a task has its own, and a file is one."""
    listed = [spec] if isinstance(spec, str) else spec or []
    return any(
        not name.startswith("task://") and not name.endswith((".jsonl", ".json", ".parquet", ".csv", ".tsv"))
        for name in listed
    )


def _splits(key: str) -> tuple[Use, ...]:
    return (Use(key, (), " to a folder or a hub dataset", _names_with_splits),)


def _backend_choices() -> tuple[str, ...]:
    from hwgrpo_backends.registry import names

    return ("auto", *names())


def _attention_names() -> tuple[str, ...]:
    from hwgrpo_backends.registry import load_all

    return tuple(dict.fromkeys(name for backend in load_all().backends.values() for name in backend.attention))


@dataclass
class LoraConfig:
    rank: int = limited(0, at_least=0)
    """Rank of the low-rank adapters; 0 trains all parameters."""
    alpha: float = limited(32.0, above=0, used_by=[_ADAPTERS])
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = limited(0.0, at_least=0, below=1, used_by=[_ADAPTERS])
    """Dropout on the adapters' input. Above 0 the old log-prob is computed in a pass of its own."""
    target_modules: list[str] = setting(lambda: ["all-linear"], used_by=[_ADAPTERS])
    """Names of the linear layers that get adapters, or `all-linear` (every one that text passes but the LM head)."""
    adapter: str | None = setting(None, path=True)
    """Folder of an existing adapter to train further, at its own rank; a frozen copy of it is then the reference."""


@dataclass
class ModelConfig:
    path: str = setting(MISSING, path=True)
    """A local folder, a hub name, or `builtin://tiny?task=sort` (a small model made and warm-started here)."""
    revision: str | None = setting(None, used_by=[_NOT_BUILT_IN])
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = setting(None, path=True)
    """Folder or hub name of the tokenizer; null takes the model's."""
    chat_template: str | None = setting(None, path=True)
    """File with a Jinja chat template that replaces the tokenizer's."""
    trust_remote_code: bool = setting(False, used_by=[_NOT_BUILT_IN])
    """Run Python code that comes with a hub model."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Compute dtype; auto takes the backend's. Trainable parameters are fp32 masters in any case."""
    attention: str = choice("auto", lambda: ("auto", *_attention_names()))
    """Attention implementation; auto takes the backend's first usable preference."""
    fused_modules: list[str] = field(default_factory=lambda: ["auto"])
    """Modules replaced by the device's fused ones where those compute the same, which is tried: names (`rms_norm`,
    `rotary`, `swiglu`), `auto` (all that the backend has) or `none`."""
    layout: str = choice("auto", lambda: ("auto", *catalog.LAYOUTS.names()))
    """How a micro-batch is laid out: `grouped` (a prompt once, its responses behind it), `padded` (one response per
    row, by length) or `packed` (sequences one behind the other); auto: grouped where the model's attention allows.
    `grouped_masked` does grouped by a dense mask, as grouped itself does where attention cannot be replaced."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    router_loss_coef: float = limited(0.0, at_least=0)
    """Factor of the load-balancing loss of mixture-of-experts models, which keeps experts in use; 0 is off. Every token
    feeds it, so no sequence is left out. Over several micro-batches it is the mean of theirs by response tokens."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataConfig:
    train: str | list[str] = setting(MISSING, path=True)
    """Training prompts: a .jsonl, .json, .parquet, .csv or .tsv file, a dataset folder, a hub name, or `task://sort`;
    or a list of those, e.g. [a.jsonl,b.parquet], whose rows follow each other."""
    validation: str | list[str] | None = setting(None, path=True)
    """Validation prompts, as `train`; null takes a task's own validation split, or validates nothing."""
    split: str = setting("train", used_by=[_splits("data.train")])
    """Split to read where `train` names a hub dataset or a folder with several."""
    validation_split: str = setting("test", used_by=[_splits("data.validation")])
    """Split to read where `validation` names a hub dataset or a folder with several."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    ground_truth_key: str | None = None
    """Column with the answer (dots go into nested ones); null tries `reward_model.ground_truth`, `ground_truth`,
    `answer`, `solution`, `target` in this order."""
    source_key: str = "data_source"
    """Column that names where a row comes from; the file name where it is missing."""
    max_prompt_tokens: int = limited(512, at_least=1)
    """Longest prompt, in tokens."""
    overlong: str = choice("filter", lambda: catalog.OVERLONG_POLICIES)
    """What happens to longer prompts: dropped and counted, cut from the left or right and counted, or an error."""
    chat: str = choice("auto", ("auto", "always", "never"))
    """Apply the chat template: to conversations only (auto), to plain text too (as one user message), or never."""
    system_prompt: str | None = None
    """System message put before every conversation that has none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options handed to the chat template, e.g. {enable_thinking: false}."""
    max_rows: int = limited(0, at_least=0)
    """Use only the first rows of the training data; 0 uses all."""
    validation_max_rows: int = limited(256, at_least=0, used_by=[_VALIDATION])
    """Use only the first rows of the validation data; 0 uses all."""
    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from `trainer.seed`."""


@dataclass
class RolloutServerConfig:
    url: str | None = None
    """Address of a server that runs already, e.g. http://127.0.0.1:8000; null starts one and ends it with the run."""
    python: str | None = setting(None, path=True, used_by=[_OWN_SERVER])
    """Python of the environment that has vLLM or SGLang, e.g. /opt/vllm/bin/python; null: the trainer's own."""
    host: str = setting("127.0.0.1", used_by=[_OWN_SERVER])
    """Address that the server listens on; others than this one are reached over the network."""
    port: int = limited(0, at_least=0, at_most=65535, used_by=[_OWN_SERVER])
    """Port that the server listens on; 0 takes a free one."""
    env: dict[str, str] = setting(dict, used_by=[_OWN_SERVER])
    """Further environment variables of the server, e.g. which devices it sees."""
    token_variable: str = "HWGRPO_SERVER_TOKEN"
    """Environment variable with the token that the server asks for, which it reads from the default one; where it is
    empty a server of our own gets a random one."""
    transfer: str = choice("auto", ("auto", "folder", "group"))
    """How weights go to the server. `group`: through a process group of rank 0 and the server's workers, over the
    backend's communication library; neither encrypted nor guarded by the token. `folder`: through files. auto: the
    group where both sides have the same library, else a folder, and a note says why. Adapters go through a folder."""
    weights_dir: str | None = setting(None, path=True, used_by=[none_of("rollout.server.transfer", "group")])
    """Folder through which weights go, seen by both sides; null: where they do not go through a group, one in shared
    memory, for a server on this host."""
    wait_for_owner: float = limited(0.0, at_least=0, at_most=LONGEST_TIMEOUT, used_by=[_RUNNING_SERVER])
    """Seconds to wait for another run that uses the server at `url` to leave it; 0 is an error that names the run."""
    take_over: bool = setting(False, used_by=[_RUNNING_SERVER])
    """Take the server at `url` from another run, which then ends with an error."""
    start_timeout: float = limited(600.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds that a server may take to start, or to come back."""
    request_timeout: float = limited(600.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds without an answer after which a server counts as hanging."""
    retries: int = limited(3, at_least=0)
    """Times a request is sent again after a server died, hung or answered garbage."""
    max_reply_mb: float = limited(256.0, above=0, at_most=1e6)
    """Size of the largest answer that is read, in MiB."""


@dataclass
class RolloutConfig:
    engine: str = choice("local", lambda: catalog.ENGINES.names())
    """What generates: `local` is the training model itself, `vllm` is vLLM in the training process, `vllm_server` is
    `vllm serve` as a process of its own, which may live in another environment, `sglang_server` is SGLang in the same
    way, which has not met a real server yet."""
    source: str = choice("auto", lambda: ("auto", *catalog.RESPONSE_SOURCES.names()), files=True)
    """Where a step's responses come from: `on_demand` generates them when they are asked for, `prefetch` while earlier
    steps are trained, or `path/to/file.py:function` of `SourceParts`. auto: prefetch with a `max_staleness` above 0."""
    n: int = limited(8, at_least=1)
    """Samples per prompt: the group size."""
    max_response_tokens: int = limited(512, at_least=1)
    """Longest response, in tokens, the stop token included."""
    temperature: float = limited(1.0, at_least=0.01, at_most=100)
    """Sampling temperature; the policy's log-probs are taken at the same one."""
    top_k: int = limited(0, at_least=0)
    """Sample among the k likeliest tokens only; 0 is off."""
    top_p: float = limited(1.0, above=0, at_most=1)
    """Sample among the likeliest tokens that together have this probability; 1 is off. As with top_k and min_p, the
    rollout's log-probs are then those of the cut distribution and the trainer's those of the whole one, which
    rollout_corr/* shows as a gap."""
    min_p: float = limited(0.0, at_least=0, below=1)
    """Drop tokens less likely than this times the likeliest one; 0 is off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; the text is cut before them, their tokens stay in the response."""
    stop_token_ids: list[int] = limited(list, at_least=0)
    """Token ids that end a response beside the tokenizer's and the generation config's end-of-sequence."""
    max_sequences: int = limited(1024, at_least=1)
    """Sequences decoded together; a larger batch is generated in parts."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Dtype of the weights that sample; auto takes the compute dtype. Another one needs a copy of the weights, and
    widens the gap between the rollout's log-probs and the trainer's, which rollout_corr/* shows."""
    max_staleness: int = limited(0, at_least=0)
    """Weight versions that responses may be older than the policy that learns from them. 0: rollout and training take
    turns. 1: the next step's responses are sampled while this one is trained (one-step-off policy). More: rollout runs
    ahead of training as far as that. Above 0 the engine keeps weights of its own, and `algorithm.correction` must be
    on."""
    partial: bool = setting(
        False, used_by=[on("rollout.max_staleness", " of 1 or more"), one_of("rollout.engine", "local")]
    )
    """Bring new weights to responses that are half sampled, instead of after they are done; their tokens are then of
    several versions. Needs `max_staleness` above 0."""
    graphs: bool = setting(False, used_by=[one_of("rollout.engine", "local"), off("trainer.deterministic", "=false")])
    """Record the local engine's decode step as a device graph where the backend offers that (cuda, rocm). It is tried
    at the start, and left where its logits are not the model's. Deterministic algorithms cannot be recorded: writing at
    an index waits for the device. vLLM and SGLang record by themselves, see `enforce_eager`. It has not been run on
    hardware yet."""
    gpu_memory_utilization: float = limited(0.5, above=0, at_most=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: share of the device's memory for weights, keys and values; the trainer needs the rest."""
    kv_cache_gb: float | None = limited(
        None, above=0, at_most=1e6, used_by=[none_of("rollout.engine", "local", "sglang_server")]
    )
    """vLLM: GiB for keys and values; null: what gpu_memory_utilization leaves, or 2 on a CPU."""
    max_model_len: int | None = limited(None, at_least=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: longest prompt and response together; null: data.max_prompt_tokens + max_response_tokens."""
    enforce_eager: bool | None = setting(None, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: neither compile nor record graphs; null: on a CPU only."""
    tensor_parallel_size: int = limited(1, at_least=1, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: devices that share one copy of the model; above 1 with servers only."""
    engine_kwargs: dict[str, Any] = setting(dict, used_by=[_OUTSIDE_ENGINE])
    """vLLM, SGLang: further arguments of the engine, e.g. {block_size: 32}; they win over what hwgrpo sets."""
    server: RolloutServerConfig = setting(RolloutServerConfig, used_by=[_SERVER])


@dataclass
class RewardFunctionConfig:
    name: str = setting(MISSING, path=True)
    """A registered reward, or `path/to/file.py:function` (verl's or TRL's signature)."""
    weight: float = limited(1.0)
    """Factor of this reward in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""
    on_error: str = choice("raise", FAILURE_POLICIES)
    """When the function raises: stop the run, use `failure_value`, take the sample out, or take its group out."""
    on_nan: str = choice("raise", FAILURE_POLICIES)
    """The same when it returns NaN, None or an infinite number."""
    timeout: float | None = limited(None, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds that it may take for a response (verl's signature) or for a batch (TRL's). It is then called in a process
    of its own, which is killed when it takes longer, whatever it hangs in. null: no limit."""
    on_timeout: str = choice("raise", FAILURE_POLICIES, used_by=[on(".timeout")])
    """The same when it takes longer than that."""
    workers: int = limited(0, at_least=0)
    """Processes that call it, per rank; with verl's signature each has a response of its own at a time. 0 calls it in
    the trainer, or in one process where there is a timeout. What it keeps in variables is each process's own."""
    failure_value: float = limited(
        0.0, used_by=[(*one_of(".on_error", "value"), *one_of(".on_nan", "value"), *one_of(".on_timeout", "value"))]
    )
    """The reward under the policy `value`."""


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """The rewards that are summed. An entry may be just a name."""
    shuffle: bool = False
    """Permute the rewards within each batch: a control run, in which nothing can be learned from them."""


@dataclass
class AdvantageConfig:
    name: str = choice("grpo", lambda: catalog.ADVANTAGES.names(), files=True)
    """Advantage estimator: a registered one, or `path/to/file.py:function` (see docs/extend.md)."""
    eps: float = limited(1e-6, at_least=0, used_by=_DIVIDED)
    """Added to the standard deviation (verl 1e-6, TRL 1e-4, OpenRLHF 1e-9)."""
    std: str = choice("group", ("group", "batch", "none"), used_by=[_SCALED])
    """What the centred reward is divided by; `none` is Dr. GRPO."""
    std_correction: int = limited(1, at_least=0, at_most=1, used_by=_DIVIDED)
    """1: unbiased standard deviation (n - 1), as verl and TRL; 0: biased."""
    singleton: str = choice("zero", ("zero", "raw", "error"))
    """Advantage of a group with one valid sample: zero, its raw reward (verl), or an error (TRL)."""
    kwargs: dict[str, Any] = setting(dict, used_by=[own_function("algorithm.advantage.name")])
    """Further keyword arguments for a function of your own."""


@dataclass
class LossConfig:
    name: str = choice("ppo_clip", lambda: catalog.POLICY_LOSSES.names(), files=True)
    """Policy loss: a registered one, or `path/to/file.py:function` (see docs/extend.md)."""
    clip_low: float = limited(0.2, at_least=0, at_most=1, used_by=[_CLIPPED])
    """Lower clip: the ratio is held above 1 - clip_low."""
    clip_high: float = limited(0.2, above=-1, used_by=[_CLIPPED])
    """Upper clip: the ratio is held below 1 + clip_high; below 0 with cispo only (TRL's absolute cap c is c - 1)."""
    dual_clip: float | None = limited(
        3.0, above=1, used_by=[none_of("algorithm.loss.name", "gspo", "cispo", "sapo", "gpg")]
    )
    """With a negative advantage the loss is at most this times -advantage; null turns dual clip off."""
    log_ratio_clamp: float | None = limited(20.0, above=0, used_by=[none_of("algorithm.loss.name", "gspo", "gpg")])
    """The log-ratio is held within plus or minus this before exp, as in verl; null: it is not, as in TRL."""
    tau_pos: float = limited(1.0, above=0, used_by=[one_of("algorithm.loss.name", "sapo")])
    """Temperature of sapo's gate where the advantage is positive."""
    tau_neg: float = limited(1.05, above=0, used_by=[one_of("algorithm.loss.name", "sapo")])
    """Temperature of sapo's gate elsewhere."""
    kwargs: dict[str, Any] = setting(dict, used_by=[own_function("algorithm.loss.name")])
    """Further keyword arguments for a function of your own."""


@dataclass
class KlConfig:
    coef: float = limited(0.0, at_least=0)
    """Weight of the KL term against the reference model in the loss; 0 loads no reference model."""
    estimator: str = choice("k3", lambda: catalog.KL_ESTIMATORS.names(), files=True, used_by=[_KL_ON])
    """KL estimator (Schulman's k1, k2, k3; a `+` takes k2's gradient), or `path/to/file.py:function`."""
    input_clamp: float | None = limited(20.0, above=0, used_by=_CLAMPED_KL)
    """k3, k3+: the log-ratio to the reference is held within plus or minus this; null: it is not, as in TRL."""
    output_clamp: float | None = limited(10.0, above=0, used_by=_CLAMPED_KL)
    """k3, k3+: the estimate is held within plus or minus this; null: it is not, as in TRL."""
    times_ratio: bool = setting(False, used_by=[_KL_ON])
    """Multiply the KL by the token's ratio, which makes its gradient unbiased (TRL's use_bias_correction_kl)."""
    kwargs: dict[str, Any] = setting(dict, used_by=[_KL_ON, own_function("algorithm.kl.estimator")])
    """Further keyword arguments for a function of your own."""


@dataclass
class AggregationConfig:
    name: str = choice("token-mean", lambda: catalog.AGGREGATIONS.names())
    """How token losses become one number, with counts over the whole update."""
    norm_length: int | None = limited(
        None, at_least=1, used_by=[one_of("algorithm.aggregation.name", "seq-mean-token-sum-norm")]
    )
    """Divisor of `seq-mean-token-sum-norm`; null takes rollout.max_response_tokens."""


@dataclass
class CorrectionConfig:
    name: str = choice("none", lambda: catalog.CORRECTIONS.names(), files=True)
    """Importance weights for the gap between the rollout engine's and the trainer's log-probs: a registered correction,
    or `path/to/file.py:function`."""
    low: float | None = limited(None, above=0, used_by=[_CORRECTED])
    """Smallest weight: truncation raises to it, masking drops what is below; null: no lower bound."""
    high: float | None = limited(2.0, above=0, used_by=[_CORRECTED])
    """Largest weight: truncation lowers to it, masking drops what is above; null: no upper bound."""
    kwargs: dict[str, Any] = setting(dict, used_by=[own_function("algorithm.correction.name")])
    """Further keyword arguments for a function of your own."""


@dataclass
class AlgorithmConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    entropy_coef: float = limited(0.0, at_least=0)
    """Weight of the entropy bonus."""


@dataclass
class OptimConfig:
    lr: float = limited(1e-6, above=0)
    """Peak learning rate of AdamW."""
    betas: list[float] = limited(lambda: [0.9, 0.999], at_least=0, below=1)
    """AdamW's decay rates."""
    eps: float = limited(1e-8, at_least=1e-30)
    """AdamW's epsilon."""
    weight_decay: float = limited(0.0, at_least=0)
    """Decoupled weight decay; norms and biases are exempt."""
    schedule: str = choice("constant", ("constant", "linear", "cosine"))
    """Learning rate after the warm-up, over `trainer.max_steps`."""
    warmup_steps: int = limited(0, at_least=0)
    """Updates over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = limited(0.0, at_least=0, at_most=1, used_by=[one_of("optim.schedule", "linear", "cosine")])
    """What linear and cosine schedules are heading for, one update past the last, as a share of `lr`."""
    grad_clip: float = limited(1.0, at_least=0)
    """Largest gradient norm; 0 does not clip."""


@dataclass
class Fsdp2Config:
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights after its forward and gather them again for its backward; false keeps them in
    between: less to move, more memory."""
    offload: bool = False
    """Keep parameters, gradients and AdamW's moments in host memory, where the update then runs; a layer's weights are
    copied to the device when it needs them."""


@dataclass
class DeepspeedConfig:
    stage: int = limited(2, at_least=1, at_most=3)
    """What is cut over the ranks (ZeRO). 1: AdamW's moments; 2: gradients too; 3: weights too, which are gathered a
    module at a time when a pass needs them."""
    offload_optimizer: bool = False
    """Keep fp32 masters and AdamW's moments in host memory, where the update then runs."""
    offload_parameters: bool = setting(False, used_by=[one_of("trainer.deepspeed.stage", 3)])
    """Keep the weights in host memory too, until a pass needs them; stage 3 only."""
    config: str | None = setting(None, path=True)
    """JSON file in DeepSpeed's format with what there is no setting for here: bucket sizes, prefetching, profilers.
    What contradicts the settings of the run is refused."""


@dataclass
class TrainerConfig:
    output_dir: str = setting("runs/default", path=True)
    """Folder for checkpoints, logs, the resolved config and the final model."""
    prompts_per_step: int = limited(32, at_least=1)
    """Prompts per step over all ranks; each is sampled `rollout.n` times."""
    prompts_per_update: int | None = limited(None, at_least=1)
    """Prompts per optimizer update; null takes prompts_per_step (one update per batch)."""
    epochs_per_batch: int = limited(1, at_least=1)
    """Passes over each batch of samples."""
    tokens_per_micro_batch: int | None = limited(None, at_least=1)
    """Tokens (prompt, response, padding) of one forward and backward pass on one device; null: 16384 on an accelerator,
    4096 on a CPU, whose caches hold no more, or what a device has of the longest sequence if that is more."""
    max_steps: int = limited(0, at_least=0)
    """Steps to train; 0 derives it from `epochs`."""
    epochs: int = limited(1, at_least=1, used_by=[off("trainer.max_steps", "=0")])
    """Passes over the training data where `max_steps` is 0."""
    seed: int = limited(0, at_least=0, at_most=2**32 - 1)
    """Seed of the data order, of sampling and of new adapter weights."""
    strategy: str = choice("auto", lambda: ("auto", *catalog.STRATEGIES.names()))
    """How one policy is trained by one process per device. `single`: one process. `ddp`: each has all of it, gradients
    are averaged. `fsdp2`: weights, gradients and moments are cut over all (fully_shard). `deepspeed`: the same by
    DeepSpeed, in stages; an optional package: pip install "hwgrpo[deepspeed]". auto: ddp where a launcher started
    several processes (torchrun), else single."""
    sequence_parallel_size: int = limited(1, at_least=1)
    """Consecutive ranks that share every sequence when the policy is trained and scored (Ulysses): each holds this part
    of the tokens, and of the heads in attention, so that a response may be this many times as long. It divides the
    ranks and the model's attention heads; every strategy of several processes takes it."""
    tensor_parallel_size: int = limited(1, at_least=1)
    """Consecutive ranks over which every decoder layer is cut for good, by transformers' tensor-parallel plan of the
    model: each computes with this part of its heads and intermediate units, and holds this part of the tokens between.
    With strategy fsdp2, which cuts each part further over the groups; it divides the ranks and the key-value heads."""
    fsdp2: Fsdp2Config = setting(Fsdp2Config, used_by=[one_of("trainer.strategy", "fsdp2")])
    deepspeed: DeepspeedConfig = setting(DeepspeedConfig, used_by=[one_of("trainer.strategy", "deepspeed")])
    resume: str = setting("auto", path=True)
    """auto continues from the newest checkpoint in output_dir; never starts over (and refuses a used folder);
    else the folder of a checkpoint."""
    save_every: int = limited(0, at_least=0)
    """Steps between checkpoints; 0 writes one at the end and on a signal."""
    save_async: bool = setting(True, used_by=[on("trainer.save_every", " of 1 or more")])
    """Train on while a checkpoint is written, from a copy of the trainable parameters and their moments in host memory
    (12 bytes a parameter, over all ranks). The one at the end and on a signal needs none; false: no other does."""
    keep_checkpoints: int = limited(2, at_least=1)
    """Newest checkpoints that are kept."""
    max_skipped_updates: int = limited(3, at_least=0)
    """Updates in a row that may be left out because their gradient is not finite; one more ends the run."""
    validate_every: int = limited(0, at_least=0, used_by=[_VALIDATION])
    """Steps between validations; 0 validates at the start and at the end."""
    validate_at_start: bool = setting(True, used_by=[_VALIDATION])
    """Validate before the first step, so that the summary can say what training changed."""
    validation_n: int = limited(4, at_least=0, used_by=[_VALIDATION])
    """Samples per validation prompt at the training temperature, beside the greedy one; 0 samples none."""
    save_final_model: bool = True
    """Write the trained model to output_dir/final in Hugging Face format."""
    deterministic: bool = False
    """Ask torch and the backend's libraries for the same numbers in every run (slower on accelerators); an operation
    that has no such kernel is an error. `hwgrpo env --deterministic` shows the variables."""
    process_group_timeout: float = limited(7200.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds that a rank waits for the others, e.g. while rank 0 reads or writes a large model, and its main thread
    for those that generate and write checkpoints; after them one is taken to hang, and the run ends with an error."""
    threads: int = limited(0, at_least=0, at_most=1024)
    """CPU threads per process; 0 leaves torch's default, shared out among the ranks of this host."""


@dataclass
class BackendConfig:
    name: str = choice("auto", _backend_choices)
    """Device family; auto takes the one that this host can use and refuses to guess between two."""


@dataclass
class KernelsConfig:
    pins: dict[str, str] = field(default_factory=dict)
    """op -> implementation that must be used, e.g. {row_stats: torch}; one that cannot run is an error."""
    strict: bool = False
    """Refuse to fall back from the backend's preferred implementation."""
    chunk_rows: int | None = limited(None, at_least=1)
    """Rows of logits that exist at a time; null: 1.25 GiB of them on accelerators, 8 MiB on CPU."""
    logits_dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Dtype of a chunk of logits; auto takes the compute dtype."""


@dataclass
class ObserveConfig:
    loggers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Where metrics go; `jsonl` writes metrics.jsonl and is needed for exact resume of logs. `wandb`, `trackio` and
    `swanlab` send them to that service too, each an optional package: pip install "hwgrpo[wandb]"."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of your own, `path/to/file.py:function` each. `function(prompts, completions, rewards, advantages)`
    returns name -> one value per response; `name/mean`, `name/max` and `name/min` over all ranks are logged."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the functions that `metrics` and `loggers` name in files:
    `observe.kwargs.my_function.threshold=0.5`."""
    project: str | None = setting(None, used_by=[_SERVICE])
    """Project under which wandb, trackio and swanlab file the run; null: hwgrpo."""
    run_name: str | None = setting(None, used_by=[_SERVICE])
    """Name of the run there; null: the last part of trainer.output_dir."""
    progress: str = choice("auto", ("auto", "rich", "plain", "none"))
    """What is shown: a live panel on a terminal, else a line per step."""
    log_every: int = limited(1, at_least=1, used_by=[one_of("observe.progress", "auto", "plain")])
    """Steps between lines of progress."""
    completions_per_step: int = limited(16, at_least=0)
    """Samples written to completions.jsonl per step (whole groups first); 0 writes none."""
    warnings: bool = True
    """Say in words when the numbers look unwell (reward flat, groups all equal, KL growing, ...), and what to try."""


@dataclass
class Config:
    """The settings of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    plugins: list[str] = field(default_factory=list)
    """Python files, or modules of this environment, that are imported before the settings are checked: what they
    register (see docs/extend.md) can be named in them."""
