"""How to run a folder in other engines: command lines for vLLM, SGLang, llama.cpp and Ollama, where they know the model.

Which engine runs which models of a family is said in the family's file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from star_elastic.families import family_of
from star_elastic.families.base import LLAMA_CPP, SGLANG, VLLM, Config, Unfit


@dataclass(frozen=True)
class Engine:
    """An engine and how it is called.

    Attributes:
        name: for people.
        commands: lines for a shell; ``{path}`` is the folder, ``{file}`` its GGUF file, ``{name}`` and ``{place}`` are the
            names that Ollama takes for the model and for that file.
        reads: the engine whose files it runs, by the name that families give it.
        quantized: whether it reads ModelOpt's FP8 and NVFP4.
    """

    name: str
    commands: tuple[str, ...]
    reads: str
    quantized: bool = False


EXPORT = "star-elastic export {path} --gguf {file}"
ENGINES = (
    Engine(VLLM, ("vllm serve {path}",), VLLM, quantized=True),
    Engine(SGLANG, ("python -m sglang.launch_server --model-path {path}",), SGLANG, quantized=True),
    Engine(LLAMA_CPP, (EXPORT, "llama-cli -m {file} -p Hello"), LLAMA_CPP),
    Engine("Ollama, then", ("echo FROM {place} > Modelfile", "ollama create {name} -f Modelfile"), LLAMA_CPP),
)


def unfit(config: Config, engine: str) -> Unfit | None:
    """Why an engine cannot run the model of a config.json; None where it can.

    Raises:
        UnknownNameError: no family file describes its ``model_type``.
        CheckpointError: the config holds an impossible value.
    """
    family = family_of(config)
    if engine not in family.engines:
        return Unfit(f"{engine} has no architecture for {family.name}")
    return family.engines[engine](config)


def engine_commands(
    config: Config, path: str, *, quantized: bool = False, per_layer: bool = False, file: str | None = None
) -> dict[str, list[str]]:
    """Command lines by engine, for those that can run the model.

    Args:
        config: the folder's config.json.
        path: the folder, or its name on the hub.
        quantized: whether it is quantized by ModelOpt.
        per_layer: whether its layers differ in width, which no config can tell an engine.
        file: its GGUF file, where there is one already.

    Example:
        >>> engine_commands(config, "small")["vLLM"]  # doctest: +SKIP
        ['vllm serve small']
    """
    if per_layer:
        return {}
    name = path.rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[^a-z0-9._-]+", "-", name.lower())  # Ollama's names
    gguf = file or f"{name}.gguf"
    words = {"path": path, "name": plain, "file": gguf, "place": gguf if gguf.startswith("/") else f"./{gguf}"}
    quoted = {key: shlex.quote(word) for key, word in words.items()}
    return {
        engine.name: [command.format(**quoted) for command in engine.commands if command != EXPORT or file is None]
        for engine in ENGINES
        if (engine.quantized or not quantized) and unfit(config, engine.reads) is None
    }


def engine_lines(commands: Mapping[str, Sequence[str]]) -> list[str]:
    """The same for people, one line an engine."""
    return [f"run in {name}: {' && '.join(given)}" for name, given in commands.items()]
