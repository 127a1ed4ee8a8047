"""The distillation loss, computed in chunks of tokens so that no [B, T, V] tensor ever exists.

With a vocabulary of 131,072 the logits of one row of 49,152 tokens take 24 GiB in fp32, and a plain loss holds several such
tensors (student, teacher, their log-softmax, the gradient). Here a chunk of tokens goes from hidden states to its share of the
loss *and of the gradients* before the next one starts. The gradient of this loss with respect to the logits is known in closed
form, so nothing is recomputed in the backward pass and nothing of the vocabulary's size outlives its chunk, except the gradient
of the head weight itself.

Under autocast the matrix products run in the autocast dtype, as an ordinary linear layer would; softmax, loss and the sum of the
head's gradient stay in fp32 (or fp64 when the inputs are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Rule = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(the student's logits [chunk, V], which tokens they are of) -> (summed loss, its gradient with respect to the logits)."""


def chunked_kl(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor | None,
    chunk_tokens: int,
) -> Tensor:
    """Forward KL(teacher || student) at temperature 1, the mean over real tokens (arXiv 2511.16664, section on distillation).

    For each token, sum over the vocabulary of ``p_teacher * (log p_teacher - log p_student)``; no language-model loss is added.

    Args:
        student_hidden: [B, T, Ds], last hidden states after the final norm.
        student_head: [V, Ds], the student's output embedding.
        teacher_hidden: [B, T, Dt]; no gradient flows to it or to the teacher's head.
        teacher_head: [V, Dt].
        mask: [B, T], non-zero at real tokens; padding gets no loss and no gradient. None counts every token.
        chunk_tokens: Tokens whose logits exist at one time; memory is about six times ``chunk_tokens * V`` numbers.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), zero when no token is real. Gradients reach the student's hidden states and head.
    """
    teacher = real_tokens(teacher_hidden, mask).detach()
    # Cast once: autocast would cast the whole [V, D] head again in every chunk.
    teacher_head = teacher_head.detach().to(product_dtype(teacher))

    def rule(student_logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return _kl_and_residual(student_logits, logits_of(teacher[part], teacher_head))

    return chunked_loss(student_hidden, student_head, mask, rule, chunk_tokens)


def chunked_loss(hidden: Tensor, head: Tensor, mask: Tensor | None, rule: Rule, chunk_tokens: int) -> Tensor:
    """Mean over real tokens of a loss on logits whose gradient is known in closed form.

    Args:
        hidden: [B, T, D].
        head: [V, D].
        mask: [B, T], non-zero at real tokens; None counts every token.
        rule: The loss; it counts real tokens only, in the order of the rows.
        chunk_tokens: Tokens whose logits exist at one time.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), zero when no token is real. Gradients reach hidden states and head.
    """
    loss: Tensor = _ChunkedLoss.apply(real_tokens(hidden, mask), head, rule, chunk_tokens)
    return loss


@torch.no_grad()
def chunked_cross_entropy(
    hidden: Tensor, head: Tensor, input_ids: Tensor, mask: Tensor | None, chunk_tokens: int
) -> Tensor:
    """Mean next-token cross-entropy in nats, for held-out evaluation (no gradient).

    Args:
        hidden: [B, T, D], last hidden states after the final norm.
        head: [V, D].
        input_ids: [B, T]; the state at t predicts the token at t + 1, the last position predicts nothing.
        mask: [B, T], non-zero at real tokens; a prediction counts when its target is real. None counts every token.
        chunk_tokens: Tokens whose logits exist at one time.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs); zero when nothing is predicted.
    """
    targets_real = None if mask is None else mask[:, 1:]
    states = real_tokens(hidden[:, :-1], targets_real)
    targets = real_tokens(input_ids[:, 1:, None], targets_real)[:, 0]
    head = head.to(product_dtype(states))
    total = torch.zeros((), dtype=loss_dtype(states), device=states.device)
    for start in range(0, len(states), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        total += F.cross_entropy(logits_of(states[part], head), targets[part], reduction="sum")
    return total / max(len(states), 1)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one sweep over chunks of N real tokens."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, student_head: Tensor, rule: Rule, chunk_tokens: int) -> Tensor:
        tokens = max(len(student), 1)
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        product = product_dtype(student)
        head = student_head.to(product)
        total = torch.zeros((), dtype=loss_dtype(student), device=student.device)
        hidden_grad = torch.empty_like(student) if wants_hidden else None
        head_grad = torch.zeros_like(student_head, dtype=total.dtype) if wants_head else None

        for start in range(0, len(student), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            loss, residual = rule(logits_of(student[part], head), part)
            total += loss
            residual = residual.div_(tokens).to(product)  # d loss / d logits, [chunk, V]
            if hidden_grad is not None:
                hidden_grad[part] = _matmul(residual, head)
            if head_grad is not None:
                head_grad += _matmul(residual.T, student[part].to(product))

        ctx.save_for_backward(hidden_grad, None if head_grad is None else head_grad.to(student_head.dtype))
        return total / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * upstream[0].to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None)


def _kl_and_residual(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Summed KL of a chunk, and ``p_student - p_teacher``, which is its gradient with respect to the student's logits."""
    student_log = F.log_softmax(student_logits, dim=-1)
    teacher_log = F.log_softmax(teacher_logits, dim=-1)
    teacher_p = teacher_log.exp()
    loss = torch.sum(teacher_p * teacher_log.sub_(student_log))
    return loss, student_log.exp_().sub_(teacher_p)


def real_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, D] -> [N, D], the rows where the mask is non-zero."""
    flat = values.reshape(-1, values.shape[-1])
    if mask is None:
        return flat
    return flat[mask.reshape(-1).to(flat.device) != 0]


def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
    """[chunk, D] and [V, D] -> [chunk, V] in the dtype of the loss."""
    return _matmul(hidden.to(head.dtype), head.T).to(loss_dtype(hidden))


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """A product in the operands' own dtype: they were cast on purpose, and autocast must not cast them again."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def product_dtype(hidden: Tensor) -> torch.dtype:
    """What a linear layer would compute in here: the autocast dtype where autocast is on, else the tensor's own."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # autocast leaves fp64 alone
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def loss_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)
