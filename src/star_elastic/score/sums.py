"""Sums over calibration tokens, gathered batch by batch, that scores are made of. All in fp64, and all of them can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from star_elastic.errors import DataError


class Sums(Protocol):
    """What is gathered at one place of a model.

    Attributes:
        place: the module listened to, named in errors.
    """

    place: str

    def finish_batch(self) -> None:
        """Close the batch."""

    def finite(self) -> Tensor:
        """Whether everything gathered is a finite number, a boolean scalar on the device that gathers."""

    def state(self) -> dict[str, Tensor]:
        """Everything gathered, between batches."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an earlier ``state``."""


class ChannelSums:
    """Importance of channels. Aggregate [Minitron]: per sample the mean over real tokens of |activation|, then over samples the
    root of the sum of squares. fp64 costs little, because tokens shrink at once to samples.

    Args:
        place: the module listened to.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.squares: Tensor | None = None  # (C,) sum over samples of the squared mean
        self.tokens = torch.zeros((), dtype=torch.int64)
        self._sums: Tensor | None = None  # (B, C) of the batch in progress
        self._counts: Tensor | None = None  # (B,)

    def measure(self, activation: Tensor) -> Tensor:
        """What is summed over tokens."""
        return activation.abs()

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """Add sums of what is measured (B, C) over ``counts`` (B,) tokens of each sample in the batch."""
        self._sums = sums if self._sums is None else self._sums + sums
        self._counts = counts if self._counts is None else self._counts + counts

    def finish_batch(self) -> None:
        """Turn the batch's sums into means, and square them into the total."""
        if self._sums is None or self._counts is None:
            return
        means = self._sums / self._counts.clamp(min=1).unsqueeze(1)
        squares = means.square().sum(0)
        self.squares = squares if self.squares is None else self.squares.to(squares.device) + squares
        self.tokens = self.tokens.to(squares.device) + self._counts.sum()
        self._sums = self._counts = None

    def finite(self) -> Tensor:
        """Whether no activation so far was NaN or infinite."""
        return torch.tensor(True) if self.squares is None else torch.isfinite(self.squares).all()

    @property
    def heard(self) -> bool:
        """Whether a real token came by."""
        return int(self.tokens) > 0

    def importance(self) -> Tensor:
        """Root of the sum of squares, fp64 (C,).

        Raises:
            DataError: no token ever came by; zero would be a false score.
        """
        if self.squares is None or not self.heard:
            raise DataError(
                f"no calibration token reached {self.place}, so its channels cannot be ranked: give more data"
            )
        return self.squares.cpu().sqrt()

    def state(self) -> dict[str, Tensor]:
        """Squares and tokens; nothing before the first token."""
        return {} if self.squares is None else {"squares": self.squares, "tokens": self.tokens}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an earlier ``state``."""
        self.squares, self.tokens = state["squares"], state["tokens"]


class SquareSums(ChannelSums):
    """Energy of channels: the root of the sum over real tokens of the squared activation, all samples alike, as Wanda takes it
    (arXiv 2306.11695). Times the norm of the columns that read it, this is how much a channel adds to what comes behind."""

    def measure(self, activation: Tensor) -> Tensor:
        """What is summed over tokens."""
        return activation.float().square()

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """Add sums of squares (B, C) over ``counts`` (B,) tokens of each sample in the batch."""
        squares = sums.sum(0)
        self.squares = squares if self.squares is None else self.squares.to(squares.device) + squares
        self.tokens = self.tokens.to(squares.device) + counts.sum()


class CosineSums:
    """How much a layer turns the residual stream: the mean over real tokens of 1 - cosine(input, output).

    Args:
        place: the layer.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.total = torch.zeros((), dtype=torch.float64)
        self.tokens = torch.zeros((), dtype=torch.int64)

    def add(self, before: Tensor, after: Tensor, mask: Tensor) -> None:
        """Add one batch: hidden states (B, T, D), and which tokens are real (B, T)."""
        cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
        self.total = self.total.to(mask.device) + (1 - cosine).masked_fill(~mask, 0).sum()
        self.tokens = self.tokens.to(mask.device) + mask.sum()

    def finish_batch(self) -> None:
        """Nothing is left open between batches."""

    def finite(self) -> Tensor:
        """Whether no hidden state so far was NaN or infinite."""
        return torch.isfinite(self.total)

    def importance(self) -> float:
        """The mean."""
        return float(self.total) / max(1, int(self.tokens))

    def state(self) -> dict[str, Tensor]:
        """Total and tokens."""
        return {"total": self.total, "tokens": self.tokens}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an earlier ``state``."""
        self.total, self.tokens = state["total"], state["tokens"]
