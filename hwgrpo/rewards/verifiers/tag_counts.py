"""Partial credit for tags: the soft form of the reward `format`."""

from __future__ import annotations

from collections.abc import Sequence

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.response_text import continued


def tags(solution_str: str, tags: Sequence[str] = ("think", "answer"), opened_markers: str = "") -> float:
    """Return the share of opening and closing tags that the response has exactly once, 0 to 1.

    Their order does not count: the reward `format` is 1 only for the full form.

    Args:
        solution_str: the response.
        tags: names of the tags, `<name>` and `</name>` each.
        opened_markers: markers at the prompt's end, of which these tags count as the response's.

    Raises:
        ConfigError: `tags` is empty.

    Source: open-r1's `tag_count_reward`, without its line ends.
    """
    markers = [f"<{slash}{name}>" for name in tags for slash in ("", "/")]
    if not markers:
        raise ConfigError("kwargs.tags of reward tags is empty; name at least one, e.g. tags: [answer]")
    text = continued(solution_str, opened_markers, markers)
    return sum(text.count(marker) == 1 for marker in markers) / len(markers)
