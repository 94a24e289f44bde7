"""Settings of a run: name, type, default, limits, and a docstring with the effect of each.

A recipe states only what differs from these defaults. `hwgrpo config` prints this file as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from hwgrpo import catalog
from hwgrpo.config import conditions as when
from hwgrpo.config.backend_choices import attention_choices, backend_choices
from hwgrpo.config.fields import (
    LONGEST_TIMEOUT,
    choice,
    limited,
    none_of,
    off,
    on,
    one_of,
    own_function,
    setting,
)
from hwgrpo.config.shipped_files import preset_names

VISION_PARTS = ("none", "projector", "all")

FAILURE_POLICIES = ("raise", "value", "mask_sample", "drop_group")

LARGEST_ERROR = 0.2
"""Bound of the relative error that an adaptive KL coefficient follows."""


@dataclass
class LoraConfig:
    rank: int = limited(0, at_least=0)
    """Rank of the low-rank adapters; 0 trains all parameters."""
    alpha: float = limited(32.0, above=0, used_by=[when.ADAPTERS])
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = limited(0.0, at_least=0, below=1, used_by=[when.ADAPTERS])
    """Dropout on the adapters' input. Above 0 the old log-probs are computed in a separate pass."""
    target_modules: list[str] = setting(lambda: ["all-linear"], used_by=[when.ADAPTERS])
    """Names of the linear layers that get adapters, or `all-linear`: all that process text, except the LM head. `re:`
    before a regular expression selects the layers whose full name it matches: `re:.*layers.[0-3].*q_proj`."""
    rslora: bool = setting(False, used_by=[when.ADAPTERS])
    """Multiply the output of new adapters by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    dora: bool = setting(False, used_by=[when.ADAPTERS])
    """Also train the norm of each output's weights (DoRA, arXiv 2402.09353); not with vLLM and `model.quantize`."""
    adapter: str | None = setting(None, path=True)
    """Folder of an existing adapter to train further, at its rank; a frozen copy of it is the reference."""
    base_dtype: str = choice("auto", ("auto", "float32", "bfloat16"), used_by=[when.ADAPTERS])
    """Dtype of the frozen base model's matrices and embeddings. auto: the compute dtype if their values are exact in
    it, as those of a model published in bfloat16 are, else float32. bfloat16 rounds other values, too."""
    vision: str = choice("none", VISION_PARTS, used_by=[when.ADAPTERS])
    """Parts of a vision-language model that get adapters besides the text model: none, the `projector` that maps the
    tower's features, or `all`: it and the tower."""


@dataclass
class ModelConfig:
    path: str = setting(MISSING, path=True)
    """A local folder, a hub name, a GGUF file, or `builtin://tiny?task=sort` (a small model made and warm-started
    here)."""
    revision: str | None = setting(None, used_by=[when.NOT_BUILT_IN])
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = setting(None, path=True)
    """Folder or hub name of the tokenizer; null: the model's."""
    chat_template: str | None = setting(None, path=True)
    """File with a Jinja chat template that replaces the tokenizer's."""
    trust_remote_code: bool = setting(False, used_by=[when.NOT_BUILT_IN])
    """Run the Python code of a hub model."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Compute dtype; auto: the backend's default. Trainable parameters are always fp32 master weights."""
    attention: str = choice("auto", attention_choices)
    """Attention implementation; auto: the first of the backend's preferences that is usable."""
    fused_modules: list[str] = field(default_factory=lambda: ["auto"])
    """Modules replaced by the device's fused ones where self-tests of each and of the whole model find the same values:
    names (`rms_norm`, `rotary`, `swiglu`), `none`, or `auto`: all on Ascend and NVIDIA GPUs, none on AMD's."""
    layout: str = choice("auto", lambda: ("auto", *catalog.LAYOUTS.names()))
    """Layout of a micro-batch: `grouped` (a prompt once, followed by its responses), `padded` (one response per row,
    sorted by length) or `packed` (sequences concatenated); auto: where the model's attention allows it grouped, or on
    GPUs packed, whichever has less work for the longest prompts and responses; else padded (docs/layouts.md).
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
    train_vision: str = choice("none", VISION_PARTS, used_by=[off("model.lora.rank", " 0")])
    """Parts of a vision-language model that are trained besides the text model: none, which encodes the images of a
    prompt once; the `projector` that maps the tower's features; or `all`: it and the tower."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class FewShotConfig:
    prompt: str = MISSING
    """Message of the user; `data.instruction` is added to it."""
    response: str = MISSING
    """The model's answer."""


