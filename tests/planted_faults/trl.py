"""Faults of hwgrpo/trl and of the import of TRL's settings."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "TRL: epsilon_high is ignored",
        "imports/trl_algorithm.py",
        'v["epsilon_high"] if v["epsilon_high"] is not None else v["epsilon"]\n',
        'v["epsilon"]\n',
        "trl/test_trl_meaning.py",
    ),
    Fault(
        "TRL: updates between checkpoints are taken for steps",
        "imports/trl_settings.py",
        "return -(-updates // per_step)",
        "return updates",
        "trl/test_trl_meaning.py",
    ),
    Fault(
        "TRL: the default of the schedule is not applied",
        "peer_tables/trl_mapped.py",
        '_SCHEDULE,\n        "linear",',
        '_SCHEDULE,\n        "constant",',
        "trl/test_trl_meaning.py",
    ),
    Fault(
        "TRL: a response that no function scored counts with reward 0",
        "trl/reward_callables.py",
        "None if all(row) else 0.0",
        "0.0",
        "trl/test_trl_trainer.py",
    ),
    Fault(
        "TRL: control.should_save is not obeyed",
        "trl/trl_steps.py",
        "if control.should_save and saved is None:",
        "if False and saved is None:",
        "trl/test_trl_scripts.py",
    ),
    Fault(
        "TRL: the best metric is never set",
        "trl/trl_evaluation.py",
        "        self._note_best(values)\n",
        "",
        "trl/test_trl_trainer.py",
    ),
    Fault(
        "TRL: a reward model reads a second BOS",
        "trl/reward_callables.py",
        ", add_special_tokens=False",
        "",
        "trl/test_trl_reward_models.py",
    ),
    Fault(
        "TRL: an interrupted object cannot resume twice",
        "trl/trl_trainer.py",
        "if resume != self._resume or self._trained:",
        "if resume != self._resume:",
        "trl/test_trl_resume.py",
    ),
    Fault(
        "TRL: a resumed run counts tokens from 0",
        "trl/trl_checkpoints.py",
        '"num_input_tokens_seen", ',
        "",
        "trl/test_trl_resume.py",
    ),
    Fault(
        "TRL: a dataset's name is missing in the metrics of its evaluation",
        "trl/trl_metrics.py",
        "if by_name or len(values) > 1:",
        "if len(values) > 1:",
        "trl/test_trl_trainer.py",
    ),
    Fault(
        "TRL: an open run that nobody trains blocks the next",
        "trainer/grpo_trainer.py",
        "            other.close()\n",
        '            raise RunError("open")\n',
        "trl/test_trl_trainer.py",
    ),
    Fault(
        "TRL: a trained adapter of a wrapped model starts as a new one",
        "trl/wrapped_model.py",
        "if _is_new(model, name):",
        "if True:",
        "trl/test_wrapped_models.py",
    ),
)
