"""The values that flow through one step, in order: PromptBatch, Completions, Rewards, TrainBatch, StepMetrics.

Shapes: G prompts, S sequences (completions), P prompt tokens in total, R response tokens in total. Sequences are stored
ragged: the tokens of sequence i are `tokens[offsets[i]:offsets[i + 1]]`. All tensors are on the CPU; only micro-batches
are moved to the device. A further column is a field of `Responses`, `Completions`, `Rewards` or `TrainBatch`
(`hwgrpo.ragged`), and a line where it is made and where it is used.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from hwgrpo.errors import ConfigError
from hwgrpo.ragged import Ragged, offsets_of, per_batch, per_prompt, per_prompt_token, per_sequence, per_token

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Raises:
        ConfigError: a value is out of range.
    """

    n: int
    """Samples per prompt."""
    max_response_tokens: int
    """Longest response, in tokens, the stop token included."""
    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, in addition to the end-of-sequence ids of tokenizer and generation config."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of responses' texts; False: only those of end, padding, beginning and unknown."""
    greedy: bool = False
    """Select the likeliest token; temperature and filters are ignored, log-probs are those of the raw logits."""
    seed: int = 0
    """Seed; with (prompt uid, sample index, position) it determines every sampled token."""
    group_timeout: float | None = None
    """Seconds for the responses to a prompt, twice, before they are dropped (`hwgrpo.rollout.deadlines`); None: any."""

    def __post_init__(self) -> None:
        rules = (
            ("n", self.n >= 1, "at least 1"),
            ("max_response_tokens", self.max_response_tokens >= 1, "at least 1"),
            ("temperature", 0 < self.temperature < math.inf, "above 0 (greedy=True for the likeliest token)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1 (0 is off)"),
            ("stop", not isinstance(self.stop, str), "a list of strings, not one string"),
            ("stop", all(self.stop), "a list of strings that are not empty"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "a list of ids of at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
            ("group_timeout", self.group_timeout is None or self.group_timeout > 0, "above 0, or null for none"),
        )
        for key, fulfilled, allowed in rules:
            if not fulfilled:
                raise ConfigError(f"rollout.{key}={getattr(self, key)!r} is out of range: it must be {allowed}")


@dataclass(frozen=True)
class Thumbnail:
    """A small copy of an image, for logs and the report."""

    content: bytes
    """A PNG or JPEG file."""
    width: int
    """Of the image itself, in pixels."""
    height: int

    def to_json(self) -> list[Any]:
        """Return it as JSON has it."""
        return [base64.b64encode(self.content).decode(), self.width, self.height]

    @classmethod
    def from_json(cls, stored: Sequence[Any]) -> Thumbnail:
        """Invert `to_json`."""
        content, width, height = stored
        return cls(base64.b64decode(content), width, height)


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, as the model's image processor returns them."""

    inputs: Mapping[str, torch.Tensor]
    """Arguments of the model's `get_image_features` (`pixel_values`, `image_grid_thw`, ...), all images together."""
    digest: str
    """Hash of the inputs: the same for the same images."""
    token_id: int
    """The token that stands for a part of an image; a prompt has one for each of the tower's features."""
    axes: torch.Tensor | None = None
    """[P, 3] int64: positions of the prompt's P tokens in time, height and width; None: the model counts tokens."""
    earlier: tuple[PromptImages, ...] = ()
    """Images that stand before these, where the prompt continues others that had some."""
    thumbnails: tuple[Thumbnail, ...] = ()
    """Of each image; not part of the digest. (): none were made."""
    mark: str = ""
    """Text of `token_id`; "": not known."""
    tokens: tuple[int, ...] = ()
    """Tokens that stand for each image; a model without a grid (`Grids`) counts them as if all images were alike."""

    @property
    def parts(self) -> tuple[PromptImages, ...]:
        """All images of the prompt, in its order."""
        return (*self.earlier, self)

    @property
    def all_thumbnails(self) -> tuple[Thumbnail, ...]:
        """Thumbnails of all images of the prompt, in its order."""
        return tuple(thumbnail for part in self.parts for thumbnail in part.thumbnails)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt, with its data row."""

    uid: str
    """Unique within a run: the same row in another epoch has another uid. Groups are formed by it."""
    text: str
    """The model's input text, after the chat template."""
    token_ids: tuple[int, ...]
    ground_truth: Any
    """The answer that rewards compare with; None if the data has no such column."""
    columns: Mapping[str, Any]
    """Column -> value of the data row, unchanged; passed on to reward functions."""
    source: str = ""
    """Source of the row (verl's `data_source` column, else the file name)."""
    place: str = ""
    """File and row, for error messages."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat messages when the prompt is a conversation, else None."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the chat template shows."""
    images: PromptImages | None = None
    """What the model sees besides the tokens; None: a prompt of text."""


@dataclass(frozen=True)
class PromptBatch:
    """The G prompts of one step on this rank."""

    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)


