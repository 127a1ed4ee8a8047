"""Sorting: the same function, every tensor a permutation of the parent's by hand-written indexing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import rearranged
from safetensors.torch import save_file
from tiny import tiny_folder, tiny_model, tokens
from transformers import AutoModelForCausalLM, NemotronHForCausalLM

from star_elastic.errors import CheckpointError, ElasticError, TargetError, UnknownNameError
from star_elastic.orders import best_first
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder, sort_parent
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic, read_config

PATTERN = "ME*-EM"
AXES = ("hidden", "heads", "mamba_heads", "mamba_head_dim", "experts", "expert_ffn", "shared_ffn", "ffn")
KINDS = {
    "heads": "*",
    "mamba_heads": "M",
    "mamba_head_dim": "M",
    "experts": "E",
    "expert_ffn": "E",
    "shared_ffn": "E",
    "ffn": "-",
}
SIZES = {
    "hidden": 64,
    "heads": 8,
    "mamba_heads": 8,
    "mamba_head_dim": 8,
    "experts": 8,
    "expert_ffn": 32,
    "shared_ffn": 48,
    "ffn": 48,
}
GROUPS = {"heads": 2, "mamba_heads": 2}


def shuffled(axis: str, rng: np.random.Generator) -> list[int]:
    """A random order that stays inside groups, written without the package."""
    size, groups = SIZES[axis], GROUPS.get(axis, 1)
    return [int(group * size // groups + i) for group in range(groups) for i in rng.permutation(size // groups)]


def random_orders(axes: tuple[str, ...], seed: int = 0) -> dict[str, list[int]]:
    """One order per axis and layer; ``hidden`` has one for the model."""
    rng = np.random.default_rng(seed)
    orders = {"hidden": shuffled("hidden", rng)} if "hidden" in axes else {}
    for axis in axes:
        if axis != "hidden":
            layers = [number for number, letter in enumerate(PATTERN) if letter == KINDS[axis]]
            orders |= {f"layers.{layer}.{axis}": shuffled(axis, rng) for layer in layers}
    return orders


def of_layer(orders: Mapping[str, list[int]], layer: int) -> dict[str, list[int]]:
    own = {key.rsplit(".", 1)[1]: order for key, order in orders.items() if key.startswith(f"layers.{layer}.")}
    return {**own, **({"hidden": orders["hidden"]} if "hidden" in orders else {})}


def load(folder: Path) -> NemotronHForCausalLM:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def check_same_function(one: NemotronHForCausalLM, other: NemotronHForCausalLM) -> None:
    with torch.no_grad():
        a, b = one(tokens()).logits, other(tokens()).logits
    assert float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("sort") / "parent", pattern=PATTERN)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("sort") / "sharded", sharded=True, pattern=PATTERN)


@pytest.mark.parametrize("axes", [*((axis,) for axis in AXES), AXES], ids="+".join)
def test_same_logits_and_permuted_tensors(parent: Path, tmp_path: Path, axes: tuple[str, ...]) -> None:
    orders = random_orders(axes)
    elastic = sort_folder(parent, tmp_path / "out", orders)
    before, after = load(parent), load(tmp_path / "out")
    check_same_function(before, after)
    by_hand = rearranged(before, lambda layer: of_layer(orders, layer))
    state = after.state_dict()
    assert by_hand.keys() == state.keys()
    assert [name for name in state if not torch.equal(state[name], by_hand[name])] == []
    assert any(not torch.equal(state[name], before.state_dict()[name]) for name in state)
    assert elastic.sorted_axes == axes


def test_sharded_in_and_out(sharded: Path, tmp_path: Path) -> None:
    orders = random_orders(AXES, seed=1)
    sort_folder(sharded, tmp_path / "out", orders, max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    before, after = load(sharded), load(tmp_path / "out")
    check_same_function(before, after)
    by_hand = rearranged(before, lambda layer: of_layer(orders, layer))
    assert all(torch.equal(tensor, by_hand[name]) for name, tensor in after.state_dict().items())


@pytest.mark.parametrize("scheme", ["on disk", "in memory"])
def test_each_expert_may_have_an_order_of_its_own(tmp_path: Path, scheme: str) -> None:
    folder = tiny_folder(tmp_path / "parent", pattern=PATTERN)
    if scheme == "in memory":
        save_file(load(folder).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(3)
    orders = {"layers.1.experts": shuffled("experts", rng), "layers.1.expert_ffn": shuffled("expert_ffn", rng)}
    own = {expert: shuffled("expert_ffn", rng) for expert in (0, 2, 5)}
    orders |= {f"layers.1.experts.{expert}.expert_ffn": order for expert, order in own.items()}
    elastic = sort_folder(folder, tmp_path / "out", orders)
    before, after = load(folder), load(tmp_path / "out")
    check_same_function(before, after)
    old, new = (model.model.layers[1].mixer.experts for model in (before, after))
    for place, expert in enumerate(orders["layers.1.experts"]):
        order = own.get(expert, orders["layers.1.expert_ffn"])  # the most specific order wins
        assert torch.equal(new.up_proj[place], old.up_proj[expert][order])
        assert torch.equal(new.down_proj[place], old.down_proj[expert][:, order])
    assert elastic.sorted_axes == ()  # the other MoE layer has no order
    everywhere = {f"layers.{layer}.experts.{e}.expert_ffn": list(range(32)) for layer in (1, 4) for e in range(8)}
    assert sort_folder(folder, tmp_path / "all", everywhere).sorted_axes == ("expert_ffn",)


def test_the_best_members_come_first(parent: Path, tmp_path: Path) -> None:
    scores = {"hidden": torch.arange(64.0), "layers.2.heads": torch.tensor([1.0, 4, 2, 3, 9, 9, 8, 10])}
    save_file(scores, tmp_path / "scores.safetensors")
    sort_parent(parent, tmp_path / "out", tmp_path / "scores.safetensors")
    before, after = load(parent), load(tmp_path / "out")
    check_same_function(before, after)
    reverse = list(reversed(range(64)))
    assert torch.equal(after.lm_head.weight, before.lm_head.weight[:, reverse])
    q = before.model.layers[2].mixer.q_proj.weight.view(8, 8, 64)[[1, 3, 2, 0, 7, 4, 5, 6]][:, :, reverse]
    assert torch.equal(after.model.layers[2].mixer.q_proj.weight, q.reshape(64, 64))


def test_equal_scores_keep_their_order(parent: Path) -> None:
    axes = open_elastic(parent)[1].axes
    assert best_first(np.array([0, 1, 1, 0, 5, 5, 5, 6], np.float32), axes["heads"]) == [1, 2, 0, 3, 7, 4, 5, 6]
    thirds = [*range(2, 64, 3), *range(1, 64, 3), *range(0, 64, 3)]
    assert best_first(np.arange(64, dtype=np.float32) % 3, axes["hidden"]) == thirds


def test_a_slice_of_the_sorted_parent_keeps_the_best(parent: Path, tmp_path: Path) -> None:
    scores = {f"layers.{layer}.expert_ffn": torch.rand(32) for layer in (1, 4)} | {"hidden": torch.rand(64)}
    (tmp_path / "scores").mkdir()
    save_file(scores, tmp_path / "scores" / "scores.safetensors")
    sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")
    slice_checkpoint(tmp_path / "sorted", tmp_path / "small", Submodel(widths={"hidden": 16, "expert_ffn": 8}))
    best = scores["hidden"].argsort(descending=True)[:16]
    assert torch.equal(load(tmp_path / "small").lm_head.weight, load(parent).lm_head.weight[:, best])


def test_what_elastic_json_records(parent: Path, tmp_path: Path) -> None:
    save_file({"hidden": torch.rand(64), "layers.1.expert_ffn": torch.rand(32)}, tmp_path / "scores.safetensors")
    returned = sort_parent(parent, tmp_path / "out", tmp_path / "scores.safetensors")
    elastic = ElasticConfig.load(tmp_path / "out")
    assert elastic == returned
    assert elastic.sorted_axes == ("hidden",)
    assert elastic.get("full").widths == SIZES
    assert elastic.provenance["parent"] == "parent"
    scores_hash = hashlib.sha256((tmp_path / "scores.safetensors").read_bytes()).hexdigest()
    assert elastic.provenance["scores_sha256"] == scores_hash
    elastic.check(open_elastic(tmp_path / "out")[1])
    assert "Sorted: hidden." in (tmp_path / "out" / "README.md").read_text()


def test_submodels_of_the_parent_stay_listed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", pattern=PATTERN)
    ElasticConfig(family="nemotron_h", submodels={"small": Submodel(widths={"hidden": 16})}).save(folder)
    elastic = sort_folder(folder, tmp_path / "out", random_orders(("hidden",)))
    assert sorted(elastic.submodels) == ["full", "small"]


def test_sizes_of_a_recognised_preset_are_listed(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from star_elastic import presets

    preset = presets.Preset("tiny", read_config(parent), {"big": {}, "half": {"hidden": 32}})
    monkeypatch.setitem(presets.PRESETS, "tiny", preset)
    elastic = sort_folder(parent, tmp_path / "out", random_orders(("hidden",)))
    assert elastic.get("half").widths["hidden"] == 32
    assert elastic.provenance["preset"] == "tiny"


def test_sorting_back_restores_the_parent_bit_for_bit(parent: Path, tmp_path: Path) -> None:
    orders = random_orders(AXES, seed=5)
    sort_folder(parent, tmp_path / "there", orders)
    back = {key: [int(place) for place in np.argsort(order)] for key, order in orders.items()}
    sort_folder(tmp_path / "there", tmp_path / "back", back)
    before, after = load(parent).state_dict(), load(tmp_path / "back").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ({"hiden": torch.rand(64)}, UnknownNameError, "no axis of this model is called 'hiden': did you mean 'hidden'"),
        ({"layers.0.expert_ffn": torch.rand(32)}, UnknownNameError, "called 'layers.0.expert_ffn'"),
        ({"layers.1.experts.8.expert_ffn": torch.rand(32)}, UnknownNameError, "experts.8.expert_ffn"),
        ({"depth": torch.rand(7)}, CheckpointError, r"depth has shape \[7\]; this model has 6 depth"),
        (
            {"depth_order": torch.tensor([0, 1, 2, 3, 4, 4])},
            CheckpointError,
            "depth_order is no permutation of the layers 0 to 5",
        ),
        (
            {"depth_order": torch.tensor([0, 1, 2, 3, 4, 5])},
            CheckpointError,
            "lose every full_attention layer, of which one must stay: give a depth_order that begins with one, such as 2",
        ),
        (
            {"depth": torch.tensor([6.0, 5, 4, 3, 2, 1])},
            CheckpointError,
            "lose every full_attention layer, of which one must stay: give a depth_order",
        ),
        ({"hidden": torch.rand(63)}, CheckpointError, r"hidden has shape \[63\]; this model has 64 hidden"),
        ({"hidden": torch.rand(64, 1)}, CheckpointError, r"hidden has shape \[64, 1\]"),
        (
            {"hidden": torch.full((64,), float("nan"))},
            CheckpointError,
            "hidden has 64 scores that are no finite number",
        ),
        ({"layers.1.expert_ffn": torch.tensor([float("inf")] + [1.0] * 31)}, CheckpointError, "has 1 scores"),
    ],
)
def test_scores_that_do_not_fit(
    parent: Path, tmp_path: Path, scores: dict[str, torch.Tensor], error: type[ElasticError], message: str
) -> None:
    save_file(scores, tmp_path / "scores.safetensors")
    with pytest.raises(error, match=message) as caught:
        sort_parent(parent, tmp_path / "out", tmp_path / "scores.safetensors")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["scores.safetensors"]


def test_scores_of_another_model_and_missing_scores(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scores.safetensors does not exist"):
        sort_parent(parent, tmp_path / "out", tmp_path)
    (tmp_path / "scores.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"scores.safetensors cannot be read as scores"):
        sort_parent(parent, tmp_path / "out", tmp_path)
    save_file({"hidden": torch.rand(64)}, tmp_path / "scores.safetensors")
    (tmp_path / "scores.json").write_text(json.dumps({"parent_fingerprint": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"scores.json is of another model"):
        sort_parent(parent, tmp_path / "out", tmp_path)
    (tmp_path / "scores.json").write_text(json.dumps({"parent_fingerprint": open_elastic(parent)[1].fingerprint}))
    sort_parent(parent, tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({"hidden": [0] * 64}, "order of hidden is no permutation of the numbers 0 to 63"),
        ({"layers.2.heads": [4, 1, 2, 3, 0, 5, 6, 7]}, "order of layers.2.heads moves member 4 out of its group"),
        (
            {"layers.0.mamba_heads": [4, 5, 6, 7, 0, 1, 2, 3]},
            "moves member 4 out of its group: members of its 2 groups",
        ),
    ],
)
def test_orders_that_would_change_the_function(
    parent: Path, tmp_path: Path, orders: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        sort_folder(parent, tmp_path / "out", orders)
    assert list(tmp_path.iterdir()) == []


def test_a_trained_family_is_not_taken_apart(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", pattern=PATTERN)
    ElasticConfig(family="nemotron_h", provenance={"training": {"steps": 3}}).save(folder)
    with pytest.raises(CheckpointError, match="is trained for its nested sizes"):
        sort_folder(folder, tmp_path / "out", random_orders(("hidden",)))
    assert [path.name for path in tmp_path.iterdir()] == ["parent"]


def test_the_parent_is_never_the_target(parent: Path, tmp_path: Path) -> None:
    save_file({"hidden": torch.rand(64)}, tmp_path / "scores.safetensors")
    with pytest.raises(TargetError, match="is the source itself"):
        sort_parent(parent, parent, tmp_path / "scores.safetensors")


def test_bfloat16(tmp_path: Path) -> None:
    tiny_model(pattern=PATTERN).to(torch.bfloat16).save_pretrained(tmp_path / "parent")
    orders = random_orders(AXES)
    sort_folder(tmp_path / "parent", tmp_path / "out", orders)
    before, after = load(tmp_path / "parent"), load(tmp_path / "out")
    by_hand = rearranged(before, lambda layer: of_layer(orders, layer))
    assert all(torch.equal(tensor, by_hand[name]) for name, tensor in after.state_dict().items())
    check_same_function(before.float(), after.float())
