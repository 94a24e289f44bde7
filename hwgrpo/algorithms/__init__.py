"""What GRPO computes, as pure functions: advantages, policy losses, KL, aggregation, rollout correction.

| file | subject |
|---|---|
| `advantages.py` | rewards -> one advantage per sequence |
| `groups.py` | reward statistics over groups |
| `surrogates.py` | the policy losses, per token |
| `policy_loss.py` | `LossSpec`, `build_loss`: policy loss + KL - entropy, as the kernels' `loss_fn` |
| `kl.py` | per-token estimators of KL(policy || reference) |
| `aggregation.py` | per-token weights that turn a sum over rows into a globally normalised mean |
| `correction.py` | weights for the gap between rollout engine and trainer, and the metrics that measure it |
| `scope.py` | how far a loss looks (token, sequence, batch), sums over ragged sequences |

The tables below name what a config may choose; nothing is imported until a name is loaded.
"""

from hwgrpo.registry import Registry

ADVANTAGES = Registry(
    "advantage estimator",
    {
        "grpo": "hwgrpo.algorithms.advantages:grpo",
        "rloo": "hwgrpo.algorithms.advantages:rloo",
        "reinforce_plus_plus_baseline": "hwgrpo.algorithms.advantages:reinforce_plus_plus_baseline",
        "opo": "hwgrpo.algorithms.advantages:opo",
        "gpg": "hwgrpo.algorithms.advantages:gpg",
        "grpo_passk": "hwgrpo.algorithms.advantages:grpo_passk",
    },
)
"""Functions `(rewards_S, group_S, valid_S, options, lengths_S=None) -> advantages_S`."""

POLICY_LOSSES = Registry(
    "policy loss",
    {
        "ppo_clip": "hwgrpo.algorithms.surrogates:ppo_clip",
        "gspo": "hwgrpo.algorithms.surrogates:gspo",
        "cispo": "hwgrpo.algorithms.surrogates:cispo",
        "sapo": "hwgrpo.algorithms.surrogates:sapo",
        "gpg": "hwgrpo.algorithms.surrogates:gpg",
    },
)
"""`Scoped` functions `(surrogate_input, spec) -> (pg_loss_N, {metric: per-row})`."""

KL_OUTPUT_CLAMP = 10.0
"""Largest per-token value of the k3 estimators, as verl's `low_var_kl` has it."""

KL_ESTIMATORS = Registry(
    "KL estimator",
    {
        "k1": "hwgrpo.algorithms.kl:k1",
        "k2": "hwgrpo.algorithms.kl:k2",
        "k3": "hwgrpo.algorithms.kl:k3",
        "abs": "hwgrpo.algorithms.kl:absolute",
        "k1+": "hwgrpo.algorithms.kl:k1_plus",
        "k3+": "hwgrpo.algorithms.kl:k3_plus",
    },
)
"""Functions `(logprob_N, ref_logprob_N) -> kl_N`; `k3` and `k3+` also take `input_clamp` and `output_clamp`."""

AGGREGATIONS = Registry(
    "loss aggregation",
    {
        "token-mean": "hwgrpo.algorithms.aggregation:token_mean",
        "token-sum": "hwgrpo.algorithms.aggregation:token_sum",
        "seq-mean-token-sum": "hwgrpo.algorithms.aggregation:seq_mean_token_sum",
        "seq-mean-token-sum-norm": "hwgrpo.algorithms.aggregation:seq_mean_token_sum_norm",
        "seq-mean-token-mean": "hwgrpo.algorithms.aggregation:seq_mean_token_mean",
    },
)
"""Functions `(lengths_S, totals) -> weight_S`."""

CORRECTIONS = Registry(
    "rollout correction",
    {
        "none": "hwgrpo.algorithms.correction:none",
        "token_truncate": "hwgrpo.algorithms.correction:token_truncate",
        "token_mask": "hwgrpo.algorithms.correction:token_mask",
        "sequence_truncate": "hwgrpo.algorithms.correction:sequence_truncate",
        "sequence_mask": "hwgrpo.algorithms.correction:sequence_mask",
    },
)
"""`Scoped` functions `(log_ratio_N, spec, cu_seqlens) -> weight_N`, or None for no correction."""

__all__ = ["ADVANTAGES", "AGGREGATIONS", "CORRECTIONS", "KL_ESTIMATORS", "POLICY_LOSSES"]
