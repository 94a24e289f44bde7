"""Reward functions in processes of their own, which can be killed.

reward_process  a function with a timeout, as the trainer calls it
worker_pool     its processes: calls handed out, overrunning ones killed, dead ones replaced
child           one of them, seen from the trainer
worker          one of them, seen from inside
messages        what the two say to each other
descendants     what a process started, in whatever session, found and ended
"""
