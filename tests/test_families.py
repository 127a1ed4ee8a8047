"""The central test. Every family, axis and size: hard mask == sliced lens == views == exported folder == hand-cut child."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cut import CASES, FIELDS, HandIndex, every_cut, layers_with
from hand_cut import batch, take
from safetensors import safe_open
from tiny import FAMILIES
from transformers import AutoModelForCausalLM, PreTrainedModel

from star_elastic.elastic import ElasticModel
from star_elastic.masks import hard_masks
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder
from star_elastic.submodel import Submodel

CUTS = every_cut()
TOGETHER = [(case, cut) for case, cut in CUTS if cut in ("all", "all and depth")]


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((one - two).abs().max() / two.abs().max()).item()


@cache
def saved(case: str, folder: Path) -> Path:
    """The case's parent as transformers writes it, once."""
    CASES[case].parent().save_pretrained(folder / case)
    return folder / case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def recorded(model: PreTrainedModel) -> dict[str, bool]:
    """What to ask a model for; those without experts have no router logits."""
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    return {"output_hidden_states": True, **({"output_router_logits": True} if has_experts else {})}


def elastic_and_child(case: str, cut: str) -> tuple[ElasticModel, PreTrainedModel]:
    """An elastic parent with the cut as ``small``, and the child cut by hand."""
    parent = CASES[case].parent()
    widths, layers = CASES[case].cuts()[cut]
    child = CASES[case].child(parent, (widths, layers))
    elastic = ElasticModel(parent)
    elastic.add("small", Submodel(widths=widths, layers=layers))
    return elastic, child


