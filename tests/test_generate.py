"""Text from nested models: the tokens of the exported slice, decoded by transformers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bytes_tokenizer import write_tokenizer
from tiny import tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from star_elastic.cli import main
from star_elastic.errors import UnknownNameError
from star_elastic.generate import generate_text
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel

SMALL = Submodel(widths={"hidden": 32, "expert_ffn": 16, "heads": 4})
PROMPT = "ab+cd="


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "elastic", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_tokenizer(folder)
    ElasticConfig(family="nemotron_h", submodels={"small": SMALL}).save(folder)
    return folder


def reference(folder: Path, **settings: object) -> str:
    """What transformers writes, from the folder alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **settings)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def test_small_writes_what_its_exported_folder_writes(elastic: Path, tmp_path: Path) -> None:
    slice_checkpoint(elastic, tmp_path / "small", SMALL, progress=False)
    text = generate_text(elastic, PROMPT, "small", max_new_tokens=12)
    assert text == reference(tmp_path / "small", do_sample=False)
    assert text != generate_text(elastic, PROMPT, max_new_tokens=12)


def test_without_a_name_the_whole_model_writes(elastic: Path) -> None:
    text = generate_text(elastic, PROMPT, max_new_tokens=12)
    assert text == reference(elastic, do_sample=False) == generate_text(elastic, PROMPT, "full", max_new_tokens=12)


def test_sampling_follows_seed_and_temperature(elastic: Path) -> None:
    before = torch.get_rng_state()
    hot = [generate_text(elastic, PROMPT, max_new_tokens=12, temperature=5.0, seed=seed) for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]
    assert torch.equal(torch.get_rng_state(), before)
    cold = generate_text(elastic, PROMPT, max_new_tokens=12, temperature=1e-4, seed=3)
    assert cold == generate_text(elastic, PROMPT, max_new_tokens=12)


def test_sampling_settings_of_the_folder_do_not_disturb_greedy_text(elastic: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(elastic, tmp_path / "parent")
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert generate_text(folder, PROMPT, max_new_tokens=12) == generate_text(elastic, PROMPT, max_new_tokens=12)


def test_text_ends_at_the_end_of_sequence(elastic: Path, tmp_path: Path) -> None:
    long = generate_text(elastic, PROMPT, max_new_tokens=12)
    third = AutoTokenizer.from_pretrained(elastic)(long)["input_ids"][2]
    folder = shutil.copytree(elastic, tmp_path / "parent")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    text = generate_text(folder, PROMPT, max_new_tokens=12)
    assert long.startswith(text) and len(text) <= 3 < len(long)


def test_command_streams_to_stdout(elastic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(elastic), "--prompt", PROMPT, "--submodel", "small", "--max-new-tokens", "12"]
    assert main(words) == 0
    assert capsys.readouterr().out == generate_text(elastic, PROMPT, "small", max_new_tokens=12) + "\n"


def test_unknown_submodel_is_refused_before_weights_load(
    elastic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("star_elastic.generate.load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    assert main(["generate", str(elastic), "--prompt", "a", "--submodel", "smal"]) == 2
    error = capsys.readouterr().err
    assert error == "error: no submodel 'smal': did you mean 'small'? known: full, small\n"
    with pytest.raises(UnknownNameError):
        generate_text(elastic, "a", "smal")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "holds no token"),
        (["--prompt", "a", "--device", "tpu9"], "device 'tpu9' cannot be used here"),
        (["--prompt", "a", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--prompt", "a", "--preset", "nemotron-3-nano-30b-a3b"], "does not have the shapes of preset"),
        (["--prompt", "a", "--preset", "nemotron"], "no preset 'nemotron'"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
    ],
)
def test_bad_words_end_in_one_line(
    elastic: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["generate", str(elastic), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_bad_folders_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tmp_path / "parent"), "--prompt", "a"]

    def told() -> str:
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "does not exist" in told()
    folder = tiny_folder(tmp_path / "parent")
    capsys.readouterr()  # transformers' writer has its own progress bar
    assert told().endswith("parent holds no tokenizer: copy tokenizer.json and its companions there\n")
    write_tokenizer(folder, extra=99)
    assert "the tokenizer has 198 tokens, the model a vocabulary of 128: it is another model's" in told()
    write_tokenizer(folder)
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in told()
