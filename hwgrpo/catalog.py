"""The names that settings select, each with its code as a string, which is imported when it is loaded.

Which settings a loss, an estimator or a KL estimator reads is declared here alone; the schema's refusals of settings
without effect, their messages and the tables of the pages follow from it.
"""

from dataclasses import dataclass

from hwgrpo.registry import Component, Registry

_SCALE = ("std", "std_correction", "eps")
"""Settings of the standard deviation that centred rewards are divided by."""


@dataclass(frozen=True)
class Estimator(Component):
    """An advantage estimator."""

    of_single_responses: bool = False
    """Whether it compares with something else than the group, so that `rollout.n` may be 1."""
    of_turns: bool = False
    """Whether the steps whose rewards it reads are the turns of responses, whatever `algorithm.process` says."""
    no_kl: str | None = None
    """Why the KL cannot be in the reward; None: it can."""


ESTIMATORS = {
    "grpo": Estimator("hwgrpo.algorithms.advantages:grpo", reads=(*_SCALE, "singleton")),
    "rloo": Estimator("hwgrpo.algorithms.advantages:rloo", reads=("singleton",)),
    "reinforce_plus_plus_baseline": Estimator(
        "hwgrpo.algorithms.advantages:reinforce_plus_plus_baseline", reads=("singleton",)
    ),
    "opo": Estimator("hwgrpo.algorithms.advantages:opo", reads=("singleton",)),
    "gpg": Estimator("hwgrpo.algorithms.advantages:gpg", reads=("singleton",)),
    "grpo_passk": Estimator("hwgrpo.algorithms.advantages:grpo_passk", reads=(*_SCALE, "singleton")),
    "max_rl": Estimator("hwgrpo.algorithms.advantages:max_rl", reads=("singleton",), no_kl="takes no negative rewards"),
    "gdpo": Estimator(
        "hwgrpo.algorithms.advantages:gdpo",
        reads=(*_SCALE, "singleton", "kwargs"),
        no_kl="compares reward functions, which have no KL",
    ),
    "reinforce_plus_plus": Estimator(
        "hwgrpo.algorithms.advantages:reinforce_plus_plus", reads=("singleton",), of_single_responses=True
    ),
    "process": Estimator(
        "hwgrpo.algorithms.advantages:process",
        reads=(*_SCALE, "singleton"),
        no_kl="compares rewards of steps, which have no KL",
    ),
    "gigpo": Estimator(
        "hwgrpo.algorithms.turn_advantages:gigpo",
        reads=(*_SCALE, "singleton", "kwargs"),
        of_turns=True,
        no_kl="compares rewards of turns, which have no KL",
    ),
    "remax": Estimator("hwgrpo.algorithms.advantages:remax", reads=("singleton",), of_single_responses=True),
    "online_rft": Estimator(
        "hwgrpo.algorithms.advantages:online_rft",
        reads=("kwargs",),
        of_single_responses=True,
        no_kl="trains on responses above a threshold, which the KL would only move",
    ),
    "optimal_token_baseline": Estimator(
        "hwgrpo.algorithms.advantages:optimal_token_baseline",
        reads=("singleton",),
        no_kl="compares rewards to go, which have no KL here",
    ),
}
ADVANTAGES = Registry("advantage estimator", ESTIMATORS)
"""Functions `(rewards_S, group_S, valid_S, config, lengths_S=None) -> advantages_S`, or `advantages_R` with the
decorator `@token_level`; one with an argument `parts` is also given {reward function: (weight, its rewards_S)}, one
with an argument `steps` the `StepRewards`, one with an argument `greedy_S` the rewards of greedy responses, one with
an argument `token_probs` the `TokenProbs`, one with an argument `kl_R` the KL of tokens in the reward. `clip` applies
to all of them."""
ADVANTAGES_OF_SINGLE_RESPONSES = tuple(name for name, each in ESTIMATORS.items() if each.of_single_responses)
POLICY_LOSSES = Registry(
    "policy loss",
    {
        "ppo_clip": Component(
            "hwgrpo.algorithms.losses:ppo_clip",
            reads=("clip_low", "clip_high", "dual_clip", "delta", "log_ratio_clamp"),
        ),
        "gspo": Component("hwgrpo.algorithms.losses:gspo", reads=("clip_low", "clip_high", "delta")),
        "cispo": Component("hwgrpo.algorithms.losses:cispo", reads=("clip_low", "clip_high", "log_ratio_clamp")),
        "sapo": Component("hwgrpo.algorithms.losses:sapo", reads=("log_ratio_clamp", "tau_pos", "tau_neg")),
        "gpg": Component("hwgrpo.algorithms.losses:gpg"),
        "gmpo": Component("hwgrpo.algorithms.losses:gmpo", reads=("clip_low", "clip_high")),
        "vespo": Component("hwgrpo.algorithms.losses:vespo", reads=("log_ratio_clamp", "kwargs")),
        "topr": Component("hwgrpo.algorithms.losses:topr", reads=("log_ratio_clamp",)),
        "dppo_tv": Component(
            "hwgrpo.algorithms.losses:dppo_tv", reads=("clip_low", "clip_high", "log_ratio_clamp", "kwargs")
        ),
        "dppo_kl": Component(
            "hwgrpo.algorithms.losses:dppo_kl", reads=("clip_low", "clip_high", "log_ratio_clamp", "kwargs")
        ),
        "dro": Component("hwgrpo.algorithms.losses:dro", reads=("kwargs",)),
        "kl_cov": Component("hwgrpo.algorithms.losses:kl_cov", reads=("kwargs",)),
        "clip_cov": Component("hwgrpo.algorithms.losses:clip_cov", reads=("clip_low", "clip_high", "kwargs")),
    },
)
"""`Scoped` functions `(surrogate_input, config) -> (pg_loss_N, {metric: per-row})`."""
KL_ESTIMATORS = Registry(
    "KL estimator",
    {
        "k1": "hwgrpo.algorithms.kl:k1",
        "k2": "hwgrpo.algorithms.kl:k2",
        "k3": Component("hwgrpo.algorithms.kl:k3", reads=("input_clamp", "output_clamp")),
        "abs": "hwgrpo.algorithms.kl:absolute",
        "k1+": "hwgrpo.algorithms.kl:k1_plus",
        "k3+": Component("hwgrpo.algorithms.kl:k3_plus", reads=("input_clamp", "output_clamp")),
        "exact": "hwgrpo.algorithms.kl:exact",
    },
)
"""Functions `(logprob_N, ref_logprob_N) -> kl_N`, with the settings that they read as keyword arguments; `exact` is
`(full_kl_N) -> kl_N`."""
EXACT_KL = "exact"
"""The one that is no estimate: the kernels compute it over the full vocabulary, from the reference's hidden states."""
AGGREGATIONS = Registry(
    "loss aggregation",
    {
        "token-mean": "hwgrpo.algorithms.aggregation:token_mean",
        "token-sum": "hwgrpo.algorithms.aggregation:token_sum",
        "seq-mean-token-sum": "hwgrpo.algorithms.aggregation:seq_mean_token_sum",
        "seq-mean-token-sum-norm": "hwgrpo.algorithms.aggregation:seq_mean_token_sum_norm",
        "seq-mean-token-mean": "hwgrpo.algorithms.aggregation:seq_mean_token_mean",
        "prompt-mean": "hwgrpo.algorithms.aggregation:prompt_mean",
    },
)
"""Functions `(lengths_S, totals) -> weight_S`."""
CORRECTIONS = Registry(
    "rollout correction",
    {
        "none": "hwgrpo.algorithms.correction:none",
        "token_truncate": "hwgrpo.algorithms.correction:token_truncate",
        "token_mask": "hwgrpo.algorithms.correction:token_mask",
        "sequence_truncate": "hwgrpo.algorithms.correction:sequence_truncate",
        "sequence_mask": "hwgrpo.algorithms.correction:sequence_mask",
        "geometric_truncate": "hwgrpo.algorithms.correction:geometric_truncate",
        "geometric_mask": "hwgrpo.algorithms.correction:geometric_mask",
    },
)
"""`Scoped` functions `(log_ratio_N, config, cu_seqlens) -> weight_N`, or None for no correction."""
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "veto"),
)
"""Statistics of `algorithm.correction.reject`."""
SAFE_LOG_RATIO = 20.0
"""Log-ratios are kept within plus or minus this before exp in importance weights, their second moments and these
statistics, as in verl: e^20 is far beyond any sensible bound. That of `veto` and estimates of the KL are not."""
REWARDS = Registry(
    "reward",
    {
        "exact_match": "hwgrpo.rewards.verifiable:exact_match",
        "gsm8k": "hwgrpo.rewards.verifiers.gsm8k:gsm8k",
        "math": "hwgrpo.rewards.mathematics:math",
        "geo3k": "hwgrpo.rewards.verifiers.geo3k:geo3k",
        "format": "hwgrpo.rewards.verifiable:format_reward",
        "length": "hwgrpo.rewards.verifiable:length_reward",
        "multiple_choice": "hwgrpo.rewards.verifiers.multiple_choice:multiple_choice",
        "numeric": "hwgrpo.rewards.verifiers.numeric:numeric",
        "question_exact_match": "hwgrpo.rewards.verifiers.question_answers:question_exact_match",
        "question_f1": "hwgrpo.rewards.verifiers.question_answers:question_f1",
        "json_schema": "hwgrpo.rewards.verifiers.json_schema:json_schema",
        "regex": "hwgrpo.rewards.verifiers.regular_expression:regex",
        "tags": "hwgrpo.rewards.verifiers.tag_counts:tags",
        "length_cosine": "hwgrpo.rewards.verifiers.cosine_length:length_cosine",
        "repetition": "hwgrpo.rewards.verifiers.repetition:repetition",
        "by_source": "hwgrpo.rewards.verifiers.by_source:by_source",
        "language": "hwgrpo.rewards.verifiers.language:language",
        "reasoning_gym": "hwgrpo.rewards.verifiers.reasoning_gym_score:reasoning_gym",
        "reward_model": "hwgrpo.rewards.models.reward_model:RewardModel",
        "process_reward_model": "hwgrpo.research.process_reward_model:ProcessRewardModel",
        "online_reward_model": "hwgrpo.research.online_reward_model:OnlineRewardModel",
        "served_reward_model": "hwgrpo.rewards.services.served_reward_model:ServedRewardModel",
        "judge": "hwgrpo.rewards.services.judge:Judge",
        "http": "hwgrpo.rewards.services.http_reward:HttpReward",
        "code": "hwgrpo.sandbox.code_reward:code",
        "environment": "hwgrpo.rewards.trajectory_outcomes:EnvironmentReward",
    },
)
VERIFYING_REWARDS = ("online_reward_model",)
"""Rewards that call another one, named by their argument `verifier`."""
SANDBOX_LEVELS = ("auto", "namespaces", "seccomp", "none")
"""Protection levels of the sandbox that runs programs of the model; `auto` selects the strongest that the host has."""
TASK_SCHEMES = ("task://", "reasoning_gym://")
"""Prefixes of data that is made here, with splits of its own."""
TASKS = Registry(
    "task",
    {
        "sort": "hwgrpo.data.tasks:sort_digits",
        "add": "hwgrpo.data.tasks:add_numbers",
        "copy": "hwgrpo.data.tasks:copy_word",
        "calculator": "hwgrpo.data.agent_tasks:calculator",
        "lookup": "hwgrpo.data.agent_tasks:lookup",
        "guess": "hwgrpo.data.agent_tasks:guess",
        "spell": "hwgrpo.data.agent_tasks:spell",
        "squares": "hwgrpo.data.picture_tasks:squares",
        "look": "hwgrpo.data.picture_tasks:look",
    },
)
ENGINES = Registry(
    "rollout.engine",
    {
        "auto": "hwgrpo.rollout.local:LOCAL",  # until hwgrpo.planning.engine_choice has resolved it
        "local": "hwgrpo.rollout.local:LOCAL",
        "sglang_server": "hwgrpo.rollout.server:SGLANG_SERVER",
        "vllm": "hwgrpo.rollout.vllm:VLLM",
        "vllm_server": "hwgrpo.rollout.server:VLLM_SERVER",
    },
    group="hwgrpo.engines",
)
"""`EngineKind`s."""
RESPONSE_SOURCES = Registry(
    "rollout.source",
    {
        "on_demand": "hwgrpo.training.feed.on_demand:on_demand",
        "filtered": "hwgrpo.training.feed.on_demand:on_demand",
        "prefetch": "hwgrpo.training.feed.prefetcher:prefetch",
    },
)
"""Functions `(SourceParts) -> ResponseSource`."""
WORKFLOWS = Registry(
    "rollout.workflow",
    {
        "single_turn": "hwgrpo.rollout.workflow:single_turn",
        "environment": "hwgrpo.agents.episode:EnvironmentWorkflow",
        "tools": "hwgrpo.agents.episode:EnvironmentWorkflow",
    },
)
"""Coroutines `(Prompt, Sampler) -> trajectories`, or classes of those, made with `WorkflowParts`."""
CALL_FORMATS = Registry(
    "rollout.agent.call_format",
    {
        "deepseek": "hwgrpo.agents.call_formats:deepseek",
        "glm": "hwgrpo.agents.call_formats:glm",
        "gpt_oss": "hwgrpo.agents.call_formats:gpt_oss",
        "hermes": "hwgrpo.agents.call_formats:hermes",
        "kimi": "hwgrpo.agents.call_formats:kimi",
        "llama3": "hwgrpo.agents.call_formats:llama3",
        "mistral": "hwgrpo.agents.call_formats:mistral",
        "qwen3_coder": "hwgrpo.agents.call_formats:qwen3_coder",
    },
)
"""`CallFormat`s: how families of models write tool calls."""
TOOLS = Registry(
    "tool",
    {
        "calculator": "hwgrpo.agents.calculator_tool:Calculator",
        "python": "hwgrpo.sandbox.python_tool:Python",
        "search": "hwgrpo.agents.search_tool:Search",
    },
)
"""Classes of tools that a policy may call (`hwgrpo.agents.thread_tool.Registered`), for `rollout.agent.tools`."""
ENVIRONMENTS = Registry(
    "environment",
    {
        "guessing_game": "hwgrpo.agents.guessing_game:GuessingGame",
        "looking": "hwgrpo.agents.looking:Looking",
        "gymnasium": "hwgrpo.agents.gymnasium_env:GymnasiumEnvironment",
        "second_try": "hwgrpo.agents.second_try:SecondTry",
        "verl_tools": "hwgrpo.migrate.verl_tools:VerlTools",
    },
)
"""Classes of environments, for `rollout.agent.environments`."""
LAYOUTS = Registry(
    "model.layout",
    {
        "padded": "hwgrpo.training.policy.layouts:PADDED",
        "packed": "hwgrpo.training.policy.layouts:PACKED",
        "grouped": "hwgrpo.training.policy.layouts:GROUPED",
        "grouped_masked": "hwgrpo.training.policy.layouts:GROUPED_MASKED",
    },
)
STRATEGIES = Registry(
    "trainer.strategy",
    {
        "single": "hwgrpo.training.strategies.strategy_kind:SINGLE",
        "ddp": "hwgrpo.training.strategies.strategy_kind:DDP",
        "fsdp2": "hwgrpo.training.strategies.strategy_kind:FSDP2",
        "deepspeed": "hwgrpo.training.strategies.strategy_kind:DEEPSPEED",
    },
    group="hwgrpo.strategies",
)
"""`StrategyKind`s."""
LOGGERS = Registry(
    "observe.loggers",
    {
        "jsonl": "hwgrpo.observe.loggers.jsonl:JsonlLogger",
        "tensorboard": "hwgrpo.observe.loggers.tensorboard:TensorBoardLogger",
        "wandb": "hwgrpo.observe.loggers.wandb:WandbLogger",
        "trackio": "hwgrpo.observe.loggers.trackio:TrackioLogger",
        "swanlab": "hwgrpo.observe.loggers.swanlab:SwanLabLogger",
    },
    group="hwgrpo.loggers",
)
STAGES = Registry("trainer.stages", {})
"""Classes of stages (`hwgrpo.training.stages.own_stage`); hwgrpo's own have no names."""
METRICS = Registry("observe.metrics", {"code": "hwgrpo.sandbox.code_reward:reason_shares"})
"""Functions `(prompts, completions, rewards, advantages_S) -> {name: values_S}`."""

SERVICES = ("wandb", "trackio", "swanlab")
"""Loggers that need a package, which hwgrpo's extra of the same name installs."""

REWARD_MODEL_LOSSES = ("classification", "mse", "bradley_terry")
"""Values of `reward_model.loss`: functions of `hwgrpo.research.reward_losses`."""

OVERLONG_POLICIES = ("filter", "truncate_left", "truncate_right", "error")
"""Values of `data.overlong`, for prompts that are too long."""
FINAL_DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of a saved model's weights."""
DATA_CHECK = "hwgrpo.data.missing_data:missing_data"
"""What checks that the data that settings name is here, by a name, since settings import no package above them."""
PEER_NAMES = Registry(
    "peer name",
    {
        "key": "hwgrpo.migrate.names_here:name_here",
        "last name": "hwgrpo.migrate.names_here:last_name_here",
        "value": "hwgrpo.migrate.names_here:value_here",
    },
)
"""What a setting or value of verl or TRL is called here: loaded for the message of an error alone."""
