"""The two sides of against_trl.py, each of which runs in a process of its own."""
