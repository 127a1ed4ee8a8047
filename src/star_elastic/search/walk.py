"""In which order members of a grid are tried: far from all that is known, then near the best, in turn.

The order depends on nothing but the grid and the losses, so a search that was interrupted, or is given more candidates, repeats
the steps that it has made and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def next_member(shares: np.ndarray, tried: Sequence[int], losses: Sequence[float]) -> int | None:
    """The member to try next; None where all were tried.

    The first is the most even one, whose most cut axis is cut least. Then every second one is the member whose nearest tried
    one is farthest away, and every other one is the untried member nearest to the best so far. Distance is Euclidean in parts of
    the parent's widths.

    Args:
        shares: part of the parent's width that each member keeps of each axis, (members, axes).
        tried: members, in the order in which they were tried.
        losses: of those.
    """
    left = np.setdiff1d(np.arange(len(shares)), tried)
    if not len(left):
        return None
    if not tried:
        return int(np.argmax(shares.min(axis=1)))
    if len(tried) % 2:
        apart = np.linalg.norm(shares[left][:, None] - shares[list(tried)], axis=2)  # (left, tried)
        return int(left[np.argmax(apart.min(axis=1))])
    best = tried[int(np.argmin(losses))]
    return int(left[np.argmin(np.linalg.norm(shares[left] - shares[best], axis=1))])
