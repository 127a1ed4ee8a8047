"""The loss from cached answers: equal to the full loss at K = V, to a computation written out for K < V."""

from __future__ import annotations

import math

import pytest
import torch
from test_distill import B, T, V, problem, reference

from star_elastic.train.distill import chunked_kl
from star_elastic.train.topk_loss import TopK, top_k, topk_kl


def answer_of(teacher, head, mask, k):
    return top_k(teacher.reshape(B * T, -1)[mask.flatten() != 0], head, k, 7)


def test_with_the_whole_vocabulary_it_is_the_full_loss():
    student, head, teacher, teacher_head, mask = problem()
    loss = topk_kl(student, head, answer_of(teacher, teacher_head, mask, V), mask, 16)
    full = chunked_kl(student, head, teacher, teacher_head, mask, 16)
    outside = reference(student, head, teacher, teacher_head, mask)
    assert abs(loss - full) < 1e-6 and abs(loss - outside) < 1e-6
    for ours, theirs in zip(
        torch.autograd.grad(loss, (student, head)), torch.autograd.grad(outside, (student, head)), strict=True
    ):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


def written_out(student_logits, teacher_logits, k):
    """The formula for one token, in plain numbers; differentiable in the student's logits."""
    p = teacher_logits.softmax(-1)
    s = student_logits.softmax(-1)
    top = sorted(range(len(p)), key=lambda token: -float(p[token]))[:k]
    rest = [token for token in range(len(p)) if token not in top]
    loss = sum(p[token] * (p[token].log() - s[token].log()) for token in top)
    r, q = sum(p[token] for token in rest), sum(s[token] for token in rest)
    return loss + r * (r.log() - q.log())


@pytest.mark.parametrize("k", [1, 5, V - 1])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_with_fewer_tokens_it_is_the_formula(k, chunk):
    student, head, teacher, teacher_head, mask = problem()
    loss = topk_kl(student, head, answer_of(teacher, teacher_head, mask, k), mask, chunk)
    rows = [(b, t) for b in range(B) for t in range(T) if mask[b, t]]
    logits, wanted = student @ head.T, teacher @ teacher_head.T
    naive = sum(written_out(logits[b, t], wanted[b, t], k) for b, t in rows) / len(rows)
    assert abs(loss - naive) < 1e-9
    for ours, theirs in zip(
        torch.autograd.grad(loss, (student, head)), torch.autograd.grad(naive, (student, head)), strict=True
    ):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_it_bounds_the_full_loss_from_below_and_rises_with_k():
    student, head, teacher, teacher_head, mask = problem()
    with torch.no_grad():
        losses = [
            float(topk_kl(student, head, answer_of(teacher, teacher_head, mask, k), mask, 16)) for k in (1, 4, 32, V)
        ]
        full = float(chunked_kl(student, head, teacher, teacher_head, mask, 16))
    assert losses == sorted(losses) and losses[0] < 0.9 * full and losses[-1] == pytest.approx(full, abs=1e-9)


def test_rounded_answers_stay_distributions():
    """With the student equal to the teacher, an unnormalised rounded answer could push the loss below zero."""
    student, head, *_, mask = problem()
    exact = answer_of(student.detach(), head.detach(), mask, 20)
    for dtype, most in ((torch.float16, 1e-6), (torch.bfloat16, 1e-4)):
        rounded = TopK(exact.ids, exact.log_p.to(dtype), exact.log_rest, exact.log_sum_exp)
        loss = topk_kl(student, head, rounded, mask, 16).detach()
        assert 0 <= float(loss) < most, dtype


def test_the_answer_gives_the_logits_back():
    _, _, teacher, head, mask = problem()
    answer = answer_of(teacher, head, mask, 3)
    logits = (teacher @ head.T).reshape(B * T, V)[mask.flatten() != 0]
    torch.testing.assert_close(answer.log_p + answer.log_sum_exp[:, None], logits.topk(3).values)
    torch.testing.assert_close(logits.gather(1, answer.ids.long()), logits.topk(3).values)
    torch.testing.assert_close(answer.log_rest.exp(), 1 - answer.log_p.exp().sum(-1))
    assert answer.ids.dtype == torch.int32 and not math.isinf(float(answer.log_rest.min()))


def test_a_batch_without_real_tokens_costs_nothing():
    student, head, teacher, teacher_head, mask = problem()
    empty = answer_of(teacher, teacher_head, mask, 3)
    empty = TopK(*(tensor[:0] for tensor in (empty.ids, empty.log_p, empty.log_rest, empty.log_sum_exp)))
    loss = topk_kl(student, head, empty, torch.zeros_like(mask), 16)
    loss.backward()
    assert loss == 0 and not student.grad.any()
