"""Loading transformers models and tokenizers, and changes to a loaded model.

loading.py                     model and tokenizer from a folder, a GGUF file, the hub, or `builtin://`
sequence_classifier.py a reward model to train, with a head of its own
saving.py                      a trained model's folder in Hugging Face format
to_device.py                   moving a model to a device, tied parameters kept tied
attention_implementations.py   which attention implementations can run here, and why the others cannot
rounding.py                    startup checks on a few tokens: their ids; whether rounding explains a difference
vision.py                      towers, projectors and images that are encoded once
tower_work.py                  FLOPs of encoding images
placeholders.py                tokens that stand for images, which no response has
lm_head.py                     from hidden states to logits: factor, soft-cap, padded vocabulary
shared_prefix_masks.py         attention over rows with one prompt and several responses to it
varlen_attention.py            attention over packed tokens by torch's flash kernels, in parts
ulysses_attention.py           sequence parallelism: all-to-all between sequence and attention heads
tensor_parallel.py             decoder layers sharded over ranks, by transformers' plan
lora.py                        LoRA adapters: new ones, or existing ones to train further
frozen_dtype.py                frozen matrices and embeddings held in the compute dtype
quantization.py                frozen linear layers and stacked experts in 4 or 8 bits
experts.py                     products of stacked experts, in the compute dtype or of quantized weights
adapted_experts.py             adapters of stacked experts as low-rank products
weight_files.py                whether the weight files are complete
stored_dtype.py                the dtype of a model's files
stored_quantization.py         quantized files: formats that are dequantized, and those that are refused
final_dtype.py                 the dtype of a saved model
router.py                      load-balancing loss of mixture-of-experts models
layers.py                      decoder layers; running a model on a device one layer at a time
time_steps.py                  time steps of state-space layers without limits, as sampling computes them
layer_values.py                settings of a configuration that differ between decoder layers
windows.py                     sliding windows; a model with shortened windows for checks
meta_device.py                 models without weights, for ranks that receive them from another
builtin.py                     `builtin://` addresses
gguf.py                        GGUF files, converted into folders in Hugging Face format
model_cache.py                 the cache of built-in and converted models
tiny.py                        the built-in model, its character tokenizer and warm start
tiny_vision.py                 the built-in vision-language model
"""
