"""ElasticModel as a whole: switching, restoring, training through it, copying, loading and saving."""

from __future__ import annotations

import copy
import functools
import inspect
import json

import pytest
import torch
from hand_cut import batch, hand_child
from tiny import tiny_folder, tiny_model
from transformers import AutoModelForCausalLM

from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, ElasticError, TargetError, UnknownNameError, WidthError
from star_elastic.submodel import ElasticConfig, Submodel

SMALL = {
    "hidden": 40,
    "heads": 2,
    "mamba_heads": 6,
    "mamba_head_dim": 4,
    "experts": 6,
    "expert_ffn": 20,
    "shared_ffn": 28,
}
CONFIG = ElasticConfig(
    family="nemotron_h",
    submodels={
        "small": Submodel(widths=SMALL),
        "narrow": Submodel(widths={"hidden": 48}),
        "short": Submodel(layers=(0, 1, 2, 4)),
        "same": Submodel(widths={"hidden": 64}, layers=(0, 1, 2, 3, 4)),
    },
)


def elastic_of(seed: int = 0, **edits) -> ElasticModel:
    return ElasticModel(tiny_model(seed, **edits), CONFIG)


def logits_of(elastic: ElasticModel, **options) -> torch.Tensor:
    with torch.no_grad():
        return elastic(batch(), **options).logits


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_full_model_is_the_untouched_model_bit_for_bit():
    untouched, elastic = tiny_model(), elastic_of()
    for model in (untouched, elastic):
        model(batch(), labels=batch()).loss.backward()
    wanted = untouched(batch()).logits
    assert torch.equal(logits_of(elastic), wanted)
    assert torch.equal(logits_of(elastic, submodel="full"), wanted)
    assert torch.equal(logits_of(elastic, submodel="same"), wanted)
    for name, parameter in untouched.named_parameters():
        assert torch.equal(parameter.grad, elastic.model.get_parameter(name).grad)


def test_names_class_and_signature_of_the_parent_stay():
    untouched, model = tiny_model(), elastic_of().model
    assert type(model) is type(untouched)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]
    for one, two in ((model, untouched), (model.model.layers[1], untouched.model.layers[1])):
        assert inspect.signature(one.forward) == inspect.signature(two.forward)
    assert model.model.layers[1].block_type == "moe"


def test_blocks_nest_and_restore_what_was_before():
    elastic = elastic_of()
    full, narrow, small = (logits_of(elastic, submodel=name) for name in ("full", "narrow", "small"))
    assert not torch.equal(narrow, small)
    with elastic.at("narrow"):
        assert torch.equal(logits_of(elastic), narrow)
        with elastic.at("small"):
            assert torch.equal(logits_of(elastic), small)
            assert torch.equal(logits_of(elastic, submodel="full"), full)
        assert torch.equal(logits_of(elastic), narrow)
        assert torch.equal(elastic.model(batch()).logits, narrow), "the parent itself follows the block"
        assert torch.equal(elastic.model.model(batch()).last_hidden_state, elastic.features(batch()))
    assert torch.equal(logits_of(elastic), full)


def test_an_exception_inside_a_block_or_a_call_restores():
    elastic = elastic_of()
    full, small = logits_of(elastic), logits_of(elastic, submodel="small")
    with pytest.raises(KeyError), elastic.at("small"):
        raise KeyError
    assert torch.equal(logits_of(elastic), full)
    handle = elastic.model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    for options in ({}, {"submodel": "small"}):
        with pytest.raises(ZeroDivisionError):
            elastic(batch(), **options)
    handle.remove()
    assert torch.equal(logits_of(elastic), full)
    assert torch.equal(logits_of(elastic, submodel="small"), small)


@pytest.mark.parametrize("use", ["at", "forward", "submodel", "generate", "features", "head_weight", "copied_bytes"])
def test_unknown_names_are_told_with_the_nearest(use):
    elastic = elastic_of()
    calls = {
        "at": lambda: elastic.at("smal").__enter__(),
        "forward": lambda: elastic(batch(), submodel="smal"),
        "submodel": lambda: elastic.submodel("smal"),
        "generate": lambda: elastic.generate(batch(), submodel="smal"),
        "features": lambda: elastic.features(batch(), submodel="smal"),
        "head_weight": lambda: elastic.head_weight("smal"),
        "copied_bytes": lambda: elastic.copied_bytes("smal"),
    }
    with pytest.raises(UnknownNameError, match="did you mean 'small'"):
        calls[use]()


def test_adding_a_submodel_checks_it_and_can_change_a_name():
    elastic = elastic_of()
    with pytest.raises(WidthError, match="nearest legal: 2 and 4"):
        elastic.add("odd", Submodel(widths={"heads": 3}))  # case 15: no cut across KV groups, no silent rounding
    assert "odd" not in elastic.config.submodels
    before = logits_of(elastic, submodel="narrow")
    elastic.add("narrow", Submodel(widths={"hidden": 32}))
    assert not torch.equal(logits_of(elastic, submodel="narrow"), before)
    assert CONFIG.submodels["narrow"].widths == {"hidden": 48}, "the config that was passed in stays"


