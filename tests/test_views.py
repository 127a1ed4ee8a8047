"""``submodel(name)``: an ordinary transformers model on views of the parent's storage."""

from __future__ import annotations

import pytest
import torch
from hand_cut import batch, hand_child
from tiny import tiny_folder, tiny_model
from transformers import AutoModelForCausalLM

from star_elastic.cut import is_view, narrow, plan_cut
from star_elastic.elastic import ElasticModel
from star_elastic.errors import ElasticError
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel

PUBLISHED = Submodel(widths={"hidden": 48, "experts": 4, "expert_ffn": 16})
GROUPED = Submodel(widths={"hidden": 48, "heads": 4, "mamba_heads": 4})


def elastic_with(submodel: Submodel, dtype: torch.dtype = torch.float32, **edits) -> ElasticModel:
    elastic = ElasticModel(tiny_model(**edits).to(dtype))
    elastic.add("small", submodel)
    return elastic


def ranges(model: torch.nn.Module) -> list[tuple[int, int]]:
    """The span of memory of each parameter's storage."""
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_published_cut_copies_nothing(dtype):
    elastic = elastic_with(PUBLISHED, dtype)
    view = elastic.submodel("small")
    assert elastic.copied_bytes("small") == 0
    assert {start for start, _ in ranges(view)} == {start for start, _ in ranges(elastic.model)}
    assert view(batch()).logits.isfinite().all()


def test_copied_bytes_are_those_of_the_gathered_tensors():
    elastic = elastic_with(GROUPED)
    view, parent = elastic.submodel("small"), elastic.model
    owned = {start for start, _ in ranges(parent)}
    copied = sum(p.nbytes for p in view.parameters() if p.untyped_storage().data_ptr() not in owned)
    assert elastic.copied_bytes("small") == copied > 0
    # By hand, for two Mamba layers and one attention layer with half of the heads kept:
    inner, groups_state, hidden = 32, 2 * 8, 48
    mamba = (
        (2 * inner + 2 * groups_state + 4) * hidden + (inner + 2 * groups_state) * 5 + 3 * 4 + inner + hidden * inner
    )
    attention = 2 * (4 * 8 * hidden)
    assert copied == 4 * (2 * mamba + attention)


@pytest.mark.parametrize("submodel", [PUBLISHED, GROUPED])
def test_changing_the_parent_changes_the_view(submodel):
    elastic = elastic_with(submodel)
    before = elastic.submodel("small")(batch()).logits
    optimiser = torch.optim.AdamW(elastic.parameters(), lr=1e-2)
    elastic(batch(), labels=batch()).loss.backward()
    optimiser.step()
    view = elastic.submodel("small")
    after = view(batch()).logits
    assert not torch.equal(before, after)
    assert torch.equal(after, hand_child(elastic.model, {}, submodel.widths)(batch()).logits)
    assert elastic.submodel("small") is view


def test_a_parent_that_was_moved_is_cut_again():
    elastic = elastic_with(GROUPED)
    assert elastic.submodel("small").dtype == torch.float32
    elastic.to(torch.float64)
    view = elastic.submodel("small")
    assert {parameter.dtype for parameter in view.parameters()} == {torch.float64}
    assert view.lm_head.weight.data_ptr() == elastic.model.lm_head.weight.data_ptr()


def test_view_model_is_untouched_by_lenses_and_stays_in_evaluation_mode():
    elastic = elastic_with(PUBLISHED).train()
    view = elastic.submodel("small")
    wanted = view(batch()).logits
    with elastic.at("full"), torch.no_grad():
        assert torch.equal(view(batch()).logits, wanted)
    with elastic.masked({"hidden": torch.zeros(64)}):
        assert torch.equal(view(batch()).logits, wanted)
    assert not view.training
    assert elastic.model.training


@pytest.mark.parametrize("submodel", [PUBLISHED, GROUPED, Submodel(widths={"hidden": 48}, layers=(0, 2, 3))])
def test_view_and_exported_folder_generate_the_same(tmp_path, submodel):
    folder = tiny_folder(tmp_path / "parent")
    elastic = ElasticModel.from_pretrained(folder, submodels={"small": submodel})
    slice_checkpoint(folder, tmp_path / "small", submodel)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(elastic.submodel("small")(batch()).logits, exported(batch()).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = exported.generate(batch(12), **options)
    assert torch.equal(elastic.submodel("small").generate(batch(12), **options), wanted)
    assert torch.equal(elastic.generate(batch(12), submodel="small", **options), wanted)
    with elastic.at("small"):
        assert torch.equal(elastic.generate(batch(12), **options), wanted)


def test_view_model_saves_as_an_ordinary_folder(tmp_path):
    elastic = elastic_with(PUBLISHED)
    view = elastic.submodel("small")
    view.save_pretrained(tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(loaded(batch()).logits, view(batch()).logits)
    assert (tmp_path / "small/model.safetensors").stat().st_size < 1.05 * sum(
        p.nbytes for p in view.parameters()
    ) + 8192


def test_a_parent_on_several_devices_has_no_views():
    elastic = elastic_with(PUBLISHED)
    elastic.model.lm_head.weight = torch.nn.Parameter(torch.empty(128, 64, device="meta"))
    with pytest.raises(ElasticError, match=r"on cpu, meta: use at\(\)"):
        elastic.submodel("small")


def test_plan_narrows_prefixes_and_gathers_runs():
    layout = ElasticModel(tiny_model()).layout
    rows = {unit.name(row): row for unit, row in layout.tensors()}
    down = plan_cut(rows["model.layers.1.mixer.experts.down_proj"], layout.members({"experts": 4, "expert_ffn": 16}))
    assert down.narrows == ((0, 0, 4), (2, 0, 16))
    assert down.is_view
    query = plan_cut(rows["model.layers.2.mixer.q_proj.weight"], layout.members({"heads": 4, "hidden": 48}))
    assert query.narrows == ((1, 0, 48),)
    ((dim, positions),) = query.gathers
    assert (dim, positions.tolist()) == (0, [*range(16), *range(32, 48)])  # heads 0, 1 and 4, 5 of 8 channels each
    assert not query.is_view
    assert is_view(rows["model.norm_f.weight"], layout.members({"hidden": 48}))
    assert plan_cut(rows["model.norm_f.weight"], layout.members({"heads": 4})).narrows == ()


def test_narrowing_a_tensor_that_is_itself_a_view():
    """Sharded training hands out parameters as views into a larger buffer."""
    buffer = torch.arange(100.0, requires_grad=True)
    matrix = buffer[13:].view(-1)[:60].view(6, 10)
    part = narrow(matrix, ((0, 1, 3), (1, 2, 5)))
    assert torch.equal(part, matrix[1:4, 2:7])
    weights = torch.randn(3, 5)
    (part * weights).sum().backward()
    seen = buffer.grad.clone()
    buffer.grad = None
    (matrix[1:4, 2:7] * weights).sum().backward()
    assert torch.equal(seen, buffer.grad)
