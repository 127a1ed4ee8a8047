"""Importance of channels against a slow computation: plain loops over samples, tokens and experts, in fp64."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from scoring import assert_close, padded, random_rows, score
from slow_scores import slow_scores, slow_weighted
from tiny import FAMILIES, tiny_model, tokens

from star_elastic.errors import CheckpointError, DataError
from star_elastic.families import layout_of
from star_elastic.layout import Layout


@pytest.mark.parametrize("pattern", ["ME*ME", "M*E-"])
@pytest.mark.parametrize("edits", [{}, {"moe_latent_size": 24}, {"n_group": 2, "topk_group": 1}])
def test_equals_the_slow_computation(pattern: str, edits: dict[str, Any]) -> None:
    model = tiny_model(3, pattern, **edits)
    rows = random_rows()
    found = score(model, padded(rows, "right"))
    assert_close(found.tensors, slow_scores(model, rows))
    assert (found.samples, found.tokens) == (5, sum(map(len, rows)))
    assert all(tensor.dtype == torch.float32 for tensor in found.tensors.values())


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_family_equals_the_slow_computation(family: str, side: str) -> None:
    model = FAMILIES[family](5)
    rows = random_rows()
    layout = layout_of(model.config.to_dict())
    found = score(model, padded(rows, side, batch_size=3), per_expert="experts" in layout.axes)
    assert_close(found.tensors, slow_scores(model, rows, per_expert=True))
    assert {key.rsplit(".", 1)[-1] for key in found.tensors} == set(layout.width_axes)


def test_gates_of_qwen3_moe_are_renormalised_where_the_model_does() -> None:
    rows = random_rows()
    model = FAMILIES["qwen3_moe"](5, norm_topk_prob=True)
    assert_close(score(model, padded(rows, "right")).tensors, slow_scores(model, rows))


def test_keys_name_axis_and_layer() -> None:
    found = score(tiny_model(0, "M*E-"), [{"input_ids": tokens()}])
    assert {key: len(tensor) for key, tensor in found.tensors.items()} == {
        "hidden": 64,
        "layers.0.mamba_heads": 8,
        "layers.0.mamba_head_dim": 8,
        "layers.1.heads": 8,
        "layers.2.experts": 8,
        "layers.2.expert_ffn": 32,
        "layers.2.shared_ffn": 48,
        "layers.3.ffn": 48,
    }


def test_left_and_right_padding_and_batch_size_give_the_same_scores() -> None:
    model = tiny_model(1)
    rows = random_rows()
    right = score(model, padded(rows, "right"))
    left = score(model, padded(rows, "left"))
    alone = score(model, padded(rows, "right", batch_size=1))
    assert_close(left.tensors, right.tensors, rtol=1e-5)
    assert_close(alone.tensors, right.tensors, rtol=1e-5)
    assert left.idle_experts == right.idle_experts == alone.idle_experts
    assert left.tokens == right.tokens == alone.tokens


def test_an_all_padding_row_is_no_sample() -> None:
    model = tiny_model(1)
    rows = random_rows((12, 20))
    batches = padded(rows, "right")
    empty = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in batches[0].items()}
    found = score(model, [empty])
    assert found.samples == 2
    assert_close(found.tensors, score(model, batches).tensors, rtol=1e-5)


@pytest.mark.parametrize(
    "batches", [[], [{"input_ids": tokens(), "attention_mask": torch.zeros(2, 24, dtype=torch.int64)}]]
)
def test_no_real_token_is_refused(batches: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(DataError, match=r"no real token, so model\.layers\.0 to model\.layers\.4 cannot be scored"):
        score(tiny_model(), batches)


def test_dropout_of_a_model_in_training_mode_does_not_blur_the_scores() -> None:
    model = tiny_model(2, attention_dropout=0.5)
    wanted = score(model, [{"input_ids": tokens()}]).tensors
    found = score(model.train(), [{"input_ids": tokens()}]).tensors
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_model_is_left_as_it_was() -> None:
    model = tiny_model(2).train()
    before = model(tokens()).logits
    hooks = {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for name, m in model.named_modules()
    }
    score(model, [{"input_ids": tokens()}])
    assert model.training
    assert hooks == {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for name, m in model.named_modules()
    }
    assert torch.equal(model(tokens()).logits, before)


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = tiny_model(2)
    with torch.no_grad():
        model.model.layers[2].norm.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError):
        score(model, [{"input_ids": tokens()}])
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_experts_that_no_token_reached_are_told() -> None:
    model = tiny_model(4)
    gate = model.model.layers[1].mixer.gate
    gate.e_score_correction_bias[:] = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    found = score(model, [{"input_ids": tokens()}])
    assert found.idle_experts[1] == [2, 3, 4, 5, 6, 7]
    assert (found.tensors["layers.1.expert_ffn"] > 0).any()


def test_expert_reached_by_padding_only_counts_as_idle() -> None:
    model = tiny_model(4)
    ids = tokens(1, 12)
    seen: list[torch.Tensor] = []
    gate = model.model.layers[1].mixer.gate
    with torch.no_grad():
        gate.register_forward_hook(lambda m, i, o: seen.append(o[2]))
        model(ids)
    mask = torch.ones_like(ids)
    mask[0, 1:] = 0  # causal: the first token's route does not depend on what follows
    found = score(model, [{"input_ids": ids, "attention_mask": mask}])
    assert found.idle_experts[1] == sorted(set(range(8)) - set(seen[0][0].tolist()))


@pytest.mark.parametrize(
    ("parameter", "place"),
    [
        ("model.layers.1.norm.weight", r"model\.layers\.1\.norm"),
        ("model.layers.1.mixer.experts.up_proj", r"model\.layers\.1\.mixer\.experts"),
        ("model.layers.3.mixer.out_proj.weight", r"model\.layers\.3"),
        ("model.layers.4.mixer.experts.down_proj", r"model\.layers\.4\.mixer\.experts"),
        ("model.norm_f.weight", r"model\.norm_f"),
        ("model.layers.4.mixer.shared_experts.up_proj.weight", r"model\.layers\.4\.mixer\.shared_experts\.down_proj"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_names_the_first_bad_module(parameter: str, place: str, value: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(parameter).fill_(value)
    with pytest.raises(CheckpointError, match=f"activations of {place} hold NaN or infinity"):
        score(model, [{"input_ids": tokens()}])


def test_nan_on_padding_does_no_harm() -> None:
    model = tiny_model(1, "EE")  # no attention: zero attention to a value of NaN is NaN, on real tokens too
    with torch.no_grad():
        model.model.embeddings.weight[127] = float("nan")
    rows = [[min(token, 126) for token in row] for row in random_rows((9, 14))]
    clean = score(tiny_model(1, "EE"), padded(rows, "right")).tensors
    assert_close(score(model, padded(rows, "right", junk=127)).tensors, clean, rtol=1e-6)


AS_PUBLISHED = dict.fromkeys(("heads", "mamba_heads", "mamba_head_dim"), "activation")
WEIGHTED = {"mamba_heads": "output", "mamba_head_dim": "output", "depth": "none"}


def weighted(layout: Layout) -> dict[str, str]:
    """Every axis of channels by what it hears times what reads it."""
    return {axis: WEIGHTED.get(axis, "weighted") for axis in layout.axes if axis != "experts"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("side", ["left", "right"])
def test_channels_times_the_weights_that_read_them(family: str, side: str) -> None:
    model = FAMILIES[family](5)
    rows = random_rows()
    layout = layout_of(model.config.to_dict())
    found = score(model, padded(rows, side), per_expert="experts" in layout.axes, methods=weighted(layout)).tensors
    assert_close({key: one for key, one in found.items() if not key.endswith(".experts")}, slow_weighted(model, rows))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_and_mamba_axes_as_published(family: str) -> None:
    model = FAMILIES[family](5)
    rows = random_rows()
    layout = layout_of(model.config.to_dict())
    methods = {"depth": "none"} | {axis: method for axis, method in AS_PUBLISHED.items() if axis in layout.axes}
    assert_close(score(model, padded(rows, "left"), methods=methods).tensors, slow_scores(model, rows, published=True))


@pytest.mark.parametrize(("pattern", "edits"), [("M*E-", {"moe_latent_size": 24}), ("M*M", {})])
@pytest.mark.parametrize("kept", [None, 4])
def test_weighted_channels_in_other_hybrids(pattern: str, edits: dict[str, Any], kept: int | None) -> None:
    model = tiny_model(3, pattern, **edits)
    rows = random_rows()
    methods = weighted(layout_of(model.config.to_dict()))
    found = score(model, padded(rows, "left"), methods=methods, kept={"mamba_head_dim": kept} if kept else {}).tensors
    wanted = {key: one for key, one in slow_weighted(model, rows, kept).items() if ".experts." not in key}
    assert_close({key: one for key, one in found.items() if not key.endswith(".experts")}, wanted)


@pytest.mark.parametrize("kept", [4, 8])
@pytest.mark.parametrize("published", [False, True])
def test_mamba_heads_are_judged_by_the_kept_channels(published: bool, kept: int) -> None:
    model = tiny_model(3, "M*M")
    rows = random_rows()
    methods = {"depth": "none", **(AS_PUBLISHED if published else {})}
    found = score(model, padded(rows, "left"), kept={"mamba_head_dim": kept}, methods=methods).tensors
    assert_close(found, slow_scores(model, rows, kept=kept, published=published))
    by_all = score(model, padded(rows, "left"), methods=methods).tensors
    assert torch.equal(found["layers.0.mamba_heads"], by_all["layers.0.mamba_heads"]) == (kept == 8)


def test_each_expert_has_an_order_of_its_own() -> None:
    model = tiny_model(3)
    rows = random_rows()
    found = score(model, padded(rows, "left"), per_expert=True)
    wanted = slow_scores(model, rows, per_expert=True)
    assert_close(found.tensors, wanted)
    reached = [f"layers.{layer}.experts.{e}.expert_ffn" for layer in (1, 4) for e in range(8)]
    missing = {f"layers.{layer}.experts.{e}.expert_ffn" for layer, idle in found.idle_experts.items() for e in idle}
    assert set(reached) - missing <= found.tensors.keys() and not missing & found.tensors.keys()


def test_the_same_numbers_whatever_the_order_of_batches_within_rounding() -> None:
    model = tiny_model(1)
    batches = padded(random_rows(), "right")
    first, again, back = score(model, batches), score(model, batches), score(model, batches[::-1])
    assert all(torch.equal(first.tensors[key], again.tensors[key]) for key in first.tensors)
    assert_close(back.tensors, first.tensors, rtol=1e-6)


def test_no_kernel_package_is_needed() -> None:
    assert score(tiny_model(), [{"input_ids": tokens()}]).tokens == 48
    assert {"mamba_ssm", "causal_conv1d"}.isdisjoint(sys.modules)
