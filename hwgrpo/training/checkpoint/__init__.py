"""Checkpoints: safetensors and a JSON manifest with checksums, verified before use.

saver.py              saves checkpoints while training continues
writer.py             writes one checkpoint
restore.py            select, verify and load one
manifest.py           read and check the manifest
shard_files.py        tensors of each rank, loadable by any other sharding
checkpoint_files.py   file names, and durable writes
rng_state.py          random state as tensors
"""
