"""Faults of hwgrpo/data."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "prompt tokens in the supervised loss",
        "data/chat_targets.py",
        "self.trained += [trained and number < last",
        "self.trained += [number < last",
        "data/test_examples.py -k every_turn",
    ),
    Fault(
        "the end token left out of the supervised loss",
        "data/chat_targets.py",
        "last = at[-1] + 1 if at",
        "last = at[-1] if at",
        "data/test_examples.py -k every_turn",
    ),
    Fault(
        "no end token after a response that is text",
        "data/chat_targets.py",
        "    targets.ids.append(end)\n    targets.trained.append(True)\n    return targets",
        "    return targets",
        "data/test_examples.py -k of_text",
    ),
    Fault(
        "a template that rewrites earlier turns is trained",
        "data/chat_targets.py",
        "if not before.startswith(targets.text) or not after.startswith(before):",
        "if False:",
        "data/test_examples.py -k forgets",
    ),
    Fault(
        "truncated responses of a run are trained",
        "data/row_filter.py",
        'if rows[i]["finished"] and rows',
        "if rows",
        "data/test_examples.py -k logged_responses",
    ),
    Fault(
        "equal responses of a run are trained several times",
        "data/row_filter.py",
        "met.setdefault(tuple(",
        "met.setdefault((str(index),) + tuple(",
        "data/test_examples.py -k logged_responses",
    ),
    Fault(
        "a resumed order of the first epoch",
        "data/sampler.py",
        'state["position"]\n        self._order = self._permutation(self.epoch)',
        'state["position"]',
        "data/test_sampler.py",
    ),
    Fault(
        "a prompt never comes back",
        "data/difficulty.py",
        "self._aside.discard(row)",
        "pass",
        "data/test_difficulty.py",
    ),
    Fault(
        "what is set aside is not in checkpoints",
        "data/difficulty.py",
        '"set_aside": sorted(self._aside)',
        '"set_aside": []',
        "data/test_difficulty.py -k restored",
    ),
    Fault(
        "a repeated prompt is kept",
        "data/duplicates.py",
        "elif key not in self._truths:",
        "elif True:",
        "data/test_published_datasets.py -k repeated",
    ),
    Fault(
        "training keeps prompts of the test split",
        "data/convert.py",
        'held_out if split == "train" else {}',
        "{}",
        "data/test_published_datasets.py -k held_out",
    ),
    Fault(
        "the letter of an option is off by one",
        "data/raw_rows.py",
        "letter = letters[int(label)]",
        "letter = letters[int(label) - 1]",
        "data/test_published_datasets.py -k lettered",
    ),
    Fault(
        "validation prompts depend on the order of rows",
        "data/own_files.py",
        "ordered = sorted(set(hashes))",
        "ordered = list(dict.fromkeys(hashes))",
        "data/test_own_files.py -k order_of_the_rows",
    ),
)
