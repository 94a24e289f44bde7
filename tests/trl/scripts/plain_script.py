"""A TRL script: one reward function, a model by name."""

from datasets import Dataset

from hwgrpo.trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({"prompt": [f"count to {i}: " for i in range(8)]})


def reward_len(completions, **kwargs):
    """Prefer five characters."""
    return [-abs(5 - len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="plain",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=2,
    logging_steps=1,
    learning_rate=1e-3,
    bf16=False,
    report_to="none",
)
trainer = GRPOTrainer(model="model", reward_funcs=reward_len, args=args, train_dataset=dataset)
result = trainer.train()
trainer.save_model("plain-model")