def loaded(folder: Path) -> PreTrainedModel:
    """Load as a user would; a key that does not fit is an error."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def assert_same(one, two) -> None:
    """Tensors, or tuples of tensors, equal bit for bit."""
    if isinstance(one, tuple):
        for first, second in zip(one, two, strict=True):
            assert_same(first, second)
    else:
        assert torch.equal(one, two)


def assert_same_state(one: PreTrainedModel, two: PreTrainedModel) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def disk_shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.offset_keys()}


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_sliced_lens_and_views_equal_the_child_bit_for_bit(case: str, cut: str) -> None:
    elastic, child = elastic_and_child(case, cut)
    ids = batch()
    wanted = child(ids, labels=ids, **recorded(child))
    seen = elastic(ids, labels=ids, submodel="small", **recorded(child))
    view = elastic.submodel("small")
    assert type(view) is type(child)
    assert_same_state(view, child)
    assert not any(tensor.is_meta for tensor in (*view.parameters(), *view.buffers()))
    assert not any(parameter.requires_grad for parameter in view.parameters())
    assert torch.equal(view(ids).logits, wanted.logits)
    assert_same(seen.loss, wanted.loss)
    for field in ("logits", *(name.removeprefix("output_") for name in recorded(child))):
        assert_same(seen[field], wanted[field])
    assert len(seen.hidden_states) == child.config.num_hidden_layers + 1


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_hard_mask_equals_the_child(case: str, cut: str) -> None:
    elastic, child = elastic_and_child(case, cut)
    widths, layers = CASES[case].cuts()[cut]
    with torch.no_grad(), elastic.masked(hard_masks(elastic.layout, Submodel(widths=widths, layers=layers))):
        seen = elastic(batch()).logits
    wanted = child(batch()).logits
    assert relative(seen, wanted) < 1e-5
    assert relative(elastic(batch()).logits, wanted) > 1e-2, "the cut changes what the model computes"


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_exported_folder_is_the_child(case: str, cut: str, folder: Path, tmp_path: Path) -> None:
    """Case 17: slice, load with transformers, logits equal; the counts are those of the tensors, the names those of a save."""
    parent = loaded(saved(case, folder))
    widths, layers = CASES[case].cuts()[cut]
    child = CASES[case].child(parent, (widths, layers))
    report = slice_checkpoint(saved(case, folder), tmp_path / "out", Submodel(widths=widths, layers=layers))
    exported = loaded(tmp_path / "out")
    assert_same_state(exported, child)
    assert torch.equal(exported(batch()).logits, child(batch()).logits)
    child.save_pretrained(tmp_path / "saved")
    assert disk_shapes(tmp_path / "out") == disk_shapes(tmp_path / "saved")
    total = sum(parameter.numel() for parameter in child.parameters())
    unused = sum(
        parameter[exported.config.num_experts_per_tok :].numel()
        for name, parameter in child.named_parameters()
        if ".experts." in name
    )
    assert (report.params, report.active_params) == (total, total - unused)
    assert exported.config.head_dim == parent.config.head_dim


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_gradients_land_where_the_child_has_them_and_nowhere_else(case: str, cut: str) -> None:
    elastic, child = elastic_and_child(case, cut)
    ids = batch()
    elastic(ids, labels=ids, submodel="small", use_cache=False).loss.backward()
    child(ids, labels=ids, use_cache=False).loss.backward()
    wanted = dict(child.named_parameters())
    index = CASES[case].index(elastic.model, CASES[case].cuts()[cut])
    of_parent = {old: (name, where) for name, (old, where) in index.items()}
    for old, parameter in elastic.model.named_parameters():
        if old not in of_parent:
            assert parameter.grad is None, f"{old} belongs to a dropped layer"
            continue
        name, where = of_parent[old]
        inside = torch.zeros_like(parameter, dtype=torch.bool)
        kept = [torch.arange(n) if at is None else at for at, n in zip(where, parameter.shape, strict=True)]
        inside[torch.meshgrid(*kept, indexing="ij")] = True
        assert wanted[name].grad.abs().max() > 0
        torch.testing.assert_close(take(parameter.grad, where), wanted[name].grad, rtol=1e-5, atol=2e-6)
        assert parameter.grad[~inside].abs().sum() == 0


@pytest.mark.parametrize(("case", "cut"), TOGETHER)
def test_every_way_to_generate_gives_the_childs_tokens(case: str, cut: str) -> None:
    elastic, child = elastic_and_child(case, cut)
    widths, layers = CASES[case].cuts()[cut]
    ids, options = batch(12), {"max_new_tokens": 8, "do_sample": False}
    wanted = child.generate(ids, **options)
    assert torch.equal(elastic.submodel("small").generate(ids, **options), wanted)
    assert torch.equal(elastic.generate(ids, submodel="small", **options), wanted)
    if layers is None:  # the cache of the parent's own generate has the parent's layers
        with elastic.at("small"):
            assert torch.equal(elastic.model.generate(ids, **options), wanted)
        with elastic.masked(hard_masks(elastic.layout, Submodel(widths=widths))):
            assert torch.equal(elastic.generate(ids, **options), wanted)


@pytest.mark.parametrize(("case", "cut"), TOGETHER)
def test_features_and_head_give_the_models_logits(case: str, cut: str) -> None:
    elastic, child = elastic_and_child(case, cut)
    with torch.no_grad():
        for name, model in (("small", child), ("full", CASES[case].parent())):
            logits = elastic.features(batch(), submodel=name) @ elastic.head_weight(name).T
            torch.testing.assert_close(logits, model(batch()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_masks_of_ones_leave_the_model_bit_for_bit(case: str) -> None:
    """In fp32, in bf16 and under autocast, where the logits of routers stay fp32."""
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        parent = CASES[case].parent().to(dtype)
        elastic = ElasticModel(parent)
        ones = {name: torch.ones(axis.size) for name, axis in elastic.layout.axes.items()}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wanted = parent(batch(), **recorded(parent))
            with elastic.masked(ones):
                seen = elastic(batch(), **recorded(parent))
        for field in ("logits", *(name.removeprefix("output_") for name in recorded(parent))):
            assert len(seen[field]) > 0
            assert_same(seen[field], wanted[field])
        if autocast:
            assert all(logits.dtype == torch.float32 for logits in seen.get("router_logits") or ())


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_views_equal_the_exported_folder_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Loaded as users load: transformers keeps rotary frequencies in fp32. Rows are multiples of 8 numbers."""
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(tmp_path / "parent")
    elastic = ElasticModel.from_pretrained(tmp_path / "parent")
    wanted = {"hidden": 48, "heads": 4, "ffn": 24, "experts": 5, "expert_ffn": 24, "shared_ffn": 24, "mamba_heads": 6}
    widths = {axis: width for axis, width in wanted.items() if axis in elastic.layout.axes}
    elastic.add("small", Submodel(widths=widths))
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths=widths))
    exported = loaded(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    assert torch.equal(elastic.submodel("small")(batch()).logits, exported(batch()).logits)
    assert torch.equal(elastic(batch(), submodel="small").logits, exported(batch()).logits)


@pytest.mark.parametrize("case", CASES)
def test_deep_copies_are_independent(case: str) -> None:
    elastic, child = elastic_and_child(case, "all")
    twin = copy.deepcopy(elastic)
    with torch.no_grad():
        for parameter in elastic.model.parameters():
            parameter.zero_()
    assert torch.equal(twin(batch(), submodel="small").logits, child(batch()).logits)
    assert len(list(twin.parameters())) == len(list(elastic.parameters()))


@pytest.mark.parametrize("case", CASES)
def test_a_view_saves_as_an_ordinary_folder(case: str, tmp_path: Path) -> None:
    elastic, child = elastic_and_child(case, "all")
    elastic.submodel("small").save_pretrained(tmp_path / "view")
    child.save_pretrained(tmp_path / "child")
    assert disk_shapes(tmp_path / "view") == disk_shapes(tmp_path / "child")
    assert torch.equal(loaded(tmp_path / "view")(batch()).logits, child(batch()).logits)


def shuffled(size: int, groups: int, rng: np.random.Generator) -> list[int]:
    """A random order that stays inside groups."""
    per_group = size // groups
    return [int(group * per_group + i) for group in range(groups) for i in rng.permutation(per_group)]


def random_orders(case: str, parent: PreTrainedModel, axes: list[str]) -> dict[str, list[int]]:
    """One order per axis and layer; ``hidden`` has one for the model."""
    rng, config = np.random.default_rng(0), parent.config
    sizes = {axis: getattr(config, FIELDS[CASES[case].family][axis]) for axis in axes}
    groups = CASES[case].groups(parent)
    keys = {"hidden": "hidden"} if "hidden" in axes else {}
    keys |= {f"layers.{n}.{axis}": axis for axis in axes if axis != "hidden" for n in layers_with(parent, axis)}
    return {key: shuffled(sizes[axis], groups.get(axis, 1), rng) for key, axis in keys.items()}


SORTS = [
    (name, axes)
    for name, case in CASES.items()
    if case.family != "nemotron_h"  # sorted by hand in test_sort.py
    for axes in [*([axis] for axis in case.axes()), case.axes()]
]


@pytest.mark.parametrize(
    ("case", "axes"), SORTS, ids=lambda value: "+".join(value) if isinstance(value, list) else value
)
def test_sorting_keeps_the_function_and_permutes_every_tensor(
    case: str, axes: list[str], folder: Path, tmp_path: Path
) -> None:
    before = loaded(saved(case, folder))
    orders = random_orders(case, before, axes)
    elastic = sort_folder(saved(case, folder), tmp_path / "out", orders)
    after = loaded(tmp_path / "out")
    assert relative(after(batch()).logits, before(batch()).logits) < 1e-5
    assert disk_shapes(tmp_path / "out") == disk_shapes(saved(case, folder))
    moved = 0
    for name, tensor in before.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else None
        members = {
            axis: torch.tensor(orders[key])
            for axis in axes
            for key in ("hidden", f"layers.{layer}.{axis}")
            if key in orders and key.endswith(axis)
        }
        index = HandIndex(before.config, FIELDS[CASES[case].family], members).of(
            name.partition(f"layers.{layer}.")[2] or name
        )
        assert torch.equal(after.state_dict()[name], take(tensor, index)), name
        moved += not torch.equal(after.state_dict()[name], tensor)
    assert moved > 0
    assert set(elastic.sorted_axes) == set(axes)
