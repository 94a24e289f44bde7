"""Measuring a policy on held-out prompts: one greedy response each, and n sampled ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends import Backend

from hwgrpo.agents.agent_rows import rows_of_agents
from hwgrpo.config import Config
from hwgrpo.config.derived import validation_sampling_of
from hwgrpo.config.named_files import with_absolute_paths
from hwgrpo.data.prompts import PromptDataset, build_dataset, dataset_notes, overlong_note
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config, load_tokenizer
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.engine_kind import check_engine, check_running_server
from hwgrpo.rollout.vllm.vllm_settings import check_head_size
from hwgrpo.training.checkpoint import restore
from hwgrpo.training.end_of_turn import end_of_turn_note
from hwgrpo.training.module_fusion import fuse
from hwgrpo.training.policy.auto_settings import attention_of
from hwgrpo.training.reward_setup import build_rewards
from hwgrpo.training.shared_setup import build_engine, load_policy, prepare_process
from hwgrpo.training.startup_checks import check_length
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import PromptBatch, Sampling

PROMPTS_AT_ONCE = 256


def scores(
    engine: Engine,
    dataset: PromptDataset,
    rewards: RewardPipeline,
    sampling: Sampling,
    rows: range,
    step: int | None = None,
    longest: int = 0,
) -> tuple[torch.Tensor, list[str], int, list[tuple[str, str, float]]]:
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

    Returns:
        [len(rows), n] fp64 total rewards (NaN for a sample removed by a failure policy, or dropped for being late), the
        prompts' sources, how many groups were dropped, and (source, function, value) of each response and function.
    """
    parts: list[torch.Tensor] = []
    dropped = 0
    sources: list[str] = []
    of_functions: list[tuple[str, str, float]] = []
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
        sources += [prompt.source for prompt in batch.prompts]
        asked = [batch.prompts[index].source for index in completions.prompt_index.tolist()]
        for name, values in scored.per_function.items():
            of_functions += [(source, name, value) for source, value in zip(asked, values.tolist(), strict=True)]
    total = torch.cat(parts) if parts else torch.zeros(0, sampling.n, dtype=torch.float64)
    return total, sources, dropped, of_functions


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
    `data.validation_max_rows` leaves rows out, `val-aux/rows` and `val-aux/rows_available` count them.

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
    greedy, sources, dropped, of_functions = scores(
        engine, dataset, rewards, replace(sampling, n=1, greedy=True), rows, step, longest
    )
    collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    columns = {"greedy": greedy[:, 0]}
    if n > 0:
        sampled, _, further, of_functions = scores(
            engine, dataset, rewards, replace(sampling, n=n), rows, step, longest
        )
        dropped += further
        columns[f"mean@{n}"] = sampled.nanmean(1)
        best = sampled.nan_to_num(nan=-torch.inf).amax(1)
        columns[f"best@{n}"] = torch.where(sampled.isnan().all(1), torch.nan, best)
    for name, values in columns.items():
        for source, value in zip(sources, values.tolist(), strict=True):
            collected[source][name].append(value)
    merged: dict[str, list[float]] = defaultdict(list)
    functions: dict[str, list[float]] = defaultdict(list)
    own = {f"{s}/reward/{k}": v for s, by in collected.items() for k, v in by.items()}
    for part, part_of_functions in strategy.gather_objects((own, of_functions)):
        for key, values in part.items():
            merged[key] += values
        for source, name, value in part_of_functions:
            functions[f"val-aux/{source}/rewards/{name}/mean"].append(value)
    metrics = {key: float(torch.tensor(values, dtype=torch.float64).nanmean()) for key, values in functions.items()}
    for key, values in merged.items():
        scores_N = torch.tensor(values, dtype=torch.float64)
        metrics[f"val-core/{key}"] = float(scores_N.nanmean())
        valid_N = scores_N[~scores_N.isnan()]
        if len(valid_N) > 1:
            metrics[f"val-aux/{key}/stderr"] = float(valid_N.std() / len(valid_N) ** 0.5)
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

    def greedy(self) -> tuple[torch.Tensor, int]:
        """Return the rewards [prompts, 1] of greedy responses, and how many groups were dropped."""
        return self._scores(greedy=True, n=1)

    def sampled(self, n: int) -> tuple[torch.Tensor, int]:
        """Return the rewards [prompts, n] of sampled responses, and how many groups were dropped."""
        return self._scores(greedy=False, n=n)

    def _scores(self, **changes: Any) -> tuple[torch.Tensor, int]:
        sampling = replace(self.sampling, **changes)
        found, _, dropped, _ = scores(self.engine, self.dataset, self.rewards, sampling, range(len(self.dataset)))
        return found, dropped


def build_evaluation(config: Config, backend: Backend, local_rank: int, checkpoint: Path | None = None) -> Evaluation:
    """Make the parts for evaluating a model, without those for training it.

    Args:
        config: settings; with a checkpoint, those of its run.
        backend: the selected device family.
        local_rank: index of this process's device on the host.
        checkpoint: folder of the checkpoint to evaluate; None: the model itself.

    Raises:
        ConfigError: there are no validation prompts.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    config = with_absolute_paths(config)
    check_engine(config)
    saved = restore.verify(checkpoint.absolute()) if checkpoint is not None else None
    device = prepare_process(config, backend, local_rank, 1)
    tokenizer = load_tokenizer(config.model)
    dataset = build_dataset(config.data, tokenizer, "validation", rows_of_agents(config))
    if dataset is None:
        raise ConfigError("data.validation is not set; set it to prompts, e.g. data.validation=test.jsonl")
    rewards = build_rewards(config, dataset, tokenizer=tokenizer, device=device)
    check_length(config, dataset)
    settings = load_model_config(config.model)
    check_head_size(config.rollout, config.model.path, settings, on_host=backend.is_host)
    check_running_server(config)
    policy = load_policy(config, device, tokenizer)
    fuse(config, device.backend, policy, attention_of(config, device))
    if saved is not None:
        restore.restore_weights(saved, policy.model)
    engine = build_engine(config, policy, tokenizer, device)
    of_checkpoint = saved.note if saved is not None else None
    overlong = overlong_note("validation", dataset, config.data.max_prompt_tokens)
    end_of_turn = end_of_turn_note(config, settings, tokenizer, dataset)
    notes = (*filter(None, (of_checkpoint, overlong, end_of_turn)), *dataset_notes("validation", dataset))
    return Evaluation(engine, dataset, rewards, validation_sampling_of(config), notes)
