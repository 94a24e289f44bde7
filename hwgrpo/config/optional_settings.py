"""Settings that recipes rarely need: adapters, group filters, sharded strategies, servers, kernels, loggers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hwgrpo import catalog
from hwgrpo.config.fields import (
    LONGEST_TIMEOUT,
    AnyOf,
    Use,
    choice,
    holds,
    limited,
    none_of,
    off,
    on,
    one_of,
    own_function,
    setting,
)
from hwgrpo.paths import verifier_of
from hwgrpo.user_code import names_a_file

ADAPTERS = on("model.lora.rank", " above 0")
"""Condition that a run trains adapters."""
STEPS = (*one_of("algorithm.advantage.name", "process"), *own_function("algorithm.advantage.name"))
"""Condition that the advantage estimator reads rewards of steps."""
_PROGRAMS = (
    Use(
        "reward.functions",
        (),
        " with code",
        lambda functions: any(
            name == "code" or names_a_file(name) for each in functions for name in (each.name, verifier_of(each) or "")
        ),
    ),
)
"""Condition that a reward runs programs: code, or a function of the user's with an argument `sandbox_level`."""
_SAMPLED = on("trainer.validation_n", " of 1 or more")
_OWN_SERVER = off("rollout.server.url")
_DIFFICULTY = tuple(
    Use(f"data.difficulty.{key}", (), " set", lambda threshold: threshold is not None)
    for key in ("easy_threshold", "hard_threshold")
)
_CORRECTED = none_of("algorithm.correction.name", "none")
_SERVICE = holds("observe.loggers", "wandb", "trackio", "swanlab")
_FILTERED = on("algorithm.filter_groups.enable", "=true")
_PAIRS = one_of("reward_model.loss", "bradley_terry")
_OUTCOMES = none_of("reward_model.loss", "bradley_terry")
_RUNNING_SERVER = on("rollout.server.url")
_KL_ON = on("algorithm.kl.coef", " above 0")
_KL_IN_LOSS = off("algorithm.kl.in_reward", "=false")


def _read_by_kl(setting: str) -> AnyOf:
    """Return the condition for a setting of the KL, which functions of the user's own do not get."""
    return one_of("algorithm.kl.estimator", *catalog.KL_ESTIMATORS.readers(setting))


@dataclass
class LoraConfig:
    rank: int = limited(0, at_least=0)
    """Rank of the low-rank adapters; 0 trains all parameters."""
    alpha: float = limited(32.0, above=0, used_by=[ADAPTERS])
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = limited(0.0, at_least=0, below=1, used_by=[ADAPTERS])
    """Dropout on the adapters' input. Above 0 the old log-probs are computed in a separate pass."""
    target_modules: list[str] = setting(lambda: ["all-linear"], used_by=[ADAPTERS])
    """Names of the linear layers that get adapters, or `all-linear`: all that process text, except the LM head. `re:`
    before a regular expression selects the layers whose full name it matches: `re:.*layers.[0-3].*q_proj`."""
    rslora: bool = setting(False, used_by=[ADAPTERS])
    """Multiply the output of new adapters by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    dora: bool = setting(False, used_by=[ADAPTERS])
    """Also train the norm of each output's weights (DoRA, arXiv 2402.09353); not with vLLM and `model.quantize`."""
    adapter: str | None = setting(None, path=True)
    """Folder of an existing adapter to train further, at its rank; a frozen copy of it is the reference."""
    base_dtype: str = choice("auto", ("auto", "float32", "bfloat16"), used_by=[ADAPTERS])
    """Dtype of the frozen base model's matrices and embeddings. auto: the compute dtype if their values are exact in
    it, as those of a model published in bfloat16 are, else float32. bfloat16 rounds other values, too."""


@dataclass
class SandboxConfig:
    level: str = choice("auto", catalog.SANDBOX_LEVELS, used_by=[_PROGRAMS])
    """Protection from programs that reward code runs (docs/sandbox.md). namespaces: own network, processes, users and
    files; seccomp: few system calls; auto: the first of them that this host allows; none: limits on resources alone."""


@dataclass
class DifficultyConfig:
    easy_threshold: float | None = limited(None)
    """Set prompts aside whose group had at least this mean reward when it was last sampled; null: none."""
    hard_threshold: float | None = limited(None)
    """The same for groups with at most this mean reward; null: none."""
    revisit: float = limited(0.1, at_least=0, at_most=1, used_by=[_DIFFICULTY])
    """Share of the epochs in which a prompt that is set aside is sampled all the same. Its group may take it back."""