@pytest.mark.parametrize("submodel", ["full", "small", "short"])
@pytest.mark.parametrize("switch", ["ours", "transformers"])
def test_checkpointing_gives_the_same_gradients(submodel, switch):
    def run(checkpointing: bool) -> tuple[dict, int]:
        elastic = elastic_of().train()
        if checkpointing and switch == "ours":
            elastic.checkpointing = True
        elif checkpointing:
            elastic.model.activation_checkpointing_enable()
        calls = []
        elastic.model.model.layers[2].register_forward_hook(lambda *_: calls.append(1))
        inner = type(elastic.model.model.layers[2].mixer)
        ran, original = [], inner.forward

        @functools.wraps(original)
        def counted(self, *args, **kwargs):
            ran.append(1)
            return original(self, *args, **kwargs)

        inner.forward = counted
        try:
            with elastic.at(submodel):
                loss = elastic(batch(), labels=batch()).loss
            loss.backward()  # outside the block: recomputation must remember the lens
        finally:
            inner.forward = original
        assert len(calls) == 1
        return gradients(elastic.model), len(ran)

    (wanted, once), (seen, twice) = run(False), run(True)
    assert (once, twice) == (1, 2)
    for name, gradient in wanted.items():
        assert (gradient is None and seen[name] is None) or torch.equal(gradient, seen[name])


def test_checkpointing_by_transformers_alone_stays_with_transformers(monkeypatch):
    elastic = elastic_of().train()
    elastic.model.activation_checkpointing_enable()
    monkeypatch.setattr("star_elastic.switch.checkpoint", lambda *_, **__: pytest.fail("checkpointed twice"))
    elastic(batch(), labels=batch()).loss.backward()


@pytest.mark.parametrize("switch", ["ours", "transformers"])
def test_checkpointing_under_masks_gives_the_same_gradients(switch):
    def run(checkpointing: bool) -> tuple[dict, torch.Tensor]:
        elastic = elastic_of().train()
        elastic.checkpointing = checkpointing and switch == "ours"
        if checkpointing and switch == "transformers":
            elastic.model.activation_checkpointing_enable()
        masks = {name: (torch.linspace(0.9, 0.3, axis.size)) for name, axis in elastic.layout.axes.items()}
        hidden = masks["hidden"].requires_grad_()
        with elastic.masked(masks):
            loss = elastic(batch(), labels=batch()).loss
        loss.backward()
        return gradients(elastic.model), hidden.grad

    (wanted, mask_wanted), (seen, mask_seen) = run(False), run(True)
    assert torch.equal(mask_wanted, mask_seen)
    assert mask_seen.abs().max() > 0
    for name, gradient in wanted.items():
        assert torch.equal(gradient, seen[name]), name


@pytest.mark.parametrize("submodel", ["full", "small", "short"])
def test_loss_through_features_and_head_equals_the_models_loss(submodel):
    elastic = elastic_of()
    ids = batch()
    loss = elastic(ids, labels=ids, submodel=submodel, use_cache=False).loss
    loss.backward()
    wanted = gradients(elastic.model)
    elastic.zero_grad()
    with elastic.at(submodel):
        logits = elastic.features(ids) @ elastic.head_weight().T
    parts = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(parts, loss)
    assert elastic.head_weight(submodel).shape == (128, elastic.features(ids, submodel=submodel).shape[-1])
    parts.backward()
    for name, gradient in wanted.items():
        seen = elastic.model.get_parameter(name).grad
        assert (gradient is None and seen is None) or torch.allclose(gradient, seen, rtol=1e-4, atol=1e-6), name


def test_features_take_an_attention_mask():
    elastic = elastic_of()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    wanted = elastic.model.model(batch(), attention_mask=mask).last_hidden_state
    assert torch.equal(elastic.features(batch(), attention_mask=mask), wanted)
    assert not torch.equal(elastic.features(batch()), wanted)


def test_a_training_step_through_a_lens_moves_only_the_nested_part():
    elastic = elastic_of()
    before = copy.deepcopy(elastic.model.state_dict())
    optimiser = torch.optim.SGD(elastic.parameters(), lr=0.1)
    elastic(batch(), labels=batch(), submodel="narrow").loss.backward()
    optimiser.step()
    changed = before["model.embeddings.weight"] != elastic.model.model.embeddings.weight
    assert changed[:, :48].any()
    assert not changed[:, 48:].any()


def test_deepcopy_makes_an_independent_model():
    elastic = elastic_of()
    small = logits_of(elastic, submodel="small")
    elastic.submodel("small")
    with elastic.at("small"):
        twin = copy.deepcopy(elastic)
        parent = copy.deepcopy(elastic.model)
    assert not twin._views, "views are not copied along: a copied view is a second set of weights"
    full = logits_of(elastic)
    assert torch.equal(logits_of(twin), full), "a copy starts as the full model"
    assert torch.equal(parent(batch()).logits, full)
    with torch.no_grad():
        elastic.model.lm_head.weight.zero_()
    assert torch.equal(logits_of(twin, submodel="small"), small)
    with elastic.at("small"):
        assert torch.equal(logits_of(twin), full)
    assert twin.submodel("small").lm_head.weight.data_ptr() == twin.model.lm_head.weight.data_ptr()


