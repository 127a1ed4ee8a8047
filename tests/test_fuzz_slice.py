"""Random models of every family, random cuts, shards and dtypes: slice, load with transformers, equal to the view."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from fuzz_models import edits, submodels
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, tokens
from transformers import AutoModelForCausalLM

from star_elastic.elastic import ElasticModel
from star_elastic.slice import slice_checkpoint

FAST = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)
LONG = settings(FAST, max_examples=60, derandomize=False, print_blob=True)
SHARDS = st.sampled_from([10**9, 40_000, 4_000])


def check_cut(data: st.DataObject, family: str) -> None:
    """Draw a parent and a nested model; the exported slice holds the view's numbers bit for bit, and computes what it does.

    Sums may round differently: a matrix library picks its kernel by alignment and by how far rows lie apart.
    """
    fields = data.draw(edits(family))
    dtype = getattr(torch, fields.pop("dtype"))
    with tempfile.TemporaryDirectory() as work:
        source, out = Path(work) / "parent", Path(work) / "out"
        model = FAMILIES[family](data.draw(st.integers(0, 99)), **fields).to(dtype)
        model.save_pretrained(source, max_shard_size=data.draw(SHARDS))
        # Loaded, since ``to`` rounds the rotary frequencies too, which transformers keeps in fp32.
        elastic = ElasticModel.from_pretrained(source)
        submodel = data.draw(submodels(elastic.layout))
        event("whole" if submodel.is_full(elastic.layout) else "cut")
        shards, threads = data.draw(SHARDS), data.draw(st.integers(1, 3))
        report = slice_checkpoint(source, out, submodel, max_shard_bytes=shards, threads=threads)
        child, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        assert child.dtype == dtype and type(child) is type(model)
        assert child.num_parameters() == report.params
        elastic.add("small", submodel)
        view, ids = elastic.submodel("small"), tokens(2, 20, fields["vocab_size"])
        ours, theirs = view.state_dict(), child.state_dict()
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        with torch.no_grad():
            wanted, found = (model.eval().float()(ids).logits for model in (child, view))
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@FAST
@given(data=st.data())
def test_a_few_cuts(data: st.DataObject, family: str) -> None:
    check_cut(data, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@LONG
@given(data=st.data())
def test_many_cuts(data: st.DataObject, family: str) -> None:
    check_cut(data, family)
