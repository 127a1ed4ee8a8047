"""A teacher on disk: what is stored, what training makes of it, interruption, and caches of something else."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_folder
from transformers import AutoModelForCausalLM

from star_elastic.cli import main
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.errors import CheckpointError, RecipeError, TargetError
from star_elastic.train import cache_run, models, train_family
from star_elastic.train.batches import planned_batches
from star_elastic.train.cache_run import CachingStopped, cache_teacher
from star_elastic.train.prepare import prepare
from star_elastic.train.recipe import Recipe
from star_elastic.train.teacher_cache import CachedTeacher

V = 288
STAGES = [
    {"phase": "settle", "steps": 3, "sequence_length": 12, "batch_size": 4, "accumulate": 2},
    {"phase": "settle", "steps": 4, "sequence_length": 20},
]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("model") / "parent", pattern="ME*", vocab_size=V)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def recipe(parent, tmp_path):
    """Two stages of rows that differ in length; documents apart, so that rows are padded."""
    lines = [json.dumps({"text": "word " * (1 + i % 4) + str(i)}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "parent": str(parent),
        "output": str(tmp_path / "out"),
        "submodels": {"full": {}, "small": {"widths": {"hidden": 48, "experts": 4}}},
        "data": {"sources": [{"path": str(tmp_path / "text.jsonl")}], "packing": "apart"},
        "batch_size": 2,
        "stages": STAGES,
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "precision": "fp32",
        "kl_chunk_tokens": 7,
        "checkpoint_every": 2,
        "device": "cpu",
    }
    return Recipe.model_validate(content)


def cache(recipe, out, k=V, **options):
    return cache_teacher(recipe, out, k, progress=False, **{"dtype": "fp32", **options})


def shards(folder):
    return {str(file.relative_to(folder)): load_file(file) for file in sorted(folder.rglob("*.safetensors"))}


def losses(recipe, output, *overrides, **options):
    train_family(recipe, [f"output={output}", *overrides], progress=False, **options)
    return [json.loads(line)["kd_loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_answers_are_those_of_the_parent(recipe, parent, tmp_path):
    """The reference is transformers' own forward, row by row without padding."""
    report = cache(recipe, tmp_path / "answers", k=5)
    assert report.rows == 3 * 4 + 4 * 2
    teacher = CachedTeacher(tmp_path / "answers", 7)
    reference = AutoModelForCausalLM.from_pretrained(parent).eval()
    tokens = padded = 0
    for _, batch in planned_batches(prepare(recipe)):
        tokens += int(batch["attention_mask"].sum())
        padded += int((batch["attention_mask"] == 0).sum())
        answer, at = teacher.answer(batch), 0
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            with torch.no_grad():
                log_p = reference(ids[None, :length], use_cache=False).logits[0].log_softmax(-1)
            here = slice(at, at := at + length)
            torch.testing.assert_close(answer.log_p[here], log_p.topk(5).values, rtol=0, atol=1e-4)
            torch.testing.assert_close(log_p.gather(1, answer.ids[here].long()), answer.log_p[here], rtol=0, atol=1e-4)
            rest = 1 - log_p.topk(5).values.exp().sum(-1)
            torch.testing.assert_close(answer.log_rest[here].exp(), rest, rtol=0, atol=1e-4)
        assert at == len(answer.ids)
    assert report.tokens == tokens and padded


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 2e-3)])
def test_training_with_the_whole_vocabulary_follows_training_with_the_teacher(recipe, tmp_path, dtype, tolerance):
    cache(recipe, tmp_path / "answers", dtype=dtype)
    live = losses(recipe, tmp_path / "live")
    cached = losses(recipe, tmp_path / "cached", f"teacher_cache={tmp_path / 'answers'}")
    assert len(live) == 7 and max(live) > 1
    assert cached == pytest.approx(live, rel=tolerance, abs=1e-5)
    told = (tmp_path / "cached/elastic.json").read_text()
    assert '"answers"' in told and str(tmp_path) not in told
    stored = {n: (t.dtype, t.shape) for n, t in load_file(tmp_path / "live/model.safetensors").items()}
    assert stored == {n: (t.dtype, t.shape) for n, t in load_file(tmp_path / "cached/model.safetensors").items()}


def test_training_needs_no_teacher_in_memory(recipe, tmp_path, monkeypatch):
    cache(recipe, tmp_path / "answers", k=3)
    monkeypatch.setattr(models, "load_teacher", None)
    assert losses(recipe, tmp_path / "cached", f"teacher_cache={tmp_path / 'answers'}")


