"""Detection of stop tokens and stop strings, and the response's text without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hwgrpo.rewards.response_text import ResponseDecoder

BROKEN = "\ufffd"
"""What decoders write for bytes that are only a part of a character."""


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None, extra: Sequence[int]
) -> tuple[int, ...]:
    """Return the ids that end a response: those of the tokenizer, of the generation config, and `extra`."""
    ids: set[int] = set(extra)
    for owner in (tokenizer, generation_config):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            ids.update([eos] if isinstance(eos, int) else eos)
    return tuple(sorted(ids))


class StopDetector:
    """Detector of the end of responses that grow by a token per step.

    Args:
        tokenizer: decodes responses.
        end_ids: token ids that end a response.
        stop: strings that end a response.
        skip_special_tokens: whether all special tokens have no text, or only those of end, padding, beginning, unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool = False,
    ) -> None:
        self._decode = ResponseDecoder(tokenizer, skip_special_tokens, end_ids)
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._ends = frozenset(end_ids)
        self._decoded: dict[tuple[int, ...], str] = {}
        self._stop = tuple(stop)
        # Every token that has text has at least one byte, so a stop string that the newest token completes began at
        # most that many tokens ago; the extra ones keep it clear of decoders that strip the first token's space.
        self._window = max((len(text.encode()) for text in stop), default=0) + 4
        self._last = tuple({text[-1] for text in stop if text} | {BROKEN})
        self._may_complete: dict[int, bool] = {}
        self._visible: dict[int, list[int]] = {}
        """Tokens that have text, of responses that have not ended; only with stop strings."""

    def ended(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append a token to some responses; return which of them it ends.

        Args:
            rows: [B] int64, numbers of the responses, whichever the caller gives them.
            tokens: [B] int64, their newest tokens.

        Returns:
            [B] bool.
        """
        ended = (tokens[:, None] == self._end_ids).any(axis=1)
        if self._stop:
            for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist())):
                if not ended[i] and token not in self._decode.hidden:
                    visible = self._visible.setdefault(row, [])
                    visible.append(token)
                    ended[i] = self._ends_like_one(token) and self._completes_stop_string(visible)
                if ended[i]:
                    self._visible.pop(row, None)
        return ended

    def _ends_like_one(self, token: int) -> bool:
        """Return whether a token may complete a stop string; most lack its last character and are decoded once."""
        known = self._may_complete.get(token)
        if known is None:
            # Twice, since decoders strip a space that the first token begins with.
            text = self._decode((token, token))
            known = self._may_complete[token] = any(character in text for character in self._last)
        return known

    def _completes_stop_string(self, visible: list[int]) -> bool:
        tail = self._decode(visible[-self._window :])
        return any(text in tail for text in self._stop)

    def text(self, tokens: Sequence[int], finished: bool) -> str:
        """Return a response's text without stop token, stop string, and tokens that have no text.

        Args:
            tokens: the response.
            finished: whether a stop token or string ended it.
        """
        by_token = finished and int(tokens[-1]) in self._ends
        key = tuple(tokens[:-1] if by_token else tokens)
        if key not in self._decoded:  # many responses to short prompts are equal
            self._decoded[key] = self._decode(key)
        text = self._decoded[key]
        if finished and not by_token:
            cuts = [position for position in (text.find(stop) for stop in self._stop) if position >= 0]
            text = text[: min(cuts)] if cuts else text
        return text
