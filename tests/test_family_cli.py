"""The command line from a parent folder to a slice that writes text, on families with other names, routers and heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from bytes_tokenizer import write_tokenizer
from safetensors.torch import load_file
from tiny import FAMILIES
from transformers import AutoModelForCausalLM, AutoTokenizer

from star_elastic.cli import main
from star_elastic.train import train_family
from star_elastic.train.state import RunFolder

SMALL = {
    "llama": {"hidden": 48, "ffn": 24, "heads": 4},
    "qwen3_moe": {"hidden": 48, "experts": 6, "expert_ffn": 16},
    "granitemoehybrid": {"hidden": 32, "experts": 6, "expert_ffn": 16, "shared_ffn": 24},
}


def recipe(folder: Path, parent: Path, text: Path, widths: dict[str, int]) -> Path:
    """A recipe of four steps, with a checkpoint after two; the result goes to ``folder``/trained."""
    content = {
        "parent": str(parent),
        "output": str(folder / "trained"),
        "submodels": {"full": {}, "small": {"widths": widths}},
        "data": {"sources": [{"path": str(text)}], "shuffle_tokens": 256},
        "sequence_length": 16,
        "batch_size": 2,
        "steps": 4,
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "precision": "fp32",
        "checkpoint_every": 2,
        "device": "cpu",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


@pytest.mark.parametrize("family", SMALL)
def test_score_sort_inspect_train_slice_and_generate(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, text = tmp_path / "parent", tmp_path / "text.txt"
    FAMILIES[family](vocab_size=288).save_pretrained(parent)
    write_tokenizer(parent)
    text.write_text("Some text to read, line after line.\n" * 60)

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    run("score", parent, tmp_path / "scores", "--data", text, "--samples", 4, "--seq-len", 32)
    run("sort", parent, tmp_path / "sorted", "--scores", tmp_path / "scores")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("parent", "sorted"))
    ids = torch.arange(3, 51).view(2, 24)
    wanted = before(ids).logits
    assert (after(ids).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()

    run("train", recipe(tmp_path, tmp_path / "sorted", text, SMALL[family]))
    metrics = [json.loads(line) for line in (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= 4

    described = json.loads(run("inspect", tmp_path / "trained", "--json"))["submodels"]["small"]
    run("slice", tmp_path / "trained", tmp_path / "small", "--to", "small")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert described["params"] == sum(parameter.numel() for parameter in small.parameters())

    told = run("generate", tmp_path / "trained", "--submodel", "small", "--prompt", "Some ", "--max-new-tokens", 6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "small")
    prompt = tokenizer("Some ", return_tensors="pt")["input_ids"]
    written = small.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True) in told


def test_a_width_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["granitemoehybrid"]().save_pretrained(tmp_path / "parent")
    capsys.readouterr()
    assert main(["slice", str(tmp_path / "parent"), str(tmp_path / "out"), "--width", "hidden=48"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: mamba_heads 8 x mamba_head_dim 16 is no multiple of hidden 48")
    assert told.count("\n") == 1 and not (tmp_path / "out").exists()
    assert main(["inspect", str(tmp_path / "parent")]) == 0
    assert "hidden, mamba_heads, mamba_head_dim: the config writes the width of the Mamba mixer" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_training_of_a_tied_model_resumes_bit_for_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared tensor is saved once, with its moments, and comes back tied."""
    text = tmp_path / "text.txt"
    FAMILIES[family](vocab_size=288).save_pretrained(tmp_path / "parent")
    write_tokenizer(tmp_path / "parent")
    text.write_text("Some text to read, line after line.\n" * 60)
    path = recipe(tmp_path, tmp_path / "parent", text, SMALL[family])
    train_family(path, [f"output={tmp_path / 'whole'}"], progress=False)
    log = RunFolder.log

    def dying(self: RunFolder, line: dict[str, object]) -> None:
        log(self, line)
        if line["step"] == 3:
            raise KeyError("killed")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="killed"):
        patch.setattr(RunFolder, "log", dying)
        train_family(path, [], progress=False)
    train_family(path, [], progress=False, resume=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "trained"))
    assert whole.keys() == resumed.keys() and "lm_head.weight" not in whole
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
