"""Kernels and attention as a child process tells them."""

import os
from collections.abc import Mapping

from hwgrpo_backends.cuda import CUDNN_LAST

from hwgrpo.doctor.survey import SurveyRequest, survey_backend

ON_CPU = SurveyRequest("cpu", devices=True)


def test_the_child_finds_the_packages_where_this_process_did(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')\n")
    told = survey_backend(ON_CPU, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert told["kernels"] == {"error": "ImportError: no torch today"}


def test_a_child_that_dies_is_told_in_every_part(tmp_path):
    (tmp_path / "torch.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    told = survey_backend(ON_CPU, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "SIGKILL" in told["kernels"]["error"]
    assert "SIGKILL" in told["attention"]["error"]


def test_a_child_that_hangs_is_given_up(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    told = survey_backend(ON_CPU, {**os.environ, "PYTHONPATH": str(tmp_path)}, limit=1.0)
    assert told["kernels"]["error"] == "it took more than 1 seconds"


def test_the_kernels_of_attention_are_those_of_a_training_process():
    environ = {name: value for name, value in os.environ.items() if name != CUDNN_LAST}
    request = SurveyRequest("cuda", devices=False)

    def kernels(environ: Mapping[str, str]) -> list[str]:
        return next(each["kernels"] for each in survey_backend(request, environ)["attention"] if each["kernels"])

    assert kernels(environ) == ["flash", "mem_efficient", "math"]
    assert kernels({**environ, CUDNN_LAST: "0"}) == ["flash", "mem_efficient", "math", "cudnn"]
