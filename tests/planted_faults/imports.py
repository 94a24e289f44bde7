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
        "import: a branch after one that is run is read, too",
        "imports/shell_conditions.py",
        "both(self.runs, both(negated(self.taken), condition))",
        "both(self.runs, condition)",
        "imports/test_shell_script.py",
    ),
    Fault(
        "import: a comparison with something unknown is false",
        "imports/shell_conditions.py",
        "len(texts) > 3:\n        return None",
        "len(texts) > 3:\n        return False",
        "imports/test_shell_script.py",
    ),
    Fault(
        "import: the ratio's cap of dppo stays the default",
        "imports/verl_algorithm.py",
        '    "dppo_tv": {"cap": ACTOR + "clip_ratio_c"},\n',
        "",
        "imports/test_verl_meaning.py",
    ),
    Fault(
        "import: gspo is aggregated by sequences whatever the key says",
        "imports/verl_algorithm.py",
        '_FORCES = ("sapo", "geo_mean")',
        '_FORCES = ("gspo", "sapo", "geo_mean")',
        "imports/test_verl_meaning.py",
    ),
    Fault(
        "import: a model that reads images is accepted",
        "imports/verl_batches.py",
        "if _IMAGES.search(",
        "if not _IMAGES and _IMAGES.search(",
        "imports/test_verl_tutorials.py",
    ),
    Fault(
        "export: warm-up updates are written as verl's steps",
        "exports/verl_export.py",
        "o.warmup_steps // updates",
        "o.warmup_steps",
        "imports/test_exports.py",
    ),
    Fault(
        "export: updates of TRL are written as steps",
        "exports/trl_export.py",
        'yield "max_steps", t.max_steps * per_step',
        'yield "max_steps", t.max_steps',
        "imports/test_exports.py",
    ),
    Fault(
        "export: a setting that is lost is not listed",
        "exports/peer_export.py",
        "if key not in unused and",
        "if key not in unused and key in reasons and",
        "imports/test_exports.py",
    ),
)
