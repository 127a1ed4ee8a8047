"""The distillation loss where the teacher's distribution is known only for its K most probable tokens.

The tokens beyond them form one bucket, of which teacher and student have a mass each. With p the teacher's probabilities, s the
student's, and r, q the mass that they leave to the bucket::

    loss = sum over the top K of p (log p - log s)  +  r (log r - log q)

Joining outcomes can only lose information, so this is a lower bound of the full forward KL (the log-sum inequality); with K the
size of the vocabulary r is 0 and the two are equal. What it leaves out is how the student spreads its mass inside the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from star_elastic.train.distill import chunked_loss, logits_of, loss_dtype, product_dtype


@dataclass(frozen=True)
class TopK:
    """What a teacher says about N real tokens.

    Attributes:
        ids: [N, K], the most probable tokens.
        log_p: [N, K], their log-probabilities, perhaps rounded.
        log_rest: [N], log of the mass beyond them; -inf where K is the vocabulary.
        log_sum_exp: [N], what the logits had before they were normalised: ``log_p + log_sum_exp`` are the logits.
    """

    ids: Tensor
    log_p: Tensor
    log_rest: Tensor
    log_sum_exp: Tensor


@torch.no_grad()
def top_k(hidden: Tensor, head: Tensor, k: int, chunk_tokens: int) -> TopK:
    """The K most probable tokens of each of N states.

    Args:
        hidden: [N, D].
        head: [V, D].
        k: Tokens to keep, at most V.
        chunk_tokens: States whose logits exist at one time.
    """
    head = head.to(product_dtype(hidden))
    parts = []
    for start in range(0, len(hidden), chunk_tokens):
        logits = logits_of(hidden[start : start + chunk_tokens], head)
        log_sum_exp = logits.logsumexp(dim=-1)
        values, ids = logits.topk(k, dim=-1)
        rest = logits.scatter_(1, ids, float("-inf")).logsumexp(dim=-1)
        parts.append((ids.int(), values - log_sum_exp[:, None], rest - log_sum_exp, log_sum_exp))
    return TopK(*(torch.cat(piece) for piece in zip(*parts, strict=True)))


def topk_kl(hidden: Tensor, head: Tensor, answer: TopK, mask: Tensor | None, chunk_tokens: int) -> Tensor:
    """Forward KL of a student from what a teacher says about its top K tokens and the rest as one bucket.

    Args:
        hidden: [B, T, D], the student's last hidden states after the final norm.
        head: [V, D], its output embedding.
        answer: Of the real tokens, N in all, in the order of the rows. Its rounding is taken out: probabilities of the top K are
            scaled so that with the rest they sum to 1.
        mask: [B, T], non-zero at real tokens; None counts every token.
        chunk_tokens: Tokens whose logits exist at one time.

    Returns:
        The mean over real tokens, in nats: a scalar in fp32 (fp64 for fp64 inputs).
    """
    dtype = loss_dtype(hidden)

    def rule(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        ids, log_rest = answer.ids[part].long(), answer.log_rest[part].to(dtype)
        log_p = answer.log_p[part].to(dtype)
        log_p = log_p + (torch.log1p(-log_rest.exp()) - log_p.logsumexp(dim=-1))[:, None]
        return _kl_and_gradient(logits, ids, log_p, log_rest)

    return chunked_loss(hidden, head, mask, rule, chunk_tokens)


def _kl_and_gradient(logits: Tensor, ids: Tensor, log_p: Tensor, log_rest: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk and its gradient [n, V]: s - p in the top K, and s - r s / q beyond."""
    log_s = F.log_softmax(logits, dim=-1)
    p, r = log_p.exp(), log_rest.exp()
    beyond = log_s.scatter(1, ids, float("-inf"))
    # Where K is the vocabulary the bucket is empty: a finite log q leaves r log q at 0, and s / q at 0.
    log_q = beyond.logsumexp(dim=-1).clamp_min(torch.finfo(log_s.dtype).min)
    loss = torch.sum(p * (log_p - log_s.gather(1, ids))) + torch.sum(torch.xlogy(r, r) - r * log_q)
    gradient = log_s.exp_().sub_(beyond.sub_(log_q[:, None]).exp_().mul_(r[:, None]))
    return loss, gradient.scatter_add_(1, ids, -p)
