"""Models and tokenizers.

| file | what |
|---|---|
| `loading.py` | from settings to model and tokenizer; the final model in Hugging Face format |
| `lora.py` | low-rank adapters, new or trained further |
| `builtin.py` | `builtin://` addresses and their cache |
| `tiny.py` | the built-in model, its character tokenizer, its warm start |
"""
