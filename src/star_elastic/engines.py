"""How to run a folder in other engines: command lines for vLLM, SGLang, llama.cpp and Ollama, where they know the model."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from star_elastic.layout import Layout

EVERY_FAMILY = frozenset({"nemotron_h", "llama", "qwen3", "qwen3_moe", "mixtral", "granitemoehybrid"})


@dataclass(frozen=True)
class Engine:
    """An engine and what it can load.

    Attributes:
        name: as its makers write it.
        commands: lines for a shell; ``{path}`` is the folder, ``{file}`` a GGUF file of its name.
        families: of which it has the architecture.
        quantized: whether it reads ModelOpt's FP8 and NVFP4.
        one_kind: whether feed-forward layers must be all experts or all dense.
    """

    name: str
    commands: tuple[str, ...]
    families: frozenset[str] = EVERY_FAMILY
    quantized: bool = False
    one_kind: bool = False

    def runs(self, family: str, kinds: Collection[str], quantized: bool) -> bool:
        """Whether it can run a model of a family with layers of these kinds."""
        expert_layers = {"moe" in kind for kind in kinds if "mlp" in kind or "moe" in kind}
        return (
            family in self.families
            and (self.quantized or not quantized)
            and not (self.one_kind and len(expert_layers) > 1)
        )


VLLM = Engine("vLLM", ("vllm serve {path}",), quantized=True)
SGLANG = Engine(
    "SGLang",
    ("python -m sglang.launch_server --model-path {path}",),
    families=EVERY_FAMILY - {"granitemoehybrid"},
    quantized=True,
)
# llama.cpp's converter does not understand the kinds of layers that transformers 5 writes for a Granite hybrid.
LLAMA_CPP = Engine(
    "llama.cpp",
    ("star-elastic export {path} --gguf {file}", "llama-cli -m {file} -p Hello"),
    families=EVERY_FAMILY - {"granitemoehybrid"},
    one_kind=True,
)
OLLAMA = Engine("Ollama, then", ("echo FROM ./{file} > Modelfile", "ollama create {name} -f Modelfile"), one_kind=True)
ENGINES = (VLLM, SGLANG, LLAMA_CPP, OLLAMA)


def engine_commands(
    layout: Layout, path: str, *, layers: Sequence[int] | None = None, quantized: bool = False
) -> dict[str, list[str]]:
    """Command lines by engine, for those that can run the model.

    Args:
        layout: the model's table, or its parent's.
        path: the folder, or its name on the hub.
        layers: those that are kept of ``layout``; None keeps all.
        quantized: whether it is quantized by ModelOpt.

    Example:
        >>> engine_commands(layout, "small")["vLLM"]  # doctest: +SKIP
        ['vllm serve small']
    """
    name = path.rstrip("/").rpartition("/")[2]
    kinds = {unit.kind for unit in layout.kept_units(layers)}
    words = {
        key: shlex.quote(word) for key, word in {"path": path, "name": name.lower(), "file": f"{name}.gguf"}.items()
    }
    return {
        engine.name: [command.format(**words) for command in engine.commands]
        for engine in ENGINES
        if engine.runs(layout.family, kinds, quantized)
    }


def engine_lines(commands: Mapping[str, Sequence[str]]) -> list[str]:
    """The same for people, one line an engine."""
    return [f"run in {name}: {' && '.join(given)}" for name, given in commands.items()]
