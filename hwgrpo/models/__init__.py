"""Models and tokenizers.

| file | what |
|---|---|
| `loading.py` | from settings to model and tokenizer; the final model in Hugging Face format |
| `head.py` | from hidden states to logits: factor, soft-cap, padded vocabulary |
| `router.py` | the load-balancing loss of mixtures of experts |
| `attention.py` | which attention implementations can run here, and why the others cannot |
| `branched_attention.py` | attention in rows that hold a prompt once and several responses |
| `exchanged_attention.py` | attention of ranks that share sequences: heads are exchanged for tokens, and back |
| `hollow.py` | models without weights, for ranks that get theirs from another |
| `layers.py` | decoder layers; a model whose layers come to a device one at a time |
| `windows.py` | windows of attention; a model with them shortened, so that a few tokens outgrow them |
| `moving.py` | a model on its device, tied parameters still tied |
| `lora.py` | low-rank adapters, new or trained further |
| `builtin.py` | `builtin://` addresses and their cache |
| `tiny.py` | the built-in model, its character tokenizer, its warm start |
"""
