"""Models and tokenizers: loading and saving (`loading`), adapters (`lora`), the model with no download (`builtin`)."""