@dataclass
class RewardModelConfig:
    loss: str = choice("classification", lambda: catalog.REWARD_MODEL_LOSSES)
    """Loss of `hwgrpo reward-model`: `classification` is binary cross-entropy with a label from 0 to 1, `mse` the
    squared difference from a number, `bradley_terry` -log sigmoid of the score of the chosen response minus that of the
    rejected one."""
    score_key: str = setting("reward", used_by=[_OUTCOMES])
    """Column with the label or number of a response, whose column `data.response_key` names."""
    chosen_key: str = setting("chosen", used_by=[_PAIRS])
    """Column with the better response: text, or chat messages."""
    rejected_key: str = setting("rejected", used_by=[_PAIRS])
    """Column with the worse response."""
    margin_key: str | None = setting(None, used_by=[_PAIRS])
    """Column with the margin by which the chosen response's score should be higher; null: none."""


@dataclass
class FilterGroupsConfig:
    enable: bool = False
    """Train on groups whose rewards differ, and sample further prompts in place of the others, until the step has its
    prompts (DAPO's dynamic sampling)."""
    metric: str = setting("reward", used_by=[_FILTERED])
    """Values that must differ within a group: `reward`, the name of a reward function, or a field that one returns
    beside its score, e.g. `acc`."""
    min_std: float = limited(0.0, at_least=0, used_by=[_FILTERED])
    """Least standard deviation, exclusive, of these values in a group; 0: any difference."""
    mean_above: float | None = limited(None, used_by=[_FILTERED])
    """Least mean, exclusive, of these values in a group; null: any."""
    mean_below: float | None = limited(None, used_by=[_FILTERED])
    """Largest mean, exclusive; null: any."""
    max_rounds: int = limited(10, at_least=1, used_by=[_FILTERED])
    """Most rounds of sampling in a step, each of at most `trainer.prompts_per_step` prompts. After them groups that
    were filtered out fill the step."""
    keep_surplus: bool = setting(False, used_by=[_FILTERED])
    """Train the next step on groups beyond the step's prompts instead of discarding them. They are of older weights,
    which needs `algorithm.correction`."""
    replay_groups: int = limited(0, at_least=0, used_by=[_FILTERED])
    """Groups to keep for replay, the newest ones that passed: drawn in proportion to their standard deviation, they
    fill steps that have too few after `max_rounds`. Needs `algorithm.correction`, as surplus does; 0: none."""


@dataclass
class CorrectionConfig:
    name: str = choice("none", lambda: catalog.CORRECTIONS.names(), files=True)
    """Importance weights for the gap between the rollout engine's and the trainer's log-probs: a registered correction,
    or `path/to/file.py:function`."""
    low: float | None = limited(None, above=0, used_by=[_CORRECTED])
    """Lower bound of the weights: truncation clamps to it, masking drops tokens below it; null: none."""
    high: float | None = limited(2.0, above=0, used_by=[_CORRECTED])
    """Upper bound of the weights: truncation clamps to it, masking drops tokens above it; null: none."""
    reject: dict[str, Any] = setting(dict)
    """Leave out what the gap makes doubtful, also without weights: statistic -> bounds (docs/grpo.md), e.g.
    {seq_mean_k1: [0.99, 1.01], token_k3: 0.1, veto: 1e-4}; verl's rollout_rs."""
    normalize: bool = setting(False, used_by=[_CORRECTED])
    """Divide the weights by their mean over the update (verl's rollout_is_batch_normalize), which takes a scoring pass
    before each update."""
    kwargs: dict[str, Any] = setting(dict, used_by=[own_function("algorithm.correction.name")])
    """Further keyword arguments for a function of your own."""


LARGEST_ERROR = 0.2
"""Bound of the relative error that an adaptive KL coefficient follows."""


