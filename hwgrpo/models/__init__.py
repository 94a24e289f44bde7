"""What is done to a transformers model, and tokenizers.

loading.py                     from settings to model and tokenizer on their device; the final model's folder
attention_implementations.py   which attention implementations can run here, and why the others cannot
lm_head.py                     from hidden states to logits: factor, soft-cap, padded vocabulary
shared_prefix_masks.py         attention in rows that hold a prompt once and several responses
ulysses_attention.py           attention of ranks that share sequences: heads are exchanged for tokens, and back
tensor_parallel.py             decoder layers sharded over ranks, by transformers' plan
lora.py                        low-rank adapters, new or trained further
router.py                      the load-balancing loss of mixtures of experts
layers.py                      decoder layers; a model whose layers come to a device one at a time
windows.py                     sliding windows; a model with them shortened, so that a few tokens outgrow them
meta_device.py                 models without weights, for ranks that get theirs from another
builtin.py                     `builtin://` addresses and their cache
tiny.py                        the built-in model, its character tokenizer, its warm start
"""
