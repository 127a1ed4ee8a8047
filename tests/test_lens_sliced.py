"""The sliced lens beside the central test of test_families.py: caches, recorders, implementations, padding, hooks, modes."""

from __future__ import annotations

import pytest
import torch
from hand_cut import MODELS, batch, cut_of, hand_child, parent_of
from transformers.integrations.moe import ExpertsInterface

from star_elastic.elastic import ElasticModel
from star_elastic.submodel import Submodel

OUTPUTS = {"output_hidden_states": True, "output_router_logits": True}


def elastic_and_child(model_name: str, cut_name: str):
    """An elastic parent with the cut as ``small``, and the hand-cut child."""
    parent = parent_of(model_name)
    widths, layers = cut_of(model_name, cut_name)
    child = hand_child(parent, MODELS[model_name], widths, layers)
    elastic = ElasticModel(parent)
    elastic.add("small", Submodel(widths=widths, layers=layers))
    return elastic, child


def assert_same(one, two) -> None:
    """Tensors, or tuples of tensors, equal bit for bit."""
    if isinstance(one, tuple):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_same(first, second)
    else:
        assert torch.equal(one, two)


@pytest.mark.parametrize("cut_name", ["hidden", "all", "all and depth"])
def test_decoding_with_a_cache_equals_the_child(cut_name):
    elastic, child = elastic_and_child("dense", cut_name)
    ids = batch(12)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    seen, wanted = elastic.generate(ids, submodel="small", **options), child.generate(ids, **options)
    assert torch.equal(seen.sequences, wanted.sequences)
    # Not bit for bit: for the one position that generate keeps, BLAS may choose another kernel for another row stride.
    for one, two in zip(seen.scores, wanted.scores, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_generate_of_the_patched_parent_follows_the_lens():
    elastic, child = elastic_and_child("plain", "all")
    with elastic.at("small"):
        seen = elastic.model.generate(batch(12), max_new_tokens=6, do_sample=False)
    assert torch.equal(seen, child.generate(batch(12), max_new_tokens=6, do_sample=False))


def test_attention_weights_are_recorded_once_each():
    elastic, child = elastic_and_child("plain", "all")
    elastic(batch(), submodel="small")  # the skeleton exists before the implementation changes
    elastic.model.set_attn_implementation("eager")
    child.set_attn_implementation("eager")
    seen = elastic(batch(), submodel="small", output_attentions=True)
    assert_same(seen.attentions, child(batch(), output_attentions=True).attentions)
    assert len(seen.attentions) == 1
    assert seen.attentions[0].shape[1] == 2  # query heads of the nested model


@pytest.mark.parametrize("first", ["full", "small"])
def test_recording_at_one_size_does_not_record_twice_at_another(first):
    elastic, _ = elastic_and_child("plain", "all and depth")
    elastic(batch(), submodel="small")
    for name in (first, "full", "small", "full"):
        seen = elastic(batch(), submodel=name, **OUTPUTS)
        layers, routers = {"full": (5, 2), "small": (3, 1)}[name]
        assert (len(seen.hidden_states), len(seen.router_logits)) == (layers + 1, routers)


def test_recording_that_the_config_asks_for():
    elastic, _ = elastic_and_child("plain", "hidden")
    assert elastic(batch(), submodel="small").hidden_states is None
    elastic.model.config.output_hidden_states = True
    assert len(elastic(batch(), submodel="small").hidden_states) == 6
    assert elastic.submodel("small").config.hidden_size == 48


@pytest.mark.parametrize("cut_name", ["hidden", "all"])
def test_a_layer_under_the_lens_compiles_without_graph_breaks(cut_name):
    elastic, child = elastic_and_child("plain", cut_name)
    width = child.config.hidden_size
    with elastic.at("small"), torch.no_grad():
        for layer, wanted in zip(elastic.model.model.layers, child.model.layers, strict=True):
            torch._dynamo.reset()
            hidden = torch.randn(1, 16, width)
            compiled = torch.compile(layer, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(hidden), wanted(hidden))


def test_experts_implementation_reaches_the_nested_model(monkeypatch):
    elastic, child = elastic_and_child("plain", "all")
    wanted = child(batch()).logits
    assert_same(elastic(batch(), submodel="small").logits, wanted)
    view = elastic.submodel("small")
    elastic.model.set_experts_implementation("eager")
    grouped = {"grouped_mm": lambda *args, **kwargs: pytest.fail("the old implementation ran")}
    monkeypatch.setattr(ExpertsInterface, "_global_mapping", ExpertsInterface._global_mapping | grouped)
    torch.testing.assert_close(elastic(batch(), submodel="small").logits, wanted)
    torch.testing.assert_close(elastic.submodel("small")(batch()).logits, wanted)
    assert elastic.submodel("small") is view


def test_left_padding_is_ignored_as_in_the_child():
    elastic, child = elastic_and_child("plain", "all")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    seen = elastic(batch(), attention_mask=mask, submodel="small").logits
    assert torch.equal(seen, child(batch(), attention_mask=mask).logits)


def test_hooks_on_the_parents_layers_fire_in_the_lens():
    elastic, _ = elastic_and_child("plain", "hidden")
    widths = []
    handle = elastic.model.model.layers[2].register_forward_hook(lambda module, args, out: widths.append(out.shape[-1]))
    elastic(batch(), submodel="small")
    elastic(batch())
    handle.remove()
    assert widths == [48, 64]


def test_training_mode_follows_the_parent():
    elastic, child = elastic_and_child("plain", "all")
    for layer in (elastic.model, child):
        layer.config.attention_dropout = 0.5
    # Dropout is read once, when attention modules are built.
    for module in (*elastic.model.modules(), *child.modules()):
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    elastic.train()
    child.train()
    torch.manual_seed(3)
    seen = elastic(batch(), submodel="small", use_cache=False).logits
    torch.manual_seed(3)
    assert torch.equal(seen, child(batch(), use_cache=False).logits)
    with elastic.at("small"):
        elastic.eval()
        assert torch.equal(elastic(batch()).logits, child.eval()(batch()).logits)
