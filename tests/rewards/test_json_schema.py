"""The reward json_schema: the document of a response, the schema's place, and the optional package."""

import json
import sys

import pytest

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.verifiers.json_schema import NO_JSON, fenced_blocks, json_document, json_schema

SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response", "document"),
    [
        (' {"a": 1}\n', {"a": 1}),
        ("null", None),
        ('so\n```json\n{"a": 1}\n```\nthat is it', {"a": 1}),
        ('```\n{"a": 1}\n```\n```\n{"a": 2}\n```', {"a": 2}),
        ('```json\n{"a": 1}\n```\n```python\nprint()\n```', {"a": 1}),
        ('~~~\n```\n{"a": 1}\n```\n~~~', NO_JSON),
        ('```json\n{"a": 1}', NO_JSON),
        ("Infinity", NO_JSON),
        ("9" * 5000, NO_JSON),
        ("[" * 100_000, NO_JSON),
        ("", NO_JSON),
    ],
)
def test_the_document_of_a_response(response, document):
    found = json_document(response)
    assert found is NO_JSON if document is NO_JSON else found == document


def test_fenced_blocks_are_those_that_close():
    assert fenced_blocks("a\n```x\n1\n2\n```\n~~~\n3\n~~~\n```\n4") == ["1\n2", "3"]


def test_without_the_package_the_error_has_the_command_that_installs_it(make_batch, reward_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    pipeline = RewardPipeline(reward_config({"name": "json_schema", "kwargs": {"schema": {"const": "unused"}}}))
    with pytest.raises(ConfigError, match=r'needs the package jsonschema .*pip install "hwgrpo\[rewards\]"'):
        pipeline.score(*make_batch([["1"]]))


def test_a_schema_of_each_row_stands_in_the_ground_truth_or_a_column(make_batch):
    texts = [['{"age": 3}', "3"], ['{"age": 3}', "3"]]
    batch = make_batch(texts, [json.dumps(SCHEMA), {"type": "integer"}])
    assert json_schema(*batch, json_score=0.25) == [1, 0.25, 0.25, 1]
    batch = make_batch(texts, ["3", "3"], columns=[{"shape": SCHEMA}, {"shape": "true"}])
    assert json_schema(*batch, column="shape") == [1, 0, 1, 1]


@pytest.mark.parametrize("schema", ['{"type": "objekt"}', "{", "3", '{"$schema": 3}'])
def test_what_is_no_schema_is_an_error_that_names_its_place(schema, make_batch):
    with pytest.raises(DataError, match=r"ground truth of .* is no JSON schema"):
        json_schema(*make_batch([["1"]], [schema]))
    with pytest.raises(ConfigError, match=r"kwargs\.schema of reward json_schema=.* is no JSON schema"):
        json_schema(*make_batch([["1"]]), schema=schema)


def test_a_row_without_schema_is_an_error(make_batch):
    with pytest.raises(DataError, match=r"column 'shape' of .* is empty"):
        json_schema(*make_batch([["1"]]), column="shape")


def test_a_reference_to_another_document_is_not_fetched(make_batch):
    with pytest.raises(Exception, match=r"nowhere\.invalid"):
        json_schema(*make_batch([["1"]]), schema={"$ref": "https://nowhere.invalid/schema"})


def test_a_document_that_is_too_deep_for_a_recursive_schema_is_not_valid(make_batch):
    text = "[" * 900 + "]" * 900
    assert json_schema(*make_batch([[text]]), schema={"items": {"$ref": "#"}}) == [0]
