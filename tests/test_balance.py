"""Even loads for experts: what is counted under each lens, how the biases move, and that a run keeps them."""

from __future__ import annotations

import pytest
import torch
from processes import run
from safetensors.torch import load_file, save_file
from tiny import tiny_folder, tiny_llama, tiny_model, tiny_qwen3_moe

from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.elastic import ElasticModel
from star_elastic.errors import RecipeError
from star_elastic.submodel import Submodel
from star_elastic.train import models, train_family
from star_elastic.train.balance import ExpertBalance
from star_elastic.train.ranks import Ranks, joined
from star_elastic.train.recipe import Recipe
from star_elastic.train.state import RunFolder

STEP = 0.01


@pytest.fixture
def elastic():
    model = ElasticModel(tiny_model(pattern="ME*E").train())
    model.add("half", Submodel(widths={"experts": 4, "hidden": 48}))
    model.add("short", Submodel(widths={"experts": 4}, layers=(0, 1, 2)))
    return model


def ids(rows=3, length=20):
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(1))


def biases(elastic):
    return {name: b.clone() for name, b in elastic.model.named_buffers() if name.endswith("correction_bias")}


def loads(model, tokens, mask=None):
    """Tokens per expert and layer of a plain transformers model, from its own record of router logits and the bias."""
    found = []
    hooks = [
        module.register_forward_hook(lambda m, a, out: found.append(out[2]))
        for name, module in model.named_modules()
        if name.endswith("mixer.gate")
    ]
    with torch.no_grad():
        model(tokens, attention_mask=mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    rows = [chosen if mask is None else chosen[mask.flatten() == 1] for chosen in found]
    return [torch.bincount(chosen.flatten(), minlength=8) for chosen in rows]


def expected(counts):
    """Moves by hand: experts below the mean of their layer rise, those above it fall."""
    return [STEP * torch.tensor([(sum(c) / len(c) > n) - (sum(c) / len(c) < n) for n in c]) for c in counts]


def moved(elastic, before):
    return [bias - before[name] for name, bias in biases(elastic).items()]


def test_the_whole_model_moves_against_the_load_of_each_expert(elastic):
    before, tokens = biases(elastic), ids()
    wanted = expected([c.tolist() for c in loads(elastic.model, tokens)])
    balance = ExpertBalance(elastic, STEP)
    with balance.counting():
        elastic(tokens)
    balance.update()
    assert all(change.any() for change in wanted)
    for change, move in zip(wanted, moved(elastic, before), strict=True):
        torch.testing.assert_close(move, change, rtol=0, atol=1e-6)
    again = biases(elastic)
    balance.update()  # nothing was counted since
    assert all(torch.equal(again[name], bias) for name, bias in biases(elastic).items())


def test_padding_is_no_load(elastic):
    tokens, mask = ids(), torch.ones(3, 20, dtype=torch.int64)
    mask[1, 3:] = 0
    wanted = expected([c.tolist() for c in loads(elastic.model, tokens, mask)])
    assert [c.tolist() for c in loads(elastic.model, tokens, mask)] != [
        c.tolist() for c in loads(elastic.model, tokens)
    ]
    before, balance = biases(elastic), ExpertBalance(elastic, STEP)
    with balance.counting():
        elastic.features(tokens, mask)
    balance.update()
    for change, move in zip(wanted, moved(elastic, before), strict=True):
        torch.testing.assert_close(move, change, rtol=0, atol=1e-6)


def test_a_slice_moves_its_own_experts_alone(elastic):
    """The reference is the exported view: an ordinary transformers model with four experts."""
    tokens, before = ids(), biases(elastic)
    wanted = expected([c.tolist()[:4] for c in loads(elastic.submodel("half"), tokens)])
    balance = ExpertBalance(elastic, STEP)
    with elastic.at("half"), balance.counting():
        elastic(tokens)
    balance.update()
    for change, move in zip(wanted, moved(elastic, before), strict=True):
        torch.testing.assert_close(move[:4], change, rtol=0, atol=1e-6)
        assert change.any() and not move[4:].any()


def masks(experts=4, depth=(1.0, 1.0, 1.0, 0.0)):
    return {"experts": (torch.arange(8) < experts).float().requires_grad_(), "depth": torch.tensor(depth)}


def test_masks_move_what_the_slice_moves(elastic):
    tokens, start = ids(), biases(elastic)
    moves = []
    for lens in (elastic.at("short"), elastic.masked(masks())):
        for name, bias in elastic.model.named_buffers():
            if name in start:
                bias.copy_(start[name])
        balance = ExpertBalance(elastic, STEP)
        with lens, balance.counting():
            elastic(tokens)
        balance.update()
        moves.append(moved(elastic, start))
    assert moves[0][0][:4].any() and not moves[0][1].any()  # the second expert layer is out
    for one, two in zip(*moves, strict=True):
        torch.testing.assert_close(one, two)


def test_layers_that_are_computed_again_count_once(elastic):
    tokens, balance = ids(), ExpertBalance(elastic, STEP)
    counted = []
    for elastic.checkpointing in (False, True):
        balance = ExpertBalance(elastic, STEP)
        with elastic.at("half"), balance.counting():
            loss = elastic(tokens, labels=tokens).loss
        loss.backward()
        counted.append({module: missing.clone() for module, missing in balance._missing.items()})
    assert all(torch.equal(missing, counted[1][module]) for module, missing in counted[0].items())


def test_nested_models_of_one_step_are_added_before_the_sign(elastic):
    """Experts 0-3 hear the errors of both sizes; with the step's sum zeroed between them the result would differ."""
    tokens, errors = ids(), [torch.zeros(8) for _ in range(2)]
    for name, kept in (("full", 8), ("half", 4)):
        for error, count in zip(errors, loads(elastic.submodel(name), tokens), strict=True):
            error[:kept] += count[:kept].float().mean() - count[:kept]
    before, balance = biases(elastic), ExpertBalance(elastic, STEP)
    for name in ("full", "half"):
        with elastic.at(name), balance.counting():
            elastic(tokens)
    balance.update()
    for error, move in zip(errors, moved(elastic, before), strict=True):
        torch.testing.assert_close(move, STEP * error.sign(), rtol=0, atol=1e-6)


def test_loads_become_even():
    model = ElasticModel(tiny_model(pattern="ME*E"))
    model.add("half", Submodel(widths={"experts": 4}))
    balance, generator = ExpertBalance(model, STEP), torch.Generator().manual_seed(3)

    def excess(name):
        """The busiest expert's load over the mean one's, mean over layers, on tokens of its own."""
        kept = 8 if name == "full" else 4
        counts = loads(model.submodel(name), torch.randint(128, (8, 64), generator=torch.Generator().manual_seed(9)))
        return sum(float(c[:kept].max() / c[:kept].float().mean()) for c in counts) / len(counts)

    before = {name: excess(name) for name in ("full", "half")}
    for _ in range(60):
        tokens = torch.randint(128, (8, 32), generator=generator)
        for name in ("full", "half"):
            with torch.no_grad(), model.at(name), balance.counting():
                model(tokens)
        balance.update()
    for name, most in before.items():
        assert most > 1.5 and excess(name) - 1 < 0.5 * (most - 1), (name, most, excess(name))


def test_models_without_a_bias_to_move_are_refused():
    for model, why in ((tiny_qwen3_moe(), "without a bias"), (tiny_llama(), "no routed experts")):
        with pytest.raises(RecipeError, match=f"balance_experts: .*{why}") as caught:
            ExpertBalance(ElasticModel(model), STEP)
        assert "\n" not in str(caught.value)


# In a training run


@pytest.fixture
def recipe(tmp_path):
    parent = tiny_folder(tmp_path / "parent", pattern="ME*E", vocab_size=288)
    write_tokenizer(parent)
    (tmp_path / "text.txt").write_text("Some text to read, line after line.\n" * 60)
    content = {
        "parent": str(parent),
        "output": str(tmp_path / "out"),
        "submodels": {"full": {}, "small": {"widths": {"experts": 4}}},
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}]},
        "sequence_length": 16,
        "batch_size": 2,
        "steps": 8,
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "balance_experts": {"step": STEP},
        "checkpoint_every": 3,
        "precision": "fp32",
        "device": "cpu",
    }
    return Recipe.model_validate(content)


