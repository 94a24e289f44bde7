"""Notes at a run's start on the text that rewards and stop strings see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.errors import quoted
from hwgrpo.rewards.response_text import continued, opened_markers, special_ids, wordless_ids

TAGS = ("think", "answer")
"""The tags of `format` and `tags` where their arguments have none."""
SHOWN = 3


def text_notes(config: Config, tokenizer: Any, prompts: Sequence[str], marks: Collection[str] = ()) -> Iterator[str]:
    """Yield notes on special tokens in responses' texts, and on markers that prompts leave open.

    Args:
        config: the run's settings.
        tokenizer: the model's tokenizer.
        prompts: the training prompts' texts.
        marks: texts of tokens that show images, which no response needs (`ImagePrompts.marks`).
    """
    skips, stops = config.rollout.skip_special_tokens, list(config.rollout.stop)
    looked_for = [(each.name, names) for each in config.reward.functions if (names := _looked_for(each))]
    others = special_ids(tokenizer) - wordless_ids(tokenizer)
    special = [token for token in tokenizer.convert_ids_to_tokens(sorted(others)) if token not in marks]
    if special and not skips:
        yield (
            f"responses' text for rewards and stop strings keeps special tokens such as {_shown(special)}; those of "
            "end, padding, beginning and unknown have no text (rollout.skip_special_tokens=false)"
        )
    for token in special if skips else ():
        users = [f"reward {name}" for name, names in looked_for if token in names]
        users += [f"rollout.stop={stop!r}" for stop in stops if token in stop]
        if users:
            yield (
                f"{' and '.join(users)} will not find {token}: it is a special token, which "
                "rollout.skip_special_tokens=true leaves out of responses' text; set it to false"
            )
    ends = Counter(opened_markers(text) for text in prompts)
    for opened, count in ends.most_common(SHOWN):
        users = [f"reward {name}" for name, names in looked_for if continued("", opened, names)]
        if users:
            yield (
                f"{count:,} of {len(prompts):,} prompts end with {quoted(opened)}, which is the beginning of the "
                f"response for {' and '.join(users)}"
            )


def _looked_for(function: RewardFunctionConfig) -> Sequence[str] | str:
    """Return the markers that a reward looks for, or the pattern in which they stand; empty for other rewards.

    An argument of another type is the reward's to refuse.
    """
    if function.name not in ("format", "tags", "regex"):
        return ()
    pattern, tags = function.kwargs.get("pattern"), function.kwargs.get("tags")
    if pattern or function.name == "regex":
        return pattern if isinstance(pattern, str) else ""
    tags = tags if tags and isinstance(tags, str | list | tuple) else TAGS
    return [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN])
