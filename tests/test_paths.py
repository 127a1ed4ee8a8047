"""``~`` in paths: where the shell left it, in words of the command line and in recipes, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_folder

from star_elastic.cli import main
from star_elastic.paths import expanded
from star_elastic.train.data import source_of
from star_elastic.train.recipe import load_recipe


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_what_is_expanded(home: Path) -> None:
    assert expanded("~/a b/c") == f"{home}/a b/c" and expanded("~") == str(home)
    for same in ("a/~", "./~/x", "org/name", "/x", "", "~no-such-user-here/x", "books/**/*.txt"):
        assert expanded(same) == same


def test_arguments_and_options(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_folder(home / "parent", pattern="ME*")
    assert main(["slice", "~/parent", "~/out", "--width", "hidden=32"]) == 0
    assert (home / "out" / "config.json").is_file()
    assert main(["verify", "~/out", "--against=~/parent"]) == 0
    assert main(["inspect", "~/out"]) == 0
    capsys.readouterr()
    assert main(["export", "~/out", "--gguf", "~/out.gguf", "--converter=~/llama.cpp"]) == 2
    assert f"--converter is {home}/llama.cpp, where there is no" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_text_that_is_no_path_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_folder(home / "parent", pattern="ME*")
    assert main(["slice", "~/parent", "~/out", "--to", "~"]) == 2
    assert "'~'" in capsys.readouterr().err


def test_recipes_and_their_overrides(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "parent: ~/parent\noutput: ./out\nsteps: 1000\nbatch_size: 1\nbudgets: {full: {params: 1.0}}\n"
        "data: {sources: [{path: ~/text.txt}, {path: a/~.txt}, {hub: owner/name}]}\n"
    )
    recipe = load_recipe(path, ["output=~/out"])
    assert (recipe.parent, recipe.output) == (home / "parent", home / "out")
    assert [source.name for source in recipe.data.sources] == [f"{home}/text.txt", "a/~.txt", "hub:owner/name"]
    assert source_of("~/held-out.jsonl").path == f"{home}/held-out.jsonl"
