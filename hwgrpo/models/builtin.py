"""`builtin://tiny`: a small Qwen3-architecture model and a character tokenizer, made and warm-started on this machine.

The warm start is supervised training on a task's demonstrations, which come from several modes of which one is right.
The result is a model that has the skill without preferring the right mode: what is left is reinforcement learning.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.data import TASKS, tasks
from hwgrpo.errors import ConfigError, choice_error

PREFIX = "builtin://"
NAMES = ("tiny",)
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
HEAD_DIM = 16
POSITIONS = 4096
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A character model has no role markers: a conversation is its contents, one after the other."""


@dataclass(frozen=True)
class TinySpec:
    """What `builtin://tiny?option=value&...` can say. Options that are not listed here are the task's own.

    Raises:
        ConfigError: a value is out of range, or the task does not know an option.
    """

    task: str = "sort"
    """Task whose demonstrations warm-start the model."""
    seed: int = 0
    """Seed of the initial weights and of the demonstrations."""
    hidden: int = 64
    """Hidden size; a multiple of 32 (heads of 16, two per key-value head)."""
    layers: int = 2
    """Decoder layers."""
    steps: int = 250
    """Warm-start steps; 0 leaves the initial weights."""
    batch: int = 128
    """Demonstrations per step."""
    lr: float = 2e-3
    """Peak learning rate of the warm start."""
    task_options: tuple[tuple[str, str], ...] = ()
    """Options handed to the task, e.g. (("digits", "5"),)."""

    def __post_init__(self) -> None:
        rules = (
            ("seed", self.seed >= 0, "at least 0"),
            ("hidden", self.hidden >= 32 and self.hidden % 32 == 0, "a positive multiple of 32"),
            ("layers", self.layers >= 1, "at least 1"),
            ("steps", self.steps >= 0, "at least 0"),
            ("batch", self.batch >= 1, "at least 1"),
            ("lr", 0 < self.lr < 1, "above 0 and below 1"),
        )
        for key, fulfilled, allowed in rules:
            if not fulfilled:
                raise ConfigError(f"{PREFIX}tiny: {key}={getattr(self, key)} is out of range: it must be {allowed}")

    @property
    def task_address(self) -> str:
        """The `task://` address of the demonstrations."""
        query = f"?{urlencode(self.task_options)}" if self.task_options else ""
        return f"{tasks.PREFIX}{self.task}{query}"


def parse(address: str) -> TinySpec:
    """Read a `builtin://` address.

    Raises:
        ConfigError: the model, the task or an option is unknown, or a value is not a number or out of range.
    """
    assert address.startswith(PREFIX), address
    name, _, query = address.removeprefix(PREFIX).partition("?")
    if name not in NAMES:
        raise choice_error(f"model.path={address!r}: built-in model", name, NAMES)
    given = dict(parse_qsl(query, keep_blank_values=True))
    if query and not given:
        raise ConfigError(f"model.path={address!r}: {query!r} is not of the form option=value&option=value")
    task = given.get("task", TinySpec.task)
    if task not in TASKS:
        raise choice_error(f"model.path={address!r}: task", task, TASKS.names())
    own = {field.name for field in fields(TinySpec)} - {"task_options"}
    of_task = inspect.signature(TASKS.load(task)).parameters
    values: dict[str, object] = {"task": task}
    options = []
    for key, value in given.items():
        if key in own:
            values[key] = _convert(address, key, value)
        elif key in of_task:
            options.append((key, value))
        else:
            raise choice_error(f"model.path={address!r}: option", key, {*own, *of_task})
    return TinySpec(**values, task_options=tuple(sorted(options)))  # pyright: ignore[reportArgumentType]


def _convert(address: str, key: str, value: str) -> object:
    kind = type(getattr(TinySpec, key))
    try:
        return kind(value)
    except ValueError:
        wanted = "a number" if kind is float else "a whole number"
        raise ConfigError(
            f"model.path={address!r}: {key}={value!r} is not {wanted}; e.g. {key}={getattr(TinySpec, key)}"
        ) from None


