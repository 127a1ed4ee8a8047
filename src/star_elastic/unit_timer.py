"""Time one unit of a model at given widths, inside the smallest model that holds it.

What is timed is the model's own code, from the moment a call of the model enters the unit until it leaves it. Weights are random
numbers, made for the call: see ``profile`` for why that is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from star_elastic.latency import Conditions
from star_elastic.layout import Layout, Unit
from star_elastic.skeleton import child_config, compare_shapes, model_class, numbered_units
from star_elastic.streamed import compute_buffers
from star_elastic.submodel import Submodel
from star_elastic.swap import Slot

SCALE = 0.02  # standard deviation of the random weights: activations stay finite


class Clock(Protocol):
    """Marks points in time, cheaply, and tells the seconds between two of them afterwards."""

    def mark(self) -> Any: ...

    def between(self, start: Any, end: Any) -> float: ...


class CpuClock:
    """Wall time."""

    def mark(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """Seconds from one mark to another."""
        return end - start


class CudaClock:
    """Events in the GPU's own queue: no waiting inside a call, which would hide that launches overlap with work."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one event to another, once the later one has happened."""
        end.synchronize()
        return start.elapsed_time(end) / 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat: inside the unit, and outside all units."""

    unit: list[float]
    outside: list[float]


class UnitTimer:
    """Times units of a model that is never built as a whole. It is a ``Measure``.

    Args:
        config: the parent's transformers config.
        layout: its table.
        conditions: what to time.
        device: where.
        dtype: of the weights, except those that are always fp32.
        clock: how.
    """

    def __init__(
        self,
        config: Any,
        layout: Layout,
        conditions: Conditions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        clock: Clock,
    ) -> None:
        config.dtype = dtype
        with torch.device("meta"), no_init_weights():
            self._parent: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        compare_shapes(self._parent, layout, Submodel())
        self._layout, self._conditions, self._device, self._dtype, self._clock = (
            layout,
            conditions,
            device,
            dtype,
            clock,
        )

    def __call__(self, unit: Unit, widths: Mapping[str, int]) -> Timing:
        """Seconds of each repeat of ``unit`` at ``widths``, inside the smallest model that holds it."""
        model, paths = self.build(Submodel(widths=dict(widths), layers=needed_layers(self._layout, unit)))
        intervals = Intervals(model, [path for _, path in paths], self._clock)
        path = next(path for one, path in paths if one.module == unit.module)
        timing = Timing([], [])
        with torch.inference_mode():
            for number, call in enumerate(self._calls(model)):
                whole, parts = intervals.of(call)
                if number >= self._conditions.warmup:
                    timing.unit.append(parts[path])
                    timing.outside.append(max(0.0, whole - sum(parts.values())))
        return timing

    def _calls(self, model: Any) -> Iterator[Callable[[], Any]]:
        """The calls to time, warm-up first; decoding reads its context once, untimed."""
        conditions = self._conditions
        vocabulary = self._layout.units[0].rows[0].shape[0]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (conditions.batch, conditions.context), generator=generator).to(self._device)
        times = conditions.warmup + conditions.repeats
        if conditions.phase == "prefill":
            for _ in range(times):
                yield lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)
            return
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache
        for _ in range(times):
            yield lambda: model(input_ids=ids[:, :1], cache=cache, use_cache=True)

    def build(self, submodel: Submodel) -> tuple[Any, list[tuple[Unit, str]]]:
        """The nested model with random weights, and its units (of the parent) with their paths in it."""
        with torch.device("meta"), no_init_weights():
            model = model_class(self._parent)(child_config(self._parent, self._layout, submodel)).eval()
        compare_shapes(model, self._layout, submodel)
        paths = list(numbered_units(self._layout, submodel))
        generator = torch.Generator(self._device).manual_seed(0)
        for unit, path in paths:
            module = model.get_submodule(path)
            for row in unit.rows:
                slot = Slot.of(module, row.name)
                dtype = torch.float32 if row.fp32 else self._dtype
                tensor = torch.empty(slot.get().shape, dtype=dtype, device=self._device)
                if slot.buffer:
                    slot.set(tensor.zero_())
                    continue
                # Vectors are norm weights, biases and the logarithms of decay rates: ones keep all of them in range.
                filled = tensor.normal_(0, SCALE, generator=generator) if len(row.dims) > 1 else tensor.fill_(1)
                slot.set(nn.Parameter(filled, requires_grad=False))
        model.tie_weights()
        compute_buffers(model, self._device)
        return model, paths


def needed_layers(layout: Layout, unit: Unit) -> tuple[int, ...]:
    """The fewest decoder layers with which a model that holds ``unit`` runs."""
    kept = set() if unit.layer is None else {unit.layer}
    kinds = {one.kind for one in layout.units if one.layer in kept}
    for kind in layout.required_kinds - kinds:
        kept.add(next(one.layer for one in layout.units if one.kind == kind and one.layer is not None))
    return tuple(sorted(kept)) or (0,)


class Intervals:
    """Measures calls of a model and of some of its modules, by hooks.

    Args:
        model: any module.
        paths: modules inside it, each called once per call of the model.
        clock: what marks time.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], clock: Clock) -> None:
        self._clock, self._starts, self._ends = clock, dict[str, Any](), dict[str, Any]()
        for path in paths:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(self._marking(self._starts, path))
            module.register_forward_hook(self._marking(self._ends, path))

    def _marking(self, marks: dict[str, Any], path: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            marks[path] = self._clock.mark()

        return mark

    def of(self, call: Callable[[], Any]) -> tuple[float, dict[str, float]]:
        """Seconds of a whole call, and of each module in it."""
        start = self._clock.mark()
        call()
        whole = self._clock.between(start, self._clock.mark())
        return whole, {path: self._clock.between(self._starts[path], self._ends[path]) for path in self._starts}
