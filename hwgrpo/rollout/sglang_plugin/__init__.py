"""Starter of SGLang in its own environment; no other file may be in this folder, which is on Python's module path."""