def resolve(address: str) -> Path:
    """Return the folder of a built-in model in Hugging Face format, making it first where it is not in the cache.

    The cache is `$HWGRPO_CACHE`, else `~/.cache/hwgrpo`. Processes that make the same model at once make it each,
    bitwise the same; one of them gets to keep its folder.

    Args:
        address: `builtin://tiny?task=sort&seed=0&...`; see `TinySpec`.

    Raises:
        ConfigError: see `parse`.
    """
    spec = parse(address)
    root = Path(os.environ.get("HWGRPO_CACHE") or Path.home() / ".cache" / "hwgrpo") / "builtin"
    folder = root / _fingerprint(spec)
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        # Written beside its place and renamed: a folder with the final name is complete.
        unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
        try:
            model, tokenizer = make(spec)
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            (unfinished / "builtin.json").write_text(json.dumps(asdict(spec), indent=2) + "\n")
            _rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _rename(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        # Another process was first; its model is the same. Any other reason is an error.
        if not folder.is_dir():
            raise


def _fingerprint(spec: TinySpec) -> str:
    """Hash everything that decides the weights: options, the code here and of the tasks, library versions."""
    parts = [
        json.dumps(asdict(spec), sort_keys=True),
        Path(__file__).read_text(),
        Path(tasks.__file__).read_text(),
        *(module.__version__ for module in (torch, transformers, tokenizers, np)),
    ]
    return f"tiny-{spec.task}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def make(spec: TinySpec) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build and warm-start a model; the same spec gives bitwise the same weights on one kind of CPU.

    Returns:
        the model (fp32, on the CPU, in evaluation mode) and its tokenizer.
    """
    task = tasks.parse_task(spec.task_address)
    tokenizer = character_tokenizer(task.alphabet)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(_config(spec, tokenizer)).float()
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        if spec.steps:
            _warm_start(model, tokenizer, task.demonstrations(spec.steps * spec.batch, spec.seed), spec)
    return model.eval(), tokenizer


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character: printable ASCII, newline and `alphabet`.

    There is no beginning-of-sequence token; any other character becomes `<unk>`.
    """
    characters = sorted({*string.printable[:95], "\n", *alphabet})
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNK, *characters))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def _config(spec: TinySpec, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden,
        intermediate_size=2 * spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.hidden // HEAD_DIM,
        num_key_value_heads=spec.hidden // (2 * HEAD_DIM),
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]], spec: TinySpec
) -> None:
    """Train on (prompt, response) pairs; the loss counts response and end-of-sequence tokens only."""
    inputs, targets = _tensors(tokenizer, pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, spec.steps))
    model.train()
    for batch_inputs, batch_targets in zip(inputs.split(spec.batch), targets.split(spec.batch)):
        # Causal attention and padding on the right: a real token never sees a padded one, so no mask is needed.
        logits = model(input_ids=batch_inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch_targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def _lr_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: up over 20 steps, then linearly down to a tenth."""
    return min((step + 1) / 20, 1.0 - 0.9 * step / steps)


def _tensors(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-token targets, both [len(pairs), longest - 1] int64; -100 where there is no loss."""
    # A look-up per character is what the tokenizer does, only some twenty times faster than calling it.
    vocabulary = tokenizer.get_vocab()
    longest = max(len(prompt) + len(response) for prompt, response in pairs) + 1
    ids = np.full((len(pairs), longest), vocabulary[PAD])
    targets = np.full((len(pairs), longest), -100)
    for row, (prompt, response) in enumerate(pairs):
        tokens = [*(vocabulary[character] for character in prompt + response), vocabulary[EOS]]
        ids[row, : len(tokens)] = tokens
        targets[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets[:, 1:])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: the order of floating-point sums, and with it the weights, must not depend on the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
