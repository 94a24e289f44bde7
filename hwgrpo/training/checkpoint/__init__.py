"""Checkpoints: safetensors and a JSON manifest with checksums, verified before use.

saver             write them while training goes on
writer            one that is being written
restore           choose, verify and load one
manifest          read and check the manifest
shard_files       tensors of each rank, read back by any other sharding
checkpoint_files  names of files, and writing them for good
rng_state         random state as tensors
"""
