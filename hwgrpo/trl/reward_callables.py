"""Reward functions and models of a TRL script -> entries of `reward.functions`."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, nearest, shown
from hwgrpo.rewards.functions import ENVIRONMENTS, TRL_SERVICES
from hwgrpo.rewards.functions import TRL as TRL_ARGUMENTS
from hwgrpo.support.template_clock import clock_options
from hwgrpo.trl.grpo_config import note

SCORED = "_scored"
"""Name of the entry that drops responses for which every function returned None; no function's name begins with _."""
_RESPONSES = "responses"
_MODEL = "reward_model"
_ONE = "solution_str"
"""Argument of verl's signature, which scores one response a call."""


class RewardModelCall:
    """A sequence-classification model as a reward: its first logit of prompt and completion.

    As in TRL the tokenizer adds no special tokens: those of a conversation are the chat template's.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer; None: that of its `name_or_path`.
        options: of the chat template.
        device: returns the run's device, which the model moves to; None: it stays where it is.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        options: Mapping[str, Any] | None = None,
        device: Callable[[], torch.device] | None = None,
    ) -> None:
        if tokenizer is None:
            from hwgrpo.support.pretrained_tokenizer import pretrained_tokenizer

            tokenizer = pretrained_tokenizer(model.config._name_or_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        self.__name__ = str(model.config._name_or_path).rstrip("/").rpartition("/")[2] or type(model).__name__
        self._model, self._tokenizer = model.eval(), tokenizer
        self._options, self._device = dict(options or {}), device

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], template_date: str | None = None, **_: Any
    ) -> list[float]:
        """Return the scores of completions; a chat template with a clock writes `template_date`."""
        options = {**clock_options(template_date), **self._options}
        pairs = zip(prompts, completions, strict=True)
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **options)
            for prompt, completion in pairs
        ]
        if self._device is not None:
            self._model.to(self._device())
        inputs = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        logits = self._model(**inputs.to(self._model.device)).logits
        return logits[:, 0].float().tolist()


class RewardCallables:
    """The rewards of a script, as entries of `reward.functions`.

    Args:
        rewards: a function, a model or the name of one, or a list of these.
        tokenizers: a tokenizer of each model, or None.
        state: returns the state that functions get as `trainer_state`.
        options: of the chat template, for models.
        conversations: whether the prompts are messages, to which a chat template is applied.
        device: returns the run's device, for models given as objects; None: they stay where they are.

    Raises:
        ConfigError: there are none, or one cannot be used.
    """

    def __init__(
        self,
        rewards: Any,
        tokenizers: Any,
        state: Callable[[], Any],
        *,
        options: Mapping[str, Any] | None = None,
        conversations: bool = True,
        device: Callable[[], torch.device] | None = None,
    ) -> None:
        listed = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        if rewards is None or not listed:
            raise ConfigError("reward_funcs is missing: give a function, or the name of a reward model, or a list")
        given = tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers] * len(listed)
        if len(given) != len(listed):
            raise ConfigError(f"reward_processing_classes has {len(given)} entries for {len(listed)} reward_funcs")
        self._state, self._device = state, device
        self._model_kwargs: dict[str, Any] = {"special_tokens": False}
        if options:
            self._model_kwargs["chat_template_kwargs"] = dict(options)
        if not conversations:
            self._model_kwargs["chat_template"] = False
        self.shown: dict[str, str] = {}
        """Name of a model's metrics here -> its name in TRL, the last part of its path."""
        self._logged: dict[str, list[float]] = {}
        """Name -> values that functions logged by `log_metric`."""
        self._missing: dict[str, list[bool]] = {}
        names: Counter[str] = Counter()
        self.entries: list[dict[str, Any]] = []
        for number, (reward, tokenizer) in enumerate(zip(listed, given, strict=True)):
            self.entries.append(self._entry(reward, tokenizer, number, names))
        if len(self.entries) > 1 and all("as" in each for each in self.entries):
            self.entries.append({"name": self._scored, "as": SCORED, "weight": 0.0, "on_nan": "mask_sample"})
        elif len(self.entries) == 1:
            self.entries[0]["on_nan"] = "mask_sample"

    def weigh(self, weights: Sequence[float] | None) -> list[dict[str, Any]]:
        """Return the entries with a weight each.

        Raises:
            ConfigError: there are more or fewer weights than functions.
        """
        functions = [each for each in self.entries if each.get("as") != SCORED]
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(f"reward_weights has {len(weights)} entries for {len(functions)} reward_funcs; one each")
        for entry, weight in zip(functions, weights or [], strict=False):
            entry["weight"] = float(weight)
        return self.entries

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the dataset has the columns that functions of TRL's signature need.

        Raises:
            ConfigError: it has not.
        """
        for entry in self.entries:
            if "as" not in entry:
                continue
            parameters = inspect.signature(entry["name"]).parameters.values()
            named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
            needed = [each.name for each in named if each.default is each.empty]
            if ENVIRONMENTS in needed and ENVIRONMENTS not in columns:
                raise ConfigError(
                    f"reward_funcs: {entry['as']} needs {ENVIRONMENTS}, and there are none: give "
                    "environment_factory, or a reward function that reads the response"
                )
            known = {*columns, *TRL_ARGUMENTS, *TRL_SERVICES, "ground_truth"}
            missing = [name for name in needed if name not in known]
            if _ONE in needed or "batch" in needed or not missing:
                continue
            near = nearest(missing[0], columns)
            raise ConfigError(
                f"reward_funcs: {entry['as']} needs the column {missing[0]!r}, which train_dataset lacks (columns: "
                f"{', '.join(sorted(columns))})" + (f": did you mean {near!r}?" if near else "")
            )

    def _entry(self, reward: Any, tokenizer: Any, number: int, names: Counter[str]) -> dict[str, Any]:
        if isinstance(reward, str):
            if tokenizer is not None:
                raise ConfigError(
                    f"reward_processing_classes[{number}]: the tokenizer of {reward!r} is that of its folder; give "
                    "None, or the model as an object with this tokenizer"
                )
            if reward in REWARDS.names() or reward.partition(":")[0].endswith(".py"):
                return {"name": reward}
            self.shown[_unused(_MODEL, names)] = _unused(reward.rstrip("/").rpartition("/")[2], names)
            return {"name": _MODEL, "kwargs": {"path": reward, **self._model_kwargs}}
        if hasattr(reward, "forward") and hasattr(reward, "config"):
            reward = RewardModelCall(reward, tokenizer, self._model_kwargs.get("chat_template_kwargs"), self._device)
        if not callable(reward):
            raise ConfigError(f"reward_funcs[{number}]={shown(reward)} is neither a function nor a model")
        name = _unused(_name_of(reward), names)
        return {"name": self._adapted(reward, name), "as": name, "on_nan": "value", "failure_value": 0.0}

    def _adapted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that gets this trainer's state, and whose None are counted."""
        signature, renames = _signature(function, name)

        def arguments(given: dict[str, Any]) -> dict[str, Any]:
            if renames:
                given[_RESPONSES] = given.pop("completions")
            if "trainer_state" in given:
                given["trainer_state"] = self._state()
            if "log_metric" in given:
                given["log_metric"] = self._log_metric
            return given

        async def awaited(values: Any, record: Callable[[Any], Any]) -> Any:
            return record(await values)

        def call(**given: Any) -> Any:
            record = self._recorder(name, one=_ONE in given)
            values = function(**arguments(given))
            return awaited(values, record) if inspect.isawaitable(values) else record(values)

        async def call_async(**given: Any) -> Any:
            return await call(**given)

        kinds = (function, getattr(type(function), "__call__", None))  # noqa: B004
        made: Any = call_async if any(map(inspect.iscoroutinefunction, kinds)) else call
        functools.update_wrapper(made, function, assigned=("__doc__", "__module__"), updated=())
        made.__name__, made.__signature__ = name, signature
        return made

    def _recorder(self, name: str, *, one: bool) -> Callable[[Any], Any]:
        """Return what counts the None of a call and returns its values as a list; `one`: of one response, a value."""
        if not one:

            def record(values: Any) -> Any:
                listed = _listed(values)
                if isinstance(listed, list):
                    self._missing[name] = [each is None for each in listed]
                return listed

            return record
        rows = self._missing.setdefault(name, [])
        rows.append(False)
        place = len(rows) - 1

        def record_one(value: Any) -> Any:
            rows[place] = value is None or (isinstance(value, Mapping) and value.get("score", 0.0) is None)
            return value

        return record_one

    def pop_logged(self) -> dict[str, list[float]]:
        """Return and clear the values that functions logged by `log_metric`, by name."""
        logged, self._logged = self._logged, {}
        return logged

    def _log_metric(self, name: str, value: float) -> None:
        self._logged.setdefault(name, []).append(float(value))

    def _scored(self, completions: Sequence[Any], **_: Any) -> list[float | None]:
        """Return None for responses that no function scored, as TRL leaves them out."""
        missing, self._missing = self._missing, {}
        listed = [rows for rows in missing.values() if len(rows) == len(completions)]
        if len(listed) < len(self.entries) - 1:  # one failed, which counts with its failure_value
            return [0.0] * len(completions)
        return [None if all(row) else 0.0 for row in zip(*listed, strict=True)]


