"""What a terminal shows of a run.

view.py       the live panel, a line per step, or nothing
progress.py   the protocol of all three; a line per step
panel.py      the live panel
"""
