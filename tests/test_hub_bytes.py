"""What a slice of the published model fetches from the hub: the numbers in the docs are those that a dry run prints.

A server on this machine gives what the hub gives: configs, and the headers of weight files in the published shapes, behind which
there is nothing (``full_shape``). A dry run asks for no more.
"""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_shape import all_tensors, sparse_folder
from hub_server import HubServer, use
from test_full_shape import needs_holes

from star_elastic.checkpoint import onepass
from star_elastic.cli import main
from star_elastic.presets import NEMOTRON_3_NANO
from star_elastic.remote import mirror
from star_elastic.units import format_bytes

DOCS = Path(__file__).parents[1] / "docs" / "how-to" / "slice-from-the-hub.md"
SHARD_BYTES = 5 * 10**9
FORMS = ("bf16", "fp8", "nvfp4")


@pytest.fixture(scope="module", params=FORMS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    home = tmp_path_factory.mktemp("hub")
    needs_holes(home)
    tensors = list(all_tensors(NEMOTRON_3_NANO.config["hybrid_override_pattern"], 128, 131072, request.param))
    folder = sparse_folder(home / "published", tensors, request.param, SHARD_BYTES)
    with HubServer(folder, name=NEMOTRON_3_NANO.hub[request.param]) as server:
        yield server


def told(form: str) -> dict[tuple[str, ...], tuple[str, str]]:
    """From the table in the docs: sizes -> bytes fetched, bytes in all."""
    rows = re.findall(rf"^\| {form.upper()} \| (.+?) \| ([\d.]+ GiB) \| ([\d.]+ GiB) \|", DOCS.read_text(), re.MULTILINE)
    return {tuple(re.findall(r"\d+b", sizes)): (some, whole) for sizes, some, whole in rows}


@pytest.mark.slow
def test_the_docs_say_what_a_dry_run_fetches(
    published: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(published, monkeypatch)
    monkeypatch.setattr(onepass, "GAP_BYTES", 2**20)
    monkeypatch.setattr(onepass, "UNIT_BYTES", 2**24)
    monkeypatch.setattr(mirror, "HEADER_GUESS", 2**18)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(0, 0, 2**50))
    form = published.name.rpartition("-")[2].lower()
    known = told(form)
    assert len(known) == 2
    for sizes, numbers in known.items():
        published.fetched.clear()
        words = [word for size in sizes for word in ("--to", size)]
        assert main(["slice", published.name, str(tmp_path / "out"), *words, "--dry-run"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("to fetch: "))
        assert re.match(r"to fetch: (.+) of (.+) \(", line).groups() == numbers  # type: ignore[union-attr]
        weights = sum(path.stat().st_size for path in published.folder.glob("*.safetensors"))
        assert numbers[1] == format_bytes(weights)
        # Asked for: small files and headers, nothing behind them.
        assert sum(got.stop - got.start for got in published.fetched) < 2**26
