"""How much a peer's gradient depends on the split into micro-batches: `python -m tests.peers.micro_batches [--smoke]`.

Prints, for settings of verl and TRL, the norm of the difference between the peer's gradient and ours with the imported
settings, relative to the norm of ours, for an update of six responses in 1, 2 or 3 micro-batches. Ours is the same for
every split. `--smoke` computes no more than one line of each peer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hwgrpo.config import Config, load_config
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_reader import trl_settings
from tests.migrate.verl_runs import config_of, imported
from tests.peers.peer_formulas import trl_loss, verl_loss, verl_settings, verl_weights
from tests.peers.test_formulas import LENGTHS, MASK, T, ours, tensors

SPLITS = (1, 2, 3)
LONGEST = 9
"""Longest response of the settings; that of the batch has 7 tokens."""
ACTOR = "actor_rollout_ref.actor."
_REJECTION = "algorithm.rollout_correction.rollout_rs"

VERL: dict[str, tuple[str, ...]] = {
    "the defaults": (),
    "`loss_agg_mode=seq-mean-token-mean`": (f"{ACTOR}loss_agg_mode=seq-mean-token-mean",),
    "`loss_agg_mode=seq-mean-token-sum`, a KL, entropy": (
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum", f"{ACTOR}use_kl_loss=True", f"{ACTOR}entropy_coeff=0.1",
    ),
    "`loss_mode=gspo`": (f"{ACTOR}policy_loss.loss_mode=gspo",),
    "`loss_agg_mode=seq-mean-token-sum-norm`, `loss_scale_factor=9`": (
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=9",
    ),
    "the same without `loss_scale_factor`": (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm",),
    "`loss_mode=geo_mean`": (f"{ACTOR}policy_loss.loss_mode=geo_mean",),
    "`loss_mode=kl_cov`": (
        f"{ACTOR}policy_loss.loss_mode=kl_cov", f"{ACTOR}policy_loss.kl_cov_ratio=0.2",
        f"{ACTOR}policy_loss.ppo_kl_coef=0.7",
    ),
    "`loss_mode=sapo`, `loss_agg_mode=token-mean`, entropy": (
        f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}entropy_coeff=0.1",
    ),
    "`rollout_rs=token_k1`": (f"{_REJECTION}=token_k1", f"{_REJECTION}_threshold=0.9_1.1"),
}  # fmt: skip
TRL: dict[str, dict[str, Any]] = {
    "the defaults (`dapo`)": {},
    "`loss_type=grpo`": {"loss_type": "grpo", "beta": 0.05},
    "`loss_type=dr_grpo`": {"loss_type": "dr_grpo"},
    "`loss_type=luspo`": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "`loss_type=cispo`": {"loss_type": "cispo", "epsilon_high": 1.1},
    "`loss_type=sapo`": {"loss_type": "sapo"},
    "`loss_type=vespo`": {"loss_type": "vespo"},
    "`loss_type=bnpo`": {"loss_type": "bnpo"},
    "`entropy_coef=0.5`": {"entropy_coef": 0.5},
    "`loss_type=grpo`, `entropy_coef=0.5`": {"loss_type": "grpo", "entropy_coef": 0.5},
    "`top_entropy_quantile=0.3`": {"top_entropy_quantile": 0.3},
    "`loss_type=grpo`, `mask_truncated_completions`": {"loss_type": "grpo", "mask_truncated_completions": True},
    "`loss_type=grpo`, `importance_sampling_level=sequence`, a KL": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.5,
    },
}  # fmt: skip


def lines(smoke: bool = False) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| settings | " + " | ".join(f"{k} micro-batch{'es' if k > 1 else ''}" for k in SPLITS) + " |"
    yield "|---" * (len(SPLITS) + 1) + "|"
    of_verl = (("verl, " + name, lambda case=case: verl_gaps(case)) for name, case in VERL.items())
    of_trl = (("TRL, " + name, lambda case=case: trl_gaps(case)) for name, case in TRL.items())
    for rows in (of_verl, of_trl):
        for name, gaps in [next(rows)] if smoke else rows:
            yield f"| {name} | " + " | ".join(_shown(each) for each in gaps()) + " |"


def _shown(gap: float) -> str:
    return "0" if gap < 1e-6 else f"{gap:.2g}"


def verl_gaps(overrides: tuple[str, ...]) -> list[float]:
    """Return the relative distance of verl's gradient from ours, for each split."""
    given, mask = tensors(), MASK.double()
    settings = verl_settings(overrides)
    correction = settings.algorithm.rollout_correction
    weights, kept = verl_weights(correction, given["old_logprob"], given["rollout_logprob"], mask)
    assert weights is None
    counts = {"batch_num_tokens": int(kept.sum()), "global_batch_size": len(mask)}

    def loss_of(part: slice, logprob: torch.Tensor, split: int) -> torch.Tensor:
        width = int(LENGTHS[part].max())
        batch = {
            "log_probs": logprob[part],
            "entropy": _entropy(logprob, given)[part],
            "old_log_probs": given["old_logprob"][part],
            "ref_log_prob": given["ref_logprob"][part],
            "advantages": given["advantage"][part, None].expand(-1, T),
            "response_mask": kept[part],
        }
        cut = {name: values[:, :width] for name, values in batch.items()}
        return verl_loss(settings.actor_rollout_ref.actor, cut, counts)

    with tempfile.TemporaryDirectory() as folder:
        length = f"data.max_response_length={LONGEST}"
        config = config_of(imported(*overrides, length), Path(folder))
    return _gaps(config, given, loss_of)