def stored_biases(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith("correction_bias")}


def test_a_run_moves_biases_by_whole_steps_and_resumes_exactly(recipe, tmp_path, monkeypatch):
    train_family(recipe, progress=False)
    before, after = stored_biases(recipe.parent), stored_biases(tmp_path / "out")
    for name, bias in after.items():
        steps = (bias - before[name]) / STEP
        assert steps.any() and steps.abs().max() < 8.01
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", stopping(5))
        with pytest.raises(Stopped):
            train_family(recipe, [f"output={tmp_path / 'half'}"], progress=False)
    train_family(recipe, [f"output={tmp_path / 'half'}"], progress=False, resume=True)
    for name, bias in stored_biases(tmp_path / "half").items():
        assert torch.equal(bias, after[name]), name


class Stopped(Exception):
    pass


def stopping(step):
    def log(self, line):
        if line["step"] == step:
            raise Stopped

    return log


def test_without_the_key_biases_stay(recipe, tmp_path):
    train_family(recipe, ["balance_experts=null", "steps=3"], progress=False)
    before = stored_biases(recipe.parent)
    for name, bias in stored_biases(tmp_path / "out").items():
        assert torch.equal(bias, before[name]), name


def test_a_run_of_a_model_without_a_bias_is_refused_before_weights_are_loaded(recipe, tmp_path, monkeypatch):
    parent = tmp_path / "softmax"
    tiny_qwen3_moe(vocab_size=288).save_pretrained(parent)
    write_tokenizer(parent)
    monkeypatch.setattr(models, "load_model", None)
    with pytest.raises(RecipeError, match="balance_experts: nothing to move in a model of family qwen3_moe"):
        train_family(recipe, [f"parent={parent}", "submodels={full: {}}"], progress=False)


def test_learned_widths_are_balanced_too(recipe, tmp_path):
    changes = ["submodels=null", "budgets={full: {params: 1.0}, small: {params: 80%}}", "router.max_extension=50"]
    train_family(recipe, [*changes, "router.axes={experts: [0.5, 1.0]}", "router.tolerance=0.3"], progress=False)
    before = stored_biases(recipe.parent)
    assert all((bias - before[name]).any() for name, bias in stored_biases(tmp_path / "out").items())


def balanced_together(tokens, out):
    """Each process counts its half of the rows; the main one stores the biases."""
    model = ElasticModel(tiny_model(pattern="ME*E").train())
    balance, ranks = ExpertBalance(model, STEP), Ranks.here()
    with torch.no_grad(), balance.counting():
        model(tokens.chunk(ranks.size)[ranks.rank])
    balance.update()
    ranks.same("biases", biases(model).values())
    if ranks.is_main:
        save_file(biases(model), out)


def test_processes_count_together(tmp_path):
    tokens = ids(rows=4)
    balanced_together(tokens, tmp_path / "one.safetensors")
    run(tmp_path / "said", 2, joined_call, tokens, tmp_path / "two.safetensors")
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert all(torch.equal(bias, two[name]) for name, bias in one.items())


def joined_call(tokens, out):
    with joined():
        balanced_together(tokens, out)
