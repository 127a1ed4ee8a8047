"""Search from a folder to a command: losses of exported slices, the cache, interruption, refusals before weights are loaded."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from bytes_tokenizer import write_tokenizer
from held_out import TEXT, family_folder, reference_loss
from safetensors.torch import load_file, save_file

import star_elastic.search.meter as meter
from star_elastic.cli import main
from star_elastic.ladder import Budget
from star_elastic.score import score_parent
from star_elastic.search import search_parent
from star_elastic.selection import RequestError
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_parent
from star_elastic.train.data import held_out_batches
from star_elastic.train.documents import load_tokenizer

ROWS: dict[str, Any] = {"tokens": 80, "seq_len": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``llama`` and ``nemotron_h``: sorted parents with ranked layers; ``plain``: an unsorted one; ``text.txt``: data."""
    home = tmp_path_factory.mktemp("search")
    (home / "text.txt").write_text(TEXT)
    for family in ("llama", "nemotron_h"):
        parent = family_folder(home / f"{family}-parent", family)
        score_parent(parent, home / "scores" / family, home / "text.txt", samples=2, seq_len=32, progress=False)
        sort_parent(parent, home / family, home / "scores" / family, progress=False)
    family_folder(home / "plain", "llama")
    return home


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.out == ""
    return said.err


@pytest.mark.parametrize(("family", "kind", "share"), [("llama", "params", 0.7), ("nemotron_h", "memory", 0.6)])
def test_each_loss_is_that_of_the_exported_slice(
    folders: Path, tmp_path: Path, family: str, kind: str, share: float
) -> None:
    parent = folders / family
    rows = list(held_out_batches(folders / "text.txt", load_tokenizer(parent), **ROWS))
    full = Budget(kind, 1, "fp32", context=16).cost(*_whole(parent))
    budget = Budget(kind, int(share * full), context=16)
    report = search_parent(parent, budget, folders / "text.txt", candidates=6, progress=False, **ROWS)
    assert set(report.axes) == set(report.layout.axes) and len(report.candidates) == 6 and report.measured == 7
    assert report.whole.loss == pytest.approx(reference_loss(parent, rows), rel=1e-5)
    for number, candidate in enumerate(report.candidates):
        sliced = slice_checkpoint(parent, tmp_path / str(number), candidate.submodel, progress=False)
        assert candidate.loss == pytest.approx(reference_loss(sliced.folder, rows), rel=1e-5)
        assert (candidate.params, candidate.active_params) == (sliced.params, sliced.active_params)
        assert candidate.cost <= budget.limit
        if kind == "params":
            assert candidate.cost == sliced.params
    losses = [candidate.loss for candidate in report.candidates]
    assert losses == sorted(losses) and report.best is report.candidates[0]
    assert len({candidate.submodel.layers for candidate in report.candidates}) > 1


def _whole(parent: Path) -> tuple[Any, Any]:
    from star_elastic.submodel import Submodel, open_elastic

    return open_elastic(parent)[1], Submodel()


