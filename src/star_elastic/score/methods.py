"""By what each axis is ranked, chosen by name and checked before anything is loaded. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from star_elastic.errors import UnknownNameError, WidthError, nearest
from star_elastic.layout import Layout, Tap
from star_elastic.selection import RequestError

ACTIVATION = (
    "per sample the mean over real tokens of |activation|; over samples the root of the sum of squares; L2 over the channels of "
    "a member (Minitron)"
)
WEIGHTED = (
    "L2 norm over all real tokens and over the channels of a member of activation x L2 norm of its column in the matrices that "
    "read it (as Wanda, for whole channels)"
)
WEIGHT_NORM = "root of the sum of squares of all matrix entries that leave with a member"
RANDOM = "uniform random numbers"

WIDTH_METHODS = {
    "activation": ACTIVATION,
    "weighted": f"{WEIGHTED}; of experts with the gate",
    "weight_norm": WEIGHT_NORM,
    "random": RANDOM,
}

HEAD_METHODS = {name: WIDTH_METHODS[name] for name in ("weighted", "activation", "weight_norm", "random")}

MAMBA_METHODS = {
    "output": f"{WEIGHTED}; at the output projection",
    "activation": f"{ACTIVATION}; of the x that the input projection gives (Nemotron Elastic eq. 3 and 4)",
    "weight_norm": WEIGHT_NORM,
    "random": RANDOM,
}

EXPERT_METHODS = {
    "reap": "mean, over the tokens routed to an expert, of gate weight x L2 norm of its output before gating (REAP)",
    "reap_sum": "sum, over the tokens routed to an expert, of gate weight x L2 norm of its output before gating (ours)",
    "activation": "sum, over the tokens routed to an expert, of the L2 norm of its output before gating",
    "frequency": "number of real tokens routed to an expert",
    "router_weight": "L2 norm of an expert's row of the router",
    "random": RANDOM,
}

DEPTH_METHODS = {
    "removal": "iterative removal: sum of squared logit change over sum of squared full logits, again after each removal "
    "(Nemotron Elastic eq. 5)",
    "kl": "iterative removal: mean over real tokens of the KL divergence from the whole model's predictions, again after each "
    "removal (ours)",
    "cosine": "1 - cosine of a layer's input and output, mean over real tokens",
    "none": "not ranked",
}

REMOVALS = ("removal", "kl")
"""Ways to rank layers that run the model again and again, each time without some of them."""

WEIGHED = ("weighted", "output")
"""Ways to rank channels that multiply what is heard with the norms of the weights that read it."""

DEPTH_SAMPLES = 16
"""Rows that iterative removal reads, unless told otherwise."""

IDLE_RULE = (
    "experts that no token reached are not measured: they rank last, by the L2 norm of their router row, as -1, -2, ..."
)


def methods_for(axis: str) -> dict[str, str]:
    """What an axis can be ranked by, and what each method means; the first is the default."""
    own = {
        "experts": EXPERT_METHODS,
        "depth": DEPTH_METHODS,
        "heads": HEAD_METHODS,
        "mamba_heads": MAMBA_METHODS,
        "mamba_head_dim": MAMBA_METHODS,
    }
    return own.get(axis, WIDTH_METHODS)


def listens(tap: Tap, method: str) -> bool:
    """Whether a method ranks an axis by what is heard at a tap."""
    if tap.axis == "experts":
        return method in ("reap", "reap_sum", "activation", "frequency")
    return method == tap.method if tap.method else method in ("activation", "weighted")


@dataclass(frozen=True)
class ScoreOptions:
    """What to measure, and how.

    Attributes:
        methods: method by axis, where it is not the default.
        kept: for ``mamba_heads``: how many members of ``mamba_head_dim`` will be kept; heads are then judged by those alone
            [Nemotron Elastic eq. 4]. Default: all of them.
        per_expert: give every routed expert an order of its channels for itself, beside the layer's.
        depth_samples: how many of the samples iterative removal reads; it runs the model once for every pair of layers.
        seed: of random methods.
    """

    methods: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    per_expert: bool = False
    depth_samples: int = DEPTH_SAMPLES
    seed: int = 0

    def method(self, axis: str) -> str:
        """The method of an axis."""
        return self.methods.get(axis, next(iter(methods_for(axis))))

    def weighs(self, axis: str) -> bool:
        """Whether an axis is ranked by activations times the norms of the weights that read them."""
        return self.method(axis) in WEIGHED

    def check(self, layout: Layout) -> None:
        """Refuse what this model cannot be asked.

        Raises:
            UnknownNameError: an axis that the model does not have, or a method that the axis does not know.
            WidthError: an illegal kept width, or one of an axis that no other is judged over.
            RequestError: per-expert orders, or a kept width, where channels are not ranked by activation; no samples for depth.
        """
        for axis, name in self.methods.items():
            if axis not in layout.axes:
                raise UnknownNameError(
                    f"--method {axis}={name}: this model has no axis {axis!r}: {nearest(axis, layout.axes)}"
                )
            if name not in methods_for(axis):
                raise UnknownNameError(f"no method {name!r} for {axis}: {nearest(name, methods_for(axis))}")
        if self.depth_samples < 1:
            raise RequestError(f"depth_samples is {self.depth_samples}: want 1 or more")
        over = {tap.over: tap.axis for unit in layout.units for tap in unit.taps if tap.over}
        for axis, width in self.kept.items():
            if axis not in over:
                known = f"only {', '.join(sorted(over))} can be" if over else "this model has no such axis"
                raise WidthError(f"--kept {axis}={width}: no axis is judged over the kept members of {axis!r}; {known}")
            layout.axes[axis].check(width)
            judged, method = over[axis], self.method(over[axis])
            if not any(listens(tap, method) for unit in layout.units for tap in unit.taps if tap.axis == judged):
                raise RequestError(
                    f"--kept {axis}={width} is for {judged} ranked by channels, and here {judged}={method}: leave it out"
                )
        if self.per_expert:
            self._check_per_expert(layout)

    def _check_per_expert(self, layout: Layout) -> None:
        inside = {tap.axis for unit in layout.units for tap in unit.taps if tap.side == "experts"} - {"experts"}
        if not inside:
            raise RequestError("--per-expert: this model has no routed experts")
        for axis in sorted(inside):
            if self.method(axis) not in ("activation", "weighted"):
                raise RequestError(f"--per-expert ranks {axis} by activation, but --method says {self.method(axis)}")

    def as_json(self, layout: Layout) -> dict[str, Any]:
        """What ``scores.json`` records: every axis with its method, spelled out."""
        return {
            "methods": {axis: self.method(axis) for axis in layout.axes},
            "kept": dict(self.kept),
            "per_expert": self.per_expert,
            "depth_samples": self.depth_samples,
            "seed": self.seed,
        }


def parse_methods(words: Sequence[str]) -> dict[str, str]:
    """Read ``AXIS=NAME`` words. Raises RequestError if one is malformed or names an axis twice."""
    return _pairs("--method", words, str, "experts=frequency")


def parse_kept(words: Sequence[str]) -> dict[str, int]:
    """Read ``AXIS=N`` words. Raises RequestError if one is malformed or names an axis twice."""
    return _pairs("--kept", words, int, "mamba_head_dim=48")


def parse_curve_widths(words: Sequence[str], layout: Layout) -> dict[str, list[int]]:
    """Read ``AXIS=N`` or ``AXIS=P%`` words: widths at which to show what a cut keeps; an axis may be named more than once.

    Raises:
        RequestError: a malformed word.
        UnknownNameError: an axis that the model does not have.
        WidthError: an illegal width, or a percentage that would cut nothing.
    """
    found: dict[str, list[int]] = {}
    for word in words:
        axis, equals, number = word.partition("=")
        if not (axis and equals and number.removesuffix("%").isdecimal()):
            raise RequestError(
                f"cannot read --width {word!r}: want AXIS=N or AXIS=P%, such as experts=64 or hidden=75%"
            )
        if axis not in layout.axes:
            raise UnknownNameError(f"--width {word}: this model has no axis {axis!r}: {nearest(axis, layout.axes)}")
        found.setdefault(axis, []).append(_width(axis, number, layout))
    return found


def _width(axis: str, number: str, layout: Layout) -> int:
    one = layout.axes[axis]
    if not number.endswith("%"):
        one.check(int(number))
        return int(number)
    percent = int(number[:-1])
    width = one.at_most(percent * one.size / 100)
    if percent == 100:
        return one.size
    if width == one.size or width > percent * one.size / 100:
        options = " and ".join(str(w) for w in one.neighbours(percent * one.size / 100))
        raise WidthError(f"{axis}={number} of {one.size} cuts nothing that can be cut; nearest legal: {options}")
    return width


def _pairs(option: str, words: Sequence[str], kind: Callable[[str], Any], example: str) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for word in words:
        axis, equals, value = word.partition("=")
        if not (axis and equals and value) or (kind is int and not value.isdecimal()):
            raise RequestError(
                f"cannot read {option} {word!r}: want AXIS={'N' if kind is int else 'NAME'}, such as {example}"
            )
        if axis in pairs:
            raise RequestError(f"{option} names {axis} twice: {pairs[axis]} and {value}")
        pairs[axis] = kind(value)
    return pairs