@dataclass
class DataImagesConfig:
    key: str | None = None
    """Column with the images of a prompt, for models that read images; null tries `images`, then `image`."""
    folder: str | None = setting(None, path=True)
    """Folder in which relative paths of images begin; null: that of the data file, for observations the working one."""
    max_per_prompt: int = limited(16, at_least=1)
    """Most images of a prompt; a row with more is an error."""
    max_pixels: int = limited(12_845_056, at_least=1)
    """Scale images with more pixels down to this area, with their ratio, before the model's processor scales them by
    its own limits. The default is that of Qwen's processors."""
    max_mb: float = limited(64.0, above=0, at_most=1e6)
    """Largest file of an image, in MiB."""
    allow_urls: bool = False
    """Fetch images that rows name by http(s) URLs; false: such a row is an error. A data file's URLs may name any host
    that this machine reaches, those of its own network included."""


@dataclass
class DifficultyConfig:
    easy_threshold: float | None = limited(None)
    """Set prompts aside whose group had at least this mean reward when it was last sampled; null: none."""
    hard_threshold: float | None = limited(None)
    """The same for groups with at most this mean reward; null: none."""
    revisit: float = limited(0.1, at_least=0, at_most=1, used_by=[when.DIFFICULTY])
    """Share of the epochs in which a prompt that is set aside is sampled all the same. Its group may take it back."""


@dataclass
class DataConfig:
    train: str | list[str] = setting(MISSING, path=True)
    """Training prompts: a .jsonl, .json, .parquet, .csv or .tsv file, a dataset folder, a hub name, `task://sort`, or
    `reasoning_gym://chain_sum?size=2000`; or a list of those, e.g. [a.jsonl,b.parquet], which are concatenated."""
    validation: str | list[str] | None = setting(None, path=True)
    """Validation prompts, as `train`; null: where `train` is one task, its own (a tenth of the size, of
    reasoning_gym://), otherwise no validation."""
    split: str = setting("train", used_by=[when.splits("data.train")])
    """Split to read where `train` names a hub dataset or a folder with several."""
    validation_split: str = setting("test", used_by=[when.splits("data.validation")])
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
    validation_max_rows: int = limited(256, at_least=0, used_by=[when.VALIDATION])
    """Use only the first rows of the validation data; 0 uses all."""
    shuffle: bool = True
    """Shuffle the rows of each epoch by `trainer.seed`."""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    images: DataImagesConfig = field(default_factory=DataImagesConfig)