def test_the_printed_command_cuts_the_best(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = tmp_path / "my parent"
    parent.symlink_to(folders / "llama")
    words = ["search", str(parent), "--data", str(folders / "text.txt"), "--params", "40k", "--candidates", "5"]
    words += ["--tokens", "80", "--seq-len", "32"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"to cut the best: {report['command']}\n" in out and "ladder: " in out
    assert "budget: at most 40.000k parameters (40,000)" in out and "losses: 6 measured now, 0 from the cache" in out
    for candidate in report["candidates"]:
        assert f"{candidate['loss']:.4f}" in out and f"{candidate['cost'] / 1000:.3f}k" in out
    command = shlex.split(report["command"])
    assert command[:3] == ["star-elastic", "slice", str(parent)]
    assert main(command[1:]) == 0
    rows = list(held_out_batches(folders / "text.txt", load_tokenizer(parent), **ROWS))
    assert reference_loss(Path(command[3]), rows) == pytest.approx(report["candidates"][0]["loss"], rel=1e-5)


def test_all_members_of_a_small_ladder_and_so_the_best(folders: Path) -> None:
    budget, data = Budget("params", 70_000), folders / "text.txt"
    few = search_parent(folders / "llama", budget, data, axes=["hidden", "ffn"], candidates=1, progress=False, **ROWS)
    every = search_parent(
        folders / "llama", budget, data, axes=["ffn", "hidden"], candidates=99, progress=False, **ROWS
    )
    assert f"{len(every.candidates)} that no other contains" in every.ladder and len(every.candidates) > 1
    assert every.best.loss <= few.best.loss and set(map(str, few.candidates)) <= set(map(str, every.candidates))
    whole = every.whole.submodel.widths
    assert all(one.submodel.widths["heads"] == whole["heads"] for one in every.candidates) and every.axes == (
        "hidden",
        "ffn",
    )


def test_a_second_search_loads_nothing_and_a_longer_one_measures_only_the_rest(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = folders / "text.txt", tmp_path / "losses.json"
    options = {"cache": cache, "progress": False, **ROWS}
    first = search_parent(folders / "llama", Budget("params", 40_000), data, candidates=4, **options)
    longer = search_parent(folders / "llama", Budget("params", 40_000), data, candidates=6, **options)
    assert (first.measured, longer.measured) == (5, 2)
    monkeypatch.setattr(meter, "load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    again = search_parent(folders / "llama", Budget("params", 40_000), data, candidates=4, **options)
    assert again.measured == 0 and again.candidates == first.candidates and again.whole == first.whole


def test_an_interrupted_search_goes_on(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = str(folders / "text.txt"), tmp_path / "losses.json"
    words = [
        "search",
        str(folders / "llama"),
        "--data",
        data,
        "--params",
        "40k",
        "--candidates",
        "4",
        "--cache",
        str(cache),
    ]
    words += ["--tokens", "80", "--seq-len", "32", "--json"]
    measure, calls = meter.held_out_loss, []

    def interrupted(*args: Any, **kwargs: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(meter, "held_out_loss", interrupted)
    assert main(words) == 2
    assert len(json.loads(cache.read_text())["losses"]) == 2
    capsys.readouterr()
    assert main(words) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert resumed["measured"] == 3 and [path.name for path in tmp_path.iterdir()] == ["losses.json"]
    cache.unlink()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["candidates"] == resumed["candidates"]


def test_other_weights_or_other_tokens_are_measured_anew(folders: Path, tmp_path: Path) -> None:
    options = {"cache": tmp_path / "losses.json", "candidates": 2, "progress": False, "seq_len": 32}
    budget, data = Budget("params", 40_000), folders / "text.txt"
    first = search_parent(folders / "llama", budget, data, tokens=80, **options)
    assert search_parent(folders / "llama", budget, data, tokens=70, **options).measured == 3
    twin = tmp_path / "twin"
    twin.mkdir()
    for path in (folders / "llama").iterdir():
        (twin / path.name).write_bytes(path.read_bytes())
    assert search_parent(twin, budget, data, tokens=80, **options).candidates == first.candidates
    tensors = load_file(twin / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, twin / "model.safetensors", {"format": "pt"})
    changed = search_parent(twin, budget, data, tokens=80, **options)
    assert changed.measured == 3 and changed.whole.loss != first.whole.loss
    # All of them are in one file, beside each other.
    assert search_parent(folders / "llama", budget, data, tokens=80, **options).measured == 0


def _spoilt(parent: Path, folder: Path, name: str, channel: int) -> Path:
    """A copy whose every number of one channel of one tensor is NaN."""
    folder.mkdir()
    for path in parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name][channel] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_loss_that_is_not_finite_ends_the_search_and_is_not_kept(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, cache = _spoilt(folders / "llama", tmp_path / "nan", "model.norm.weight", 60), tmp_path / "losses.json"
    words = ["--data", str(folders / "text.txt"), "--params", "40k", "--tokens", "80", "--seq-len", "32"]
    words += ["--cache", str(cache), "--json"]
    told = "the model's loss at full width is nan: look for NaN or infinity among its weights\n"
    assert refused(["search", str(parent), *words], capsys).endswith(told) and not cache.exists()
    told = told.replace("weights\n", "weights, or try --dtype float32\n")
    assert refused(["search", str(parent), *words, "--dtype", "bfloat16"], capsys).endswith(told)
    # A candidate that fails where the whole model does not; the losses before it stay.
    measured: list[float] = []

    def failing(model: Any, *args: Any, **kwargs: Any) -> float:
        measured.append(len(measured) + 1.0)
        return measured[-1] if len(measured) < 3 else math.inf

    monkeypatch.setattr(meter, "held_out_loss", failing)
    error = refused(["search", str(folders / "llama"), *words], capsys)
    assert re.search(r"the model's loss at widths (\w+=\d+, )*\w+=\d+(, layers [\d,]+)? is inf: look for NaN", error)
    assert [entry["loss"] for entry in json.loads(cache.read_text())["losses"]] == [1.0, 2.0]
    cache.write_text(cache.read_text().replace("2.0", "NaN"))
    assert "is no cache of a search: losses.1.loss" in refused(["search", str(folders / "llama"), *words], capsys)


def test_the_stored_dtype_by_its_name_is_what_auto_means(folders: Path, tmp_path: Path) -> None:
    options = {"cache": tmp_path / "losses.json", "candidates": 2, "progress": False, **ROWS}
    budget, data = Budget("params", 40_000), folders / "text.txt"
    first = search_parent(folders / "llama", budget, data, **options)
    named = search_parent(folders / "llama", budget, data, dtype="float32", **options)
    assert (first.measured, named.measured) == (3, 0) and named.candidates == first.candidates
    half = search_parent(folders / "llama", budget, data, dtype="bfloat16", **options)
    assert half.measured == 3 and all(one.submodel.widths["hidden"] % 8 == 0 for one in half.candidates)  # 16-byte rows


def test_the_tokenizer_of_another_model_is_refused(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = family_folder(tmp_path / "parent", "llama")
    write_tokenizer(parent, extra=99)
    capsys.readouterr()
    words = ["search", str(parent), "--data", str(folders / "text.txt"), "--params", "40k"]
    assert "the tokenizer has 198 tokens, the model a vocabulary of 128: it is another model's" in refused(words, capsys)


def test_a_budget_that_the_whole_model_fits(folders: Path) -> None:
    report = search_parent(folders / "llama", Budget("params", 10**9), folders / "text.txt", progress=False, **ROWS)
    assert report.best == report.whole and report.measured == 1
    assert report.command.endswith(" --to full")


def test_what_a_user_should_know_is_said(folders: Path) -> None:
    data = folders / "text.txt"
    options = {"candidates": 1, "progress": False, **ROWS}
    plain = search_parent(folders / "plain", Budget("params", 40_000), data, **options)
    assert "not sorted along hidden, heads, ffn" in plain.notes[0] and plain.axes == ("hidden", "heads", "ffn")
    active = Budget("active_params", 50_000)
    usual = search_parent(folders / "nemotron_h", active, data, **options)
    assert "experts" not in usual.axes and "does not see experts" in usual.notes[0] and "stay whole" in usual.notes[0]
    named = search_parent(folders / "nemotron_h", active, data, axes=["hidden", "experts"], **options)
    assert named.axes == ("hidden", "experts") and "saves next to nothing" in named.notes[0]
    total = search_parent(folders / "nemotron_h", Budget("params", 90_000), data, **options)
    assert "experts" in total.axes and total.notes == ()


def test_bad_input_is_refused_before_the_model_is_loaded(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    parent, data = str(folders / "llama"), str(folders / "text.txt")
    words = ["search", parent, "--data", data, "--params", "40k"]
    assert "reach from" in refused(["search", parent, "--data", data, "--params", "10"], capsys)
    assert "no budget is given: say exactly one of --params" in refused(["search", parent, "--data", data], capsys)
    assert "--params and --memory exclude each other" in refused([*words, "--memory", "1GB"], capsys)
    assert "did you mean 'hidden'" in refused([*words, "--axes", "hiden"], capsys)
    assert "names ffn twice" in refused([*words, "--axes", "ffn, ffn"], capsys)
    assert "no axis ''" in refused([*words, "--axes", ""], capsys)
    assert "none" in refused(["search", str(tmp_path / "none"), "--data", data, "--params", "1"], capsys)
    assert "none.txt" in refused(["search", parent, "--data", "none.txt", "--params", "40k"], capsys)
    assert "longer than the model" in refused([*words, "--seq-len", "9999"], capsys)
    assert "unknown dtype 'float23'" in refused([*words, "--dtype", "float23"], capsys)
    plain = ["search", str(folders / "plain"), *words[2:]]
    assert "layers are not ranked" in refused([*plain, "--axes", "hidden,depth"], capsys)
    cache = tmp_path / "losses.json"
    assert "does not exist" in refused([*words, "--cache", str(tmp_path / "none" / "losses.json")], capsys)
    for content, message in (
        ("{", "cannot be read as JSON"),
        ('{"format_version": 1}', "is no cache of a search: losses"),
        ('{"format_version": 2, "losses": []}', "format_version 2"),
        ('{"format_version": 1, "losses": [{"loss": 1}]}', "is no cache of a search: losses.0.parent_fingerprint"),
    ):
        cache.write_text(content)
        assert message in refused([*words, "--cache", str(cache)], capsys)
        assert cache.read_text() == content
    with pytest.raises(RequestError):
        search_parent(parent, Budget("params", 40_000), data, axes=[])
