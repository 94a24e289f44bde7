"""The local engine: the training model samples.

engine                   generate, with the training weights or a copy in the compute dtype
decoding                 the loop: one prefill per prompt, a token per step, finished rows dropped
decode_rows              rows that are decoded together
token_sampling           filters on logits and counter-based draws
lean_step                a decode step with as few operations as the architecture allows
architectures            which models have it
lean_step_check          the startup check against the model's own forward
shared_prefix_attention  attention of new tokens over a prompt that several rows share
adapted_linear           linear layers with low-rank adapters
decode_graph             the lean step as a device graph
precision                where bf16 is a gain
"""
