"""A TRL script: several rewards with weights, one async, one that does not judge every response, extra metrics."""

from datasets import Dataset

from hwgrpo.trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({"prompt": ["a", "b", "c", "d"], "kind": ["x", "y", "x", "y"]})
seen = []


def length(completions, completion_ids, trainer_state, **kwargs):
    """Score the number of tokens."""
    seen.append(trainer_state.global_step)
    return [len(ids) / 10 for ids in completion_ids]


async def letters(completions, kind, log_metric, **kwargs):
    """Judge responses to prompts of one kind."""
    log_metric("kinds", len(set(kind)))
    return [float("a" in each) if which == "x" else None for each, which in zip(completions, kind, strict=True)]


trainer = GRPOTrainer(
    model="model",
    reward_funcs=[length, letters],
    args=GRPOConfig(
        output_dir="weights",
        per_device_train_batch_size=8,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        logging_steps=1,
        reward_weights=[0.5, 2.0],
        loss_type="dr_grpo",
        scale_rewards=False,
        bf16=False,
    ),
    train_dataset=dataset,
)
result = trainer.train()
