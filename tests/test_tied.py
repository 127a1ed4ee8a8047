"""A head that is tied to the embedding: one tensor, counted once, masked once, exported once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, use
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_llama, tokens
from transformers import AutoModelForCausalLM

from star_elastic import cost
from star_elastic.checkpoint import Checkpoint
from star_elastic.cli import main
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder
from star_elastic.submodel import Submodel
from star_elastic.verify import verify_folder

HEAD = "lm_head.weight"
TYING = [family for family in FAMILIES if family != "nemotron_h"]


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


def twice(once: Path, path: Path, difference: float = 0.0) -> Path:
    """A folder that stores its tied head too, or another head."""
    shutil.copytree(once, path)
    state = load_file(once / "model.safetensors")
    assert HEAD not in state
    head = state["model.embed_tokens.weight"].clone()
    head[-1, -1] += difference
    save_file({**state, HEAD: head}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", TYING)
def test_written_once_where_the_source_stores_it_twice(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, both = tmp_path / "once" / "parent", tmp_path / "both" / "parent"
    FAMILIES[family](tie_word_embeddings=True).save_pretrained(once)
    twice(once, both)
    for folder in (once, both):
        assert main(["slice", str(folder), str(folder.parent / "out"), "--width", "hidden=32"]) == 0
    note = f"note: {HEAD} is stored beside model.embed_tokens.weight, to which config.json ties it"
    assert capsys.readouterr().out.count(note) == 1
    out = tmp_path / "both" / "out"
    assert contents(out) == contents(tmp_path / "once" / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and model.lm_head.weight is model.model.embed_tokens.weight
    assert verify_folder(out, against=both).ok and verify_folder(twice(out, tmp_path / "by hand"), against=both).ok
    orders = {"hidden": list(reversed(range(64)))}
    for folder in (once, both):
        sort_folder(folder, folder.parent / "sorted", orders)
    assert contents(tmp_path / "both" / "sorted") == contents(tmp_path / "once" / "sorted")


@pytest.mark.parametrize("family", TYING)
def test_two_different_tensors_that_the_config_ties_are_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES[family](tie_word_embeddings=True).save_pretrained(tmp_path / "once")
    both = twice(tmp_path / "once", tmp_path / "both", difference=1e-3)
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main(["slice", str(both), str(tmp_path / "out"), "--width", "hidden=32", *more]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err == (
            f"error: {both}: config.json ties {HEAD} to model.embed_tokens.weight, but the weights hold two different "
            f"tensors: set tie_word_embeddings to false to keep both, or remove {HEAD}\n"
        )
    with pytest.raises(CheckpointError, match="two different tensors"):
        sort_folder(both, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    # Both ways out that the message names.
    slice_checkpoint(tmp_path / "once", tmp_path / "removed", Submodel(widths={"hidden": 32}))
    config = json.loads((both / "config.json").read_text())
    (both / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    slice_checkpoint(both, tmp_path / "kept", Submodel(widths={"hidden": 32}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert torch.equal(model.lm_head.weight, load_file(both / "model.safetensors")[HEAD][:, :32])


def test_a_family_that_never_ties_keeps_both(tmp_path: Path) -> None:
    """transformers' NemotronH reads the field and ties nothing."""
    model = FAMILIES["nemotron_h"](tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths={"hidden": 32}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight[:, :32])
    assert torch.equal(loaded.model.embeddings.weight, model.model.embeddings.weight[:, :32])


def test_on_the_hub_a_sample_is_compared_and_the_copy_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 1024, "tie_word_embeddings": True}
    tiny_llama(**sizes).save_pretrained(tmp_path / "once")
    both = twice(tmp_path / "once", tmp_path / "both")
    head = Checkpoint.open(both).tensors[HEAD]
    cut = Submodel(widths={"hidden": 32})
    slice_checkpoint(both, tmp_path / "local", cut)
    with HubServer(both) as server:
        use(server, monkeypatch)
        slice_checkpoint(server.name, tmp_path / "out", cut)
        inside = (max(0, min(f.stop, head.offset + head.nbytes) - max(f.start, head.offset)) for f in server.fetched)
        assert 0 < sum(inside) <= 2**13 < head.nbytes // 10
    assert contents(tmp_path / "out").keys() == contents(tmp_path / "local").keys()
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    with HubServer(twice(tmp_path / "once", tmp_path / "other", difference=1e-3)) as server:
        use(server, monkeypatch)
        with pytest.raises(CheckpointError, match=r"^org/tiny: config.json ties lm_head.weight to model.embed_tokens"):
            slice_checkpoint(server.name, tmp_path / "out2", cut)
    assert not (tmp_path / "out2").exists()


def test_weights_that_are_not_tied_as_the_config_says_are_refused() -> None:
    model = tiny_llama()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight, but .* two different"):
        ElasticModel(model)


def test_a_tied_config_knows_its_alias() -> None:
    head = layout_of(tiny_llama().config.to_dict()).units[-1].rows[0]
    assert head.alias == "model.embed_tokens.weight"
    assert layout_of(tiny_llama(tie_word_embeddings=False).config.to_dict()).units[-1].rows[0].alias is None
