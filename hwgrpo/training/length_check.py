"""The longest prompt and response against the model's positions."""

from __future__ import annotations

import transformers

from hwgrpo.config import Config
from hwgrpo.data.prompts import PromptDataset
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config
from hwgrpo.models.windows import rope_switches_at


def check_length(
    config: Config, *datasets: PromptDataset | None, settings: transformers.PreTrainedConfig | None = None
) -> None:
    """Check that the longest prompt and response fit the model's positions, and do not change its rotary embeddings.

    Args:
        config: the run's settings.
        datasets: training and validation prompts.
        settings: the model's transformers configuration; None: read it.

    Raises:
        ConfigError: one of these is not so.
    """
    settings = settings or load_model_config(config.model)
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    longest = max(data.longest for data in datasets if data is not None)
    response = config.rollout.max_response_tokens
    if positions is not None and longest + response > positions:
        raise ConfigError(
            f"rollout.max_response_tokens={response}: with the longest prompt ({longest} tokens) a sequence can be "
            f"{longest + response} tokens long, but model.path={config.model.path!r} has {positions} positions; use at "
            f"most {positions - longest}, or lower data.max_prompt_tokens"
        )
    switch = rope_switches_at(settings)
    if switch is not None and longest + response > switch:
        # the log-probs of a short sequence would depend on the other sequences in its batch, and cached keys on timing
        raise ConfigError(
            f"rollout.max_response_tokens={response}: with the longest prompt ({longest} tokens) a sequence can be "
            f"{longest + response} tokens long, but the rotary embeddings of model.path={config.model.path!r} "
            f"(longrope) change for all tokens of a batch that has more than {switch}; use at most "
            f"{switch - longest}, or lower data.max_prompt_tokens"
        )
