"""The local engine: the training model samples.

engine.py                    generate, with the training weights or a copy in the compute dtype
decoding.py                  the loop: one prefill per prompt, a token per step, finished rows dropped
decode_rows.py               rows that are decoded together
token_sampling.py            filters on logits, and drawing a token
lean_step.py                 a decode step with as few operations as the architecture allows
architectures.py             which models have it
lean_step_check.py           the startup check against the model's own forward
shared_prefix_attention.py   attention of new tokens over a prompt that several rows share
adapted_linear.py            linear layers with low-rank adapters
decode_graph.py              the lean step as a device graph
"""

from hwgrpo.rollout.engine_kind import EngineKind

LOCAL = EngineKind(maker="hwgrpo.rollout.local.engine:local_engine", samples_with_policy=True)
