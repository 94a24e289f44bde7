"""The schema of the op that scoring on an NPU calls, as torch-npu 2.13.0 ships it; a slow test compares it again."""

SCHEMA = (
    "npu_fused_linear_online_max_sum(Tensor input, Tensor weight, Tensor target, int vocab_start_index, "
    "int vocab_end_index, bool return_logits=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
