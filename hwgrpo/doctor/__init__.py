"""Diagnosis of a machine: its devices, the selected backend, reasons against the others, and fixes. Imports no torch.

host_facts.py           facts about the host besides its devices: compilers, memory, disk, locale, limits
checks.py               one `Finding` per possible fault: pure functions over facts
versions.py             compatible versions of torch, torch-npu, CANN, vLLM, Triton, with sources
survey.py               kernels, attention and rollout engines of the selected backend; survey_child.py imports torch
hardware.py             backends that this project has been run on, from its result files
device_check.py         self-tests of every device, in a child process: device_check_child.py
child_environment.py    child processes with a time limit that find this project's packages
diagnosis.py            the report, made from all of these
diagnosis_text.py       the report for a terminal
diagnosis_markdown.py   the report for a GitHub issue
redact.py               removal of secrets and names
"""