@dataclass
class KlConfig:
    coef: float = limited(0.0, at_least=0)
    """Weight of the KL to the reference model, in the loss or in the reward; 0 loads no reference model."""
    estimator: str = choice("k3", lambda: catalog.KL_ESTIMATORS.names(), files=True, used_by=[_KL_ON])
    """KL estimator (Schulman's k1, k2, k3; a `+` has k2's gradient), or `path/to/file.py:function`. `exact` is the KL
    over the full vocabulary instead of an estimate from the sampled token. The expected gradient of k3 is that of
    KL(reference, policy), those of k2, k1+, k3+ and exact are that of KL(policy, reference)."""
    input_clamp: float | None = limited(20.0, above=0, used_by=[_KL_ON, _read_by_kl("input_clamp")])
    """k3, k3+: clamp of the log-ratio to the reference, plus or minus; null: none, as in TRL."""
    output_clamp: float | None = limited(10.0, above=0, used_by=[_KL_ON, _read_by_kl("output_clamp")])
    """k3, k3+: clamp of the estimate, plus or minus; null: none, as in TRL."""
    times_ratio: bool = setting(False, used_by=[_KL_ON, _KL_IN_LOSS])
    """Multiply the KL by the token's ratio, which makes its gradient unbiased (TRL's use_bias_correction_kl)."""
    in_reward: bool = setting(False, used_by=[_KL_ON])
    """Take the KL of each response, summed over its tokens, from its reward instead of adding it to the loss (verl's
    use_kl_in_reward). It takes a pass for the old log-probs, and is not differentiated: k1 is the usual estimator."""
    target: float | None = limited(None, above=0, used_by=[_KL_ON])
    """KL, nats per token, to which `coef`, then the first one, is adapted after each step (verl's
    kl_ctrl.target_kl); null: fixed."""
    sync_every: int = limited(0, at_least=0, used_by=[_KL_ON])
    """Steps after which the reference model is moved towards the policy (TRL's ref_model_sync_steps); 0: it stays the
    model of the start. With adapters it is a frozen copy of the adapter. Not with DeepSpeed's stage 3."""
    sync_share: float = limited(1.0, above=0, at_most=1, used_by=[on("algorithm.kl.sync_every", " above 0")])
    """The policy's share in the moved reference; 1 copies it (TRL's ref_model_mixup_alpha). Adapters: only 1."""
    horizon: int = limited(10000, at_least=1, used_by=[on("algorithm.kl.target", " above 0")])
    """Responses over which an adapted `coef` changes by at most 20 percent (verl's kl_ctrl.horizon); above 0.2 times
    the responses of a step."""
    kwargs: dict[str, Any] = setting(dict, used_by=[_KL_ON, own_function("algorithm.kl.estimator")])
    """Further keyword arguments for a function of your own."""


@dataclass
class ProcessConfig:
    delimiter: str = setting("\n", used_by=[STEPS, off("algorithm.process.pattern"), off("algorithm.process.function")])
    """Text that ends a step of a response."""
    pattern: str | None = setting(None, used_by=[STEPS, off("algorithm.process.function")])
    """Regular expression in place of the delimiter, e.g. '\\n+'."""
    function: str | None = setting(None, path=True, used_by=[STEPS])
    """`path/to/file.py:function` in place of both: `function(text)` returns the ascending ends of the steps, in
    characters."""


