"""What GRPO computes, as pure functions.

advantages.py    rewards -> one advantage per sequence
groups.py        reward statistics over groups
policy_loss.py   `build_loss`: policy loss + KL - entropy, as the kernels' `loss_fn`
surrogates.py    the policy losses, per token
kl.py            per-token estimators of KL(policy || reference)
aggregation.py   per-token weights that turn a sum over rows into a globally normalised mean
correction.py    weights for the gap between rollout engine and trainer, and the metrics that measure it
scope.py         how far a loss looks (token, sequence, batch), sums over ragged sequences
"""
