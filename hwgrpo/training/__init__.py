"""The loop, the policy model, batch layouts, strategies, checkpoints."""
