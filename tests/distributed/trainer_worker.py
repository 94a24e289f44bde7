"""Run by torchrun: the command, then `Trainer` with the same as objects, then one that a rank stops.

torchrun --nproc-per-node 2 trainer_worker.py FOLDER STRATEGY

FOLDER holds recipe.yaml, which is empty, train.jsonl and validation.jsonl.
"""

import json
import os
import sys
from pathlib import Path

from hwgrpo import Trainer
from hwgrpo.cli.main import main as hwgrpo
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.models.builtin import resolve
from tests.support.runs import dense_reward
from tests.support.runs.runs import SMALL

OBJECTS = ("model.path", "data.train", "reward.functions")
OWN = ("data.validation_max_rows", "trainer.validation_n", "trainer.max_steps")


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(folder: Path, strategy: str) -> None:
    rank = int(os.environ["RANK"])
    given = {each.partition("=")[0]: each for each in SMALL}
    common = [each for key, each in given.items() if key not in (*OBJECTS, *OWN)]
    common += [f"trainer.strategy={strategy}", "trainer.max_steps=2", "trainer.validate_at_start=false"]
    files = [given["model.path"], given["reward.functions"], f"data.train={folder}/train.jsonl"]
    files += [f"data.validation={folder}/validation.jsonl"]
    model_folder = resolve(given["model.path"].removeprefix("model.path="))
    assert hwgrpo(["train", f"{folder}/recipe.yaml", *common, *files, f"trainer.output_dir={folder}/command"]) == 0

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    trainer = Trainer(
        {"trainer.output_dir": folder / "objects"},
        common,
        model=model,
        train_data=rows_of(folder / "train.jsonl"),
        validation_data=rows_of(folder / "validation.jsonl"),
        rewards=dense_reward.share_right,
    )
    evaluations, responses = [], []
    for step in trainer:
        responses.append(len(step.completions))
        evaluations.append(trainer.evaluate())
        trainer.save_model(folder / "saved")
    results = {"status": trainer.train(), "responses": responses, "evaluations": evaluations}
    if rank == 0:
        model.save_pretrained(folder / "given")

    stopped = Trainer({"trainer.output_dir": folder / "stopped"}, [*common, *files])
    for _ in stopped:
        if rank == 1:
            stopped.stop()
    results["stopped"] = stopped.train(), stopped.step
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    with ended_as_rank():
        main(Path(sys.argv[1]), sys.argv[2])
