"""The order of layers: iterative removal against real logits of models without them, cosines against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring import padded, random_rows, score
from slow_scores import divergence, logits_without, slow_cosines, slow_removal, squared_error
from tiny import FAMILIES, tiny_model, tokens

from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.score.changes import SquaredLogits
from star_elastic.score.depth import depth_order, first_samples, passes, remove_layers

KL = {"methods": {"depth": "kl"}}
REMOVAL = {"methods": {"depth": "removal"}}
COSINE = {"methods": {"depth": "cosine"}}


def table(model: Any) -> Layout:
    return layout_of(model.config.to_dict())


def held(model: Any) -> set[int]:
    """Attention layers of hybrids: one of them has to stay."""
    kinds = getattr(model.config, "layers_block_type", [])
    return {number for number, kind in enumerate(kinds) if kind == "full_attention"}


@pytest.mark.parametrize(("methods", "by"), [(REMOVAL, squared_error), (KL, divergence)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_removal_equals_real_logits_without_the_layers(family: str, side: str, methods: Any, by: Any) -> None:
    model = FAMILIES[family](2)
    rows = random_rows()
    found = score(model, padded(rows, side), **methods)
    removed, errors = slow_removal(model, rows, held(model), by)
    assert found.depth_order == tuple(removed[::-1])
    by_layer = dict(zip(removed, errors, strict=True))
    wanted = torch.tensor([by_layer[layer] for layer in range(len(removed))])
    assert torch.allclose(found.tensors["depth"], wanted, rtol=2e-4)
    assert found.depth_errors is not None
    kept = {len(removed) - 1 - n: error for n, error in enumerate(errors[:-1])}
    assert found.depth_errors.keys() == kept.keys()
    assert all(found.depth_errors[n] == pytest.approx(kept[n], rel=2e-4) for n in kept)


def test_layers_are_judged_again_after_each_removal() -> None:
    # One ranking of single removals is not the answer on this model, so that a lazy version would show.
    model = tiny_model(2, "MEME*E")
    rows = random_rows()
    removed, _ = slow_removal(model, rows, {4})
    once = {layer: slow_removal_alone(model, rows, layer) for layer in range(6)}
    assert sorted(once, key=lambda layer: once[layer]) != removed
    assert score(model, padded(rows, "right"), **REMOVAL).depth_order == tuple(removed[::-1])


def slow_removal_alone(model: Any, rows: list[list[int]], layer: int) -> float:
    return squared_error(*([logits_without(model, row, gone) for row in rows] for gone in ([layer], [])))


@pytest.mark.parametrize("methods", [REMOVAL, KL, COSINE])
def test_the_first_layers_of_the_order_always_hold_attention(methods: dict[str, Any]) -> None:
    model = tiny_model(0, "M*E*M")
    with torch.no_grad():
        for layer in (1, 3):
            model.model.layers[layer].mixer.o_proj.weight.mul_(1e-6)  # the least important layers by far
    found = score(model, [{"input_ids": tokens()}], **methods)
    assert found.depth_order is not None
    assert found.depth_order[0] in (1, 3) and found.depth_order[-1] in (1, 3)
    for kept in range(1, 6):
        table(model).check({}, tuple(sorted(found.depth_order[:kept])))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_cosines_equal_loops(family: str) -> None:
    model = FAMILIES[family](3)
    rows = random_rows()
    found = score(model, padded(rows, "left"), **COSINE)
    wanted = slow_cosines(model, rows)
    assert torch.allclose(found.tensors["depth"], torch.tensor(wanted), rtol=1e-3)
    assert found.depth_order == tuple(depth_order(dict(enumerate(wanted)), table(model)))
    assert not found.depth_errors


def test_no_depth_when_not_asked() -> None:
    found = score(tiny_model(), [{"input_ids": tokens()}])
    assert found.depth_order is None and "depth" not in found.tensors


def test_squared_logits_equal_the_head_s() -> None:
    model = tiny_model()
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = float((model.lm_head(hidden).double() ** 2).sum())
        assert float(SquaredLogits(model, table(model)).whole(hidden)) == pytest.approx(wanted, rel=1e-5)


def test_divergence_in_blocks_of_tokens_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny_model(2), random_rows()
    wanted = score(model, padded(rows, "right"), **KL).tensors["depth"]
    monkeypatch.setattr("star_elastic.score.changes.LOGITS_AT_ONCE", 3 * 128)
    assert torch.allclose(score(model, padded(rows, "right"), **KL).tensors["depth"], wanted, rtol=1e-6)


def test_removal_reads_the_first_samples_only() -> None:
    model = tiny_model(2)
    rows = random_rows()
    some = score(model, padded(rows, "right"), **REMOVAL, depth_samples=3)
    assert torch.equal(some.tensors["depth"], score(model, padded(rows[:3], "right"), **REMOVAL).tensors["depth"])
    assert not torch.equal(some.tensors["depth"], score(model, padded(rows, "right"), **REMOVAL).tensors["depth"])


def test_rows_of_padding_are_no_samples() -> None:
    ids, mask = tokens(4), torch.tensor([0, 1, 0, 1])[:, None].expand(4, 24)
    [batch] = first_samples([{"input_ids": ids, "attention_mask": mask}], 2, torch.device("cpu"))
    assert torch.equal(batch["input_ids"], ids[[1, 3]])


@pytest.mark.parametrize("pattern", ["M*E*M", "ME*M"])
def test_the_bar_ends_at_its_total(pattern: str) -> None:
    model = tiny_model(0, pattern)
    batches = list(first_samples(padded(random_rows(), "right"), 4, torch.device("cpu")))
    told: list[int] = []
    with torch.inference_mode():
        remove_layers(model, table(model), batches, advance=told.append)
    assert sum(told) == passes(table(model), len(batches))


def test_model_is_left_as_it_was() -> None:
    model = tiny_model(2)
    before = model(tokens()).logits
    score(model, [{"input_ids": tokens()}], **REMOVAL)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(tokens()).logits, before)


def test_a_head_that_is_not_finite_is_told() -> None:
    model = tiny_model(2)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match="logits hold NaN"):
        score(model, [{"input_ids": tokens()}], **REMOVAL)
