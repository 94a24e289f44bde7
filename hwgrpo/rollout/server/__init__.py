"""Engines behind HTTP: vLLM and SGLang as servers that all ranks share.

engine.py            requests, retries, recovery
dialect.py           what the kinds of server have in common, and where they differ
vllm.py, sglang.py   the kinds
attachment.py        find a server or start one
server_process.py    a server that the run starts, watches and ends
http_client.py       requests with a token and limits on time and size
owner.py             whose weights a server has
weight_transfer.py   how weights get there: a folder or a process group
weights_folder.py    safetensors files per version
weights_group.py     the trainer's side of the process group
"""
