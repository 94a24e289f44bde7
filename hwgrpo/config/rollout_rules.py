"""What a rollout engine cannot be combined with; which settings it uses is declared in the schema."""

from __future__ import annotations

from hwgrpo.catalog import ENGINES, EXACT_KL
from hwgrpo.config.schema import RolloutServerConfig, Settings
from hwgrpo.errors import ConfigError, shown
from hwgrpo.user_code import names_a_file


def check_rollout(config: Settings) -> None:
    """Check that the engine supports the settings of `rollout` and the policy's adapters.

    Raises:
        ConfigError: the first setting that it does not support, with the remedy.
    """
    r = config.rollout
    refuse = ENGINES.load(r.engine).refuse
    if refuse is not None:
        refuse(config)
    if (r.source, bool(r.max_staleness)) in (("on_demand", True), ("filtered", True), ("prefetch", False)):
        raise ConfigError(
            f"rollout.source={r.source!r} with rollout.max_staleness={r.max_staleness}: responses are prefetched "
            "with a max_staleness of 1 or more, and never with 0; leave rollout.source out"
        )
    check_filter(config)
    _check_exact_kl(config)
    easy, hard = config.data.difficulty.easy_threshold, config.data.difficulty.hard_threshold
    if (easy is not None or hard is not None) and names_a_file(r.source):
        raise ConfigError(
            f"data.difficulty.easy_threshold={easy}, hard_threshold={hard} with rollout.source={r.source!r}: the next "
            "prompts are known only when the last ones are scored, and a source of your own may draw them before; "
            "leave one of them out"
        )
    if easy is not None and hard is not None and hard >= easy:
        raise ConfigError(
            f"data.difficulty.hard_threshold={hard:g} must be below data.difficulty.easy_threshold={easy:g}"
        )
    _check_agent(config)
    if r.workflow != "single_turn" and r.engine == "vllm" and (r.tensor_parallel_size or 1) > 1:
        raise ConfigError(
            f"rollout.workflow={r.workflow!r} with rollout.engine=vllm and rollout.tensor_parallel_size="
            f"{r.tensor_parallel_size}: ranks that share an engine would have to ask for tokens equally often; use "
            "rollout.tensor_parallel_size=1, or rollout.engine=vllm_server"
        )
    if r.agent.asynchronous and not ENGINES.load(r.engine).has_sessions:
        raise ConfigError(
            f"rollout.agent.asynchronous=true with rollout.engine={r.engine}: this engine samples the turns of all "
            "trajectories in rounds; use rollout.engine=local, vllm_server or sglang_server, or leave "
            "rollout.agent.asynchronous out"
        )
    if r.sleep_mode == "always" and r.max_staleness:
        raise ConfigError(
            f"rollout.sleep_mode='always' with rollout.max_staleness={r.max_staleness}: the engine generates while the "
            "policy is trained; leave one of them out"
        )
    hung = config.trainer.process_group_timeout
    if r.group_timeout is not None and 2 * r.group_timeout >= hung:
        raise ConfigError(
            f"rollout.group_timeout={r.group_timeout:g}: a late group may take twice as long, and after "
            f"trainer.process_group_timeout={hung:g} s the wait for it counts as hung; use less than {hung / 2:g}"
        )
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    if r.max_model_len is not None and r.max_model_len < longest:
        raise ConfigError(
            f"rollout.max_model_len={r.max_model_len} is smaller than a sequence can be (data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_response_tokens={r.max_response_tokens}); use at least "
            f"{longest}, or leave it out"
        )
    _check_urls(r.server)
    lora = config.model.lora
    if r.merge_adapters and (config.model.quantize != "none" or lora.dora):
        other = "model.lora.dora=true" if lora.dora else f"model.quantize={config.model.quantize}"
        raise ConfigError(
            f"rollout.merge_adapters=true with {other}: only plain LoRA on weights that are not quantized is merged; "
            "leave rollout.merge_adapters out"
        )
    if r.server.transfer == "group" and (lora.rank or lora.adapter):
        raise ConfigError(
            f"rollout.server.transfer='group' with model.lora.rank={lora.rank}, model.lora.adapter={lora.adapter!r}: "
            "an adapter goes to the server through a folder; leave rollout.server.transfer out"
        )


def _check_agent(config: Settings) -> None:
    """Check the workflows of `rollout.agent`."""
    r, agent = config.rollout, config.rollout.agent
    for workflow, name in (("tools", "tools"), ("environment", "environments")):
        if r.workflow == workflow and not getattr(agent, name):
            raise ConfigError(
                f"rollout.workflow={workflow} with rollout.agent.{name}=[]: name at least one, e.g. "
                f"rollout.agent.{name}=[path/to/file.py:name]"
            )
    hung = config.trainer.process_group_timeout
    if r.workflow in ("tools", "environment") and agent.turn_timeout >= hung:
        raise ConfigError(
            f"rollout.agent.turn_timeout={agent.turn_timeout:g} must be below trainer.process_group_timeout={hung:g}, "
            "after which a workflow that waits counts as hung"
        )


