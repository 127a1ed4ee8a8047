"""The demo's parts: the task against plain arithmetic, its verdicts, its reuse of stages. The whole runs in test_docs."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_folder, tiny_model, tokens
from transformers import AutoTokenizer

from star_elastic.demo import run as demo_run
from star_elastic.demo.facts import budgets_are_met, sizes_share_memory, sorted_equals_parent, views_equal_folders
from star_elastic.demo.measure import Quality, Size, print_choices
from star_elastic.demo.run import Stages, demo_recipe
from star_elastic.demo.settings import FULL, QUICK
from star_elastic.demo.task import (
    MAX_OPERANDS,
    Chain,
    held_out_chains,
    library_text,
    make_chain,
    training_rows,
    write_data,
)
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.elastic import ElasticModel
from star_elastic.errors import TargetError
from star_elastic.evaluate import exact_match, held_out_loss
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder
from star_elastic.submodel import Submodel
from star_elastic.train.recipe import Recipe, load_recipe
from star_elastic.train.report import Choice
from star_elastic.train.trainer import TrainingStopped


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("operands", [2, 5, MAX_OPERANDS])
def test_a_chain_is_right_arithmetic(operands: int) -> None:
    """Python's own evaluation of the question gives the answer, and of every start of it the running values."""
    chain = make_chain(random.Random(operands), operands)
    terms = re.findall(r"[+-]\d", chain.question)
    assert len(terms) == operands and chain.question.endswith("=")
    values = [str(eval("0" + "".join(terms[: n + 1])) % 10) for n in range(operands)]
    assert re.findall(r"[a-z][+-]\d(\d)", chain.thought) == values
    assert chain.answer == values[-1]


def test_training_rows_cut_about_the_asked_share_of_thoughts() -> None:
    rows = list(training_rows(random.Random(0), 2000))
    complete = sum(
        len(row["messages"][1]["reasoning_content"]) * 3 == (len(row["messages"][0]["content"]) - 1) * 4 for row in rows
    )
    assert 0.66 < complete / len(rows) < 0.74


def test_held_out_questions_and_text_were_not_trained_on(tmp_path: Path) -> None:
    write_data(tmp_path, rows=3000, text_chars=20_000, held_out=50, seed=0)

    def questions(name: str) -> list[str]:
        return [json.loads(row)["messages"][0]["content"] for row in (tmp_path / name).read_text().splitlines()]

    assert len(questions("held-out.jsonl")) == 50
    assert not set(questions("held-out.jsonl")) & set(questions("reasoning.jsonl"))
    assert (tmp_path / "held-out.txt").read_text() == library_text(21_000)[20_000:]