@dataclass
class RolloutServerConfig:
    url: str | list[str] | None = None
    """Address of a running server, e.g. http://127.0.0.1:8000, or a list of those, over which requests are spread; null
    starts one and stops it with the run."""
    python: str | None = setting(None, path=True, used_by=[_OWN_SERVER])
    """Python of the environment that has vLLM or SGLang, e.g. /opt/vllm/bin/python; null: the trainer's, or for vLLM
    that of .venv-vllm or .venv-vllm-ascend, which `scripts/setup.sh --rollout` makes, if the trainer's has none for the
    run's devices. These two are asked, and used only where they belong to you or root."""
    host: str = setting("127.0.0.1", used_by=[_OWN_SERVER])
    """Address that the server listens on; the default is reachable from this host only."""
    port: int = limited(0, at_least=0, at_most=65535, used_by=[_OWN_SERVER])
    """Port that the server listens on, and the next ones those of further servers; 0: free ones."""
    env: dict[str, str] = setting(dict, used_by=[_OWN_SERVER])
    """Further environment variables of the server, e.g. its visible devices."""
    token_variable: str = "HWGRPO_SERVER_TOKEN"
    """Environment variable with the server's token; the server itself reads HWGRPO_SERVER_TOKEN. Where it is empty, a
    server that the run starts gets a random token."""
    transfer: str = choice("auto", ("auto", "folder", "group"))
    """Weight transfer to the server. `group`: a process group of rank 0 and the server's workers, over the backend's
    communication library; neither encrypted nor guarded by the token. `folder`: files. auto: the group where both
    sides have the same library, else a folder, with a note that says why. Adapters are sent as files."""
    weights_dir: str | None = setting(None, path=True, used_by=[none_of("rollout.server.transfer", "group")])
    """Folder for the transfer by files, visible to both sides; null: one in shared memory, for a server on this
    host."""
    wait_for_owner: float = limited(0.0, at_least=0, at_most=LONGEST_TIMEOUT, used_by=[_RUNNING_SERVER])
    """Seconds to wait for another run that uses a server at `url`; 0: an error that names that run."""
    take_over: bool = setting(False, used_by=[_RUNNING_SERVER])
    """Take over the servers at `url` from another run, which then ends with an error."""
    start_timeout: float = limited(600.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds that a server may take to start or restart."""
    request_timeout: float = limited(600.0, above=0, at_most=LONGEST_TIMEOUT)
    """Most seconds for a request, a prompt with its n responses, queueing included; then the server counts as hung."""
    retries: int = limited(3, at_least=0)
    """Retries of a request after a server died, hung or sent an invalid reply."""
    max_reply_mb: float = limited(256.0, above=0, at_most=1e6)
    """Largest reply that is read, in MiB."""


@dataclass
class ValidationSamplingConfig:
    temperature: float | None = limited(None, at_least=0.01, at_most=100, used_by=[_SAMPLED])
    """Temperature of the sampled responses of validations; null: `rollout.temperature`."""
    top_k: int | None = limited(None, at_least=0, used_by=[_SAMPLED])
    """Their top_k, 0 is off; null: `rollout.top_k`."""
    top_p: float | None = limited(None, above=0, at_most=1, used_by=[_SAMPLED])
    """Their top_p, 1 is off; null: `rollout.top_p`."""


@dataclass
class Fsdp2Config:
    sync_every: str = choice("auto", lambda: ("auto", "update", "micro_batch"))
    """When weights are gathered and gradients reduced. `update`: once per update; a device then holds the weights and
    fp32 gradients of all layers. `micro_batch`: layer by layer in each pass. auto: `update` if its plan fits."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward and gather them again for its backward; false keeps them: less
    communication, more memory. With sync_every=update this is for scoring only."""
    offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory and update there; a layer's weights are copied to
    the device when it needs them."""


@dataclass
class DeepspeedConfig:
    stage: int = limited(2, at_least=1, at_most=3)
    """ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too, which are gathered module by module when a
    pass needs them."""
    sync_every: str = choice(
        "auto", lambda: ("auto", "update", "micro_batch"), used_by=[one_of("trainer.deepspeed.stage", 2)]
    )
    """When stage 2 reduces gradients. `update`: once per update, as stage 1; a device then holds all fp32 gradients.
    `micro_batch`: in each pass, as stage 3. auto: `update` if its plan fits."""
    offload_optimizer: bool = False
    """Keep fp32 master weights and optimizer states in host memory and update there."""
    offload_parameters: bool = setting(False, used_by=[one_of("trainer.deepspeed.stage", 3)])
    """Keep the weights in host memory too; stage 3 only."""
    config: str | None = setting(None, path=True)
    """JSON file in DeepSpeed's format for options without a setting here: bucket sizes, prefetching, profilers. Options
    that contradict the run's settings are refused."""


@dataclass
class KernelsConfig:
    pins: dict[str, str] = field(default_factory=dict)
    """op -> required implementation, e.g. {row_stats: torch}; one that cannot run is an error."""
    strict: bool = False
    """Refuse to fall back from the backend's preferred implementation."""
    chunk_rows: int | None = limited(None, at_least=1)
    """Rows of logits computed at once; null: as many as fit 1.25 GiB on accelerators, 8 MiB on CPU."""
    logits_dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Dtype of a chunk of logits; auto: the compute dtype."""


@dataclass
class ObserveConfig:
    loggers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Loggers of metrics; `jsonl` writes metrics.jsonl and is needed for exact resume of logs. `wandb`, `trackio` and
    `swanlab` send them to that service, each an optional package: pip install "hwgrpo[wandb]"."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of your own, `path/to/file.py:function` each. `function(prompts, completions, rewards, advantages)`
    returns name -> one value per response; `name/mean`, `name/max` and `name/min` over all ranks are logged."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the functions that `metrics` and `loggers` name in files:
    `observe.kwargs.my_function.threshold=0.5`."""
    project: str | None = setting(None, used_by=[_SERVICE])
    """Project of the run in wandb, trackio and swanlab; null: hwgrpo."""
    run_name: str | None = setting(None, used_by=[_SERVICE])
    """Name of the run in wandb, trackio and swanlab; null: the last part of trainer.output_dir."""
    progress: str = choice("auto", ("auto", "rich", "plain", "none"))
    """Progress output: auto is a live panel (rich) on a terminal, else a line per step (plain)."""
    log_every: int = limited(1, at_least=1, used_by=[one_of("observe.progress", "auto", "plain")])
    """Steps between lines of progress."""
    completions_per_step: int = limited(16, at_least=0)
    """Samples written to completions.jsonl per step (complete groups first); 0 writes none."""
    warnings: bool = True
    """Warn when metrics look unhealthy (flat reward, zero-variance groups, growing KL, ...), with what to try."""
