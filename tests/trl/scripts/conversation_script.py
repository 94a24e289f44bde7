"""A TRL script: a conversational dataset, rewards that read messages, and HfArgumentParser."""

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser

from hwgrpo.trl import GRPOConfig, GRPOTrainer

parser = HfArgumentParser(GRPOConfig)  # pyright: ignore[reportArgumentType]
(args,) = parser.parse_args_into_dataclasses(
    [
        *("--output_dir", "conversation", "--per_device_train_batch_size", "4", "--num_generations", "4"),
        *("--max_completion_length", "6", "--max_steps", "2", "--logging_steps", "1", "--bf16", "False"),
        *("--lr_scheduler_type", "constant", "--learning_rate", "1e-3"),
    ]
)
messages = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"what is {i}?"}] for i in range(4)
]
dataset = Dataset.from_dict({"prompt": messages, "solution": ["0", "1", "2", "3"]})
prompts_seen = []


def accuracy(prompts, completions, solution, **kwargs):
    """Look for the solution in the assistant's message."""
    prompts_seen.extend(prompts)
    return [float(each in completion[0]["content"]) for completion, each in zip(completions, solution, strict=True)]


trainer = GRPOTrainer(
    model="model",
    processing_class=AutoTokenizer.from_pretrained("model"),
    reward_funcs=accuracy,
    args=args,
    train_dataset=dataset,
)
result = trainer.train()
