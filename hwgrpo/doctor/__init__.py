"""What this machine can do, what was chosen, why not the rest, and what to type to repair it. Imports no torch.

host_facts.py           what is known of a machine beside its devices: compilers, memory, disk, locale, limits
checks.py               one `Finding` per thing that can be wrong: pure functions over facts
versions.py             which versions of torch, torch-npu, CANN, vLLM, Triton go together, with sources
survey.py               kernels, attention and rollout engines of the chosen backend; survey_child.py asks torch
hardware.py             which backends this project has been run on, by its result files
device_check.py         every device computes something, in a child process: device_check_child.py
child_environment.py    child processes with a time limit that find this project's packages
diagnosis.py            all of it together, as one document
diagnosis_text.py       the document for a terminal
diagnosis_markdown.py   the document for an issue
redact.py               what must not leave this machine
"""