class Killed(Exception):
    pass


def test_an_interrupted_cache_and_run_end_as_unbroken_ones(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_run, "SHARD_BYTES", 1)  # a shard per batch
    cache(recipe, tmp_path / "whole", k=9)
    asked = []

    def save(tensors, file, real=cache_run._save):
        asked.append(file.name)
        if len(asked) == 5:
            raise Killed
        real(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr(cache_run, "_save", save)
        with pytest.raises(Killed):
            cache(recipe, tmp_path / "broken", k=9)
        assert not (tmp_path / "broken").exists() and len(shards(tmp_path / "broken.run")) == 4
        with pytest.raises(TargetError, match=r"broken\.run holds an unfinished cache: continue it with --resume"):
            cache(recipe, tmp_path / "broken", k=9)
        with pytest.raises(CheckpointError, match="is of another recipe, parent or top-k"):
            cache(recipe, tmp_path / "broken", k=8, resume=True)
        cache(recipe, tmp_path / "broken", k=9, resume=True)
    assert len(asked) == 5 + 3  # seven batches, of which four were there
    whole, resumed = shards(tmp_path / "whole"), shards(tmp_path / "broken")
    assert whole.keys() == resumed.keys() and len(whole) == 7 and not (tmp_path / "broken.run").exists()
    for file, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed[file][name]), (file, name)
    assert (tmp_path / "whole/cache.json").read_text() == (tmp_path / "broken/cache.json").read_text()


