"""Numbers that are not numbers, told where they arise: in a weight, or in what a module gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from star_elastic.errors import CheckpointError


class NotFiniteError(CheckpointError):
    """NaN or infinity in weights, activations or scores: the same run would meet it again."""


def check_weights(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise NotFiniteError with the name of the first tensor that holds NaN or infinity; integers always pass."""
    named = [(name, tensor.detach()) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The two ends say it of all, without a mask as large as the tensor; the device is asked once.
    ends = [torch.isfinite(torch.stack(torch.aminmax(tensor))).all() for _, tensor in named]
    fine = torch.stack([end.cpu() for end in ends]).tolist() if ends else []
    if not all(fine):
        raise NotFiniteError(f"{named[fine.index(False)][0]} holds NaN or infinity, so nothing can be ranked")


def check_scores(scores: Mapping[str, Tensor]) -> None:
    """Raise NotFiniteError with the key of the first scores that are not all finite."""
    for key, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise NotFiniteError(f"scores of {key} hold NaN or infinity, so its members cannot be ranked")


class OutputCheck:
    """Whether what a module gave for real tokens was finite. Sums of one batch; nothing is kept.

    Args:
        place: the module listened to, named in errors.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._fine = torch.tensor(True)

    def add(self, output: Tensor) -> None:
        """See an output, (B, T, D), with zero on padding."""
        self._fine = torch.isfinite(output).all()

    def finish_batch(self) -> None:
        """Nothing is left open between batches."""

    def finite(self) -> Tensor:
        """Whether the last output was finite, a boolean scalar."""
        return self._fine

    def state(self) -> dict[str, Tensor]:
        """Nothing to go on from."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to go on from."""
