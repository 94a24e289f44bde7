"""The math of GRPO as pure functions.

advantages.py           the estimators, rewards -> one advantage per sequence or token: GRPO, RLOO, OPO, ...
token_advantages.py     estimators with one advantage per token, rewards of steps, or probabilities
turn_advantages.py      turns compared with those of the same state (GiGPO)
groups.py               reward statistics over groups
policy_loss.py          `build_loss`: policy loss + KL - entropy, as the kernels' `loss_fn`
losses.py               the policy losses per token: PPO clip, GSPO, CISPO, SAPO, ...
settings_of_ratio.py    settings of a loss without effect where every ratio is 1
token_selection.py      tokens chosen by comparing all of an update
coefficients.py         fixed and adapted coefficients of KL and entropy
kl.py                   per-token estimators of KL(policy || reference), and the exact KL
aggregation.py          per-token weights that turn a sum over rows into a globally normalized mean
correction.py           importance weights between rollout engine and trainer, rejection, metrics of their mismatch
gap_guard.py            when a gap between rollout engine and trainer calls for which measure, and its likely cause
scope.py                scope of a loss (token, sequence, batch), sums over ragged sequences
"""
