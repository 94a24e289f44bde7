"""The plugin that runs inside a vLLM server, in any environment: only this folder is put on its PYTHONPATH."""