def trl_gaps(settings: Mapping[str, Any]) -> list[float]:
    """Return the relative distance of TRL's gradient from ours, for each split."""
    given, lengths = tensors(spread=0.25), LENGTHS.clone()
    own = {"max_completion_length": LONGEST, **settings}
    if own.pop("mask_truncated_completions", False):
        lengths[2] = 0
    mask = (torch.arange(T) < lengths[:, None]).to(torch.int64)
    if own.get("epsilon_high") is None:
        own["epsilon_high"] = 0.2

    def loss_of(part: slice, logprob: torch.Tensor, split: int) -> torch.Tensor:
        inputs = {
            "completion_mask": mask[part],
            "advantages": given["advantage"][part],
            "old_per_token_logps": given["old_logprob"][part],
            "ref_per_token_logps": given["ref_logprob"][part],
            "num_items_in_batch": mask.sum(),
        }
        entropy = _entropy(logprob, given)[part]
        return trl_loss(logprob[part], entropy, inputs, accumulation=split, steps_per_generation=split, **own)

    fields = {"num_generations": 3, "per_device_train_batch_size": 6, **settings, "max_completion_length": LONGEST}
    fields |= {"model_name_or_path": "unused", "dataset_name": "rows.jsonl"}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(recipe_text(import_trl(trl_settings(fields, {})), "TRL"))
        config = load_config(recipe, ["data.train=task://sort", "reward.functions=[exact_match]"])
    return _gaps(config, given, loss_of, lengths)


def _entropy(logprob: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return entropies [B, T] with a gradient, which is 1 with respect to the log-probs."""
    return given["entropy"] + logprob - logprob.detach()


def _gaps(
    config: Config,
    given: dict[str, torch.Tensor],
    loss_of: Callable[[slice, torch.Tensor, int], torch.Tensor],
    lengths: torch.Tensor = LENGTHS,
) -> list[float]:
    aggregation = config.algorithm.aggregation
    length = aggregation.norm_length or config.rollout.max_response_tokens
    here = ours(config.algorithm, given, aggregation.name, norm_length=length, lengths=lengths, entropy_slope=1.0)[1]
    found = []
    for split in SPLITS:
        size = len(LENGTHS) // split
        logprob = given["logprob"].clone().requires_grad_()
        for start in range(0, len(LENGTHS), size):
            loss_of(slice(start, start + size), logprob, split).backward()
        assert logprob.grad is not None
        found.append(float((logprob.grad - here).norm() / here.norm()))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one line of each peer")
    for line in lines(parser.parse_args().smoke):
        print(line)


if __name__ == "__main__":
    main()
