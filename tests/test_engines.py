"""Commands for other engines: right lines, only where the engine knows the model, printed and in the model card alike."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from quantized import quantized_folder
from tiny import FAMILIES, tiny_folder

from star_elastic import Submodel, families, slice_checkpoint
from star_elastic.card import split_card
from star_elastic.cli import main
from star_elastic.engines import engine_commands, unfit
from star_elastic.submodel import read_config

SERVERS = {"vLLM", "SGLang"}
EVERYWHERE = SERVERS | {"llama.cpp", "Ollama, then"}


def nemotron(pattern: str) -> dict[str, Any]:
    return {"model_type": "nemotron_h", "hybrid_override_pattern": pattern}


def names(config: dict[str, Any], **options: bool) -> set[str]:
    return set(engine_commands(config, "model", **options))


def test_the_lines_of_each_engine() -> None:
    commands = engine_commands({"model_type": "llama"}, "sizes/small")
    assert commands == {
        "vLLM": ["vllm serve sizes/small"],
        "SGLang": ["python -m sglang.launch_server --model-path sizes/small"],
        "llama.cpp": [
            "star-elastic export sizes/small --gguf small.gguf",
            "llama-cli -m small.gguf -p Hello",
        ],
        "Ollama, then": ["echo FROM ./small.gguf > Modelfile", "ollama create small -f Modelfile"],
    }


def test_names_that_a_shell_or_ollama_would_not_take() -> None:
    commands = engine_commands({"model_type": "llama"}, "My model's 12B")
    assert commands["vLLM"] == ["""vllm serve 'My model'"'"'s 12B'"""]
    assert commands["Ollama, then"][1] == "ollama create my-model-s-12b -f Modelfile"


@pytest.mark.parametrize("name", ["small", "my model", "it's"])
def test_the_modelfile_names_the_file_that_export_writes(name: str, tmp_path: Path) -> None:
    commands = engine_commands({"model_type": "llama"}, name)
    subprocess.run(commands["Ollama, then"][0], shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "Modelfile").read_text() == f"FROM ./{name}.gguf\n"
    words = subprocess.check_output(f"printf '%s\\n' {commands['llama.cpp'][0]}", shell=True, text=True).splitlines()
    assert words == ["star-elastic", "export", name, "--gguf", f"{name}.gguf"]


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (nemotron("ME*E"), EVERYWHERE),
        (nemotron("ME*-"), SERVERS),
        (nemotron("M-*-"), SERVERS),
        ({"model_type": "qwen3"}, EVERYWHERE),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2}, SERVERS),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 32}, EVERYWHERE),
        ({"model_type": "qwen3_moe"}, SERVERS),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, EVERYWHERE),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [1]}, SERVERS),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 2}, SERVERS),
        ({"model_type": "mixtral"}, EVERYWHERE),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 32}, {"vLLM"}),
    ],
)
def test_engines_are_named_where_they_know_the_model(config: dict[str, Any], known: set[str]) -> None:
    assert names(config) == known
    assert names(config, quantized=True) == known & SERVERS
    assert names(config, per_layer=True) == set()


def test_a_family_that_says_nothing_else_runs_everywhere_and_each_engine_is_known() -> None:
    assert {engine for family in families.FAMILIES.values() for engine in family.engines} == SERVERS | {"llama.cpp"}


def test_why_not_and_whether_another_converter_could() -> None:
    both, dense = unfit(nemotron("ME*-"), "llama.cpp"), unfit(nemotron("M-*-"), "llama.cpp")
    assert both and not both.elsewhere and "experts and dense MLP layers" in both.why
    assert dense and dense.elsewhere and "without experts" in dense.why
    granite = {"model_type": "granitemoehybrid", "num_hidden_layers": 2}
    for kinds, elsewhere in ((["mamba", "attention"], True), (["linear_attention", "full_attention"], False)):
        found = unfit({**granite, "layer_types": kinds}, "llama.cpp")
        assert found and found.elsewhere is elsewhere
    found = unfit(granite, "SGLang")
    assert found and found.why == "SGLang has no architecture for granitemoehybrid"


def block(card: str) -> list[str]:
    """The lines of the card's block on other engines."""
    return card.partition("## Other engines")[2].partition("```bash\n")[2].partition("\n```")[0].splitlines()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_slice_is_told_with_the_same_commands_that_its_card_has(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    FAMILIES[family]().save_pretrained("parent")
    assert main(["slice", "parent", "out", "--width", "hidden=32"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run in ")]
    commands = engine_commands(read_config("out"), "out")
    assert commands and printed == [f"run in {name}: {' && '.join(lines)}" for name, lines in commands.items()]
    wanted = [line for name, lines in commands.items() for line in (f"# {name}", *lines)]
    assert block(split_card(Path("out/README.md").read_text())[1]) == wanted
    assert (family in ("qwen3_moe", "granitemoehybrid")) == ("llama.cpp" not in commands)


def test_what_stays_decides_not_what_the_parent_had(tmp_path: Path) -> None:
    """Of experts and dense MLPs one kind is left, and the fields that told of the other are gone."""
    parent = tiny_folder(tmp_path / "parent", pattern="ME*-")
    slice_checkpoint(parent, tmp_path / "experts", Submodel(layers=(0, 1, 2)))
    slice_checkpoint(parent, tmp_path / "dense", Submodel(layers=(0, 2, 3)))
    assert "llama-cli" in (tmp_path / "experts" / "README.md").read_text()
    assert "llama-cli" not in (tmp_path / "dense" / "README.md").read_text()
    assert set(engine_commands(json.loads((tmp_path / "dense" / "config.json").read_text()), "dense")) == SERVERS


def test_a_quantized_slice_is_for_those_who_read_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized_folder(tmp_path / "parent", "nvfp4")
    assert main(["slice", str(folder), str(tmp_path / "out"), "--width", "hidden=32"]) == 0
    said, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    for text in (said, card):
        assert "vllm serve" in text and "sglang.launch_server" in text
        assert "gguf" not in text and "ollama" not in text and "llama" not in text