def test_a_resumed_training_asks_for_the_same_answers(recipe, tmp_path, monkeypatch):
    cache(recipe, tmp_path / "answers", k=9)
    use = f"teacher_cache={tmp_path / 'answers'}"
    unbroken = losses(recipe, tmp_path / "unbroken", use)
    answer = CachedTeacher.answer
    count = iter(range(100))

    def dying(self, batch):
        if next(count) == 8:  # the third step of the second stage
            raise Killed
        return answer(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(CachedTeacher, "answer", dying)
        with pytest.raises(Killed):
            losses(recipe, tmp_path / "resumed", use)
    assert losses(recipe, tmp_path / "resumed", use, resume=True) == unbroken


def test_a_signal_stops_between_batches(recipe, tmp_path, monkeypatch):
    ask, sent = cache_run._Writer._ask, []

    def interrupted(self, teacher, part):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return ask(self, teacher, part)

    with monkeypatch.context() as patch:
        patch.setattr(cache_run._Writer, "_ask", interrupted)
        with pytest.raises(CachingStopped, match="the same with --resume continues"):
            cache(recipe, tmp_path / "answers", k=3)
    assert not (tmp_path / "answers").exists()
    cache(recipe, tmp_path / "answers", k=3, resume=True)


def test_a_signal_while_the_folder_is_made_says_how_to_go_on(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache_run._Writer, "check_space", lambda *args: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(CachingStopped, match="the same with --resume continues"):
            cache(recipe, tmp_path / "answers", k=3)
    cache(recipe, tmp_path / "answers", k=3, resume=True)


# What is refused


@pytest.fixture
def answers(recipe, tmp_path):
    cache(recipe, tmp_path / "answers", k=3)
    return tmp_path / "answers"


def test_a_cache_of_something_else_is_refused_before_weights_are_loaded(recipe, answers, tmp_path, monkeypatch):
    other = tiny_folder(tmp_path / "other", pattern="ME*", vocab_size=V, seed=1)
    write_tokenizer(other)
    text = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "more.jsonl").write_text(text + '{"text": "one more"}\n')
    shuffled = tmp_path / "text" / "text.jsonl"
    shuffled.parent.mkdir()
    shuffled.write_text(text.replace("word", "mood"))
    longer = [STAGES[0], {**STAGES[1], "sequence_length": 16}]
    more = [STAGES[0], {**STAGES[1], "steps": 5}]
    other_first = [{**STAGES[0], "sequence_length": 15}, STAGES[1]]
    monkeypatch.setattr(models, "load_model", None)
    for change, told in {
        f"parent={other}": "belongs to another parent",
        "seed=3": "belongs to seed 0, not 3",
        f"data.sources.0.path={tmp_path / 'more.jsonl'}": "belongs to other data",
        f"data.sources.0.path={shuffled}": "belongs to other data",
        "data.packing=cross": "belongs to other data",
        f"stages={json.dumps(longer)}": "has 8 rows of 20 tokens for stage 1, the recipe reads 8 of 16",
        f"stages={json.dumps(other_first)}": r"has \d+ rows of \d+ tokens for stage 0, the recipe reads \d+ of 15",
        f"stages={json.dumps(more)}": "has 8 rows of 20 tokens for stage 1, the recipe reads 10 of 20",
        f"teacher_cache={tmp_path / 'text'}": "holds no cache.json: make it with cache-teacher",
    }.items():
        with pytest.raises((RecipeError, CheckpointError), match=f"teacher_cache: .*{told}") as caught:
            train_family(recipe, [f"teacher_cache={answers}", change], progress=False)
        assert "\n" not in str(caught.value), change


def test_a_shorter_last_stage_needs_no_new_cache(recipe, answers, tmp_path):
    fewer = [STAGES[0], {**STAGES[1], "steps": 2}]
    assert len(losses(recipe, tmp_path / "out", f"teacher_cache={answers}", f"stages={json.dumps(fewer)}")) == 5


def test_a_row_that_is_not_there_is_told(recipe, answers):
    teacher = CachedTeacher(answers, 7)
    with pytest.raises(RecipeError, match="has no answer to a row that this run reads"):
        teacher.answer({"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)})


def test_a_damaged_shard_is_told(recipe, answers):
    next(answers.rglob("*.safetensors")).write_bytes(b"xx")
    with pytest.raises(CheckpointError, match=r"00000\.safetensors cannot be read .*make the cache again"):
        CachedTeacher(answers, 7)


def test_searches_that_may_be_extended_are_refused(recipe, tmp_path):
    content = recipe.model_dump(exclude_unset=True, exclude={"submodels", "stages"})
    budgets = {"steps": 20, "sequence_length": 16, "budgets": {"full": {"params": 1.0}, "small": {"params": "80%"}}}
    searching = Recipe.model_validate(content | budgets)
    with pytest.raises(RecipeError, match=r"teacher_cache: .*set router\.max_extension to 0"):
        cache(searching, tmp_path / "answers")
    assert cache(searching, tmp_path / "answers", k=3, overrides=["router.max_extension=0"]).rows == 40


def test_space_and_k_are_checked_before_work(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)
    with pytest.raises(RecipeError, match=f"top-k {V + 1}: the parent has {V} tokens"):
        cache(recipe, tmp_path / "answers", k=V + 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="not enough space for the cache: needs .* are free; a smaller --top-k"):
        cache(recipe, tmp_path / "answers", k=3)
    assert not (tmp_path / "answers.run").exists()
    with pytest.raises(TargetError, match="nothing to resume"):
        cache(recipe, tmp_path / "answers", k=3, resume=True)


def test_the_verb_writes_what_train_takes(recipe, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.model_dump_json(exclude_unset=True))  # JSON is YAML
    command = ["cache-teacher", str(file), str(tmp_path / "answers"), "--top-k", "3", "stages.1.steps=2"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "16 rows" in told and "will take up to" in told and f"teacher_cache={tmp_path / 'answers'}" in told
    assert main([*command, "--dtype", "int4"]) == 2
    assert main([*command]) == 2 and "not empty" in capsys.readouterr().err
    assert main(["train", str(file), "stages.1.steps=2", f"teacher_cache={tmp_path / 'answers'}"]) == 0


def test_several_processes_are_refused_before_anything_is_read(tmp_path, capsys, monkeypatch):
    words = ["cache-teacher", str(tmp_path / "no-such.yaml"), str(tmp_path / "cache"), "--top-k", "4"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", 1), ("1", 0)):  # the first one says it for all
        monkeypatch.setenv("RANK", rank)
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == told and error.count("cache-teacher is one process, and 2 were started") == told
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert main(words) == 2
    assert "no-such.yaml" in capsys.readouterr().err


def test_a_cache_of_another_vocabulary_is_refused(recipe, answers, tmp_path, monkeypatch):
    """Same text and tokenizer, so even the rows are the same, but the parent has tokens that the cached one lacked."""
    wider = tiny_folder(tmp_path / "wider", pattern="ME*", vocab_size=V + 12)
    write_tokenizer(wider)
    monkeypatch.setattr(models, "load_model", None)
    with pytest.raises(RecipeError, match="answers belongs to another parent: run cache-teacher again"):
        train_family(recipe.model_copy(update={"parent": wider, "teacher_cache": answers}), progress=False)
    assert not list(tmp_path.glob("out*"))