def test_two_models_side_by_side_do_not_touch_each_other():
    one, two = elastic_of(0), elastic_of(1)
    full = logits_of(two)
    with one.at("small"):
        assert torch.equal(logits_of(two), full)
        with two.at("narrow"):
            assert logits_of(one).shape == logits_of(two).shape
            assert not torch.equal(logits_of(two), full)


def test_two_elastic_models_on_one_parent_share_the_switch():
    parent = tiny_model()
    one, two = ElasticModel(parent, CONFIG), ElasticModel(parent, CONFIG)
    small = logits_of(one, submodel="small")
    assert torch.equal(logits_of(two, submodel="small"), small)
    with two.at("small"):
        assert torch.equal(logits_of(one), small)


def test_parameters_that_are_not_in_memory_are_refused():
    model = tiny_model()
    model.model.layers[1].mixer.experts.up_proj = torch.nn.Parameter(torch.empty(8, 32, 64, device="meta"))
    with pytest.raises(ElasticError, match="offloaded"):
        ElasticModel(model)


def test_a_config_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="submodel 'small'"):
        ElasticModel(
            tiny_model(), ElasticConfig(family="nemotron_h", submodels={"small": Submodel(widths={"hidden": 50})})
        )


def test_a_model_under_an_accelerate_hook_is_patched_inside_it():
    """accelerate keeps the class's forward as ``_old_forward`` and puts its own in front; both must run."""
    elastic_reference = elastic_of()
    model = tiny_model()
    calls = []
    for module in (model, model.model, *model.model.layers):
        module._hf_hook, module._old_forward = object(), module.forward

        def hooked(*args, _module=module, **kwargs):
            calls.append(_module)
            return _module._old_forward(*args, **kwargs)

        module.forward = hooked
    elastic = ElasticModel(model, CONFIG)
    assert torch.equal(logits_of(elastic, submodel="small"), logits_of(elastic_reference, submodel="small"))
    assert len(calls) == 7


def test_bf16_model_takes_only_widths_that_keep_its_rows_aligned():
    model = tiny_model().to(torch.bfloat16)
    elastic = ElasticModel(model)
    with pytest.raises(WidthError, match="multiples of 8"):
        elastic.add("odd", Submodel(widths={"hidden": 44}))
    elastic.add("small", Submodel(widths={"hidden": 48, "heads": 4, "expert_ffn": 16}))
    child = hand_child(model, {}, {"hidden": 48, "heads": 4, "expert_ffn": 16})
    child.model.layers[1].mixer.gate.to(torch.bfloat16)
    assert torch.equal(logits_of(elastic, submodel="small"), child(batch()).logits)


def test_save_and_load_keep_weights_and_submodels(tmp_path):
    elastic = elastic_of()
    elastic.save_pretrained(tmp_path / "saved")
    assert ElasticConfig.load(tmp_path / "saved") == CONFIG
    loaded = ElasticModel.from_pretrained(tmp_path / "saved")
    for name in ("full", "small", "short"):
        assert torch.equal(logits_of(loaded, submodel=name), logits_of(elastic, submodel=name))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(plain(batch()).logits, logits_of(elastic))
    with pytest.raises(TargetError):
        elastic.save_pretrained(tmp_path / "saved")
    with elastic.at("small"):
        elastic.save_pretrained(tmp_path / "inside")
    inside = ElasticModel.from_pretrained(tmp_path / "inside")
    assert torch.equal(logits_of(inside), logits_of(elastic)), "a lens changes nothing of what is saved"


def test_a_failing_save_leaves_nothing(tmp_path, monkeypatch):
    elastic = elastic_of()
    monkeypatch.setattr(ElasticConfig, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        elastic.save_pretrained(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_elastic_json_takes_submodels(tmp_path):
    folder = tiny_folder(tmp_path / "parent", sharded=True)
    elastic = ElasticModel.from_pretrained(folder, submodels={"small": Submodel(widths=SMALL)}, dtype=torch.float32)
    assert torch.equal(logits_of(elastic, submodel="small"), logits_of(elastic_of(), submodel="small"))
    assert not elastic.training


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"submodels": {"odd": Submodel(widths={"heads": 3})}}, WidthError, "nearest legal"),
        ({"submodels": {"odd": Submodel(widths={"hiden": 32})}}, UnknownNameError, "did you mean 'hidden'"),
        ({"preset": "nemotron-3-nano"}, UnknownNameError, "nemotron-3-nano-30b-a3b"),
    ],
)
def test_bad_requests_are_refused_before_weights_are_loaded(tmp_path, monkeypatch, options, error, words):
    folder = tiny_folder(tmp_path / "parent")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=words):
        ElasticModel.from_pretrained(folder, **options)


def test_a_damaged_folder_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    folder = tiny_folder(tmp_path / "parent")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 48}))
    with pytest.raises(CheckpointError, match="says"):
        ElasticModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        ElasticModel.from_pretrained(tmp_path / "missing")
