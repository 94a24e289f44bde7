"""A small Qwen3-architecture model and a character tokenizer, warm-started on a task's demonstrations.

The demonstrations come from several modes of which one is right. The result is a model that has the skill without
preferring the right mode, which is left to reinforcement learning.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.data.agent_tasks import ASSISTANT, ROLES, ChatTask
from hwgrpo.data.agent_tasks import CHAT_TEMPLATE as AGENT_TEMPLATE
from hwgrpo.data.tasks import Task

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
POSITIONS = 4096
INITIALIZER_RANGE = 0.06
"""Standard deviation of initial weights. The usual 0.02 suits wide models; at width 64 learning starts late with it."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A character model has no role markers: a conversation is its contents, one after the other."""
ROLES_TEMPLATE = (
    '{% if tools %}tools, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\n'
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ (eos_token if message.role == 'assistant' else '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Of `byte_tokenizer`."""


def make(
    *, task: Task, seed: int, hidden: int, layers: int, steps: int, batch: int, lr: float, head: int = 16
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build and warm-start a model; the same arguments give bitwise the same weights on one kind of CPU.

    Args:
        task: whose demonstrations it is warm-started on.
        seed: of the initial weights and of the demonstrations.
        hidden: hidden size, a multiple of twice the head size.
        layers: decoder layers.
        steps: warm-start steps; 0 leaves the initial weights.
        batch: demonstrations per step.
        lr: peak learning rate.
        head: size of an attention head.

    Returns:
        the model (fp32, on the CPU, in evaluation mode) and its tokenizer.
    """
    tokenizer = character_tokenizer(task.alphabet)
    if isinstance(task, ChatTask):
        tokens: list[str | AddedToken] = [AddedToken(text, normalized=False) for text in (*ROLES, *task.tokens)]
        tokenizer.add_tokens(tokens)
        tokenizer.chat_template = AGENT_TEMPLATE
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer, hidden, layers, head)).float()
        model.generation_config.pad_token_id = model.config.pad_token_id
        if steps:
            of_chats = isinstance(task, ChatTask)
            inputs, targets = _tensors(tokenizer, task.demonstrations(steps * batch, seed), of_chats)
            pairs = zip(inputs.split(batch), targets.split(batch), strict=True)
            warm_start(model, (({"input_ids": each}, wanted) for each, wanted in pairs), steps, lr)
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte, for any text; its chat template shows roles and Hermes' calls."""
    special = {token: 256 + i for i, token in enumerate((PAD, EOS))}
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(alphabet | special, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=ROLES_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=10**6,
    )


def _config(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, head: int) -> Qwen3Config:
    vocabulary = tokenizer.get_vocab()
    return Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // (2 * head),
        head_dim=head,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
    )


def warm_start(
    model: Any, batches: Iterable[tuple[Mapping[str, torch.Tensor], torch.Tensor]], steps: int, lr: float
) -> None:
    """Train a model on batches.

    Args:
        model: all of it is trained.
        batches: arguments of its forward, and next-token targets [B, L] int64, -100 where there is no loss.
        steps: number of batches.
        lr: peak learning rate.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, steps))
    model.train()
    for inputs, targets in batches:
        # Causal attention and padding on the right: a real token never sees a padded one, so no mask is needed.
        logits = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def _lr_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: up over 20 steps, then linearly down to a tenth."""
    return min((step + 1) / 20, 1.0 - 0.9 * step / steps)


def _tensors(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]], of_chats: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-token targets, both [len(pairs), longest - 1] int64; -100 where there is no loss.

    Args:
        tokenizer: the model's.
        pairs: prompts and responses.
        of_chats: the responses have several turns; what is observed between them has no loss.
    """
    vocabulary = tokenizer.get_vocab()
    if of_chats:
        encoded = [_encoded_chat(tokenizer, *pair) for pair in pairs]
    else:  # a look-up per character equals the tokenizer's result and is about twenty times faster
        encoded = [
            ([vocabulary[character] for character in prompt], [vocabulary[character] for character in response])
            for prompt, response in pairs
        ]
    longest = max(len(prompt) + len(response) for prompt, response in encoded) + 1
    ids = np.full((len(pairs), longest), vocabulary[PAD])
    targets = np.full((len(pairs), longest), -100)
    for row, (prompt, response) in enumerate(encoded):
        tokens = [*prompt, *response, vocabulary[EOS]]
        ids[row, : len(tokens)] = tokens
        targets[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    if of_chats:
        targets[observed_tokens(ids, vocabulary[EOS], vocabulary[ASSISTANT])] = -100
    return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets[:, 1:])


@functools.lru_cache(maxsize=1 << 16)
def _encoded_chat(tokenizer: PreTrainedTokenizerFast, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of a response; conversations are drawn many times each."""
    both = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, response))
    return tuple(both)  # type: ignore[return-value]


def observed_tokens(ids: np.ndarray, end: int, begin: int) -> np.ndarray:
    """Return [N, T] bool: the tokens between the end of a turn and the beginning of the next one, which included."""
    ends, begins = np.cumsum(ids == end, axis=1), np.cumsum(ids == begin, axis=1)
    between = np.roll(ends, 1, axis=1)
    between[:, 0] = 0
    return (between >= begins) | (ids == begin)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: the order of floating-point sums, and with it the weights, must not depend on the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
