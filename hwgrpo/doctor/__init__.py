"""What this machine can do, what was chosen, why not the rest, and what to type to repair it. Imports no torch.

| module | holds |
|---|---|
| `host` | what is known of a machine beside its devices: compilers, memory shared, disk, locale, limits, variables |
| `checks` | one `Finding` per thing that can be wrong: pure functions over facts |
| `versions` | which versions of torch, torch-npu, CANN, vLLM, Triton, transformers go together, with sources |
| `survey`, `inside` | kernels and attention of the chosen backend, asked of torch in a child process |
| `engines` | rollout engines of the chosen backend |
| `hardware` | which backends this project has been run on, by its result files |
| `run`, `run_child` | tier 2: a child process per device that computes something and compares |
| `child` | child processes with a time limit that answer in lines of JSON |
| `report` | all of it together, as one document |
| `show`, `github`, `redact` | the document for a terminal and for an issue; what must not leave this machine |
"""
