"""Engines behind HTTP: vLLM and SGLang as servers that all ranks share.

engine           requests, retries, recovery
dialect          what the kinds of server have in common, and where they differ
vllm, sglang     the kinds
attachment       find a server or start one
server_process   a server that the run starts, watches and ends
http_client      requests with a token and limits on time and size
owner            whose weights a server has
weight_transfer  how weights get there: a folder or a process group
weights_folder   safetensors files per version
weights_group    the trainer's side of the process group
"""
