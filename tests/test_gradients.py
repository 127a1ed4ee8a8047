"""Gradients of a step: several budgets on the same rows, rows in parts, and what reaches the router."""

from __future__ import annotations

import pytest
import torch
from search_runs import search_content, search_parent, write_recipe

from star_elastic.train import load_recipe
from star_elastic.train.gradients import distil, split
from star_elastic.train.prepare import prepare
from star_elastic.train.state import RunFolder
from star_elastic.train.trainer import Trainer


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return search_parent(tmp_path_factory.mktemp("model") / "parent")


@pytest.fixture
def trainer(parent, tmp_path):
    loaded = load_recipe(write_recipe(search_content(parent, tmp_path), tmp_path))
    made = Trainer(prepare(loaded), RunFolder(loaded))
    made.student.eval()
    return made


def gradients(module):
    found = {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None
    }
    module.zero_grad(set_to_none=True)
    return found


def assert_close(one, two, tolerance):
    assert one.keys() == two.keys() and one
    for name in one:
        assert (one[name] - two[name]).abs().max() <= tolerance * max(two[name].abs().max(), 1e-3), name


def padded_batch():
    ids = torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:], mask[3, 9:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def search_gradients(trainer, names, parts, batch):
    trainer.search.noise.manual_seed(5)
    samples = {name: trainer.search.sample(name, 2) for name in names}
    losses = distil(trainer.student, trainer.learner.teacher, batch, trainer.learner.views(names, samples), parts=parts)
    trainer.search.backward(samples)
    return losses, gradients(trainer.student) | gradients(trainer.search.router)


def test_several_budgets_share_one_answer_and_average_their_gradients(trainer, monkeypatch):
    names, batch = ["full", "mid", "small"], padded_batch()
    asked = []
    features = trainer.learner.teacher.model.features
    monkeypatch.setattr(trainer.learner.teacher.model, "features", lambda *args: (asked.append(1), features(*args))[1])
    losses, together = search_gradients(trainer, names, 1, batch)
    assert len(asked) == 1

    trainer.search.noise.manual_seed(5)
    apart, alone = [], {}
    for name in names:
        samples = {name: trainer.search.sample(name, 2)}
        alone |= distil(trainer.student, trainer.learner.teacher, batch, trainer.learner.views([name], samples))
        trainer.search.backward(samples)
        apart.append(gradients(trainer.student) | gradients(trainer.search.router))
    mean = {name: sum(part[name] for part in apart) / 3 for name in together}
    assert_close(together, mean, 1e-5)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {n: v.item() for n, v in alone.items()}
    )


def test_rows_in_parts_give_the_gradient_of_all_rows(trainer):
    """Padding makes the parts unequal: the mean is over real tokens, not over parts."""
    batch = padded_batch()
    losses, whole = search_gradients(trainer, ["mid", "small"], 1, batch)
    for parts in (2, 3, 4):
        partly, added = search_gradients(trainer, ["mid", "small"], parts, batch)
        assert_close(added, whole, 1e-5)
        for name in losses:
            assert partly[name].item() == pytest.approx(losses[name].item(), rel=1e-6)


def test_rows_are_split_without_empty_parts():
    batch = padded_batch()
    for parts in (1, 2, 3, 4, 9):
        pieces = list(split(batch, parts))
        assert all(len(piece["input_ids"]) for piece in pieces) and len(pieces) <= parts
        assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])


def test_the_router_learns_from_the_model_too(trainer):
    """Its gradient is that of the whole loss, by autograd through everything at once, not only that of the budget."""
    batch, search = padded_batch(), trainer.search
    _, ours = search_gradients(trainer, ["small"], 2, batch)
    search.noise.manual_seed(5)
    drawn = search.router.sample(
        "small", tau=search.sharpness(2)[0], scale=search.sharpness(2)[1], generator=search.noise
    )
    with trainer.student.masked(search.router.masks(drawn)):
        loss = trainer.learner.teacher.distance(trainer.learner.teacher.answer(batch), trainer.student, batch)
    kd = torch.autograd.grad(loss, list(search.router.parameters()), retain_graph=True, allow_unused=True)
    assert max(grad.abs().max() for grad in kd) > 1e-4
    budgets = sum(search.budget_loss(name, 2) for name in ("full", "mid", "small")) / 3
    (loss + search.options.weight * budgets).backward()
    assert_close(ours, gradients(trainer.student) | gradients(search.router), 1e-5)
