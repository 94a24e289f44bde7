#!/usr/bin/env bash
# A run script in the form of verl's examples: GRPO of a text model, rewards by data_source.
set -xeuo pipefail

export VLLM_USE_V1=1
unset ROCR_VISIBLE_DEVICES

# Paths
DATA_HOME=${DATA_HOME:-"${HOME}/data"}
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen2.5-0.5B-Instruct"}
sets=(gsm8k math)
train_files="['${DATA_HOME}/${sets[0]}/train.parquet', '${DATA_HOME}/${sets[1]}/train.parquet']"
test_files="['${DATA_HOME}/${sets[0]}/test.parquet']"

# Lengths and batches
max_prompt_length=$((16 * 8))
max_response_length=8
token_len_per_gpu=$(((max_prompt_length + max_response_length) * 4))
n_resp_per_prompt=4
rollout_name=${ROLLOUT_NAME:-vllm}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
offload=True
if [ "$NGPUS_PER_NODE" -gt 1 ]; then
    gen_tp=2
else
    gen_tp=1
    offload=False
fi
[[ "$rollout_name" == vllm || "$rollout_name" == sglang ]] || exit 1

PERF=(
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${token_len_per_gpu}
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.fsdp_config.param_offload=${offload}   # the reference model
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)
PERF+=(actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp})

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$train_files" \
    data.val_files="$test_files" \
    data.train_batch_size=8 \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=${MODEL_PATH} \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    "${PERF[@]}" \
    actor_rollout_ref.rollout.name=$rollout_name \
    actor_rollout_ref.rollout.n=$n_resp_per_prompt \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=2 \
    trainer.critic_warmup=0 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name='tiny_text' \
    trainer.experiment_name="tiny_$(date +%Y%m%d)" \
    trainer.default_local_dir="${DATA_HOME}/ckpts" \
    trainer.n_gpus_per_node=$NGPUS_PER_NODE \
    trainer.nnodes=${NNODES:-1} \
    trainer.save_freq=-1 \
    trainer.test_freq=2 \
    trainer.total_epochs=1 "$@" 2>&1 | tee "${DATA_HOME}/run.log"
