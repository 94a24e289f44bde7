"""Faults of hwgrpo/trainer."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "the threads of a run left behind",
        "trainer/process_state.py",
        "torch.set_num_threads(threads)",
        "pass",
        "trainer/test_grpo_trainer.py -k completed",
    ),
    Fault(
        "a reward file that has changed not read again",
        "trainer/process_state.py",
        "if name.startswith(MODULE_PREFIX):",
        "if False:",
        "trainer/test_grpo_trainer.py -k read_again",
    ),
    Fault(
        "a variable that the loop has set taken away",
        "trainer/process_state.py",
        "_apply(_changes(now if self._paused is None else self._paused, now), self._before)",
        "pass",
        "trainer/test_grpo_trainer.py -k variable",
    ),
    Fault(
        "a stopped run without a checkpoint",
        "trainer/grpo_trainer.py",
        "                        self.save_checkpoint()\n",
        "",
        "trainer/test_grpo_trainer.py -k stop_ends",
    ),
    Fault(
        "the trained weights not given back",
        "trainer/given_model.py",
        "own[name].copy_(tensor)",
        "own[name].copy_(own[name])",
        "trainer/test_given_objects.py -k gets_the_weights",
    ),
    Fault(
        "a model recognized by its settings alone",
        "trainer/given_model.py",
        "    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())\n",
        "",
        "trainer/test_given_objects.py -k gets_the_weights",
    ),
    Fault(
        "two functions of one name accepted",
        "trainer/given_settings.py",
        "if objects.setdefault(name, function) is not function:",
        "if objects.setdefault(name, function) is None:",
        "trainer/test_given_objects.py -k refused_by",
    ),
    Fault(
        "the code of a function given as an object not recorded",
        "training/code_files.py",
        "if source is not None:",
        "if source is None:",
        "trainer/test_given_objects.py -k code_of_a_function",
    ),
)
