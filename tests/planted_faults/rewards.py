"""Faults of hwgrpo/rewards."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a reward that is no plain number believed to be one",
        "rewards/failure_policy.py",
        "if type(result) is float",
        "if isinstance(result, object)",
        "rewards/test_combine.py",
    ),
    Fault(
        "the other groups dropped",
        "rewards/failure_policy.py",
        "prompt_index != self.completions",
        "prompt_index == self.completions",
        "rewards/test_combine.py",
    ),
    Fault(
        "rewards called for a step without responses",
        "rewards/failure_policy.py",
        "        if size == 0:",
        "        if False:",
        "training/test_late_groups.py -k not_called",
    ),
    Fault(
        "incomplete characters end steps",
        "rewards/response_steps.py",
        ".rstrip(INCOMPLETE))",
        ")",
        "rewards/test_response_steps.py -k tokens_of_steps",
    ),
    Fault(
        "steps decoded from within a character",
        "rewards/response_steps.py",
        "if high - 1 > first and not decode(tokens[first : high - 1]).endswith(INCOMPLETE):",
        "if high - 1 > first:",
        "rewards/test_response_steps.py -k tokens_of_steps",
    ),
    Fault(
        "the space of a first token lost",
        "rewards/response_steps.py",
        "before += complete(first, high) - complete(high - 1, high)\n            first = high - 1",
        "before += complete(first, high)\n            first = high",
        "rewards/test_response_steps.py -k first_space",
    ),
    Fault(
        "white space as a step",
        "rewards/response_steps.py",
        "if text[start : match.start()].strip():",
        "if match.end():",
        "rewards/test_response_steps.py -k white_space",
    ),
    Fault(
        "one number as the reward of the first step",
        "rewards/step_totals.py",
        "sums[-1] += setting.weight * number",
        "sums[0] += setting.weight * number",
        "rewards/test_response_steps.py -k number_is_that_of_the_last",
    ),
    Fault(
        "too many rewards of steps",
        "rewards/failure_policy.py",
        "if len(numbers) != count:",
        "if len(numbers) < count:",
        "rewards/test_response_steps.py -k another_number",
    ),
    Fault(
        "rewards of steps of a failed response stay",
        "rewards/failure_policy.py",
        "self.steps.pop(sample, None)",
        "pass",
        "rewards/test_response_steps.py -k no_number",
    ),
    Fault(
        "estimators of steps without their rewards",
        "rewards/step_totals.py",
        "if self.counts and not self._listed and not self._failed:",
        "if False:",
        "rewards/test_response_steps.py -k need_a_function",
    ),
    Fault(
        "no seccomp filter",
        "rewards/sandbox/confinement.py",
        'if "seccomp" in self.parts:',
        "if False:",
        "rewards/test_sandbox.py -k system_call",
    ),
    Fault(
        "programs in the host's network",
        "rewards/sandbox/namespaces.py",
        '    "net": linux.CLONE_NEWNET,\n',
        "",
        "rewards/test_sandbox.py -k namespaces_of_its_own",
    ),
    Fault(
        "no limit on the output of programs",
        "rewards/sandbox/program_run.py",
        "> self._most:",
        "< 0:",
        "rewards/test_sandbox.py -k how_it_ended",
    ),
    Fault(
        "programs asked whether they equal the expected value",
        "rewards/sandbox/tests_process.py",
        "return isinstance(other, Remote) and ",
        "return ",
        "rewards/test_code_reward.py -k forge",
    ),
    Fault(
        "tests in the memory of programs",
        "rewards/sandbox/program_run.py",
        "        with _Run(self) as run:\n            stdout, stderr, verdicts",
        "        tests_text, again = os.read(pipe, size), os.pipe()\n        os.write(again[1], tests_text)\n"
        "        pipe = again[0]\n"
        "        with _Run(self) as run:\n            stdout, stderr, verdicts",
        "rewards/test_sandbox.py -k in_no_memory",
    ),
    Fault(
        "a level below the one asked for",
        "rewards/sandbox/protection.py",
        'AUTOMATIC = ("namespaces", "seccomp")',
        'AUTOMATIC = ("namespaces", "seccomp", "none")',
        "rewards/test_sandbox.py -k remedies",
    ),
)
