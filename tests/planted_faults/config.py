"""Faults of hwgrpo/config."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a folder named by a tilde",
        "config/typed.py",
        'with_home(value) if field.metadata.get("home") else value',
        "value",
        "cli/test_export.py -k tilde",
    ),
    Fault(
        "a deadline longer than a hang",
        "config/rollout_rules.py",
        "2 * r.group_timeout >= hung",
        "r.group_timeout >= hung",
        "rollout/test_deadlines.py -k refused",
    ),
    Fault(
        "a preset in an override loses to the recipe",
        "config/presets.py",
        "merge(recipe, preset) if given else",
        "merge(preset, recipe) if given else",
        "config/test_presets.py",
    ),
    Fault(
        "a preset wins over the recipe that names it",
        "config/presets.py",
        "else merge(preset, recipe)",
        "else merge(recipe, preset)",
        "config/test_presets.py",
    ),
    Fault(
        "a preset's setting without effect refused",
        "config/load.py",
        "{*imported, *used_before, *of_presets}",
        "{*imported, *used_before}",
        "config/test_presets.py",
    ),
    Fault(
        "combinations: a ratio on a KL that has its gradient already",
        "config/algorithm_rules.py",
        'kl.estimator in ("k1+", "k3+")',
        'kl.estimator in ("k1+",)',
        "config/test_combinations.py",
    ),
    Fault(
        "an exact KL with log-probs of truncated distributions",
        "config/rollout_rules.py",
        "if used and kl.coef and",
        "if False and",
        "training/update/test_exact_kl.py -k refused",
    ),
    Fault(
        "combinations: a trust region of no gap",
        "config/algorithm_rules.py",
        'a.m2po_threshold is not None and a.old_logprobs == "rollout"',
        "False",
        "config/test_combinations.py",
    ),
    Fault(
        "combinations: a cap that another binds before",
        "config/algorithm_rules.py",
        "if loss.delta >= bound:",
        "if loss.delta > bound:",
        "config/test_combinations.py",
    ),
    Fault(
        "combinations: a pair of values that is not checked",
        "config/combinations.py",
        "if message is not None and not _by_names(",
        "if message is not None and _by_names(",
        "docs/test_combinations.py",
    ),
    Fault(
        "arguments of a built-in function that are no numbers",
        "config/algorithm_rules.py",
        '    _check_numbers("algorithm.loss", a.loss.name, a.loss.kwargs)\n',
        "",
        "config/test_own_functions.py -k finite_numbers",
    ),
    Fault(
        "validations are sampled as training is",
        "config/derived.py",
        "for key, value in settings.items() if value is not None}",
        "for key, value in settings.items() if value is None}",
        "training/test_parts.py",
    ),
    Fault(
        "arguments of losses without ranges",
        "config/bound_arguments.py",
        "        if arguments.keys() & {name, *others}:",
        "        if False:",
        "config/test_bound_arguments.py",
    ),
    Fault(
        "a horizon that turns the KL's coefficient around",
        "config/validate.py",
        "    _check_horizon(c)\n",
        "",
        "algorithms/test_coefficients.py -k horizon",
    ),
)
