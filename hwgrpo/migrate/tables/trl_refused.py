"""TRL's settings without a counterpart: refused with the nearest thing here, unless they have a neutral value."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_row import PeerRow, refused

_FP16 = "float16 overflows without loss scaling, which is not supported"

REFUSED = (
    *refused(
        "sampled tokens are not penalized here", "1.0, or the reward repetition", 1.0, keys=("repetition_penalty",)
    ),
    *refused(_FP16, "bf16=True", False, keys=("fp16", "fp16_full_eval")),
    *refused("vLLM has its own models alone", "vllm", "vllm", "auto", None, keys=("vllm_model_impl",)),
    *refused(
        "responses are not constrained by a grammar",
        "the reward regex or json_schema",
        None,
        keys=("vllm_structured_outputs_regex",),
    ),
    *refused("completions are not pushed to the hub", "completions.jsonl", None, keys=("log_completions_hub_repo",)),
    *refused(
        "the batch has whole groups and is not halved",
        "leaving it out: after an out-of-memory error a pass is repeated with smaller micro-batches",
        False,
        keys=("auto_find_batch_size",),
    ),
    *refused("no checkpoint is the best one", "eval_strategy, and choose one", False, keys=("load_best_model_at_end",)),
    *refused("there are no labels in GRPO", "0.0", 0.0, keys=("label_smoothing_factor",)),
    *refused("embeddings have no noise in GRPO", "leaving it out", None, keys=("neftune_noise_alpha",)),
    *refused("the optimizers here have no further arguments", "adam_beta1 ...", None, keys=("optim_args",)),
    *refused("the first validation is after eval_steps", "eval_steps", 0, keys=("eval_delay",)),
    *refused("anomaly detection slows every pass", "hwgrpo doctor", "", [], None, keys=("debug",)),
    *refused(
        "devices are assigned by settings of the trainer",
        "trainer.sequence_parallel_size, trainer.tensor_parallel_size",
        None,
        keys=("parallelism_config",),
    ),
    *refused(
        "accelerate is not used", "fsdp, deepspeed, or the trainer's settings", None, keys=("accelerator_config",)
    ),
    *refused("modules beside the adapters stay frozen", "leaving it out", None, [], keys=("lora_modules_to_save",)),
    *refused("adapters are of modules", "lora_target_modules", None, [], keys=("lora_target_parameters",)),
    *refused("4 bits are nf4", "nf4", "nf4", keys=("bnb_4bit_quant_type",)),
    *refused("subsets are named in files", "files with the rows; hwgrpo data convert", None, keys=("dataset_config",)),
    *refused("a test split is not cut off", "hwgrpo data convert --validation", None, keys=("test_split_size",)),
    *refused("callbacks are objects of a script", "GRPOTrainer(callbacks=...)", None, [], keys=("callbacks",)),
    *refused("a template is a file", "a FILE with it, and model.chat_template=FILE", None, keys=("chat_template",)),
    PeerRow(
        "replay_buffer_size",
        "refused",
        "algorithm.filter_groups.replay_groups",
        "an experimental trainer of TRL has it; its weights are other ones",
        instead="algorithm.filter_groups.enable=true with replay_groups",
    ),
)
