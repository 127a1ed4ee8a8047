"""Listening to a model on calibration data: one forward pass gives every width axis, the experts, and the layers' cosines.

Where to listen is read from the table (``Unit.taps``): the input or output of a module, or inside fused experts, which are one
module without parts and therefore run, while we listen, in a written-out form of the same function. Several axes may be read
from the same channels (Mamba heads, and the channels of a head); these are heard once.

Padding is masked out *before* it is summed, so that even a NaN on a padding position cannot leak into a score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from star_elastic.layout import Layout, Tap, Unit
from star_elastic.score.experts import ExpertSums, FusedExperts
from star_elastic.score.finite import NotFiniteError, OutputCheck
from star_elastic.score.methods import ScoreOptions, listens
from star_elastic.score.spots import Spot, expert_channel_axes, expert_count, expert_key, place_of, spot_of
from star_elastic.score.sums import ChannelSums, CosineSums, SquareSums, Sums

S = TypeVar("S", bound=Sums)


@dataclass
class Recorder:
    """Listens to a model and keeps sums for each place.

    Attributes:
        channels: by ``place_of``; and by ``expert_key`` for single experts.
        experts: by layer.
        cosines: by layer.
        gathered: all of them.
    """

    layout: Layout
    options: ScoreOptions = field(default_factory=ScoreOptions)
    channels: dict[str, ChannelSums] = field(default_factory=dict)
    experts: dict[int, ExpertSums] = field(default_factory=dict)
    cosines: dict[int, CosineSums] = field(default_factory=dict)
    gathered: dict[str, Sums] = field(default_factory=dict)
    _mask: Tensor | None = None
    _padded: bool = True
    _heard: dict[int, Sums] = field(default_factory=dict)  # of the batch in progress, in the order of hearing

    def __post_init__(self) -> None:
        for unit in self.layout.units:
            if unit.layer is None:
                continue
            for tap in self._taps(unit):
                if tap.side == "experts":
                    self._expect_experts(unit, unit.layer, tap)
                else:
                    self._expect_channels(place_of(unit, tap), f"{unit.module}.{tap.module}", tap.axis)
            if self.options.method("depth") == "cosine":
                self.cosines[unit.layer] = self.gathered[f"{unit.module}:cosine"] = CosineSums(unit.module)

    def _expect_channels(self, key: str, place: str, axis: str) -> None:
        if key not in self.channels:
            kind = SquareSums if self.options.weighs(axis) else ChannelSums
            self.channels[key] = self.gathered[key] = kind(place)

    def _expect_experts(self, unit: Unit, layer: int, tap: Tap) -> None:
        place, count = place_of(unit, tap), expert_count(unit)
        if layer not in self.experts:
            self.experts[layer] = self.gathered[f"{place}:experts"] = ExpertSums(place, count)
        if tap.axis in expert_channel_axes(unit):
            weighs = self.options.weighs(tap.axis)  # each expert's channels, by what that expert's weights make of them
            if not weighs:
                self._expect_channels(place, place, tap.axis)
            for expert in range(count) if weighs or self.options.per_expert else ():
                self._expect_channels(expert_key(place, expert), f"expert {expert} of {place}", tap.axis)

    @contextmanager
    def listening(self, model: nn.Module, units: Iterable[Unit] | None = None) -> Iterator[None]:
        """Attach to ``units`` (default: all) for the duration of the block; the model is as before afterwards, also on errors."""
        with ExitStack() as stack:
            for unit in self.layout.units if units is None else units:
                for path, listener in self._listeners(unit, model):
                    stack.enter_context(_attached(model.get_submodule(path), listener))
            yield

    @contextmanager
    def batch(self, mask: Tensor) -> Iterator[None]:
        """Run one forward pass inside this block. ``mask`` (B, T) is true on real tokens.

        Raises:
            NotFiniteError: NaN or infinite activations; names the first module that had them.
        """
        self._mask = mask.bool()
        self._padded, self._heard = not bool(self._mask.all()), {}
        try:
            yield
            heard = list(self._heard.values())
            for sums in heard:
                sums.finish_batch()
            fine = torch.stack([sums.finite().to(mask.device) for sums in heard]).tolist() if heard else []
            if not all(fine):
                place = heard[fine.index(False)].place
                raise NotFiniteError(f"activations of {place} hold NaN or infinity, so nothing can be ranked")
        finally:
            self._mask = None

    @property
    def mask(self) -> Tensor:
        """Real tokens of the batch in progress, (B, T)."""
        assert self._mask is not None, "a forward pass outside Recorder.batch"
        return self._mask

    def _silence(self, activation: Tensor, real: Tensor) -> Tensor:
        """Zero where a token (...) of the activation (..., C) is not real; a batch without padding is not copied."""
        return activation.masked_fill(~real.unsqueeze(-1), 0) if self._padded else activation

    def _open(self, sums: S) -> S:
        """The same sums, noted as heard in this batch."""
        self._heard.setdefault(id(sums), sums)
        return sums

    def state(self) -> dict[str, Tensor]:
        """Everything gathered so far, by place and name."""
        return {f"{key}/{name}": tensor for key, sums in self.gathered.items() for name, tensor in sums.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an earlier ``state``, exactly."""
        by_key: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            key, _, leaf = name.rpartition("/")
            by_key.setdefault(key, {})[leaf] = tensor
        for key, saved in by_key.items():
            self.gathered[key].restore(saved)

    def _taps(self, unit: Unit) -> list[Tap]:
        """Taps whose axis is ranked by what is heard there."""
        return [tap for tap in unit.taps if listens(tap, self.options.method(tap.axis))]

    def _listeners(self, unit: Unit, model: nn.Module) -> Iterator[tuple[str, Listener]]:
        if unit.kind == "head":  # never run
            return
        # Before any reader of the output: whoever gave it is the culprit.
        yield unit.module, self._output_listener(OutputCheck(unit.module))
        if unit.layer is None:
            return
        taps = self._taps(unit)
        for spot in dict.fromkeys(spot_of(unit, tap) for tap in taps if tap.side != "experts"):
            yield spot.module, self._channel_listener(spot)
        for path in dict.fromkeys(f"{unit.module}.{tap.module}" for tap in taps if tap.side == "experts"):
            experts = FusedExperts.of(unit, path.removeprefix(f"{unit.module}."), model.get_submodule(path))
            yield path, self._experts_listener(experts, unit.layer, path)
        if unit.layer in self.cosines:
            yield unit.module, self._cosine_listener(self.cosines[unit.layer])

    def _channel_listener(self, spot: Spot) -> Listener:
        sums = self.channels[spot.key]

        def hear(_module: nn.Module, inputs: tuple[Tensor, ...], _named: dict[str, Any], output: Any = None) -> None:
            activation = (inputs[0] if output is None else output).detach()  # (B, T, C)
            part = activation.narrow(-1, spot.start, spot.segment.size)
            silenced = self._silence(sums.measure(part), self.mask)
            self._open(sums).add(silenced.sum(1, dtype=torch.float64), self.mask.sum(1))

        return Listener(before=hear) if spot.side == "input" else Listener(after=hear)

    def _experts_listener(self, experts: FusedExperts, layer: int, path: str) -> Listener:
        served = self.experts[layer]

        def hear(expert: int, token: Tensor, gate: Tensor, inner: Tensor, answer: Tensor) -> None:
            batch, length = self.mask.shape
            real, sample = self.mask.reshape(-1)[token], token // length  # (S,)
            self._open(served).add(expert, real, gate, answer)
            listening = [self.channels[key] for key in (path, expert_key(path, expert)) if key in self.channels]
            if not listening:
                return
            adding = inner * gate.unsqueeze(1) if isinstance(listening[0], SquareSums) else inner
            silenced = self._silence(listening[0].measure(adding), real)
            per_sample = inner.new_zeros(batch, inner.shape[1], dtype=torch.float64).index_add_(
                0, sample, silenced.double()
            )
            counts = torch.zeros(batch, dtype=torch.int64, device=token.device).index_add_(0, sample, real.long())
            for sums in listening:
                self._open(sums).add(per_sample, counts)

        def run(hidden: Tensor, choice: Tensor, gates: Tensor) -> Tensor:
            return experts.run(hidden, choice, gates, hear)

        return Listener(instead=run)

    def _output_listener(self, check: OutputCheck) -> Listener:
        def hear(_module: nn.Module, _inputs: tuple[Tensor, ...], _named: dict[str, Any], output: Any) -> None:
            whole = output[0] if isinstance(output, tuple) else output
            self._open(check).add(self._silence(whole.detach(), self.mask))

        return Listener(after=hear)

    def _cosine_listener(self, sums: CosineSums) -> Listener:
        def hear(_module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any], output: Any) -> None:
            before = inputs[0] if inputs else named["hidden_states"]
            self._open(sums).add(before, output[0] if isinstance(output, tuple) else output, self.mask)

        return Listener(after=hear)


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
        handles.append(module.register_forward_pre_hook(listener.before, with_kwargs=True))
    if listener.after:
        handles.append(module.register_forward_hook(listener.after, with_kwargs=True))
    if listener.instead:
        module.forward = listener.instead
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if listener.instead:
            del module.forward  # the class's own shows again
