"""A head that is tied to the embedding: one tensor, counted once, masked once, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, tokens
from transformers import AutoModelForCausalLM

from star_elastic import cost
from star_elastic.checkpoint import Checkpoint
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel


def twins() -> tuple[ElasticModel, ElasticModel]:
    """A tied model, and an untied one of the same values."""
    tied, untied = tiny_llama(), tiny_llama(tie_word_embeddings=False)
    untied.load_state_dict(tied.state_dict())
    return ElasticModel(tied), ElasticModel(untied)


def test_counted_once() -> None:
    tied, untied = twins()
    head = 128 * 64
    assert cost.params(untied.layout, {}) - cost.params(tied.layout, {}) == head
    assert cost.weight_bytes(untied.layout, {}) - cost.weight_bytes(tied.layout, {}) == 2 * head
    assert tied.layout.fingerprint != untied.layout.fingerprint


def test_a_soft_mask_enters_once_as_it_does_untied() -> None:
    tied, untied = twins()
    mask = {"hidden": torch.linspace(1, 0.2, 64)}
    with torch.no_grad(), tied.masked(mask), untied.masked(mask):
        assert torch.equal(tied(tokens()).logits, untied(tokens()).logits)


def test_the_gradient_is_the_sum_of_both_uses() -> None:
    tied, untied = twins()
    for elastic in (tied, untied):
        elastic.add("small", Submodel(widths={"hidden": 48}))
        elastic(tokens(), labels=tokens(), submodel="small").loss.backward()
    both = untied.model.lm_head.weight.grad + untied.model.model.embed_tokens.weight.grad
    torch.testing.assert_close(tied.model.lm_head.weight.grad, both)


def test_a_view_stays_tied_and_copies_nothing() -> None:
    tied, _ = twins()
    tied.add("small", Submodel(widths={"hidden": 48, "ffn": 20}))
    view = tied.submodel("small")
    assert view.lm_head.weight is view.model.embed_tokens.weight
    assert tied.copied_bytes("small") == 0
    assert sum(p.numel() for p in view.parameters()) == cost.params(tied.layout, {"hidden": 48, "ffn": 20})
    with torch.no_grad():
        tied.model.lm_head.weight.mul_(2)
    again = tied.submodel("small")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, tied.model.lm_head.weight[:, :48])


def test_exported_once_also_where_the_source_holds_it_twice(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "once", Submodel(widths={"hidden": 48}))
    assert "lm_head.weight" not in Checkpoint.open(tmp_path / "once").tensors
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_are_not_tied_as_the_config_says_are_refused() -> None:
    model = tiny_llama()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight, but .* two different"):
        ElasticModel(model)


def test_a_tied_config_knows_its_alias() -> None:
    head = layout_of(tiny_llama().config.to_dict()).units[-1].rows[0]
    assert head.alias == "model.embed_tokens.weight"
    assert layout_of(tiny_llama(tie_word_embeddings=False).config.to_dict()).units[-1].rows[0].alias is None
