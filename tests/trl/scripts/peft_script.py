"""A TRL script: LoRA on a model object, a KL, a verifiable reward with a column of the dataset."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.trl import GRPOConfig, GRPOTrainer

model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
dataset = Dataset.from_list([{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)])


def correct(prompts, completions, answer, **kwargs):
    """Score the last digit."""
    return [float(completion.endswith(each)) for completion, each in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=[correct],
    args=GRPOConfig(
        "peft",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=6,
        num_train_epochs=1,
        beta=0.04,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        bf16=False,
    ),
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
result = trainer.train()
trainer.save_model()