def scores_ahead(config: Settings) -> str | None:
    """Return the setting by which the next prompts depend on the rewards of prefetched ones; None: there is none."""
    if not config.rollout.max_staleness:
        return None
    if config.algorithm.filter_groups.enable:
        return "algorithm.filter_groups.enable=true"
    difficulty = config.data.difficulty
    return None if difficulty.easy_threshold is None and difficulty.hard_threshold is None else "data.difficulty"


def check_prefetching_ranks(config: Settings, world_size: int) -> None:
    """Check that ranks which choose their prompts together can do so beside the training.

    Raises:
        ConfigError: they would not sample and get new weights in the same order.
    """
    key, r = scores_ahead(config), config.rollout
    if key is None or world_size == 1:
        return
    if r.max_staleness > 1:
        raise ConfigError(
            f"{key} with rollout.max_staleness={r.max_staleness} on {world_size} ranks, which choose their prompts "
            "together: the order of sampling and new weights must be the same on all of them; use "
            "rollout.max_staleness=1"
        )
    if r.partial:
        raise ConfigError(
            f"{key} with rollout.max_staleness={r.max_staleness}, rollout.partial=true on {world_size} ranks, which "
            "choose their prompts together: a rank would wait for another one in the middle of a batch; leave "
            "rollout.partial out"
        )


def check_filter(config: Settings) -> None:
    """Check the settings of `algorithm.filter_groups`.

    Raises:
        ConfigError: the other settings do not allow it.
    """
    r, f, a = config.rollout, config.algorithm.filter_groups, config.algorithm
    if not f.enable:
        if r.source == "filtered":
            raise ConfigError(
                "rollout.source='filtered' with algorithm.filter_groups.enable=false filters nothing; leave "
                "rollout.source out, or set algorithm.filter_groups.enable=true"
            )
        return
    key = "algorithm.filter_groups.enable=true"
    if names_a_file(r.source):
        raise ConfigError(
            f"{key} with rollout.source={r.source!r}: a source of your own may leave groups as they are; leave one of "
            "them out"
        )
    if r.n == 1:
        raise ConfigError(f"{key} with rollout.n=1: the rewards of one response never differ; use rollout.n=2 or more")
    if f.mean_above is not None and f.mean_below is not None and f.mean_above >= f.mean_below:
        raise ConfigError(
            f"algorithm.filter_groups.mean_above={f.mean_above:g} must be below "
            f"algorithm.filter_groups.mean_below={f.mean_below:g}"
        )
    stale = f"replay_groups={f.replay_groups}" if f.replay_groups else "keep_surplus=true" if f.keep_surplus else None
    if stale and a.correction.name == "none" and a.old_logprobs != "rollout":
        raise ConfigError(
            f"algorithm.filter_groups.{stale}: responses of older weights need importance weights; set "
            "algorithm.correction.name, e.g. token_truncate"
        )


def _check_exact_kl(config: Settings) -> None:
    """Check that the policy's log-probs are over the full vocabulary where the KL is.

    An engine that reports which tokens its filters drop makes them those of the truncated distribution.
    """
    r, kl = config.rollout, config.algorithm.kl
    filters = {"top_k": (r.top_k, 0), "top_p": (r.top_p, 1.0), "min_p": (r.min_p, 0.0)}
    used = [f"rollout.{name}={shown(value)}" for name, (value, none) in filters.items() if value != none]
    if used and kl.coef and kl.estimator == EXACT_KL and ENGINES.load(r.engine).reports_floors:
        raise ConfigError(
            f"algorithm.kl.estimator=exact with {', '.join(used)} and rollout.engine={r.engine}: log-probs are then "
            "those of the truncated distribution, and the KL is over the full vocabulary; leave the filter out, or use "
            "algorithm.kl.estimator=k3"
        )


def server_urls(server: RolloutServerConfig) -> list[str]:
    """Return the addresses in `rollout.server.url`; none where the run starts its server."""
    url = server.url
    return [] if url is None else [url] if isinstance(url, str) else [*url]


def _check_urls(server: RolloutServerConfig) -> None:
    urls = server_urls(server)
    if server.url is not None and not urls:
        raise ConfigError("rollout.server.url=[] names no server; leave it out, and the run starts one")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.server.url={shown(url)} must begin with http:// or https://")
        if urls.count(url) > 1:
            raise ConfigError(f"rollout.server.url names {shown(url)} twice; name each server once")
