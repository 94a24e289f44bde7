"""Random sets of overrides, drawn from the schema: right values, limits, near misses and nonsense."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

from hwgrpo_backends import BackendError
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import Config, load_config
from hwgrpo.config.document import entries
from hwgrpo.config.fields import Limits
from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError

BASE = (
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=2&batch=8&digits=3",
    "data.train=task://sort?digits=3",
    "data.max_prompt_tokens=16",
    "rollout.n=4",
    "rollout.max_response_tokens=6",
    "reward.functions=[exact_match]",
    "trainer.prompts_per_step=4",
    "trainer.max_steps=6",
    "trainer.threads=1",
    "observe.loggers=[jsonl]",
)
LONG = "x" * 300
NONSENSE = (
    "", "null", "~", "true", "no", "0", "1", "-1", "2", "3.5", "1e-300", "1e308", "1e999", ".inf", "-.inf", ".nan",
    "１", "1:30", "010", "0x1F", "1_000", "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 30, "2147483648",
    "18446744073709551616", "[]", "{}", "[1, 2", "{a: 1, a: 2}", "{1: 2}", "[[[]]]", "[" * 200, "[null]",
    "[1, x, 2.5]", "{a: {b: c}}", "???", "[???]", "${rollout.n}", "${nope.at.all}", "${oc.env:HOME}",
    "${oc.env:NOT_SET}", "${", "\\${x}", "${oc.decode:[}", "&a [*a]", "*nowhere", "!!python/object:os.system x",
    "!!set {a}", "!!binary aGk=", "- a\n- b", "a: b", "\ta: b", "a\n\tb: c", "'", '"', "%", "@x", "`", "\\", "\0",
    "\ud800", "\udc80", "e\u0301", "\u202e", "🦥", " ", "a b", LONG, f"{LONG}.jsonl", f"./{LONG}", f"[{LONG}.py]",
    "~nobody-of-that-name/x", "~", "/", ".", "..", "/dev/null", "/proc/self/mem", "/root/x/y.jsonl", "http://[",
    "builtin://", "builtin://tiny?seed=99999999999", "builtin://tiny?hidden=x", "builtin://huge", "task://",
    "task://sort?digits=0", "task://sort?digits=99", "task://nope", "owner/name:subset:x", "a/b/c.py:f",
    "[exact_match, exact_match]", "[{name: length, kwargs: {x: 1}}]", "[{}]", "[{weight: 1}]", "2024-01-01",
)  # fmt: skip
"""Values for any setting."""
RIGHT = {
    "model.path": ["builtin://tiny?steps=0", "builtin://tiny?task=sort&hidden=32&layers=1&steps=2&batch=8&digits=3"],
    "model.lora.target_modules": ["[all-linear]", "[q_proj, v_proj]", "[nope]"],
    "model.fused_modules": ["[auto]", "[none]", "[rms_norm]"],
    "data.train": ["task://sort?digits=3", "task://copy", "openai/gsm8k"],
    "data.validation": ["task://sort?digits=3", "null"],
    "reward.functions": ["[exact_match]", "[length, format]", "[{name: exact_match, weight: 2, timeout: 5}]"],
    "reward.functions[].name": ["exact_match", "length", "gsm8k"],
    "observe.loggers": ["[jsonl]", "[jsonl, tensorboard]", "[]", "[wandb]"],
    "trainer.resume": ["auto", "never"],
    "rollout.server.url": ["http://127.0.0.1:9", "[http://127.0.0.1:9,http://127.0.0.1:8]", "null"],
}
"""Key -> values that are right on their own."""
HANDLED = (ConfigError, DataError, RewardError, CheckpointError, BackendError, RunError)
"""What the command line turns into one line."""
_REMEDY = re.compile(
    r"The sections are|so a number comes|there are:|\b(use|set|put|allowed|choose|must|mean|leave|name|write|has|have|"
    r"e\.g\.|here|remove|give|raise|lower|tried|looked for|check|Fix|needs?|is required|save|options?|indent|install|"
    r"add|takes?|knows?)\b",
    re.IGNORECASE,
)


def draw(seed: int) -> list[str]:
    """Return one to five overrides; in two sets of three most are right, so that later checks are reached."""
    rng = random.Random(seed)
    wild = rng.choice([0.0, 0.08, 0.5])
    return [_override(rng, wild) for _ in range(rng.randint(1, 5))]


def _override(rng: random.Random, wild: float) -> str:
    entry = rng.choice(entries())
    key = entry.key.replace("[]", "." + (rng.choice(["1", "-1", "x"]) if rng.random() < wild else "0"))
    if rng.random() < wild / 4:
        key = _other_key(rng, key)
    return f"{key}={rng.choice(NONSENSE) if rng.random() < wild else _value(rng, entry.key, wild)}"


def _other_key(rng: random.Random, key: str) -> str:
    cut = rng.randrange(len(key))
    return rng.choice(
        [key[:cut] + key[cut + 1 :], f"~{key}", f"+{key}", f"{key}.0", f"{key}.x", f"{key}.", f".{key}", key.upper(),
         key.rpartition(".")[0] or key, key.rpartition(".")[2], key.replace(".", ".."), f"{key}[0]", "", "é", "\udc80",
         f"{key}.99999999999", LONG, "num_generations", "actor_rollout_ref.rollout.n", "data.train_batch_size"]
    )  # fmt: skip


def _value(rng: random.Random, key: str, wild: float) -> str:
    field = _field(key)
    limits: Limits | None = field.metadata.get("limits")
    names = limits.names() if limits else None
    if names:
        name = rng.choice(names)
        return rng.choice([name[:-1], name + "x", name.upper(), f"[{name}]"]) if rng.random() < wild else name
    if limits:
        bounds = [b for b in (limits.at_least, limits.at_most, limits.above, limits.below) if b is not None]
        if rng.random() < max(wild, 0.2):
            near = [b + d for b in bounds for d in (-1, -1e-9, 0, 1e-9, 1)]
            return str(rng.choice([*near, *map(int, near), 10 ** rng.randint(0, 40), rng.random() * 100]))
        inside = [v for v in (1, 2, 4, 8, 16, 64, 0.5, 0.3, 1e-4) if limits.accepts(v)] or bounds
        whole = [int(v) for v in inside if v == int(v)]
        kinds = str(field.type)
        value = rng.choice(inside if "float" in kinds else whole or [1])
        return f"[{value}, {value}]" if "list" in kinds else str(value)
    if "bool" in str(field.type):
        return rng.choice(["true", "false"])
    if "dict" in str(field.type):
        return rng.choice(["{}", "{a: 1}", "{row_stats: torch}", "{enable_thinking: false}"])
    return rng.choice(RIGHT.get(key) or (["[a]", "[]", "['#']"] if "list" in str(field.type) else ["null", "a", "b c"]))


def _field(key: str) -> dataclasses.Field:
    section: type = Config
    *parents, last = key.replace("[]", "").split(".")
    for name in parents:
        hint = {f.name: f for f in dataclasses.fields(section)}[name].type
        section = getattr(__import__("hwgrpo.config.schema", fromlist=["x"]), re.sub(r"^list\[|\]$", "", str(hint)))
    return next(f for f in dataclasses.fields(section) if f.name == last)


def attempt(overrides: list[str], output: Path, *, plan: bool = True) -> str | None:
    """Load the settings and plan a run with them, as `--dry-run` does; return the refusal, or None.

    Any exception but those of `HANDLED` passes through.
    """
    from hwgrpo.config.validate import check_resume, check_world_size
    from hwgrpo.planning.dry_run import make_plan

    try:
        config = load_config(None, [*BASE, f"trainer.output_dir={output}", *overrides], data_may_be_missing=True)
        check_resume(config)
        check_world_size(config, 1)
        if plan:
            make_plan(config, BACKEND, 1)
    except HANDLED as error:
        return str(error)
    return None


def lacks(message: str, overrides: list[str]) -> list[str]:
    """Return what an error should have said and did not: the key of a setting, or a remedy."""
    keys = {entry.key.replace("[]", "") for entry in entries()}
    sections = {key.rsplit(".", i)[0] for key in keys for i in range(key.count(".") + 1)}
    plain = re.sub(r"\.\d+", "", message)
    named = any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", plain) for key in keys | sections)
    named = named or any(override.partition("=")[0] and override.partition("=")[0] in message for override in overrides)
    named = named or "builtin://" in message or "task://" in message or "is not an override" in message
    return [what for what, there in (("key", named), ("remedy", _REMEDY.search(message))) if not there]
