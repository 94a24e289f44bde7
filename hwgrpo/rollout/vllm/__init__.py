"""vLLM in the training process.

engine.py          one engine per rank, on the rank's own device
vllm_settings.py   from the run's settings to vLLM's, for an engine here and for a server
"""
