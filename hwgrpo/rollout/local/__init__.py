"""The local engine, which samples with the training model.

engine.py                    generate and score, with the training weights or a copy in the compute dtype
frozen_copy.py               a copy of the weights for an engine that cannot share them
decode_session.py            requests in turns, each continuing the keys and values of the one before
decoding.py                  the loop: one prefill per prompt, a token per step for all slots, ended responses replaced
slot_scheduler.py            which response each slot decodes; the number of steps for given lengths
decode_rows.py               batches of rows: their protocol, by the model's forward, equal responses decoded once
kept_responses.py            ended responses whose keys and values wait for the next turn, bounded in memory
continued_prefill.py         prefill of what a turn adds to the keys and values of earlier ones
decode_drift.py              startup comparison with full forward passes at the rounding of the model
image_check.py               startup comparison of decoding after an image with the model's own logits
token_sampling.py            sampling of a token, from what top-k, top-p and min-p keep
lean_step.py                 a decode step with as few operations as the architecture allows
architectures.py             architectures that support it
lean_step_check.py           its startup check against the model's own forward
shared_prefix_attention.py   attention of new tokens over a prompt shared by several rows
adapted_linear.py            linear layers with low-rank adapters; those of the same input as one
merged_adapters.py           adapters merged into the weights of the sampler's copy
joined_weights.py            weights side by side in memory
packed_weights.py            products by oneDNN on a CPU, frozen weights in its layout
kernel_fallback.py           the kernels of the lean step, and decoding without after a failed check
decode_graph.py              the lean step as a device graph
graph_fallback.py            whether it is one, and decoding without after a failed recording
"""

from hwgrpo.rollout.engine_kind import EngineKind

LOCAL = EngineKind(
    maker="hwgrpo.rollout.local.engine:local_engine",
    samples_with_policy=True,
    reports_floors=True,
    has_sessions=True,
    image_models=None,
)
