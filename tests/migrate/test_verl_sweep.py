"""The script that imports every run script of a copy of verl, on forms of today's scripts."""

import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SWEEP = runpy.run_path(str(REPO / "scripts/sweep_verl_scripts.py"))
RESULTS = REPO / "benchmarks/results/verl_scripts.md"
TODAY = """set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import no_such_npu' 2>/dev/null && echo npu || echo gpu)}
INFER=${INFER:-vllm}
case "$DEVICE" in
    gpu | npu) ;;
    *) echo no >&2; exit 1 ;;
esac
EXTRA=()
case "${DEVICE}" in
    gpu)
        case "${MACHINE:-}" in
            gb200) N=4 ;;
            *) N=8 ;;
        esac ;;
    npu) N=16; EXTRA+=(actor_rollout_ref.actor.use_torch_compile=False) ;;
esac
RAY=()
if [ "${UV:-1}" != 0 ] && { [ "$INFER" = vllm ] || [ "$INFER" = sglang ]; }; then
    RAY=(ray_kwargs.ray_init.num_cpus=4)
fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.n_gpus_per_node=$N \\
    data.train_files=$ROOT/a.parquet actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 +own.key=1 \\
    trainer.logger='["console"]' "${RAY[@]}" "${EXTRA[@]}" "$@"
"""
CRITIC = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae"
OTHER = "python3 -m recipe.other.main_other a=1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name, text in {"today": TODAY, "critic": CRITIC, "other": OTHER, "helper": "echo verl"}.items():
        (scripts / f"run_{name}.sh").write_text(text)
    return scripts


def test_the_table_has_a_line_per_script_that_starts_a_trainer(folder: Path, capsys):
    assert SWEEP["main"]([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "`scripts`: 3 scripts that start a trainer: 1 imported, 1 refused, 1 stopped." in text
    assert "| run_today.sh | imported |  |" in text
    assert "| run_critic.sh | refused | `algorithm.adv_estimator=gae` |" in text
    assert "| run_other.sh | stopped | run_other.sh, line 1: recipe.other.main_other is no entry point" in text
    assert SWEEP["main"]([]) == 2


def test_the_page_of_results_has_the_form_that_the_script_prints():
    lines = RESULTS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| run_")]
    results = [row.split(" | ")[1] for row in rows]
    counts = ", ".join(f"{results.count(each)} {each}" for each in ("imported", "refused", "stopped"))
    assert f": {len(rows)} scripts that start a trainer: {counts}." in lines[2]
    page = (REPO / "docs/from-verl.md").read_text()
    assert f"{results.count('imported')} import and {results.count('refused')} are refused" in page
    assert all(row.split(" | ")[2].strip(" |") for row in rows if "| refused |" in row)