@dataclass
class RolloutServerConfig:
    url: str | list[str] | None = None
    """Address of a running server, e.g. http://127.0.0.1:8000, or a list of those, over which requests are spread; null
    starts one and stops it with the run."""
    python: str | None = setting(None, path=True, used_by=[when.OWN_SERVER])
    """Python of the environment that has vLLM or SGLang, e.g. /opt/vllm/bin/python; null: the trainer's, or for vLLM
    that of .venv-vllm or .venv-vllm-ascend, which `scripts/setup.sh --rollout` makes, if the trainer's has none for the
    run's devices. These two are asked, and used only where they belong to you or root."""
    host: str = setting("127.0.0.1", used_by=[when.OWN_SERVER])
    """Address that the server listens on; the default is reachable from this host only."""
    port: int = limited(0, at_least=0, at_most=65535, used_by=[when.OWN_SERVER])
    """Port that the server listens on, and the next ones those of further servers; 0: free ones."""
    env: dict[str, str] = setting(dict, used_by=[when.OWN_SERVER])
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
    wait_for_owner: float = limited(0.0, at_least=0, at_most=LONGEST_TIMEOUT, used_by=[when.RUNNING_SERVER])
    """Seconds to wait for another run that uses a server at `url`; 0: an error that names that run."""
    take_over: bool = setting(False, used_by=[when.RUNNING_SERVER])
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
class ToolConfig:
    name: str = setting(MISSING, path=True)
    """A registered tool (`python`, `search`), or `path/to/file.py:function` with type hints and a docstring, from which
    the model gets its JSON schema."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of yours, which the model neither sees nor sets."""
    timeout: float = limited(30.0, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds per call, from when a process makes it. A call that takes longer is an error that the model reads; its
    process is killed. `search` has no limit."""
    workers: int = limited(4, at_least=1)
    """Processes that call it, per rank (of `search` threads): so many calls run at once, or eight times as many of an
    async function."""
    max_chars: int = limited(4096, at_least=16)
    """Longest text of a result, in characters, images not counted; a longer one is truncated, with a note of how many
    were left out, which does not count."""
    truncate: str = choice("middle", ("left", "middle", "right"))
    """Side of a long result that is left out."""


@dataclass
class EnvironmentConfig:
    name: str = setting(MISSING, path=True)
    """`path/to/file.py:Class` with `reset` and `step` (docs/agents.md), or a registered environment."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    label: str | None = None
    """Name by which rows choose it, where one class is used several times; null: the class's, or the registered one."""
    weight: float = limited(1.0, above=0)
    """Share of the rows without a column `environment` that get this environment, relative to the others'."""


@dataclass
class AgentConfig:
    tools: list[ToolConfig] = setting(list, used_by=[when.AGENT])
    """Functions that the policy may call. An entry may be just a name."""
    environments: list[EnvironmentConfig] = setting(list, used_by=[one_of("rollout.workflow", "environment")])
    """Environments that the policy acts in. Of several each row gets the one that its column `environment` names, else
    one by weight. An entry may be just a name."""
    max_turns: int | None = limited(None, at_least=1, used_by=[when.AGENT])
    """Most turns of the policy in a trajectory; null: as many as there are tokens for."""
    max_turn_tokens: int | None = limited(None, at_least=1, used_by=[when.AGENT])
    """Most tokens of a turn; null: as many as the trajectory has left. `rollout.max_response_tokens` bounds the
    trajectory, or each row of one that forks, observed tokens included."""
    call_format: str = choice("auto", lambda: ("auto", *catalog.CALL_FORMATS.names()), used_by=[when.AGENT])
    """How the model writes tool calls; auto: found in the chat template."""
    turn_timeout: float = limited(60.0, above=0, at_most=LONGEST_TIMEOUT, used_by=[when.AGENT])
    """Seconds that an environment may take to be made, for `reset` or for `step`, and each call of a tool from when one
    of its `workers` makes it: the wait for a free worker counts in no time limit."""
    trajectory_timeout: float | None = limited(None, above=0, at_most=LONGEST_TIMEOUT, used_by=[when.AGENT])
    """Seconds that the environment or the tools of a trajectory may take, all its turns together, without the wait for
    a free worker; null: any."""
    on_failure: str = choice("mask_sample", FAILURE_POLICIES, used_by=[when.AGENT])
    """When an environment raises, is late or returns an invalid observation, or an image of a tool's result cannot be
    shown: drop the trajectory, drop its group, stop the run, or give it the reward 0 (`value`). Any other failure of a
    tool is text that the model reads."""
    asynchronous: bool = setting(False, used_by=[none_of("rollout.workflow", "single_turn")])
    """Let each trajectory go on as soon as its tools have answered, so that no other one waits for a slow tool; with
    `rollout.engine=local`, `vllm_server` or `sglang_server`. Which responses are decoded together then depends on the
    tools' speed, and numbers may differ in their last bits from run to run. false: in rounds, whose numbers can be
    repeated and resumed bit for bit."""


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
    """How the responses to a prompt come about: `single_turn`, `tools` (the policy calls `agent.tools`), `environment`
    (it acts in `agent.environments`, docs/agents.md), or `path/to/file.py:function` of the prompt and a sampler
    (docs/extend.md), for turns of your own."""
    agent: AgentConfig = field(default_factory=AgentConfig)
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
    max_sequences: int | None = limited(None, at_least=1)
    """Sequences decoded at once; of a larger batch each takes the place of one that has ended. null: with the local
    engine as many as the plan has memory for, at most 1024 (256 where a device's memory is not known); with others
    1024. A run keeps the number."""
    dtype: str = choice("auto", ("auto", "float32", "bfloat16"))
    """Dtype of the sampler's weights; auto: the compute dtype. Another one needs a copy of the weights, and widens the
    gap between the rollout's log-probs and the trainer's, which rollout_corr/* shows."""
    merge_adapters: bool = setting(False, used_by=[when.ADAPTERS, one_of("rollout.engine", "auto", "local")])
    """Sample with a copy of the weights in which LoRA's adapters are merged: faster decoding, for the memory of the
    adapted matrices. In bfloat16 a change below 1/512 of its weight is then rounded away: at first the sampler hardly
    differs from the base model, which rollout_corr/* shows."""
    group_timeout: float | None = limited(None, above=0, at_most=LONGEST_TIMEOUT)
    """Seconds for all responses to a prompt, time in the engine's queue included. A group that takes longer is
    requested again once, with the same seed, then dropped: the step goes on without it (docs/faults.md). null: none."""
    max_staleness: int = limited(0, at_least=0)
    """Most weight versions by which responses may be older than the policy trained on them. 0: rollout and training
    alternate. 1: the next step's responses are sampled while this one is trained (one-step-off policy). More: rollout
    prefetches up to that many steps. Above 0 the engine has its own copy of the weights, and `algorithm.correction`
    must be on."""
    guard: str = choice("warn", ("off", "warn", "act"), used_by=when.SAME_DISTRIBUTION)
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
    graphs: bool | None = setting(None, used_by=when.RECORDED, accepted_unused=(False,))
    """Record the local engine's decode step as a device graph, not with deterministic algorithms: their indexed writes
    synchronize with the device. null: where this has run on hardware (cuda); after a failed recording the run goes on
    without. true: also elsewhere (rocm: never run); a failed recording ends the run. A self-test at the start turns it
    off where its logits differ from the model's. vLLM and SGLang record on their own, see `enforce_eager`."""
    gpu_memory_utilization: float | None = limited(None, above=0, at_most=1, used_by=[when.OUTSIDE_ENGINE])
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
    max_model_len: int | None = limited(None, at_least=1, used_by=[when.OUTSIDE_ENGINE])
    """vLLM, SGLang: longest prompt and response together; null: data.max_prompt_tokens + max_response_tokens."""
    enforce_eager: bool | None = setting(None, used_by=[when.OUTSIDE_ENGINE])
    """vLLM, SGLang: neither compile nor record graphs; null: on a CPU only."""
    tensor_parallel_size: int = limited(1, at_least=1, used_by=[when.OUTSIDE_ENGINE])
    """vLLM, SGLang: devices that share one copy of the model. With `vllm` they are those of so many consecutive ranks
    of a host, which then sample together; neither with `max_staleness` nor with `group_timeout`."""
    engine_kwargs: dict[str, Any] = setting(dict, used_by=[when.OUTSIDE_ENGINE])
    """vLLM, SGLang: further arguments of the engine, e.g. {block_size: 32}; they override those that hwgrpo sets. An
    engine of your own: its settings (docs/extend.md)."""
    server: RolloutServerConfig = setting(RolloutServerConfig, used_by=[when.SERVER])


@dataclass
class RewardFunctionConfig:
    name: str = setting(MISSING, path=True)
    """A registered reward, or `path/to/file.py:function` (verl's or TRL's signature)."""
    weight: float = limited(1.0)
    """Factor of this reward in the sum."""
    text: str = choice("response", ("response", "last_turn"), used_by=[when.AGENT])
    """Text of a response that it gets: all of it, with what was observed, or what the policy wrote in its last turn,
    without tool calls and reasoning."""
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
class SandboxConfig:
    level: str = choice("auto", catalog.SANDBOX_LEVELS, used_by=[when.PROGRAMS])
    """Protection from programs that reward code runs (docs/sandbox.md). namespaces: own network, processes, users and
    files; seccomp: few system calls; auto: the first of them that this host allows; none: limits on resources alone."""


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
    eps: float = limited(1e-6, at_least=0, at_most=1, used_by=[when.read_by_estimator("eps"), when.DIVIDED])
    """Added to the standard deviation (verl 1e-6, TRL 1e-4, OpenRLHF 1e-9)."""
    std: str = choice("group", ("group", "batch", "none"), used_by=[when.read_by_estimator("std")])
    """Standard deviation by which the centred reward is divided; `none` is Dr. GRPO."""
    std_correction: int = limited(
        1, at_least=0, at_most=1, used_by=[when.read_by_estimator("std_correction"), when.DIVIDED]
    )
    """1: unbiased standard deviation (n - 1), as verl and TRL; 0: biased."""
    singleton: str = choice("zero", ("zero", "raw", "error"), used_by=[when.read_by_estimator("singleton")])
    """Advantage of a group with one valid sample: zero, its raw reward (verl), or an error (TRL)."""
    clip: float | None = limited(None, above=0)
    """Advantages are kept within plus or minus this; null: not at all."""
    kwargs: dict[str, Any] = setting(
        dict, used_by=[(*own_function("algorithm.advantage.name"), *when.read_by_estimator("kwargs"))]
    )
    """Further keyword arguments of the estimator (docs/grpo.md), or of a function of your own."""


@dataclass
class LossConfig:
    name: str = choice("ppo_clip", lambda: catalog.POLICY_LOSSES.names(), files=True)
    """Policy loss: a registered one, or `path/to/file.py:function` (see docs/extend.md)."""
    clip_low: float = limited(0.2, at_least=0, at_most=1, used_by=[when.read_by_loss("clip_low")])
    """Lower clip: the ratio is clamped at 1 - clip_low."""
    clip_high: float = limited(0.2, above=-1, used_by=[when.read_by_loss("clip_high")])
    """Upper clip: the ratio is clamped at 1 + clip_high; negative with cispo only (TRL's absolute cap c is c - 1)."""
    dual_clip: float | None = limited(3.0, above=1, used_by=[when.read_by_loss("dual_clip")])
    """With a negative advantage the loss is at most this times -advantage; null turns dual clip off."""
    delta: float | None = limited(None, above=1, used_by=[when.read_by_loss("delta")])
    """Cap of the ratio with a negative advantage, where it is not clipped, and with a positive one if it is below
    1 + clip_high (TRL's delta, INTELLECT-2's two-sided clip); null: none."""
    log_ratio_clamp: float | None = limited(20.0, above=0, used_by=[when.read_by_loss("log_ratio_clamp")])
    """Clamp of the log-ratio, plus or minus, before exp, as in verl; null: none, as in TRL."""
    tau_pos: float = limited(1.0, above=0, used_by=[when.read_by_loss("tau_pos")])
    """Temperature of sapo's gate where the advantage is positive."""
    tau_neg: float = limited(1.05, above=0, used_by=[when.read_by_loss("tau_neg")])
    """Temperature of sapo's gate where it is not."""
    kwargs: dict[str, Any] = setting(
        dict, used_by=[(*own_function("algorithm.loss.name"), *when.read_by_loss("kwargs"))]
    )
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
class FilterGroupsConfig:
    enable: bool = False
    """Train on groups whose rewards differ, and sample further prompts in place of the others, until the step has its
    prompts (DAPO's dynamic sampling)."""
    metric: str = setting("reward", used_by=[when.FILTERED])
    """Values that must differ within a group: `reward`, the name of a reward function, or a field that one returns
    beside its score, e.g. `acc`."""
    min_std: float = limited(0.0, at_least=0, used_by=[when.FILTERED])
    """Least standard deviation, exclusive, of these values in a group; 0: any difference."""
    mean_above: float | None = limited(None, used_by=[when.FILTERED])
    """Least mean, exclusive, of these values in a group; null: any."""
    mean_below: float | None = limited(None, used_by=[when.FILTERED])
    """Largest mean, exclusive; null: any."""
    max_rounds: int = limited(10, at_least=1, used_by=[when.FILTERED])
    """Most rounds of sampling in a step, each of at most `trainer.prompts_per_step` prompts. After them groups that
    were filtered out fill the step."""
    keep_surplus: bool = setting(False, used_by=[when.FILTERED])
    """Train the next step on groups beyond the step's prompts instead of discarding them. They are of older weights,
    which needs `algorithm.correction`."""
    replay_groups: int = limited(0, at_least=0, used_by=[when.FILTERED])
    """Groups to keep for replay, the newest ones that passed: drawn in proportion to their standard deviation, they
    fill steps that have too few after `max_rounds`. Needs `algorithm.correction`, as surplus does; 0: none."""


@dataclass
class CorrectionConfig:
    name: str = choice("none", lambda: catalog.CORRECTIONS.names(), files=True)
    """Importance weights for the gap between the rollout engine's and the trainer's log-probs: a registered correction,
    or `path/to/file.py:function`."""
    low: float | None = limited(None, above=0, used_by=[when.CORRECTED])
    """Lower bound of the weights: truncation clamps to it, masking drops tokens below it; null: none."""
    high: float | None = limited(2.0, above=0, used_by=[when.CORRECTED])
    """Upper bound of the weights: truncation clamps to it, masking drops tokens above it; null: none."""
    reject: dict[str, Any] = setting(dict)
    """Leave out what the gap makes doubtful, also without weights: statistic -> bounds (docs/grpo.md), e.g.
    {seq_mean_k1: [0.99, 1.01], token_k3: 0.1, veto: 1e-4}; verl's rollout_rs."""
    normalize: bool = setting(False, used_by=[when.CORRECTED])
    """Divide the weights by their mean over the update (verl's rollout_is_batch_normalize), which takes a scoring pass
    before each update."""
    kwargs: dict[str, Any] = setting(dict, used_by=[own_function("algorithm.correction.name")])
    """Further keyword arguments for a function of your own."""


@dataclass
class KlConfig:
    coef: float = limited(0.0, at_least=0)
    """Weight of the KL to the reference model, in the loss or in the reward; 0 loads no reference model."""
    estimator: str = choice("k3", lambda: catalog.KL_ESTIMATORS.names(), files=True, used_by=[when.KL_ON])
    """KL estimator (Schulman's k1, k2, k3; a `+` has k2's gradient), or `path/to/file.py:function`. `exact` is the KL
    over the full vocabulary instead of an estimate from the sampled token. The expected gradient of k3 is that of
    KL(reference, policy), those of k2, k1+, k3+ and exact are that of KL(policy, reference)."""
    input_clamp: float | None = limited(20.0, above=0, used_by=[when.KL_ON, when.read_by_kl("input_clamp")])
    """k3, k3+: clamp of the log-ratio to the reference, plus or minus; null: none, as in TRL."""
    output_clamp: float | None = limited(10.0, above=0, used_by=[when.KL_ON, when.read_by_kl("output_clamp")])
    """k3, k3+: clamp of the estimate, plus or minus; null: none, as in TRL."""
    times_ratio: bool = setting(False, used_by=[when.KL_ON, when.KL_IN_LOSS])
    """Multiply the KL by the token's ratio, which makes its gradient unbiased (TRL's use_bias_correction_kl)."""
    in_reward: bool = setting(False, used_by=[when.KL_ON])
    """Take the KL of each response, summed over its tokens, from its reward instead of adding it to the loss (verl's
    use_kl_in_reward). It takes a pass for the old log-probs, and is not differentiated: k1 is the usual estimator."""
    target: float | None = limited(None, above=0, used_by=[when.KL_ON])
    """KL, nats per token, to which `coef`, then the first one, is adapted after each step (verl's
    kl_ctrl.target_kl); null: fixed."""
    sync_every: int = limited(0, at_least=0, used_by=[when.KL_ON])
    """Steps after which the reference model is moved towards the policy (TRL's ref_model_sync_steps); 0: it stays the
    model of the start. With adapters it is a frozen copy of the adapter. Not with DeepSpeed's stage 3."""
    sync_share: float = limited(1.0, above=0, at_most=1, used_by=[on("algorithm.kl.sync_every", " above 0")])
    """The policy's share in the moved reference; 1 copies it (TRL's ref_model_mixup_alpha). Adapters: only 1."""
    horizon: int = limited(10000, at_least=1, used_by=[on("algorithm.kl.target", " above 0")])
    """Responses over which an adapted `coef` changes by at most 20 percent (verl's kl_ctrl.horizon); above 0.2 times
    the responses of a step."""
    kwargs: dict[str, Any] = setting(dict, used_by=[when.KL_ON, own_function("algorithm.kl.estimator")])
    """Further keyword arguments for a function of your own."""


@dataclass
class ProcessConfig:
    steps: str = choice("text", ("text", "turns"), used_by=[when.STEPS])
    """Steps of a response: parts of its `text`, which the settings below separate, or its `turns`, the runs of tokens
    that the policy sampled."""
    delimiter: str = setting(
        "\n", used_by=[when.STEPS, when.TEXT_STEPS, off("algorithm.process.pattern"), off("algorithm.process.function")]
    )
    """Text that ends a step of a response."""
    pattern: str | None = setting(None, used_by=[when.STEPS, when.TEXT_STEPS, off("algorithm.process.function")])
    """Regular expression in place of the delimiter, e.g. '\\n+'."""
    function: str | None = setting(None, path=True, used_by=[when.STEPS, when.TEXT_STEPS])
    """`path/to/file.py:function` in place of both: `function(text)` returns the ascending ends of the steps, in
    characters."""


@dataclass
class AlgorithmConfig:
    preset: str | None = choice(None, preset_names)
    """Settings of a published method, of which any can be set otherwise (`hwgrpo config presets` lists them). In an
    override it wins over the recipe, in a recipe the recipe's other settings win over it."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    process: ProcessConfig = setting(ProcessConfig, used_by=[when.STEPS])
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
    entropy_coef_delta: float = limited(0.005, above=0, used_by=when.ADAPTIVE_ENTROPY)
    """Step of an adapted entropy coefficient, per update."""
    entropy_coef_min: float = limited(0.0, at_least=0, used_by=when.ADAPTIVE_ENTROPY)
    """Lower bound of an adapted entropy coefficient."""
    entropy_coef_max: float = limited(1.0, at_least=0, used_by=when.ADAPTIVE_ENTROPY)
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
    vision_lr: float | None = limited(None, above=0, used_by=[when.VISION_TRAINS])
    """Peak learning rate of a vision-language model's tower and projector; null: `lr`."""
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
class ValidationSamplingConfig:
    temperature: float | None = limited(None, at_least=0.01, at_most=100, used_by=[when.SAMPLED])
    """Temperature of the sampled responses of validations; null: `rollout.temperature`."""
    top_k: int | None = limited(None, at_least=0, used_by=[when.SAMPLED])
    """Their top_k, 0 is off; null: `rollout.top_k`."""
    top_p: float | None = limited(None, above=0, at_most=1, used_by=[when.SAMPLED])
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
    capture_steps: list[int] = limited(list, at_least=1)
    """Steps to write to output_dir/captures, each a folder with what `hwgrpo replay` needs to run it again on another
    machine (docs/replay.md); with strategy single or ddp."""
    capture_weights: bool = setting(False, used_by=[on("trainer.capture_steps", " not empty")])
    """Write the weights and optimizer states before a captured step, too: 12 bytes per trainable parameter. Without
    them a replay needs the run's checkpoint of the step before, or for step 1 model.path."""
    profile_steps: list[int] = limited(list, at_least=1)
    """Steps to profile by torch's profiler, on the host and on the device: output_dir/profiles gets a trace and a table
    of the longest kernels of each, of rank 0 (docs/profiling.md). A profiled step is slower."""
    tokens_per_micro_batch: int | None = limited(None, at_least=1)
    """Tokens (prompt, response, padding) of one forward and backward pass on one device, and up to a 64th more; null:
    16384 on an accelerator, 1024 on a CPU, there up to 4096 for a prompt with its responses, or a device's share of the
    longest sequence if that is more."""
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
    resume_check: str = choice("error", ("error", "warn", "off"))
    """What happens if the log-probs that this machine computes of a checkpoint's weights differ from those of the
    machine that saved it by more than rounding explains: `error` ends the run before its first step, `warn` prints a
    warning and continues. `off` computes none, neither at a resume nor at a checkpoint."""
    save_every: int = limited(0, at_least=0)
    """Steps between checkpoints; 0 writes one at the end and on a signal."""
    save_async: bool = setting(True, used_by=[on("trainer.save_every", " of 1 or more")])
    """Write checkpoints in the background, from a copy of the trainable parameters and optimizer states in host memory
    (12 bytes per parameter, over all ranks). Those at the end and on a signal need no copy."""
    keep_checkpoints: int = limited(2, at_least=1)
    """Number of newest checkpoints to keep."""
    max_skipped_updates: int = limited(3, at_least=0)
    """Consecutive updates that may be skipped because their gradient is not finite; one more ends the run."""
    validate_every: int = limited(0, at_least=0, used_by=[when.VALIDATION])
    """Steps between validations; 0 validates at the start and at the end."""
    validate_at_start: bool = setting(True, used_by=[when.VALIDATION])
    """Validate before the first step, so that the summary can show what training changed."""
    validation_n: int = limited(4, at_least=0, used_by=[when.VALIDATION])
    """Samples per validation prompt, in addition to the greedy one; 0: none."""
    validation_sampling: ValidationSamplingConfig = setting(ValidationSamplingConfig, used_by=[when.VALIDATION])
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
    threads: int | Literal["free"] = limited(0, at_least=0, at_most=1024)
    """CPU threads per process; 0: torch's default, divided among the ranks of this host. free: as many of torch's
    default as this process's cores that other programs leave free, on Linux, measured anew before each step. Another
    number of threads may round differently, so a second or resumed run is not the same to the last bit. One process
    only, and not with `rollout.max_staleness`; commands without training steps measure once at their start."""


@dataclass
class BackendConfig:
    name: str = choice("auto", backend_choices)
    """Device family; auto: the one that this host can use; two usable ones are an error."""


@dataclass
class RewardModelConfig:
    loss: str = choice("classification", lambda: catalog.REWARD_MODEL_LOSSES)
    """Loss of `hwgrpo reward-model`: `classification` is binary cross-entropy with a label from 0 to 1, `mse` the
    squared difference from a number, `bradley_terry` -log sigmoid of the score of the chosen response minus that of the
    rejected one."""
    score_key: str = setting("reward", used_by=[when.OUTCOMES])
    """Column with the label or number of a response, whose column `data.response_key` names."""
    chosen_key: str = setting("chosen", used_by=[when.PAIRS])
    """Column with the better response: text, or chat messages."""
    rejected_key: str = setting("rejected", used_by=[when.PAIRS])
    """Column with the worse response."""
    margin_key: str | None = setting(None, used_by=[when.PAIRS])
    """Column with the margin by which the chosen response's score should be higher; null: none."""


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
    project: str | None = setting(None, used_by=[when.SERVICE])
    """Project of the run in wandb, trackio and swanlab; null: hwgrpo."""
    run_name: str | None = setting(None, used_by=[when.SERVICE])
    """Name of the run in wandb, trackio and swanlab; null: the last part of trainer.output_dir."""
    progress: str = choice("auto", ("auto", "rich", "plain", "none"))
    """Progress output: auto is a live panel (rich) on a terminal, else a line per step (plain)."""
    log_every: int = limited(1, at_least=1, used_by=[one_of("observe.progress", "auto", "plain")])
    """Steps between lines of progress."""
    completions_per_step: int = limited(16, at_least=0)
    """Samples written to completions.jsonl per step (complete groups first); 0 writes none."""
    logged_images: int = limited(1000, at_least=0)
    """Most thumbnails of images that a run writes to images/ for completions.jsonl, each distinct image once; of later
    ones the size alone is logged. 0 writes none."""
    warnings: bool = True
    """Warn when metrics look unhealthy (flat reward, zero-variance groups, growing KL, ...), with what to try."""


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
