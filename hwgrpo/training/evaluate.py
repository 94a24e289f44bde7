"""Measuring a policy on held-out prompts: one greedy response each, and n sampled ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends import Backend

from hwgrpo.agents.agent_metrics import agent_metrics
from hwgrpo.agents.agent_rows import rows_of_agents
from hwgrpo.config import Config
from hwgrpo.config.derived import validation_sampling_of
from hwgrpo.config.named_files import with_absolute_paths
from hwgrpo.data.prompts import PromptDataset, build_dataset, dataset_notes, overlong_note
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_image_prompts, load_model_config, load_tokenizer
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.engine_kind import check_engine, check_running_server
from hwgrpo.rollout.vllm.vllm_settings import check_head_size
from hwgrpo.rollout.workflow import MakeWorkflow
from hwgrpo.rollout.workflow_engine import with_workflow
from hwgrpo.training.checkpoint import restore
from hwgrpo.training.end_of_turn import end_of_turn_note
from hwgrpo.training.module_fusion import fuse
from hwgrpo.training.policy.auto_settings import attention_of
from hwgrpo.training.reward_setup import build_rewards
from hwgrpo.training.shared_setup import build_engine, load_policy, prepare_process, turn_template
from hwgrpo.training.startup_checks import check_length
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import PromptBatch, Sampling

PROMPTS_AT_ONCE = 256
OF_VALIDATIONS = (
    *("agent/turns/mean", "agent/failures", "agent/stop/"),
    *("tools/call_frequency", "tools/failure_frequency"),
)
"""Beginnings of the `agent_metrics` that a validation has."""


@dataclass(frozen=True)
class Scores:
    """The rewards of the responses to P prompts, n to each."""

    rewards: torch.Tensor
    """[P, n] fp64; NaN for a sample that a failure policy removed, or whose group was dropped for being late."""
    sources: list[str]
    """[P]"""
    environments: list[str]
    """[P]: environment of each prompt, "": none."""
    dropped: int
    """Groups that were late."""
    of_functions: list[tuple[str, str, float]]
    """(source, function, value) of each response and function."""
    outcomes: list[Mapping[str, Any]]
    """Of each response that is a trajectory with tools or in an environment."""

    def by_environment(self) -> dict[str, torch.Tensor]:
        """Return the rewards [prompts, n] of each environment; {} where there are fewer than two."""
        names = sorted({*self.environments} - {""})
        here = {name: torch.tensor([each == name for each in self.environments]) for name in names}
        return {name: self.rewards[here[name]] for name in names} if len(names) > 1 else {}


def scores(
    engine: Engine,
    dataset: PromptDataset,
    rewards: RewardPipeline,
    sampling: Sampling,
    rows: range,
    step: int | None = None,
    longest: int = 0,
) -> Scores:
    """Generate responses and score them.

    Args:
        engine: generates the responses.
        dataset: the prompts.
        rewards: scores the responses.
        sampling: sampling parameters, with n responses per prompt.
        rows: indices of the prompts.
        step: the last finished training step, for rewards that draw random numbers; None outside training.
        longest: the most rows of a rank. Ranks may share an engine, and then generate at the same time: one without a
            prompt left repeats one.
    """
    parts: list[torch.Tensor] = []
    found = Scores(torch.zeros(0, sampling.n, dtype=torch.float64), [], [], 0, [], [])
    dropped = 0
    for start in range(0, max(len(rows), longest), PROMPTS_AT_ONCE):
        chunk = rows[start : start + PROMPTS_AT_ONCE]
        # epoch -1: validation prompts share no uid, and so no random numbers, with training prompts
        batch = PromptBatch(tuple(dataset.prompt(row, -1) for row in chunk or range(1)))
        completions = engine.generate(batch, sampling)
        if not chunk:
            break
        drawing = ("validation", step, "greedy" if sampling.greedy else "sampled", start)
        scored = rewards.score(batch, completions, drawing=drawing)
        total = torch.full((len(chunk), sampling.n), torch.nan, dtype=torch.float64)
        total[completions.prompt_index.unique()] = scored.total.where(scored.valid, torch.nan).view(-1, sampling.n)
        parts.append(total)
        dropped += len(completions.dropped)
        found.sources.extend(prompt.source for prompt in batch.prompts)
        found.outcomes.extend(outcome for outcome in completions.outcomes if outcome)
        found.environments.extend(str(prompt.columns.get("environment") or "") for prompt in batch.prompts)
        asked = [batch.prompts[index].source for index in completions.prompt_index.tolist()]
        for name, values in scored.per_function.items():
            found.of_functions.extend(
                (source, name, value) for source, value in zip(asked, values.tolist(), strict=True)
            )
    acted = any(outcome["environment"] for outcome in found.outcomes)  # otherwise the column is of the data's own
    environments = found.environments if acted else [""] * len(found.environments)
    rewards_PN = torch.cat([found.rewards, *parts])
    return replace(found, rewards=rewards_PN, dropped=dropped, environments=environments)


def validate(
    engine: Engine,
    dataset: PromptDataset,
    rewards: RewardPipeline,
    config: Config,
    strategy: Strategy,
    step: int,
) -> dict[str, float]:
    """Return `val-core/<source>/reward/{greedy, mean@n, best@n}` over all prompts, distributed over the ranks.

    Each `val-core/X` comes with `val-aux/X/stderr`, its standard error over two or more prompts.
    `val-aux/<source>/rewards/<function>/mean` is the mean of a function over sampled responses, or greedy ones. With
    `rollout.group_timeout`, `val-aux/groups_dropped` counts the groups that are in none of them. Where
    `data.validation_max_rows` leaves rows out, `val-aux/rows` and `val-aux/rows_available` count them. With several
    environments `val-aux/<environment>/reward/...` has the means of each; `val-aux/agent/*` and `val-aux/tools/*` are
    those of `agent_metrics`, of sampled responses, or greedy ones.

    Args:
        engine: generates the responses.
        dataset: validation prompts.
        rewards: scores the responses.
        config: how many responses of a prompt are sampled, and how.
        strategy: gathers over ranks.
        step: the last finished training step.
    """
    sampling, n = validation_sampling_of(config), config.trainer.validation_n
    rows = range(strategy.rank, len(dataset), strategy.world_size)
    longest = -(-len(dataset) // strategy.world_size)
    greedy = scores(engine, dataset, rewards, replace(sampling, n=1, greedy=True), rows, step, longest)
    last, dropped = greedy, greedy.dropped
    columns = {"greedy": greedy.rewards[:, 0]}
    if n > 0:
        last = scores(engine, dataset, rewards, replace(sampling, n=n), rows, step, longest)
        dropped += last.dropped
        columns[f"mean@{n}"] = last.rewards.nanmean(1)
        best = last.rewards.nan_to_num(nan=-torch.inf).amax(1)
        columns[f"best@{n}"] = torch.where(last.rewards.isnan().all(1), torch.nan, best)
    own: dict[str, list[float]] = defaultdict(list)
    for name, values in columns.items():
        for source, environment, value in zip(greedy.sources, greedy.environments, values.tolist(), strict=True):
            own[f"val-core/{source}/reward/{name}"].append(value)
            own[f"val-aux/{environment}/reward/{name}"].append(value)
    merged: dict[str, list[float]] = defaultdict(list)
    functions: dict[str, list[float]] = defaultdict(list)
    outcomes: list[Mapping[str, Any]] = []
    environments: set[str] = set()
    mine = (own, last.of_functions, last.outcomes, greedy.environments)
    for part, part_of_functions, part_of_outcomes, part_of_environments in strategy.gather_objects(mine):
        for key, values in part.items():
            merged[key] += values
        for source, name, value in part_of_functions:
            functions[f"val-aux/{source}/rewards/{name}/mean"].append(value)
        outcomes += part_of_outcomes
        environments.update(part_of_environments)
    metrics = {key: float(torch.tensor(values, dtype=torch.float64).nanmean()) for key, values in functions.items()}
    for key, values in merged.items():
        scores_N = torch.tensor(values, dtype=torch.float64)
        if key.startswith("val-core/"):
            metrics[key] = float(scores_N.nanmean())
            valid_N = scores_N[~scores_N.isnan()]
            if len(valid_N) > 1:
                metrics[f"val-aux/{key.removeprefix('val-core/')}/stderr"] = float(valid_N.std() / len(valid_N) ** 0.5)
        elif len(environments - {""}) > 1 and not key.startswith("val-aux//"):
            metrics[key] = float(scores_N.nanmean())
    agents = agent_metrics(outcomes)
    metrics |= {f"val-aux/{key}": value for key, value in agents.items() if key.startswith(OF_VALIDATIONS)}
    if sampling.group_timeout is not None:
        metrics["val-aux/groups_dropped"] = strategy.sum([dropped])[0]
    return metrics | dataset.row_counts


@dataclass(frozen=True)
class Evaluation:
    """A model, prompts and rewards, ready for evaluation."""

    engine: Engine
    dataset: PromptDataset
    rewards: RewardPipeline
    sampling: Sampling
    notes: tuple[str, ...] = ()
    """Notes for the user on the checkpoint and the prompts."""

    def greedy(self) -> Scores:
        """Return the scores of greedy responses, one to each prompt."""
        return self._scores(greedy=True, n=1)

    def sampled(self, n: int) -> Scores:
        """Return the scores of n sampled responses to each prompt."""
        return self._scores(greedy=False, n=n)

    def _scores(self, **changes: Any) -> Scores:
        sampling = replace(self.sampling, **changes)
        return scores(self.engine, self.dataset, self.rewards, sampling, range(len(self.dataset)))


def build_evaluation(
    config: Config,
    backend: Backend,
    local_rank: int,
    checkpoint: Path | None = None,
    *,
    workflow: MakeWorkflow | None = None,
    sampler: Callable[[Any], Engine] | None = None,
) -> Evaluation:
    """Make the parts for evaluating a model, without those for training it.

    Args:
        config: settings; with a checkpoint, those of its run.
        backend: the selected device family.
        local_rank: index of this process's device on the host.
        checkpoint: folder of the checkpoint to evaluate; None: the model itself.
        workflow: makes the workflow in place of `rollout.workflow`.
        sampler: tokenizer -> what samples in place of the model, which is then not loaded.

    Raises:
        ConfigError: there are no validation prompts.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    config = with_absolute_paths(config)
    check_engine(config)
    saved = restore.verify(checkpoint.absolute()) if checkpoint is not None else None
    device = prepare_process(config, backend, local_rank, 1)
    tokenizer = load_tokenizer(config.model)
    dataset = build_dataset(
        config.data, tokenizer, "validation", rows_of_agents(config), load_image_prompts(config.model, tokenizer)
    )
    if dataset is None:
        raise ConfigError("data.validation is not set; set it to prompts, e.g. data.validation=test.jsonl")
    rewards = build_rewards(config, dataset, tokenizer=tokenizer, device=device)
    if sampler is not None:
        turns, limit = turn_template(config, None, tokenizer), config.trainer.process_group_timeout
        engine = with_workflow(sampler(tokenizer), config.rollout.workflow, tokenizer, limit, turns, config, workflow)
        return Evaluation(engine, dataset, rewards, validation_sampling_of(config))
    check_length(config, dataset)
    settings = load_model_config(config.model)
    check_head_size(config.rollout, config.model.path, settings, on_host=backend.is_host)
    check_running_server(config)
    policy = load_policy(config, device, tokenizer)
    fuse(config, device.backend, policy, attention_of(config, device))
    if saved is not None:
        restore.restore_weights(saved, policy.model)
    engine = build_engine(config, policy, tokenizer, device, workflow=workflow)
    of_checkpoint = saved.note if saved is not None else None
    overlong = overlong_note("validation", dataset, config.data.max_prompt_tokens)
    end_of_turn = end_of_turn_note(config, settings, tokenizer, dataset)
    notes = (*filter(None, (of_checkpoint, overlong, end_of_turn)), *dataset_notes("validation", dataset))
    return Evaluation(engine, dataset, rewards, validation_sampling_of(config), notes)