def write_images(seen: Sequence[Sequence[PromptImages]], prefix: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the images of several responses as tensors, and what else there is to know of them, as JSON has it."""
    tensors, known = {}, []
    for number, images in enumerate(seen):
        known.append(
            [
                {
                    "digest": each.digest,
                    "token_id": each.token_id,
                    "names": [*each.inputs],
                    "mark": each.mark,
                    "tokens": [*each.tokens],
                    "thumbnails": [thumbnail.to_json() for thumbnail in each.thumbnails],
                }
                for each in images
            ]
        )
        for place, each in enumerate(images):
            tensors |= {f"{prefix}.{number}.{place}.{name}": tensor for name, tensor in each.inputs.items()}
    return tensors, known


def read_images(tensors: Mapping[str, torch.Tensor], prefix: str, known: Any) -> tuple[tuple[PromptImages, ...], ...]:
    """Invert `write_images`."""
    return tuple(
        tuple(
            PromptImages(
                {name: tensors[f"{prefix}.{number}.{place}.{name}"] for name in each["names"]},
                each["digest"],
                each["token_id"],
                thumbnails=tuple(map(Thumbnail.from_json, each["thumbnails"])),
                mark=each["mark"],
                tokens=tuple(each.get("tokens", ())),
            )
            for place, each in enumerate(images)
        )
        for number, images in enumerate(known)
    )


NO_ROW = -1
"""`Responses.row_starts` of a token that begins no further row."""
EXTRA = "extra."
"""Begins the names of `token_extras` among the inputs of a loss, which they cannot replace."""


@dataclass(frozen=True)
class Responses(Ragged):
    """S responses as they were sampled, with what belongs to each token from there to the loss."""

    prompt_index: torch.Tensor = field(metadata=per_sequence())
    """[S] int64: index of each response's prompt in the batch; ascending."""
    tokens: torch.Tensor = field(metadata=per_token())
    """[R] int64: response tokens, the stop token included when one was sampled."""
    offsets: torch.Tensor
    """[S + 1] int64."""
    logprobs: torch.Tensor = field(metadata=per_token())
    """[R] fp32: log-prob of each token under the distribution it was sampled from (temperature, top-k/p, min-p)."""
    _: KW_ONLY
    floors: torch.Tensor | None = field(default=None, metadata=per_token(missing=-math.inf))
    """[R] fp32: log-prob under the full distribution below which the filters dropped tokens, and the trainer does;
    None: not reported."""
    loss_mask: torch.Tensor | None = field(default=None, metadata=per_token(missing=True, dtype="bool"))
    """[R] bool: False for tokens that the policy did not sample, as a tool's reply: they are inputs of the model, in
    lengths and in texts, but neither loss, KL, advantages nor counts of an update have them; their `logprobs` are not
    read. None: all were sampled."""
    seen: tuple[tuple[PromptImages, ...], ...] = field(
        default=(), metadata=per_sequence(missing=(), written_by=write_images, read_by=read_images)
    )
    """S tuples of images that were observed in the responses; () where none was."""
    shifts: torch.Tensor | None = field(default=None, metadata=per_token(missing=0, dtype="int64"))
    """[R, 3] int64: how far each token's positions in time, height and width, counted from the prompt's end, are beyond
    its number in the response; None: not at all."""
    row_starts: torch.Tensor | None = field(default=None, metadata=per_token(missing=NO_ROW, dtype="int64"))
    """[R] int64: at the first token of each further row of a trajectory, with how many tokens of its prompt that row
    begins; `NO_ROW` elsewhere. A trajectory is one response of one or more rows, each of which the model reads by
    itself: a history that was rewritten, masked by `loss_mask`, and what was sampled after it. None: each response is
    one row."""
    token_extras: Mapping[str, torch.Tensor] = field(default_factory=dict, metadata=per_token(names_key="token_extras"))
    """name -> [R, ...]: further values of each token, from an engine of one's own: the same names in every batch. A
    loss gets those of one number per token."""

    @property
    def loss_lengths(self) -> torch.Tensor:
        """[S] int64: tokens of each response that carry loss."""
        if self.loss_mask is None:
            return self.lengths
        return offsets_of(self.loss_mask.long())[self.offsets].diff()

    def loss_tokens_of(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return [R] bool: the tokens that carry loss of the sequences where `sequences` [S] bool is true."""
        tokens_R = self.per_token_of(sequences)
        return tokens_R if self.loss_mask is None else tokens_R & self.loss_mask

    def turn_ends(self) -> list[list[int]]:
        """Return the index of each turn's last token in its response, ascending; [-1] where nothing was sampled.

        A turn is a run of sampled tokens of a row: two sampled segments without a token between them are one turn.
        """
        if self.loss_mask is None and self.row_starts is None:
            return [[length - 1] for length in self.lengths.tolist()]
        mask = self.tokens.eq(self.tokens) if self.loss_mask is None else self.loss_mask
        follows = mask.clone()
        follows[:-1] &= ~mask[1:] if self.row_starts is None else ~mask[1:] | self.row_starts[1:].ne(NO_ROW)
        last = self.offsets[1:][self.lengths > 0] - 1
        follows[last] = mask[last]
        ends, bounds = follows.nonzero()[:, 0].tolist(), self.offsets.tolist()
        turns = offsets_of(follows.long())[self.offsets].tolist()
        return [
            [end - start for end in ends[first:stop]] or [-1]
            for start, (first, stop) in zip(bounds, pairwise(turns), strict=False)
        ]

    def token_lists(self) -> list[list[int]]:
        """Return the tokens of each response."""
        tokens = self.tokens.tolist()
        return [tokens[start:end] for start, end in pairwise(self.offsets.tolist())]

    def row_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bounds [B + 1] int64 of all B rows among the tokens, and the trajectory [B] int64 of each row."""
        import torch

        sequences = torch.arange(len(self))
        if self.row_starts is None:
            return self.offsets, sequences
        begin = self.row_starts.ne(NO_ROW).nonzero()[:, 0]
        # a row may begin with the first token of its response, after an empty one
        trajectory, order = torch.cat([sequences, self.per_token_of(sequences)[begin]]).sort(stable=True)
        return torch.cat([torch.cat([self.offsets[:-1], begin])[order], self.offsets[-1:]]), trajectory

    @property
    def longest_rows(self) -> torch.Tensor:
        """[S] int64: tokens of each response's longest row."""
        bounds, trajectory = self.row_bounds()
        return bounds.new_zeros(len(self)).scatter_reduce_(0, trajectory, bounds.diff(), "amax")

    def new_tokens(self) -> list[list[int]]:
        """Return the tokens of each response without the rewritten histories of its further rows."""
        if self.row_starts is None or self.loss_mask is None:
            return self.token_lists()
        lists = []
        columns = (self.tokens, self.loss_mask, self.row_starts)
        for start, end in pairwise(self.offsets.tolist()):
            kept, in_history = [], False
            for token, sampled, row in zip(*(column[start:end].tolist() for column in columns), strict=True):
                in_history = (in_history or row != NO_ROW) and not sampled
                if not in_history:
                    kept.append(token)
            lists.append(kept)
        return lists

    def by_prompt(self, prompts: int) -> list[Self]:
        """Return the responses to each of the prompts, as copies, with `prompt_index` 0."""
        parts = self.split(self.prompt_index.bincount(minlength=prompts).tolist())
        return [replace(part, prompt_index=part.prompt_index - i) for i, part in enumerate(parts)]


def _oldest(parts: Sequence[Completions]) -> int:
    return min((part.weight_version for part in parts if len(part)), default=0)


@dataclass(frozen=True)
class Completions(Responses):
    """S sampled responses, ragged, with their log-probs under the sampling distribution."""

    finished: torch.Tensor = field(metadata=per_sequence())
    """[S] bool: True if the response ended with a stop token or string, False if it was truncated at the limit."""
    texts: tuple[str, ...] = field(metadata=per_sequence())
    """S decoded responses (`Sampling.skip_special_tokens`), without the stop string."""
    weight_version: int = field(default=0, metadata=per_batch(joined=_oldest))
    """Policy version that sampled the responses; the oldest, if there are several."""
    versions: torch.Tensor | None = field(
        default=None, metadata=per_token(missing=lambda part: part.weight_version, dtype="int64")
    )
    """[R] int64: policy version that sampled each token, if weights changed in between; None: all `weight_version`."""
    outcomes: tuple[Mapping[str, Any], ...] = field(default=(), metadata=per_sequence(missing={}))
    """S outcomes of trajectories (`hwgrpo.agents.episode.OUTCOME`), as JSON has them, {} without one; () where no
    response has one."""
    late: int | None = None
    """Groups that missed `Sampling.group_timeout`; None: there is none."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Index of each prompt whose group was dropped, so that it has no responses here -> reason."""

    @property
    def outcome_of_each(self) -> tuple[Mapping[str, Any], ...]:
        """The S outcomes, {} without one."""
        return self.outcomes or ({},) * len(self)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token."""
        return self.weight_version if self.versions is None else int(self.versions.max())


@dataclass(frozen=True)
class StepRewards(Ragged):
    """The rewards of the K steps of S responses, ragged; every response has at least one step."""

    rewards: torch.Tensor = field(metadata=per_token())
    """[K] fp64: weighted sums; meaningless where the response is not valid."""
    ends: torch.Tensor = field(metadata=per_token())
    """[K] int64: index of a step's last token in its response, not descending; -1 in a response without tokens."""
    offsets: torch.Tensor
    """[S + 1] int64: the steps of response i are `offsets[i]:offsets[i + 1]`."""
    states: torch.Tensor | None = field(default=None, metadata=per_token(missing=-1, dtype="int64"))
    """[K] int64: a number of the environment's state in which a turn was taken, the same for equal states; -1: not
    known. None: the steps are no turns."""

    def among(self, loss_mask: torch.Tensor, response_offsets: torch.Tensor) -> StepRewards:
        """Return the steps with `ends` counted among the tokens that carry loss.

        Args:
            loss_mask: [R] bool, of the responses' tokens.
            response_offsets: [S + 1] int64, bounds of the responses.
        """
        before = offsets_of(loss_mask.long())
        start = self.per_token_of(response_offsets[:-1])
        return replace(self, ends=before[start + self.ends + 1] - before[start] - 1)


@dataclass(frozen=True)
class Rewards(Ragged):
    """The reward of each response, and its components."""

    total: torch.Tensor = field(metadata=per_sequence())
    """[S] fp64: the weighted sum; meaningless where `valid` is False."""
    valid: torch.Tensor = field(metadata=per_sequence())
    """[S] bool: False for a sample removed by a failure policy (`mask_sample`, `drop_group`)."""
    per_function: Mapping[str, torch.Tensor] = field(metadata=per_sequence(stored="reward", names_key="functions"))
    """name -> [S] fp64, NaN where the function returned no value."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """`errors/<name>`, `nans/<name>`, `timeouts/<name>` -> count in this batch."""
    first_failures: Mapping[str, str] = field(default_factory=dict)
    """The same keys -> the first failed sample and its error, as text."""
    extras: tuple[Mapping[str, Any], ...] = field(default=(), metadata=per_sequence(missing={}))
    """S dicts of extra fields that reward functions returned with the score; may be empty."""
    steps: StepRewards | None = field(default=None, metadata=per_sequence(ragged_class=StepRewards))
    """The rewards of the responses' steps, whose sums are `total`; None: the estimator reads none."""
    greedy: torch.Tensor | None = field(default=None, metadata=per_sequence())
    """[S] fp64: reward of the greedy response to the same prompt, NaN: none; None: the estimator reads none."""

    def __len__(self) -> int:
        return len(self.total)


def text_axes(length: int) -> torch.Tensor:
    """Return [length, 3] int64: the positions of tokens of text, the same in time, height and width."""
    import torch

    return torch.arange(length)[:, None].expand(-1, 3)


def _text_axes(part: TrainBatch) -> torch.Tensor:
    import torch

    return torch.cat([text_axes(length) for length in part.prompt_offsets.diff().tolist()])


@dataclass(frozen=True)
class TrainBatch(Responses):
    """The batch of a step's policy updates: the valid responses, with what their losses need."""

    prompt_tokens: torch.Tensor = field(metadata=per_prompt_token())
    """[P] int64: each prompt once."""
    prompt_offsets: torch.Tensor
    """[G + 1] int64."""
    advantages: torch.Tensor = field(metadata=per_sequence())
    """[S] fp32; with `token_advantages` their mean over the tokens of each sequence."""
    old_logprobs: torch.Tensor | None = field(default=None, metadata=per_token())
    """[R] fp32: log-probs of the policy at the start of the update; None on policy, where the ratio is 1."""
    ref_logprobs: torch.Tensor | None = field(default=None, metadata=per_token())
    """[R] fp32: log-probs of the reference model; None when no KL term needs them."""
    rollout_shares: torch.Tensor | None = field(default=None, metadata=per_token())
    """[R] fp32: weight of the rollout's log-prob in the old one, the rest is the current; None: `old_logprobs`."""
    token_advantages: torch.Tensor | None = field(default=None, metadata=per_token())
    """[R] fp32: the advantage of each token; None: every token has the advantage of its sequence."""
    weights: torch.Tensor | None = field(default=None, metadata=per_sequence())
    """[S] fp32: weight of every token of a sequence in the loss of one update; None: not known yet."""
    selections: Mapping[str, torch.Tensor] = field(default_factory=dict, metadata=per_token(names_key="selections"))
    """Input of the loss -> [R] fp32: what selections among the tokens of one update gave them."""
    prompt_axes: torch.Tensor | None = field(default=None, metadata=per_prompt_token(missing=_text_axes))
    """[P, 3] int64: positions of the prompts' tokens in time, height and width; None: the model counts tokens."""
    images: tuple[PromptImages | None, ...] = field(
        default=(), metadata=per_prompt(missing=lambda part: (None,) * (len(part.prompt_offsets) - 1))
    )
    """Of the G prompts; () where none has any."""
    trajectory: torch.Tensor | None = field(default=None, metadata=per_sequence())
    """[S] int64: where each sequence is a row (`by_rows`), the number of its trajectory; None: it is a response."""
    temperature: float | None = field(default=None, metadata=per_batch(joined=lambda parts: parts[0].temperature))
    """Of the log-probs that models compute: that of sampling, of all parts alike; None: `rollout.temperature`."""

    def column(self, name: str) -> tuple[torch.Tensor, bool]:
        """Return a column's tensor, and whether it has one entry per token; also of a selection, or `EXTRA` + name."""
        if name in self.selections:
            return self.selections[name], True
        if name.startswith(EXTRA):
            return self.token_extras[name.removeprefix(EXTRA)], True
        return super().column(name)

    def by_rows(self) -> TrainBatch:
        """Return the same tokens with each row as a sequence of its own, which the model computes by itself.

        Prompts of which some row has the beginning alone are there twice.
        """
        import torch

        if self.row_starts is None:
            return self
        bounds, trajectory = self.row_bounds()
        lengths, prompt_of = self.prompt_offsets.diff(), self.prompt_index[trajectory]
        kept = lengths[prompt_of]
        starts = self.row_starts[bounds[:-1].clamp_max(max(len(self.tokens) - 1, 0))] if len(self.tokens) else kept
        further = torch.zeros_like(trajectory, dtype=torch.bool)
        further[1:] = trajectory.diff() == 0
        kept = torch.where(further, starts, kept)
        cut = kept < lengths[prompt_of]
        cuts, number = torch.stack([prompt_of[cut], kept[cut]], dim=1).unique(dim=0, return_inverse=True)
        firsts = self.prompt_offsets[cuts[:, 0]].tolist()
        beginnings = [self.prompt_tokens[first : first + n] for first, n in zip(firsts, cuts[:, 1].tolist())]
        prompt_index = prompt_of.clone()
        prompt_index[cut] = len(lengths) + number
        changed: dict[str, Any] = {
            "prompt_tokens": torch.cat([self.prompt_tokens, *beginnings]),
            "prompt_offsets": offsets_of(torch.cat([lengths, cuts[:, 1]])),
            "offsets": bounds,
        }
        if self.prompt_axes is not None:
            axes = [self.prompt_axes[first : first + n] for first, n in zip(firsts, cuts[:, 1].tolist())]
            changed["prompt_axes"] = torch.cat([self.prompt_axes, *axes])
        if self.images:  # a trajectory with several rows has none
            changed["images"] = (*self.images, *[None] * len(cuts))

        def of_rows(value: Any, per: str) -> Any:
            if per != "sequence":
                return value
            return tuple(value[i] for i in trajectory.tolist()) if isinstance(value, tuple) else value[trajectory]

        rows = self._with(changed, of_rows)
        return replace(rows, prompt_index=prompt_index, row_starts=None, trajectory=trajectory)

    @property
    def rollout_logprobs(self) -> torch.Tensor:
        """[R] fp32: `logprobs`, those that the rollout engine reported."""
        return self.logprobs

    @property
    def advantages_R(self) -> torch.Tensor:
        """[R] fp32: the advantage of each token."""
        return self.per_token_of(self.advantages) if self.token_advantages is None else self.token_advantages


def image_columns(prompts: Sequence[Prompt], *, shifted: bool = False) -> dict[str, Any]:
    """Return the columns `images` and `prompt_axes` of a batch; none where no prompt has images.

    Args:
        prompts: of the batch.
        shifted: whether responses have `shifts`.
    """
    import torch

    images = tuple(prompt.images for prompt in prompts)
    present = [each for each in images if each is not None]
    if not present and not shifted:
        return {}
    axes = None
    if shifted or present[0].axes is not None:
        each = (text_axes(len(prompt.token_ids)) if prompt.images is None else prompt.images.axes for prompt in prompts)
        axes = torch.cat([tensor for tensor in each if tensor is not None])
    return {"images": images, "prompt_axes": axes}


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one finished step, under verl's and TRL's names."""

    step: int
    values: Mapping[str, float]
