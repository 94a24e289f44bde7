"""Other names of TRL's settings -> the names of the tables: older ones, and ones that only tutorials use."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.trl_ignored import IGNORED
from hwgrpo.migrate.tables.trl_mapped import MAPPED
from hwgrpo.migrate.tables.trl_refused import REFUSED

ROWS = {row.key: row for row in (*MAPPED, *REFUSED, *IGNORED)}
"""Every row by its key: fields of GRPOConfig, ModelConfig, DatasetMixtureConfig and the script's arguments."""

OLDER = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "torch_dtype": "dtype",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "dataset_split": "dataset_train_split",
    "use_liger_loss": "use_liger_kernel",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
"""Names of earlier versions of TRL and transformers."""

TUTORIALS = {
    "kl_coef": "beta",
    "max_new_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "reward_function": "reward_funcs",
    "reward_functions": "reward_funcs",
    "group_size": "num_generations",
    "clip_range": "epsilon",
    "wandb_project": "project",
}
"""Names that no version of TRL's GRPOConfig has; it would refuse them."""

TRL = PeerNames("TRL", ROWS, OLDER, TUTORIALS)
