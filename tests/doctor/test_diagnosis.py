"""What a diagnosis asks torch, and when: the chosen backend is surveyed beside tier 1, and again where that changes it.

Facts are made up here; `test_command.py` has the processes.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from hwgrpo.doctor import diagnosis
from hwgrpo.doctor.survey import SurveyRequest
from tests.support.devices import hosts


@pytest.fixture
def diagnosed(monkeypatch, tmp_path):
    """Diagnoses a host of facts before and after tier 1; returns the questions, in their order, and the report."""

    def diagnose(before, after):
        steps = []

        @contextmanager
        def start_survey(question, environ):
            steps.append(("begun", question))
            yield lambda: survey_backend(question, environ)

        def survey_backend(question, environ):
            steps.append(("answered", question))
            return {"kernels": {"asked": question}}

        def tier1(facts, environ, backends):
            steps.append("tier 1")
            return after

        monkeypatch.setattr(diagnosis, "gather_tier0", lambda root, environ, backends: before)
        monkeypatch.setattr(diagnosis, "gather_tier1", tier1)
        monkeypatch.setattr(diagnosis, "start_survey", start_survey)
        monkeypatch.setattr(diagnosis, "survey_backend", survey_backend)
        return steps, diagnosis.diagnose("auto", root=tmp_path, environ={})

    return diagnose


@pytest.mark.parametrize("host, name", [(hosts.cpu(), "cpu"), (hosts.rocm(), "rocm"), (hosts.npu(), "npu")])
def test_the_backend_that_tier_0_chooses_is_surveyed_beside_tier_1(diagnosed, host, name):
    question = SurveyRequest(name, devices=True)
    steps, told = diagnosed(replace(host, torch=None), host)
    assert steps == [("begun", question), "tier 1", ("answered", question)]
    assert (told.decision.selected, told.survey) == (name, {"kernels": {"asked": question}})


def test_another_backend_is_asked_about_where_tier_1_changes_the_decision(diagnosed):
    steps, told = diagnosed(hosts.cpu(torch=None), hosts.rocm())
    assert steps == [("begun", SurveyRequest("cpu", True)), "tier 1", ("answered", SurveyRequest("rocm", True))]
    assert (told.decision.selected, told.survey["kernels"]["asked"]) == ("rocm", SurveyRequest("rocm", True))


def test_devices_that_only_tier_1_finds_are_asked_about_again(diagnosed):
    inherited = {"variables": {"HWGRPO_BACKEND_SELECTED": "rocm"}}
    steps, _ = diagnosed(hosts.cpu(torch=None, **inherited), hosts.rocm(**inherited))
    assert steps == [("begun", SurveyRequest("rocm", False)), "tier 1", ("answered", SurveyRequest("rocm", True))]


def test_where_attention_depends_on_the_chip_it_is_asked_for_once_torch_has_told_the_chip(diagnosed):
    steps, _ = diagnosed(hosts.cuda(torch=None), hosts.cuda())
    assert steps == ["tier 1", ("answered", SurveyRequest("cuda", True, "sm_90"))]


@pytest.mark.parametrize("variables", [{}, {"HWGRPO_BACKEND_SELECTED": "cpu"}])
def test_where_torch_does_not_import_no_answer_is_waited_for(diagnosed, variables):
    broken = hosts.cpu(torch=hosts.BROKEN_PLUGIN, variables=variables)
    steps, told = diagnosed(replace(broken, torch=None), broken)
    assert told.decision.selected == variables.get("HWGRPO_BACKEND_SELECTED")
    assert steps == [("begun", SurveyRequest("cpu", True)), "tier 1"]
    assert told.survey == {}


def test_without_torch_nothing_is_asked(diagnosed):
    bare = hosts.cpu(torch=None, torch_version=None)
    steps, told = diagnosed(bare, bare)
    assert (steps, told.survey) == ([], {})
