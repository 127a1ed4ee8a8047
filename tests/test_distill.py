"""The chunked loss against torch's own kl_div on full logits (case: full [B, T, V] buffers of 28 GB)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from star_elastic.train.distill import chunked_cross_entropy, chunked_kl

B, T, DS, DT, V = 3, 37, 12, 20, 101


def problem(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    student = random(B, T, DS).requires_grad_()
    head = random(V, DS).requires_grad_()
    mask = (torch.rand(B, T, generator=generator) < 0.7).long()
    return student, head, random(B, T, DT), random(V, DT), mask


def reference(student, head, teacher, teacher_head, mask):
    """kl_div on whole logits, in the dtype given; the mean over real tokens."""
    student_log = F.log_softmax(student @ head.T, dim=-1)
    teacher_log = F.log_softmax(teacher @ teacher_head.T, dim=-1)
    per_token = F.kl_div(student_log, teacher_log, log_target=True, reduction="none").sum(-1)
    return (per_token * mask).sum() / mask.sum()


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("chunk", [1, 7, 64, B * T, 10 * B * T])
def test_loss_and_gradients_equal_kl_div_on_full_logits(chunk):
    student, head, *rest = problem()
    loss = chunked_kl(student, head, *rest, chunk)
    expected = reference(student, head, *rest)
    assert abs(loss - expected) < 1e-6
    for ours, theirs in zip(gradients(loss, student, head), gradients(expected, student, head), strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def test_gradients_scale_with_what_comes_from_above_and_survive_a_second_backward():
    student, head, *rest = problem()
    loss = 3 * chunked_kl(student, head, *rest, 16)
    first = torch.autograd.grad(loss, (student, head), retain_graph=True)
    second = torch.autograd.grad(loss, (student, head))
    expected = gradients(3 * reference(student, head, *rest), student, head)
    for a, b, c in zip(first, second, expected, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-8)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-8)


def test_gradcheck():
    student, head, teacher, teacher_head, mask = problem()
    cut = slice(0, 5)
    args = (student[:1, cut].detach().requires_grad_(), head[:9].detach().requires_grad_())
    frozen = (teacher[:1, cut], teacher_head[:9], mask[:1, cut])
    assert torch.autograd.gradcheck(lambda s, h: chunked_kl(s, h, *frozen, 2), args)


def test_padding_has_no_loss_and_no_gradient():
    student, head, teacher, teacher_head, mask = problem()
    loss = chunked_kl(student, head, teacher, teacher_head, mask, 16)
    grad = gradients(loss, student)[0]
    assert torch.equal(grad[mask == 0], torch.zeros_like(grad[mask == 0]))
    noisy = torch.where(mask[..., None] == 0, torch.full_like(teacher, 1e6), teacher)
    assert torch.equal(chunked_kl(student, head, noisy, teacher_head, mask, 16), loss)


def test_without_a_mask_every_token_counts_and_without_tokens_the_loss_is_zero():
    student, head, teacher, teacher_head, mask = problem()
    everything = torch.ones_like(mask)
    assert torch.equal(
        chunked_kl(student, head, teacher, teacher_head, None, 16),
        chunked_kl(student, head, teacher, teacher_head, everything, 16),
    )
    nothing = chunked_kl(student, head, teacher, teacher_head, torch.zeros_like(mask), 16)
    assert nothing == 0 and gradients(nothing, student)[0].abs().max() == 0


def test_teacher_and_itself_have_no_distance_and_the_teacher_gets_no_gradient():
    student, head, *_ = problem()
    teacher = student.detach().clone().requires_grad_()
    loss = chunked_kl(student, head, teacher, head, None, 16)
    assert abs(loss) < 1e-12
    loss.backward()
    assert teacher.grad is None


def test_large_logits_stay_finite():
    student, head, teacher, teacher_head, mask = problem(torch.float32)
    loss = chunked_kl(student * 1e3, head, teacher * 1e3, teacher_head, mask, 16)
    assert torch.isfinite(loss) and torch.isfinite(gradients(loss, head)[0]).all()


def test_bf16_autocast_runs_products_in_bf16_and_the_loss_in_fp32():
    student, head, teacher, teacher_head, mask = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_kl(student, head, teacher, teacher_head, mask, 16)
        student_log = F.log_softmax(F.linear(student, head).float(), dim=-1)
        teacher_log = F.log_softmax(F.linear(teacher, teacher_head).float(), dim=-1)
        per_token = F.kl_div(student_log, teacher_log, log_target=True, reduction="none").sum(-1)
        expected = (per_token * mask).sum() / mask.sum()
    exact = reference(student, head, teacher, teacher_head, mask)
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 1e-6 * expected  # the same bf16 logits, the same fp32 softmax
    assert abs(loss - exact) > 2e-6 * exact  # and they really were bf16
    for ours, theirs in zip(gradients(loss, student, head), gradients(expected, student, head), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


class Allocations(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def largest_of(loss_of):
    student, head, teacher, teacher_head, mask = problem(torch.float32)
    with Allocations() as seen:
        loss_of(student, head, teacher, teacher_head, mask).backward()
    return seen.largest


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    chunk = 24  # a chunk of logits, 24 x 101, is larger than either head and than all hidden states
    limit = max(chunk * V, V * DT, B * T * DT)
    assert limit == chunk * V and limit < B * T * V / 4
    assert largest_of(lambda *args: chunked_kl(*args, chunk)) == limit
    assert largest_of(reference) == B * T * V  # the meter sees what it should


@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_cross_entropy_equals_torch_on_shifted_tokens(chunk):
    hidden, head, _, _, mask = problem()
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3))
    labels = torch.where(mask == 0, torch.full_like(ids, -100), ids)[:, 1:]
    expected = F.cross_entropy((hidden @ head.T)[:, :-1].reshape(-1, V), labels.reshape(-1), ignore_index=-100)
    assert abs(chunked_cross_entropy(hidden, head, ids, mask, chunk) - expected) < 1e-10
    whole = F.cross_entropy((hidden @ head.T)[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))
    assert abs(chunked_cross_entropy(hidden, head, ids, None, chunk) - whole) < 1e-10
