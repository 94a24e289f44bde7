"""What runs inside a vLLM server, in whatever environment that lives: this folder alone is put on its PYTHONPATH."""
