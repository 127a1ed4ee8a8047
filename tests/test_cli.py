"""The command line itself: help, bad words, and that every mistake ends as one line and exit code 2."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny import tiny_folder

from star_elastic.cli import main
from star_elastic.errors import DataError
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.version import VERSION

VERBS = ["inspect", "score", "sort", "train", "cache-teacher", "slice", "search", "profile", "generate", "demo"]
NANO = ["inspect", "--preset", "nemotron-3-nano-30b-a3b"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run words that must be refused, and return what was said: one line on stderr, nothing on stdout."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.err.endswith("\n")
    return said.err


def python(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verbs_help_has_an_example_of_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"\n    star-elastic {verb} " in out and "Usage: star-elastic" in out


def test_no_help_needs_torch_or_transformers() -> None:
    code = (
        "import sys; from star_elastic.cli import main\n"
        f"for words in [[], *([verb] for verb in {VERBS})]: assert main([*words, '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, star_elastic; assert not {'torch', 'transformers', 'pydantic', 'typer'} & set(sys.modules)"
    assert python("-c", code).returncode == 0


def test_module_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"star-elastic {VERSION}\n"
    done = python("-m", "star_elastic", "slcie")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no command 'slcie'; did you mean 'slice'?") and done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slcie"], "did you mean 'slice'? known: cache-teacher, demo"),
        (["cache-teacher", "--nope"], "No such option: --nope"),
        (["xyz"], "no command 'xyz'"),
        (["--nope"], "No such option: --nope"),
        (["inspect", "--nope"], "No such option: --nope"),
        (["inspect"], "give a model folder, or --preset NAME"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["inspect", "--preset", "nemotron-3-nano"], "did you mean 'nemotron-3-nano-30b-a3b'"),
        (["score"], "Missing argument 'PARENT'"),
        (["score", "a"], "Missing argument 'OUT'"),
        (["score", "a", "b"], "Missing option '--data'"),
        (["score", "a", "b", "--data", "f", "--samples", "x"], "--samples"),
        (["score", "a", "b", "--data", "f", "--samples", "0"], "--samples"),
        (["score", "a", "b", "--data", "f", "--seq-len", "-1"], "--seq-len"),
        (["sort", "a", "b"], "Missing option '--scores'"),
        (["train"], "Missing argument 'RECIPE.yaml'"),
        (["slice", "a"], "Missing argument 'OUT'"),
        (["slice", "a", "b"], "no size is given: say exactly one of --to, --width/--layers, --params"),
        (["slice", "a", "b", "--to", "x", "--width", "hidden=8"], "--to and --width/--layers exclude each other"),
        (["slice", "a", "b", "--params", "many"], "cannot read 'many': want a positive number such as 12e9"),
        (["slice", "a", "b", "--memory", "24Gib/s"], "want a positive size such as 24GiB"),
        (["slice", "a", "b", "--width", "hidden"], "want AXIS=N"),
        (["slice", "a", "b", "--memory", "1GB", "--context", "0"], "--context"),
        (["generate", "a"], "Missing option '--prompt'"),
        (["generate", "a", "--prompt"], "requires an argument"),
        (["demo", "--fast"], "No such option: --fast"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(words, capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "none"],
        ["score", "none", "out", "--data", "f.txt"],
        ["sort", "none", "out", "--scores", "none"],
        ["train", "none.yaml"],
        ["slice", "none", "out", "--params", "1e9"],
        ["generate", "none", "--prompt", "a"],
    ],
)
def test_what_is_not_there(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "none" in refused(words, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError("two\nlines"), "error: two lines\n"),
        (KeyboardInterrupt(), "error: interrupted; nothing unfinished was kept\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/x"), "error: Permission denied: /srv/x\n"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: [Errno 28] No space left on device\n"),
    ],
)
def test_mistakes_and_misfortune_are_one_line(
    error: BaseException, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("star_elastic.inspect.run_inspect", fail)
    assert refused(NANO, capsys) == line


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("star_elastic.inspect.run_inspect", fail)
    with pytest.raises(ZeroDivisionError):
        main(NANO)


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = f"import sys; from star_elastic.cli import main; sys.exit(main({[*NANO, '--json']}))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# slice: that its words arrive at the right place


@pytest.fixture
def elastic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tiny_folder(tmp_path / "elastic")
    submodels = {"small": Submodel(widths={"hidden": 32}), "mid": Submodel(widths={"hidden": 48})}
    ElasticConfig(family="nemotron_h", submodels=submodels).save(folder)
    capsys.readouterr()  # transformers' writer has a progress bar of its own
    return folder


def hidden_of(folder: Path) -> int:
    return load_file(folder / "model.safetensors")["lm_head.weight"].shape[1]


@pytest.mark.parametrize(
    ("words", "hidden", "said"),
    [
        (["--to", "small"], 32, "hidden 64 -> 32"),
        (["--width", "hidden=40", "--width", "heads=4"], 40, "hidden 64 -> 40, heads 8 -> 4"),
        (["--params", "110k"], 48, "chosen: mid: 102."),
        (["--active-params", "50k"], 32, "at most 50.000k active parameters (50,000) wanted"),
        (["--memory", "0.45MB", "--context", "8"], 48, "fp32 weights and caches of 1 x 8 tokens"),
        (["--layers", "0,2,3"], 64, "depth 5 -> 3 (layers 0, 2, 3)"),
    ],
)
def test_slice_words(
    elastic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], hidden: int, said: str
) -> None:
    out = tmp_path / "out"
    assert main(["slice", str(elastic), str(out), *words, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert said in dry and "was not written" in dry and not out.exists()
    assert main(["slice", str(elastic), str(out), *words]) == 0
    wet = capsys.readouterr().out
    told = dry.splitlines()[:-1]
    assert (
        wet.splitlines()[: len(told)] == told
        and f"\nrun in vLLM: vllm serve {out}\n" in wet
        and f"wrote {out}: " in wet
    )
    assert hidden_of(out) == hidden


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_slice_refusals_write_nothing(
    elastic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dry: list[str]
) -> None:
    def told(*words: str, out: Path = tmp_path / "out") -> str:
        message = refused(["slice", str(elastic), str(out), *words, *dry], capsys)
        assert not (tmp_path / "out").exists()
        return message

    assert "did you mean 'small'? known: full, mid, small" in told("--to", "smal")
    assert "hidden width 33 is illegal" in told("--width", "hidden=33")
    assert "nothing fits 10 parameters" in told("--params", "10")
    assert "the source itself" in told("--to", "small", out=elastic)
    assert "inside the source" in told("--to", "small", out=elastic / "out")
    (elastic / "model.safetensors").write_bytes((elastic / "model.safetensors").read_bytes()[:-9])
    assert "not a whole safetensors file" in told("--to", "small")


def test_ctrl_c_while_the_program_is_still_loading() -> None:
    code = "import sys; from unittest import mock; from star_elastic.__main__ import run\n"
    code += "def stop(*words): raise KeyboardInterrupt\n"
    code += "with mock.patch('builtins.__import__', stop): answer = run()\nsys.exit(answer)"
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (2, "error: interrupted before anything was done\n")
