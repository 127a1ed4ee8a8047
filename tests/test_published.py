"""The published checkpoints by their names on the hub: recognised by config and tensors, planned from headers, nothing written.

The hub is a server on this machine, behind which sparse files lie in the real shapes.
"""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import pytest
from full_shape import CUT, Stored, all_tensors, sparse_folder
from hub_server import HubServer, use
from test_full_shape import needs_holes

from star_elastic.checkpoint import onepass
from star_elastic.cli import main
from star_elastic.remote import mirror

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
STEM = "nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B"
EXTRA = {
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "num_logits_to_keep": 1,
    "residual_in_fp32": False,
    "use_cache": True,
}
"""Fields that published configs have beside those that shapes follow from."""


def needed_bytes(tensors: Sequence[Stored], sizes: Sequence[str]) -> int:
    """By hand: where the first dimension is cut, the rows of the larger size; all rows elsewhere, because columns are in each."""
    total = 0
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        kept = max(CUT[size].get(rows, rows) for size in sizes)
        total += tensor.nbytes // rows * kept
    return total


def dry_run(name: str, folder: Path, out: Path, sizes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Ask a hub that has this folder under this name, for exact ranges; the exit code. No tensor is fetched, nothing written."""
    needs_holes(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(0, 0, 2**50))
    before = sorted(out.parent.iterdir())
    with HubServer(folder, name=name) as server:
        use(server, monkeypatch)
        monkeypatch.setattr(onepass, "UNIT_BYTES", 2**24)
        monkeypatch.setattr(mirror, "HEADER_GUESS", 2**18)
        code = main(["slice", name, str(out), *(word for size in sizes for word in ("--to", size)), "--dry-run"])
        assert sum(f.stop - f.start for f in server.fetched) < 2**24, "more than headers was fetched"
    assert sorted(out.parent.iterdir()) == before
    return code


@pytest.mark.parametrize(("form", "sizes"), [("nvfp4", ["12b", "23b"]), ("fp8", ["12b"]), ("bf16", ["23b"])])
def test_a_dry_run_by_its_name(
    form: str, sizes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = list(all_tensors(PATTERN, 128, 131072, form))
    folder = sparse_folder(tmp_path / "parent", tensors, form, 5 * 10**9, empty=True, **EXTRA)
    assert dry_run(f"{STEM}-{form.upper()}", folder, tmp_path / "out", sizes, monkeypatch) == 0
    said = capsys.readouterr().out
    params = {"12b": "12,426,655,424", "23b": "23,683,654,304"}
    assert all(params[size] in said for size in sizes)
    needed, whole = needed_bytes(tensors, sizes), sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    gib = 2**30
    assert f"to fetch: {needed / gib:.2f} GiB of {whole / gib:.2f} GiB ({needed / whole:.0%})" in said
    assert ("note: quantized" in said) == (form != "bf16")
    assert "not sorted" not in said  # the published channels lie in order of importance


def test_only_its_own_shapes_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name alone tells nothing, and under another name the shapes do."""
    tensors = list(all_tensors(PATTERN, 128, 131072, "bf16"))
    folder = sparse_folder(tmp_path / "parent", tensors, "bf16", 5 * 10**9, empty=True, **EXTRA)
    assert dry_run("org/copy", folder, tmp_path / "out", ["12b"], monkeypatch) == 0
    assert "12,426,655,424" in capsys.readouterr().out
    fewer = list(all_tensors(PATTERN, 120, 131072, "bf16"))
    folder = sparse_folder(tmp_path / "fewer", fewer, "bf16", 5 * 10**9, empty=True, **EXTRA, n_routed_experts=120)
    assert dry_run(f"{STEM}-BF16", folder, tmp_path / "out", ["12b"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "no submodel '12b'" in said and said.count("\n") == 1
