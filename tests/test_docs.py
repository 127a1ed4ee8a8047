"""Every command of README and tutorial runs as written, in order, in an empty folder; the quick demo's facts hold."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import FAMILIES, tiny_model

from star_elastic.families import layout_of

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Make an environment first, which is what runs this test; that they exist is checked below.
SET_UP = {"make demo\nmake test", "pip install -c constraints.txt -e ."}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and code of each executable block of a page."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no code"
    return [(language, code) for language, code in found if code.strip() not in SET_UP]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An empty folder, and an environment in which ``star-elastic`` is this code."""
    folder = tmp_path_factory.mktemp("docs")
    command = folder / "bin" / "star-elastic"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m star_elastic "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    work = folder / "work"
    work.mkdir()
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return work, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run(language: str, code: str, shell: tuple[Path, dict[str, str]]) -> str:
    work, environment = shell
    program = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*program, code], cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tutorial_and_then_the_readme_run_as_written(shell: tuple[Path, dict[str, str]]) -> None:
    for page in ("docs/tutorial.md", "README.md"):
        for language, code in blocks(page):
            run(language, code, shell)
    work, _ = shell
    report = json.loads((work / "demo-out" / "report.json").read_text())
    assert [fact["holds"] for fact in report["facts"]] == [True, True, True, True]
    assert set(report["sizes"]) == {"full", "mid", "small"}
    reached = [size["choice"]["cost"] for size in report["sizes"].values()]
    assert reached == [size["params"] for size in report["sizes"].values()]
    shares = [cost / reached[0] for cost in reached]
    assert shares == pytest.approx([1, 0.75, 0.5], rel=0.05)
    for name in report["sizes"]:
        assert (work / "demo-out" / "slices" / name / "model.safetensors").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_make_targets_of_the_readme_exist(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_the_page_of_families_lists_each_with_its_axes() -> None:
    """The tiny models have every kind of layer that their family knows, but for NemotronH's dense MLP."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs" / "families.md").read_text(), re.MULTILINE)
    written = {family: re.findall(r"`(\w+)`", axes) for family, axes in rows if family != "model_type"}
    builders = {**FAMILIES, "nemotron_h": lambda: tiny_model(pattern="ME*-")}
    assert written == {
        family: list(layout_of(build().config.to_dict()).width_axes) for family, build in builders.items()
    }


def test_design_names_every_module_once_and_in_its_package() -> None:
    """A cell of names may change the package on the way (``families/``); a name outside of one lies at the top."""
    table = (ROOT / "docs" / "design.md").read_text().partition("## Where things are")[2]
    told = []
    for row in re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)[1:]:
        package = ""
        for word in re.findall(r"`([\w/]+)`", " ".join(row)):
            package, name = (word, "") if word.endswith("/") else (package, word)
            told += [f"{package}{name}"] if name else []
    there = [path.relative_to(ROOT / "src" / "star_elastic") for path in (ROOT / "src").rglob("*.py")]
    assert sorted(told) == sorted(str(path.with_suffix("")) for path in there if not path.name.startswith("__"))
