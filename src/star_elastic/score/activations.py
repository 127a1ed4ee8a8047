"""Activation importance: how large each channel's activations are on calibration data. Forward passes only.

Aggregation follows Model-Optimizer's Minitron implementation: per sample the mean over real tokens of |activation|, then the
root of the sum of squares over samples. Sums run in fp64, which costs little because they shrink at once from tokens to
samples. Padding is masked out *before* it is summed, so that even a NaN on a padding position cannot leak into a score.

Where to listen is read from the table (``Unit.taps``): the input or output of a module, or inside fused experts, which are one
module without parts and therefore run, while we listen, in a written-out form of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from star_elastic.errors import CheckpointError, DataError
from star_elastic.layout import Layout, Tap, Unit
from star_elastic.orders import axis_key
from star_elastic.score.experts import FusedExperts


class ChannelSums:
    """Importance of the channels seen at one tap, gathered batch by batch.

    Args:
        place: the module listened to, named in errors.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.squares: Tensor | None = None  # (C,) sum over samples of the squared mean
        self.tokens = 0
        self._sums: Tensor | None = None  # (B, C) of the batch in progress
        self._counts: Tensor | None = None  # (B,)

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """Add sums of |activation| (B, C) over ``counts`` (B,) tokens of each sample in the batch."""
        self._sums = sums if self._sums is None else self._sums + sums
        self._counts = counts if self._counts is None else self._counts + counts

    def finish_batch(self) -> None:
        """Close the batch: turn sums into means, and square them into the total.

        Raises:
            CheckpointError: an activation was NaN or infinite.
        """
        if self._sums is None or self._counts is None:
            return
        if not bool(torch.isfinite(self._sums).all()):
            raise CheckpointError(f"activations of {self.place} hold NaN or infinity, so nothing can be ranked")
        means = self._sums / self._counts.clamp(min=1).unsqueeze(1)
        squares = means.square().sum(0).cpu()
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += int(self._counts.sum())
        self._sums = self._counts = None

    def importance(self) -> Tensor:
        """Root of the sum of squares over samples, fp64 (C,).

        Raises:
            DataError: no token ever came by; zero would be a false score.
        """
        if self.squares is None or self.tokens == 0:
            raise DataError(f"no calibration token reached {self.place}, so its channels cannot be ranked: give more data")
        return self.squares.sqrt()


@dataclass
class Recorder:
    """Listens at every tap of a model and keeps one ``ChannelSums`` for each axis and layer.

    Attributes:
        sums: by (axis, layer).
        expert_tokens: by layer, how many real (token, choice) pairs each expert served, (E,).
    """

    layout: Layout
    sums: dict[tuple[str, int], ChannelSums] = field(default_factory=dict)
    expert_tokens: dict[int, Tensor] = field(default_factory=dict)
    _mask: Tensor | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Attach to every tap for the duration of the block; the model is as before afterwards, also on errors."""
        with ExitStack() as stack:
            for unit in self.layout.units:
                for tap in unit.taps:
                    assert unit.layer is not None
                    module = model.get_submodule(f"{unit.module}.{tap.module}")
                    sums = self.sums.setdefault((tap.axis, unit.layer), ChannelSums(f"{unit.module}.{tap.module}"))
                    stack.enter_context(_attached(module, self._listener(unit, tap, module, sums)))
            yield

    @contextmanager
    def batch(self, mask: Tensor) -> Iterator[None]:
        """Run one forward pass inside this block. ``mask`` (B, T) is true on real tokens."""
        self._mask = mask.bool()
        try:
            yield
            for sums in self.sums.values():
                sums.finish_batch()
        finally:
            self._mask = None

    @property
    def mask(self) -> Tensor:
        """Real tokens of the batch in progress, (B, T)."""
        assert self._mask is not None, "a forward pass outside Recorder.batch"
        return self._mask

    def _listener(self, unit: Unit, tap: Tap, module: nn.Module, sums: ChannelSums) -> Listener:
        if tap.side == "experts":
            assert unit.layer is not None
            return self._experts_listener(unit, tap, unit.layer, module, sums)

        def hear(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> None:
            activation = (inputs[0] if output is None else output).detach()  # (B, T, C)
            silenced = activation.abs().masked_fill(~self.mask.unsqueeze(-1), 0)
            sums.add(silenced.sum(1, dtype=torch.float64), self.mask.sum(1))

        return Listener(before=hear) if tap.side == "input" else Listener(after=hear)

    def _experts_listener(self, unit: Unit, tap: Tap, layer: int, module: nn.Module, sums: ChannelSums) -> Listener:
        experts = FusedExperts.of(unit, tap, module)
        served = self.expert_tokens.setdefault(layer, torch.zeros(experts.count, dtype=torch.int64))

        def hear(expert: int, token: Tensor, inner: Tensor) -> None:
            batch, length = self.mask.shape
            real = self.mask.reshape(-1)[token]  # (S,)
            sample = (token // length)[real]
            per_sample = inner.new_zeros(batch, inner.shape[1], dtype=torch.float64)
            per_sample.index_add_(0, sample, inner[real].abs().double())
            sums.add(per_sample, torch.bincount(sample, minlength=batch))
            served[expert] += int(real.sum())

        def run(hidden: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
            return experts.run(hidden, choice, weight, hear)

        return Listener(instead=run)


@dataclass(frozen=True)
class Listener:
    """How to attach to a module: a hook before it, a hook after it, or a function to run instead of its forward."""

    before: Callable[..., None] | None = None
    after: Callable[..., None] | None = None
    instead: Callable[..., Tensor] | None = None


@contextmanager
def _attached(module: nn.Module, listener: Listener) -> Iterator[None]:
    handles = []
    if listener.before:
        handles.append(module.register_forward_pre_hook(listener.before))
    if listener.after:
        handles.append(module.register_forward_hook(listener.after))
    if listener.instead:
        module.forward = listener.instead
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if listener.instead:
            del module.forward  # the class's own shows again


def collect(recorder: Recorder) -> dict[str, Tensor]:
    """Scores by key, fp32: an axis with one order for the whole model is summed over layers, others are kept per layer.

    Keys are ``hidden`` and ``layers.{i}.{axis}``.

    Raises:
        DataError: a tap saw no token.
    """
    scores: dict[str, Tensor] = {}
    for (axis, layer), sums in recorder.sums.items():
        key = axis_key(recorder.layout.axes[axis], layer)
        importance = sums.importance()
        scores[key] = scores[key] + importance if key in scores else importance
    return {key: score.float() for key, score in scores.items()}
