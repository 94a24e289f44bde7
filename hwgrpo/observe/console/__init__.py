"""What a terminal shows of a run.

choose    the live panel, a line per step, or nothing
progress  the protocol of all three; a line per step
panel     the live panel
"""
