"""llama.cpp's own converter: found here, and run in a process of its own.

It asks transformers to run code that comes with a tokenizer; who calls it refuses folders that bring any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from star_elastic.errors import ElasticError

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
HOW_TO_GET = (
    f"git clone https://github.com/ggml-org/llama.cpp, then set {VARIABLE} to that folder (or give --converter FOLDER)"
)
POLL_SECONDS = 0.2


class ConverterError(ElasticError, RuntimeError):
    """llama.cpp's converter is not here, does not run, or refuses a folder."""


@dataclass(frozen=True)
class Converter:
    """The converter and the Python that runs it.

    Attributes:
        script: ``convert_hf_to_gguf.py``.
        python: a Python that has what llama.cpp's requirements list.
        chosen: whether the user chose that Python, so that its libraries may be others than ours.
    """

    script: Path
    python: str
    chosen: bool = False

    @classmethod
    def find(cls, converter: Path | str | None = None, python: Path | str | None = None) -> Converter:
        """Find both.

        Args:
            converter: llama.cpp's folder, or the script in it; looked for in ``LLAMA_CPP`` and ``PATH`` if left out.
            python: the Python to run it with; this one if left out.

        Raises:
            ConverterError: one of them is not there; says how to get it.
        """
        runner = shutil.which(str(python)) if python else sys.executable
        script = find_converter(converter)
        if runner is None:
            raise ConverterError(f"--python {python} is no program: give a Python that has llama.cpp's requirements")
        return cls(script, runner, python is not None)

    def check_runs(self) -> None:
        """Have it print its options, which imports what it needs.

        Raises:
            ConverterError: it fails; says what it said last.
        """
        done = subprocess.run(
            [self.python, str(self.script), "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(),
        )
        if done.returncode:
            last = _last_line(done.stderr.decode(errors="replace"))
            raise ConverterError(f"llama.cpp's converter {self.script} does not run: {last}{_hint(last)}")

    def convert(
        self, folder: Path, out: Path, kind: str, log: Path, advance: Callable[[int], None] = lambda done: None
    ) -> None:
        """Run it to its end, or end it with us.

        Args:
            folder: a transformers folder.
            out: the file that it is to write, in a folder for itself: it may write more than one.
            kind: type of the file, as ``export.BITS`` names them.
            log: a file for what it says.
            advance: told how many bytes it has written since it was last called.

        Raises:
            ConverterError: it fails, or writes nothing; says what it said last.
        """
        command = [self.python, str(self.script), str(folder.absolute())]
        command += ["--outfile", str(out), "--outtype", kind.lower()]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment())
            try:
                _watch(process, out, advance)
            finally:
                process.kill()
                process.wait()
        last = _last_line(log.read_text(encoding="utf-8", errors="replace"))
        if process.returncode:
            raise ConverterError(f"llama.cpp's converter refuses the folder: {last}{_hint(last)}")
        if not out.exists():
            raise ConverterError(f"{self.script} wrote no file: {last}")


def find_converter(given: Path | str | None = None) -> Path:
    """llama.cpp's converter: where ``given`` says, else where the variable LLAMA_CPP says, else on PATH.

    Raises:
        ConverterError: it is not there; says how to get it.
    """
    for source, place in (("--converter", given), (VARIABLE, os.environ.get(VARIABLE))):
        if place:
            script = Path(place) / SCRIPT if Path(place).is_dir() else Path(place)
            if not script.is_file():
                raise ConverterError(f"{source} is {place}, where there is no {SCRIPT}: {HOW_TO_GET}")
            return script.absolute()
    found = shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py"))
    if found is None:
        raise ConverterError(f"llama.cpp's {SCRIPT} is not on PATH: {HOW_TO_GET}")
    return Path(found).absolute()


def _watch(process: subprocess.Popen[bytes], out: Path, advance: Callable[[int], None]) -> None:
    """Wait for the end, and tell how the file grows."""
    done = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        size = out.stat().st_size if out.exists() else 0
        advance(size - done)
        done = size


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def _hint(last: str) -> str:
    wanted = "; install llama.cpp's requirements, or give a --python that has them"
    return wanted if "No module named" in last else ""