def test_every_row_fits_the_training_length(tokenizer: Any) -> None:
    longest = make_chain(random.Random(0), MAX_OPERANDS)
    text = tokenizer.apply_chat_template(longest.messages(), tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == FULL.length - 1
    assert tokenizer.decode(ids) == text
    assert "a" + tokenizer.decode(tokenizer("a+3", add_special_tokens=False)["input_ids"][1:]) == "a+3"
    assert len(tokenizer("a+3-4", add_special_tokens=False)["input_ids"]) == 3  # a, +3, -4


class Scripted(torch.nn.Module):
    """Answers every prompt with the tokens that a function of the prompt's text gives."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, answer: Any) -> None:
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = [self.answer(self.tokenizer.decode(row)) for row in input_ids]
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        width = max(map(len, rows))
        padded = [row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


def test_exact_match_counts_answers_behind_the_thought(tokenizer: Any) -> None:
    chains = held_out_chains(random.Random(3), 20)
    rows = [chain.messages() for chain in chains]
    by_question = {chain.question: chain for chain in chains}

    def chain_of(prompt: str) -> Chain:
        found = re.search(r"<user>(.*)<assistant>", prompt)
        assert found
        return by_question[found[1]]

    def score(answer: Any) -> float:
        return exact_match(Scripted(tokenizer, answer), tokenizer, rows, max_new_tokens=40)

    assert score(lambda p: f"{chain_of(p).thought}</think>{chain_of(p).answer}<eos>") == 1
    assert score(lambda p: f"{chain_of(p).thought}</think>{chain_of(p).answer}<eos>junk") == 1
    assert score(lambda p: f"{chain_of(p).thought}</think>{chain_of(p).answer}{chain_of(p).answer}<eos>") == 0
    assert score(lambda p: chain_of(p).answer) == 0  # never stopped thinking
    evens = sum(int(chain.answer) % 2 == 0 for chain in chains) / len(chains)
    assert score(lambda p: f"</think>{int(chain_of(p).answer) // 2 * 2}<eos>") == evens


def test_held_out_loss_is_the_models_own() -> None:
    """transformers' loss on each unpadded row, weighted by its targets."""
    model = tiny_model()
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    with torch.no_grad():
        rows = [(model(ids[:1], labels=ids[:1]).loss, 19), (model(ids[1:, :12], labels=ids[1:, :12]).loss, 11)]
    expected = sum(loss.item() * count for loss, count in rows) / 30
    batches = [{"input_ids": ids, "attention_mask": mask}]
    assert held_out_loss(ElasticModel(model), batches, chunk_tokens=7) == pytest.approx(expected, rel=1e-5)


def choice(target: float, cost: float) -> Choice:
    return Choice("params", target, cost, cost / target - 1, 0.875, True, {"hidden": 48, "expert_ffn": 16}, "")


def size(sorted_loss: float, trained_loss: float, is_parent: bool) -> Size:
    quality = {name: Quality(loss, 0.5) for name, loss in (("sorted", sorted_loss), ("trained", trained_loss))}
    return Size("x", choice(1000, 960), {}, 1, 1, 1, quality, is_parent)


def test_a_smaller_size_must_improve_and_the_parents_own_must_not_get_worse() -> None:
    assert size(2.0, 1.9, False).verdict == "better"
    assert size(2.0, 2.0, False).verdict == "WORSE"
    assert size(2.0, 2.03, True).verdict == "kept"
    assert size(2.0, 2.05, True).verdict == "WORSE"


def test_stages_are_reused_and_foreign_folders_refused(tmp_path: Path) -> None:
    console, made = Console(quiet=True), []

    def work(folder: Path) -> None:
        folder.mkdir()
        made.append(folder.name)

    for _ in range(2):
        Stages(tmp_path / "demo", QUICK, console).run("data", "data", work)
    assert made == ["data"]
    with pytest.raises(TargetError, match="other settings"):
        Stages(tmp_path / "demo", replace(QUICK, seed=1), console)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(TargetError, match="holds no demo"):
        Stages(tmp_path / "mine", QUICK, console)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_the_facts_hold_on_real_folders_and_fail_on_wrong_ones(tmp_path: Path) -> None:
    parent = tiny_folder(tmp_path / "parent")
    sort_folder(parent, tmp_path / "sorted", {"hidden": list(range(63, -1, -1))})
    submodels = {"small": Submodel(widths={"hidden": 32, "expert_ffn": 16})}
    slice_checkpoint(tmp_path / "sorted", tmp_path / "small", submodels["small"], progress=False)
    elastic = ElasticModel.from_pretrained(tmp_path / "sorted", submodels=submodels)
    ids = tokens(2, 16)
    assert sorted_equals_parent(parent, tmp_path / "sorted", ids).holds
    assert views_equal_folders(elastic, {"small": tmp_path / "small"}, ids).holds
    assert sizes_share_memory(elastic, ["small"]).holds

    other = tiny_folder(tmp_path / "other", seed=5)
    assert not sorted_equals_parent(parent, other, ids).holds
    slice_checkpoint(other, tmp_path / "wrong", submodels["small"], progress=False)
    assert not views_equal_folders(elastic, {"small": tmp_path / "wrong"}, ids).holds
    elastic.add("heads", Submodel(widths={"mamba_heads": 4}))
    assert not sizes_share_memory(elastic, ["small", "heads"]).holds

    held = sum(tensor.numel() for tensor in load_file(tmp_path / "small" / "model.safetensors").values())
    held -= sum(buffer.numel() for name, buffer in elastic.model.named_buffers() if "correction_bias" in name)
    for share, holds in ((1.04, True), (0.96, True), (1.06, False), (0.94, False)):
        # What the router says of its own choice does not count.
        fact = budgets_are_met({"small": choice(held / share, held / share)}, {"small": tmp_path / "small"})
        assert fact.holds is holds and f"small {share - 1:+.1%}" in fact.measured


def test_the_router_s_choice_is_printed_with_its_error_and_certainty() -> None:
    console = Console(width=80, file=io.StringIO())
    print_choices([size(2.0, 1.9, False)], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    row = re.findall(r"[^\s│]+", printed.splitlines()[-2])
    assert row == ["x", "1,000", "960", "-4.0%", "48", "16", "88%"]
    assert "expert_ffn" in printed  # nothing is wrapped at the usual width


def test_the_shipped_recipe_is_the_demo_s() -> None:
    shipped = load_recipe(Path(__file__).parent.parent / "recipes" / "demo.yaml")
    out = Path("demo-out")
    assert shipped == Recipe.model_validate(demo_recipe(FULL, out / "sorted", Path("demo-family"), out / "data"))


def test_a_search_that_ends_off_its_budgets_stops_the_demo_each_time(tmp_path: Path) -> None:
    """One step is too few for a router; a second call goes on with the same run and must not pass it off as done."""
    parent, data = tiny_folder(tmp_path / "parent", vocab_size=288), tmp_path / "data"
    data.mkdir()
    write_data(data, rows=40, text_chars=4000, held_out=4, seed=0)
    write_tokenizer(parent)
    settings = replace(QUICK, search_steps=1, settle_steps=1, batch_size=2)
    for _ in range(2):
        with pytest.raises(TrainingStopped, match=r"off its budgets .* '(mid|small)' would get .*%"):
            demo_run._train(tmp_path / "elastic", parent, data, settings, progress=False)
        assert not (tmp_path / "elastic").exists()


def test_the_demo_fails_when_a_fact_or_a_size_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from star_elastic.cli import main

    for passed, code in ((True, 0), (False, 1)):
        monkeypatch.setattr("star_elastic.demo.run_demo", lambda *_, p=passed, **__: SimpleNamespace(passed=p))
        assert main(["demo"]) == code
    assert demo_run.run_demo is not None
