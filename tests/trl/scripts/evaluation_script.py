"""A TRL script: evaluation, callbacks that control the run, checkpoints."""

from datasets import Dataset
from transformers import TrainerCallback

from hwgrpo.trl import GRPOConfig, GRPOTrainer

events = []


class Recorder(TrainerCallback):
    """Record the events, and stop after the third update."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        events.append(("begin", state.max_steps, model is not None))

    def on_step_end(self, args, state, control, **kwargs):
        events.append(("step", state.global_step))
        if state.global_step == 1:
            control.should_save = control.should_log = control.should_evaluate = True
        if state.global_step == 3:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=(), **kwargs):
        events.append(("log", state.global_step, "loss" in logs))

    def on_evaluate(self, args, state, control, metrics=(), **kwargs):
        events.append(("evaluate", state.global_step, sorted(metrics)))

    def on_save(self, args, state, control, **kwargs):
        events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        events.append(("end", state.global_step))


rows = [{"prompt": f"say {i}"} for i in range(8)]


def short(completions, **kwargs):
    """Prefer short completions."""
    return [-float(len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="model",
    reward_funcs=short,
    args=GRPOConfig(
        output_dir="evaluation",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=6,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=Dataset.from_list(rows),
    eval_dataset={"first": Dataset.from_list(rows[:2]), "second": Dataset.from_list(rows[2:4])},
    callbacks=[Recorder()],
)
result = trainer.train()
metrics = trainer.evaluate(Dataset.from_list(rows[:1]))
