"""Faults of hwgrpo/imports."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "import: a variable set under a condition counts",
        "imports/shell_script.py",
        "        if why is not None:\n            self._variables[name] = [self._mark",
        "        if why is None and False:\n            self._variables[name] = [self._mark",
        "imports/test_shell_script.py",
    ),
    Fault(
        "import: a comment between continued lines ends the command",
        "imports/bash_words.py",
        "if between is not None and",
        "if between is None and",
        "imports/test_shell_script.py",
    ),
    Fault(
        "import: verl's clip_ratio is applied while both bounds are set",
        "imports/verl_algorithm.py",
        "origin = both if v[bound] is None else bound",
        "origin = both",
        "imports/test_verl_meaning.py",
    ),
    Fault(
        "import: warm-up steps of verl are taken for updates",
        "imports/verl_batches.py",
        "counted * updates",
        "counted",
        "imports/test_verl_meaning.py",
    ),
    Fault(
        "import: a default of verl that differs is not applied",
        "peer_tables/verl_mapped.py",
        '"optim.weight_decay", 0.01',
        '"optim.weight_decay", 0.0',
        "imports/test_verl_meaning.py",
    ),
    Fault(
        "import: any value of a refused key passes",
        "imports/peer_import.py",
        'if row.kind == "refused" and not any',
        'if row.kind == "refused" and any',
        "imports/test_verl_account.py",
    ),
    Fault(
        "import: an update of OpenRLHF is taken to count prompts",
        "imports/openrlhf_import.py",
        "prompts = update // n",
        "prompts = update",
        "imports/test_core_meaning.py",
    ),
    Fault(
        "import: the KL of OpenRLHF without use_loss is put into the loss",
        "imports/openrlhf_import.py",
        "if not v[in_loss]:",
        "if False:",
        "imports/test_core_meaning.py",
    ),
    Fault(
        "import: the dual clip of ROLL is its pg_clip",
        "imports/roll_import.py",
        "1 + 2 * v[both] if v[dual]",
        "v[both] if v[dual]",
        "imports/test_core_meaning.py",
    ),
    Fault(
        "import: the leave-one-out deviation of NeMo-RL passes as that of the group",
        "imports/nemo_rl_import.py",
        "elif v[leaves] and v[scales]:",
        "elif v[leaves] and v[scales] and False:",
        "imports/test_core_meaning.py",
    ),
    Fault(
        "import: the key of wandb is shown",
        "imports/openrlhf_reader.py",
        '"***" if OPENRLHF',
        "value if OPENRLHF",
        "imports/test_core_account.py",
    ),
    Fault(
        "import: a key that is not read is not listed",
        "imports/peer_import.py",
        "entries = [_entry(v, key, assignments, remarks, refusals, unused) for key in v.given]",
        "entries = [_entry(v, key, assignments, remarks, refusals, unused) for key in v.given if key in v.names.rows]",
        "imports/test_core_account.py",
    ),
)
