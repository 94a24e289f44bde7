"""Which settings of the algorithm exclude each other, found by asking the check of a run about every pair."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo import catalog
from hwgrpo.config.load import Config, load_config
from hwgrpo.config.schema import AlgorithmConfig
from hwgrpo.config.validate import check_config
from hwgrpo.errors import ConfigError

Settings = Mapping[str, Any]
"""Full key -> value."""

NAMES: dict[str, tuple[tuple[str, ...], Settings]] = {
    "algorithm.loss.name": (tuple(catalog.POLICY_LOSSES.names()), {}),
    "algorithm.kl.estimator": (tuple(catalog.KL_ESTIMATORS.names()), {"algorithm.kl.coef": 0.1}),
    "algorithm.aggregation.name": (tuple(catalog.AGGREGATIONS.names()), {}),
    "algorithm.correction.name": (tuple(catalog.CORRECTIONS.names()), {}),
    "algorithm.advantage.name": (tuple(catalog.ADVANTAGES.names()), {}),
}
"""Settings that select by name: their names, and what these need."""
PRODUCT = tuple(NAMES)[:4]
"""Those of which every combination is checked; advantages are compared with each other setting."""
_FILTER = {"algorithm.filter_groups.enable": True}
VALUES: tuple[tuple[str, Any, Settings], ...] = (
    ("algorithm.loss.clip_low", 0.1, {}),
    ("algorithm.loss.clip_high", 0.3, {}),
    ("algorithm.loss.clip_high", -0.5, {"algorithm.loss.name": "cispo"}),
    ("algorithm.loss.dual_clip", 1.5, {}),
    ("algorithm.loss.delta", 2.0, {}),
    ("algorithm.loss.log_ratio_clamp", 5.0, {}),
    ("algorithm.loss.tau_pos", 2.0, {"algorithm.loss.name": "sapo"}),
    ("algorithm.loss.tau_neg", 2.0, {"algorithm.loss.name": "sapo"}),
    ("algorithm.loss.kwargs", {"beta": 0.3}, {"algorithm.loss.name": "dro"}),
    ("algorithm.kl.coef", 0.1, {}),
    ("algorithm.kl.input_clamp", 5.0, {"algorithm.kl.coef": 0.1}),
    ("algorithm.kl.output_clamp", 5.0, {"algorithm.kl.coef": 0.1}),
    ("algorithm.kl.times_ratio", True, {"algorithm.kl.coef": 0.1}),
    ("algorithm.aggregation.norm_length", 9, {"algorithm.aggregation.name": "seq-mean-token-sum-norm"}),
    ("algorithm.correction.low", 0.5, {"algorithm.correction.name": "token_mask"}),
    ("algorithm.correction.high", 3.0, {"algorithm.correction.name": "token_mask"}),
    ("algorithm.correction.reject", {"token_k3": 0.1}, {}),
    ("algorithm.advantage.eps", 1e-4, {}),
    ("algorithm.advantage.std", "batch", {}),
    ("algorithm.advantage.std", "none", {}),
    ("algorithm.advantage.std_correction", 0, {}),
    ("algorithm.advantage.singleton", "raw", {}),
    ("algorithm.advantage.singleton", "error", {}),
    ("algorithm.advantage.clip", 1.0, {}),
    ("algorithm.kl.in_reward", True, {"algorithm.kl.coef": 0.1}),
    ("algorithm.kl.target", 0.05, {"algorithm.kl.coef": 0.1}),
    ("algorithm.kl.sync_every", 100, {"algorithm.kl.coef": 0.1}),
    ("algorithm.kl.sync_share", 0.6, {"algorithm.kl.coef": 0.1, "algorithm.kl.sync_every": 100}),
    ("algorithm.kl.horizon", 2000, {"algorithm.kl.coef": 0.1, "algorithm.kl.target": 0.05}),
    ("algorithm.process.steps", "turns", {"algorithm.advantage.name": "process"}),
    ("algorithm.process.delimiter", ";", {"algorithm.advantage.name": "process"}),
    ("algorithm.process.pattern", "[;.]", {"algorithm.advantage.name": "process"}),
    ("algorithm.correction.normalize", True, {"algorithm.correction.name": "token_truncate"}),
    ("algorithm.filter_groups.enable", True, {}),
    ("algorithm.filter_groups.metric", "acc", _FILTER),
    ("algorithm.filter_groups.min_std", 0.1, _FILTER),
    ("algorithm.filter_groups.mean_above", 0.1, _FILTER),
    ("algorithm.filter_groups.mean_below", 0.9, _FILTER),
    ("algorithm.filter_groups.max_rounds", 3, _FILTER),
    ("algorithm.filter_groups.keep_surplus", True, {**_FILTER, "algorithm.correction.name": "token_truncate"}),
    ("algorithm.filter_groups.replay_groups", 8, {**_FILTER, "algorithm.correction.name": "token_truncate"}),
    ("algorithm.entropy_coef", 0.01, {}),
    ("algorithm.entropy_target", 0.2, {}),
    ("algorithm.entropy_coef_delta", 0.01, {"algorithm.entropy_target": 0.2}),
    ("algorithm.entropy_coef_min", 0.0001, {"algorithm.entropy_target": 0.2, "algorithm.entropy_coef": 0.01}),
    ("algorithm.entropy_coef_max", 0.5, {"algorithm.entropy_target": 0.2}),
    ("algorithm.mask_truncated", True, {}),
    ("algorithm.top_entropy_share", 0.2, {}),
    ("algorithm.m2po_threshold", 0.04, {}),
    ("algorithm.old_logprobs", "rollout", {}),
    ("algorithm.old_logprobs", "interpolated", {}),
    ("algorithm.off_policy_threshold", 0.1, {}),
    ("rollout.n", 1, {"algorithm.advantage.singleton": "raw"}),
    ("rollout.max_staleness", 1, {"algorithm.correction.name": "token_truncate"}),
)
"""Other settings: a value besides the default, and what it needs to be legal."""


@dataclass(frozen=True)
class Exclusion:
    """A setting that cannot have some values of another one."""

    setting: str
    """As `key=value`."""
    other: str
    """Key of the other setting."""
    values: tuple[str, ...]
    """Values of the other that are refused."""
    allowed: tuple[str, ...]
    """Names of the other that are not; empty for a setting without names."""
    refusal: str
    """The message for the first of them."""

    @property
    def reason(self) -> str:
        """The reason that the message gives, which is that for all of the values."""
        return _reason(self.refusal)


class Checker:
    """Asks the check of a run about settings, each time beside the defaults of `algorithm`."""

    def __init__(self) -> None:
        self._base = dataclasses.replace(load_config("tiny_sort", []), algorithm=AlgorithmConfig())

    def refusal(self, *settings: Settings) -> str | None:
        """Return the message that refuses the settings, of which later ones win; None if they are legal."""
        config = dataclasses.replace(
            self._base, algorithm=copy.deepcopy(self._base.algorithm), rollout=copy.deepcopy(self._base.rollout)
        )
        for key, value in itertools.chain.from_iterable(each.items() for each in settings):
            _assign(config, key, value)
        try:
            check_config(config)
        except ConfigError as error:
            return str(error)
        return None


def _assign(config: Config, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    section: Any = config
    for each in sections:
        section = getattr(section, each)
    setattr(section, name, value)


def refused_products() -> tuple[int, dict[tuple[str, ...], str]]:
    """Return how many combinations of names of `PRODUCT` there are, and those refused with their messages."""
    checker = Checker()
    needs = [NAMES[key][1] for key in PRODUCT]
    combinations = list(itertools.product(*(NAMES[key][0] for key in PRODUCT)))
    found = {}
    for names in combinations:
        message = checker.refusal(*needs, dict(zip(PRODUCT, names, strict=True)))
        if message is not None:
            found[names] = message
    return len(combinations), found


def exclusions() -> list[Exclusion]:
    """Return what excludes what: every value with every name, and every two values, and advantages with names."""
    checker = Checker()
    found = []
    for key, value, needs in VALUES:
        assert checker.refusal(needs, {key: value}) is None, f"{key}={value} needs something else"
        for other, (names, others_need) in NAMES.items():
            with_name = {}
            for name in names:
                message = checker.refusal(others_need, needs, {key: value}, {other: name})
                if message is not None and _has_no_use(needs, message):  # with this name the value does not need it
                    message = checker.refusal(others_need, {key: value}, {other: name})
                with_name[name] = message
            found += _excluded(f"{key}={written(value)}", other, with_name)
    for (key, value, needs), (other, its, others_need) in itertools.combinations(VALUES, 2):
        if key == other or other in needs or key in others_need:
            continue
        if any(needs[each] != others_need[each] for each in needs.keys() & others_need.keys()):
            continue  # each is compared with the names that the other needs
        message = checker.refusal(needs, others_need, {key: value, other: its})
        if message is not None and not _by_names(checker, (key, value, needs), (other, its, others_need)):
            found.append(Exclusion(f"{key}={written(value)}", other, (written(its),), (), message))
    names, _ = NAMES["algorithm.advantage.name"]
    for advantage, other in itertools.product(names, PRODUCT):
        others, needs = NAMES[other]
        chosen = {"algorithm.advantage.name": advantage}
        with_name = {name: checker.refusal(needs, chosen, {other: name}) for name in others}
        found += _excluded(f"algorithm.advantage.name={advantage}", other, with_name)
    return found


def _has_no_use(needs: Settings, message: str) -> bool:
    """Return whether a message refuses what a value needs, for having no effect."""
    return " has no effect with " in message and message.partition("=")[0] in needs


def _by_names(checker: Checker, first: tuple[str, Any, Settings], second: tuple[str, Any, Settings]) -> bool:
    """Return whether one of two values is refused with what the other needs, so that a row on names says it."""
    (key, value, needs), (other, its, others_need) = first, second
    return (
        checker.refusal(needs, others_need, {key: value}) is not None
        or checker.refusal(others_need, needs, {other: its}) is not None
    )


def _excluded(setting: str, other: str, messages: Mapping[str, str | None]) -> list[Exclusion]:
    refused = {name: message for name, message in messages.items() if message is not None}
    if not refused:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, message in refused.items():
        by_reason.setdefault(_reason(message), []).append(name)
    # what is left is allowed only where one reason refuses all others
    allowed = tuple(name for name in messages if name not in refused) if len(by_reason) == 1 else ()
    return [Exclusion(setting, other, tuple(names), allowed, refused[names[0]]) for names in by_reason.values()]


def _reason(message: str) -> str:
    """Return why a message refuses its settings, without their names and the remedy."""
    refused = message.partition("; ")[0]
    return "no effect" if " has no effect with " in refused else refused.partition(": ")[2]


def written(value: Any) -> str:
    """Return a value as an override has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(each)}" for name, each in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def summary() -> str:
    """Return one sentence on the combinations of all names."""
    count, refused = refused_products()
    said = "all are accepted" if not refused else f"{len(refused):,} are refused"
    return f"Of the {count:,} combinations of {', '.join(PRODUCT[:-1])} and {PRODUCT[-1]} {said}."


def refused_values(excluded: Exclusion) -> str:
    """Return the values of the other setting that are refused, or those allowed where that is shorter."""
    if excluded.allowed and len(excluded.allowed) < len(excluded.values):
        return f"{excluded.other} other than {', '.join(excluded.allowed)}"
    return f"{excluded.other}={' or '.join(excluded.values)}"
