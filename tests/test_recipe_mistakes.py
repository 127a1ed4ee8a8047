"""Mistakes of recipes that mislead easily: in a lone entry, in YAML itself, and values that Python would let pass."""

from __future__ import annotations

import pytest
from test_recipe import refused, write

from star_elastic.train.recipe import load_recipe

LONE_SOURCE = """\
parent: ./sorted
output: ./family
steps: 100
data:
  sources:
    - SOURCE
"""
LONE_SUBMODEL = """\
parent: ./sorted
output: ./family
steps: 100
data: {sources: [{path: a.txt}]}
submodels:
  small: SUBMODEL
"""
ANY = """\
parent: ./sorted
output: ./family
data: {sources: [{path: a.txt}]}
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{path: R, knd: text}", "unknown key 'data.sources.0.knd'; did you mean 'kind'?"),
        ("{path: R, kind: foo}", "data.sources.0.kind = 'foo': should be 'reasoning' or 'text'"),
        ("{path: R, weight: 0}", "data.sources.0.weight = 0: should be greater than 0"),
        ("{path: R, weight: true}", "data.sources.0.weight = True: should be a number"),
        ("{path: R, hub: R}", "a source needs exactly one of 'path' and 'hub'"),
        ("{kind: text}", "a source needs exactly one of 'path' and 'hub'"),
        ("{path: ''}", "data.sources.0.path = '': should not be empty"),
        ("{hub: ' '}", "data.sources.0.hub = ' ': should not be empty"),
        ("R", "data.sources.0 = 'R': should be a mapping; known keys: path, hub"),
        ("null", "data.sources.0 = None: should be a mapping; known keys: path, hub"),
    ],
)
def test_a_mistake_in_the_only_source_is_told_itself(tmp_path, source, message):
    told = refused(tmp_path, LONE_SOURCE.replace("SOURCE", source))
    assert told.startswith(f"recipe.yaml:6: {message}") and "more)" not in told


@pytest.mark.parametrize(
    ("submodel", "message"),
    [
        ("{widhts: {hidden: 48}}", "unknown key 'submodels.small.widhts'; did you mean 'widths'?"),
        ("{widths: {hidden: '32'}}", "submodels.small.widths.hidden = '32': should be a valid integer"),
        ("{widths: {hidden: 32.0}}", "submodels.small.widths.hidden = 32.0: should be a valid integer"),
        ("{widths: 3}", "submodels.small.widths = 3: should be a mapping"),
        ("{layers: [0, true]}", "submodels.small.layers.1 = True: should be a valid integer"),
        ("{probability: 0}", "submodels.small.probability = 0: should be greater than 0"),
        ("half", "submodels.small = 'half': should be a mapping; known keys: widths, layers, probability"),
    ],
)
def test_a_mistake_in_the_only_submodel_is_told_itself(tmp_path, submodel, message):
    told = refused(tmp_path, LONE_SUBMODEL.replace("SUBMODEL", submodel))
    assert told.startswith(f"recipe.yaml:6: {message}") and "more)" not in told


def test_a_list_without_items_is_still_refused(tmp_path):
    told = refused(tmp_path, LONE_SOURCE.replace("- SOURCE", "[]"))
    assert told == "recipe.yaml:5: data.sources = []: should have at least 1 item, not 0"
    told = refused(tmp_path, LONE_SUBMODEL.replace("\n  small: SUBMODEL", " {}"))
    assert told == "recipe.yaml:5: submodels = {}: should have at least 1 item, not 0"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2020-13-45", "recipe.yaml:1: not valid YAML: '2020-13-45' cannot be read (month must be in 1..12); quote it"),
        ("!!int x", "recipe.yaml:1: not valid YAML: 'x' cannot be read"),
        ("9" * 5000, "recipe.yaml:1: not valid YAML: '9999"),
        (
            "&p [*p]",
            "recipe.yaml:1: not valid YAML: nested more than 20 levels deep, or an alias inside what it stands for",
        ),
        ("&p {a: *p}", "recipe.yaml:1: not valid YAML: nested more than 20 levels deep, or an alias inside"),
        ("[" * 3000, "recipe.yaml: not valid YAML: nested more than 20 levels deep"),
        ("[" * 100 + "]" * 100, "recipe.yaml:1: not valid YAML: nested more than 20 levels deep"),
        ("a\x07b", "recipe.yaml: not valid YAML: unacceptable character #x0007"),
        ("''", "recipe.yaml:1: parent = '': should not be empty"),
        ("'  '", "recipe.yaml:1: parent = ' ': should not be empty"),
        ('"a\\0b"', "recipe.yaml:1: parent = 'a\\x00b': should not contain a NUL character"),
        ("2020-12-24", "recipe.yaml:1: parent = datetime.date(2020, 12, 24): should be a path"),
    ],
)
def test_values_that_yaml_or_the_disk_cannot_take(tmp_path, value, message):
    text = LONE_SOURCE.replace("SOURCE", "path: a.txt")
    assert refused(tmp_path, text.replace("parent: ./sorted", f"parent: {value}")).startswith(message)
    assert refused(tmp_path, text, [f"parent={value}"]).startswith(("override 'parent=", 'override "parent='))


def test_an_empty_output_is_refused(tmp_path):
    text = LONE_SOURCE.replace("SOURCE", "path: a.txt").replace("./family", "''")
    assert refused(tmp_path, text) == "recipe.yaml:2: output = '': should not be empty"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps: true", "steps = True: should be a valid integer"),
        ("steps: '100'", "steps = '100': should be a valid integer"),
        ("steps: 100.0", "steps = 100.0: should be a valid integer"),
        ("tokens: true", "tokens = True: should be a valid integer"),
        ("tokens: 1.5", "tokens = 1.5: should be a valid integer"),
        ("steps: 100\nseed: false", "seed = False: should be a valid integer"),
        ("steps: 100\nsequence_length: '64'", "sequence_length = '64': should be a valid integer"),
        ("steps: 100\noptimizer: {warmup_steps: 1.0}", "optimizer.warmup_steps = 1.0: should be a valid integer"),
        ("steps: 100\noptimizer: {lr: true}", "optimizer.lr = True: should be a number"),
        ("steps: 100\noptimizer: {betas: [0.9, false]}", "optimizer.betas.1 = False: should be a number"),
        ("steps: 100\nactivation_checkpointing: 1", "activation_checkpointing = 1: should be true, false or auto"),
    ],
)
def test_a_value_of_another_kind_is_not_taken_for_a_number(tmp_path, line, message):
    assert refused(tmp_path, ANY + line).split(": ", 1)[1] == message


@pytest.mark.parametrize(
    ("written", "tokens"), [("60B", 60e9), ("1.5e9", 1.5e9), ("1.5e+9", 1.5e9), ("6_000_000", 6e6)]
)
def test_tokens_are_written_in_many_ways(tmp_path, written, tokens):
    assert load_recipe(write(tmp_path, f"{ANY}tokens: {written}")).tokens == tokens


@pytest.mark.parametrize(
    ("written", "rate"), [("1e-4", 1e-4), ("0.0001", 1e-4), ("2.0e-4", 2e-4), ("1", 1.0), ("'0.5'", 0.5)]
)
def test_rates_are_written_in_many_ways(tmp_path, written, rate):
    assert load_recipe(write(tmp_path, f"{ANY}steps: 100\noptimizer: {{lr: {written}}}")).optimizer.lr == rate


def test_a_number_as_a_name_is_told(tmp_path):
    told = refused(tmp_path, ANY + "steps: 100\nbudgets: {12: {params: 0.5}}")
    assert told.split(": ", 1)[1] == "budgets.12: 12 is no text, as a name should be: quote it"