def _listed(values: Any) -> Any:
    """Return a tensor, an array, a tuple or a generator as a list; anything else as it is."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, tuple | Iterator) else values


def _signature(function: Callable[..., Any], name: str) -> tuple[inspect.Signature, bool]:
    """Return a signature of TRL's form, and whether `responses` stands for `completions`."""
    parameters = list(inspect.signature(function).parameters.values())
    known = {each.name for each in parameters}
    renames = _RESPONSES in known and not known & {"completions", "solution_str"}
    if renames:
        note(f"reward_funcs: {name}(..., responses) is read as TRL's (..., completions)")
        parameters = [each.replace(name="completions") if each.name == _RESPONSES else each for each in parameters]
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD and not known & {"solution_str", "batch"}:
        missing = [each for each in ("prompts", "completions", "completion_ids") if each not in known]
        missing += [each for each in ("trainer_state", "log_extra", "log_metric") if each not in known]
        missing = [each for each in missing if not (renames and each == "completions")]
        extra = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in missing]
        parameters = [*parameters[:-1], *extra, parameters[-1]]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) if each.kind in kinds else each for each in parameters
    ]
    return inspect.Signature(parameters), renames


def _unused(name: str, names: Counter[str]) -> str:
    """Return a name with its number if it has occurred before."""
    names[name] += 1
    return name if names[name] == 1 else f"{name}_{names[name]}"


def _name_of(function: Any) -> str:
    """Return a name for metrics: letters, digits, _ and -."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    name = re.sub(r"[^\w-]", "_", name).strip("_") or "reward"
    return name if re.match(r"[A-Za-z_]", name) else f"reward_{name}"
