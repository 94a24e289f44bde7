"""Checkpoints: safetensors and a JSON manifest with checksums, verified before use.

saver.py              write them while training goes on
writer.py             one that is being written
restore.py            choose, verify and load one
manifest.py           read and check the manifest
shard_files.py        tensors of each rank, read back by any other sharding
checkpoint_files.py   names of files, and writing them for good
rng_state.py          random state as tensors
"""
