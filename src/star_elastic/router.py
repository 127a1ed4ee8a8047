"""The router: a budget goes in, a probability for every candidate width of every axis comes out.

One two-layer MLP per axis, without biases, reads the one-hot budget and nothing else; tokens never enter (Nemotron Elastic, arXiv
2511.16664). While it learns, probabilities are turned into soft masks and expected widths; in the end the most probable widths
inside the budget's tolerance are frozen (``router_freeze``) and the router has done its work.

Probabilities are keyed as masks are: by axis, or by (axis, layer) where layers choose for themselves. They are fp32 by default,
under autocast too. Noise is drawn on the CPU, so that all ranks and devices that share a generator's state agree on a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from star_elastic import router_files
from star_elastic.axes import DEPTH
from star_elastic.budget import Budget
from star_elastic.combinations import Combinations, Key, axis_of
from star_elastic.errors import CheckpointError, ElasticError, UnknownNameError, nearest
from star_elastic.layout import Layout
from star_elastic.masks import prefix_mask
from star_elastic.router_axis import AxisRouter, straight_through
from star_elastic.router_freeze import Frozen, freeze

FULL_WEIGHT = 10.0  # of the squared error that keeps the full model whole

Probabilities = Mapping[Key, Tensor]
"""Axis, or (axis, layer), -> probability of each candidate, [C], in the order of the candidates."""


class Router(nn.Module):
    """Chooses widths from a budget.

    Args:
        layout: the parent's table.
        candidates: axis -> legal widths, descending, as ``candidates.candidates`` gives them.
        budgets: what to choose for: budgets, or their names alone.
        per_layer: axes on which every layer that has them chooses for itself.
        hidden: width of the MLPs.
        std: standard deviation of the weights at first.
        depth_order: layers from most to least important, where ``depth`` has candidates.
        seed: of the weights at first.

    Attributes:
        names: of the budgets, in the order of the one-hot.
        budgets: by name; empty where only names were given.
        combinations: everything that can be chosen.

    Raises:
        UnknownNameError: an axis of ``per_layer`` without candidates.
        WidthError: an axis of ``per_layer`` that is one for the whole model, an illegal candidate, or ``depth`` without an order.
        ElasticError: no budgets, or two of one name.
    """

    def __init__(
        self,
        layout: Layout,
        candidates: Mapping[str, Sequence[int]],
        budgets: Sequence[Budget] | Sequence[str],
        *,
        per_layer: Collection[str] = (),
        hidden: int = 256,
        std: float = 0.1,
        depth_order: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.names = tuple(budget if isinstance(budget, str) else budget.name for budget in budgets)
        if not self.names or len(set(self.names)) < len(self.names):
            raise ElasticError(f"a router needs budgets, each of its own name, not {', '.join(self.names) or 'none'}")
        self.budgets = {budget.name: budget for budget in budgets if isinstance(budget, Budget)}
        self.layout, self.hidden = layout, hidden
        self.per_layer = tuple(name for name in candidates if name in per_layer)
        self.depth_order = None if depth_order is None else tuple(depth_order)
        self.combinations = Combinations(layout, candidates, per_layer, depth_order)
        self.candidates = self.combinations.candidates
        self._keys: dict[str, list[Key]] = {name: [] for name in candidates}
        for key in self.combinations.keys:
            self._keys[axis_of(key)].append(key)
        generator = torch.Generator().manual_seed(seed)
        self.axes = nn.ModuleDict()
        for name, widths in self.candidates.items():
            self.axes[name] = AxisRouter(len(self.names), hidden, len(self._keys[name]), len(widths), std, generator)
            self.register_buffer(f"prefixes_{name}", self._prefixes(name), persistent=False)
            self.register_buffer(f"widths_{name}", torch.tensor(widths, dtype=torch.float32), persistent=False)

    def _prefixes(self, name: str) -> Tensor:
        """Which members, or which layers, each candidate keeps: [C, size], ones and zeros."""
        if name != DEPTH:
            return torch.stack([prefix_mask(self.layout.axes[name], width) for width in self.candidates[name]])
        kept = torch.zeros(len(self.candidates[name]), self.layout.num_layers)
        for number, depth in enumerate(self.candidates[name]):
            kept[number, list(self.combinations.layers(depth))] = 1
        return kept

    def _logits(self, budget: str | Mapping[str, float]) -> dict[str, Tensor]:
        """Logits [blocks, C] per axis."""
        weights = {budget: 1.0} if isinstance(budget, str) else budget
        for name in weights:
            if name not in self.names:
                raise UnknownNameError(f"the router knows no budget {name!r}: {nearest(name, self.names)}")
        if min(weights.values(), default=-1) < 0 or abs(sum(weights.values()) - 1) > 1e-6:
            raise ElasticError(f"weights of budgets sum to 1, and none is negative: not {dict(weights)}")
        like = next(self.parameters())
        vector = torch.tensor([weights.get(name, 0.0) for name in self.names], dtype=like.dtype, device=like.device)
        return {name: axis(vector) for name, axis in self.axes.items()}

    def _keyed(self, by_axis: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """Rows [C] by key from one tensor [blocks, C] per axis."""
        return {key: row for name, rows in by_axis.items() for key, row in zip(self._keys[name], rows, strict=True)}

    def probabilities(
        self, budget: str | Mapping[str, float], *, tau: float = 1.0, scale: float = 1.0
    ) -> dict[Key, Tensor]:
        """Noise-free probabilities: softmax(scale x logits / tau) for every key.

        Args:
            budget: a name, or name -> weight for a budget between trained ones (``budget.interpolate``).
            tau: temperature.
            scale: of the logits.

        Raises:
            UnknownNameError: no such budget.
            ElasticError: weights that do not sum to 1.
        """
        logits = self._logits(budget)
        return self._keyed({name: (scale * rows / tau).softmax(dim=-1) for name, rows in logits.items()})

    def sample(
        self,
        budget: str | Mapping[str, float],
        *,
        tau: float,
        scale: float,
        generator: torch.Generator,
        hard: bool = False,
    ) -> dict[Key, Tensor]:
        """Gumbel-Softmax: softmax((scale x logits + noise) / tau), with noise of its own for every key.

        Args:
            budget: as for ``probabilities``.
            tau: temperature.
            scale: of the logits; the noise is not scaled.
            generator: of the noise, on the CPU. Each call takes the same number of draws from it, whatever the budget.
            hard: one-hot choices, exactly, with the gradient of the soft ones (straight-through).
        """
        sampled = {}
        for name, rows in self._logits(budget).items():
            noise = -torch.empty(rows.shape, dtype=torch.float32).exponential_(generator=generator).log()
            soft = ((scale * rows + noise.to(rows)) / tau).softmax(dim=-1)
            sampled[name] = straight_through(soft) if hard else soft
        return self._keyed(sampled)

    def masks(self, probabilities: Probabilities) -> dict[Key, Tensor]:
        """Masks, by key: the sum over candidates of probability x prefix indicator; of ``depth``, one gate per layer."""
        return {key: row @ self.get_buffer(f"prefixes_{axis_of(key)}").to(row) for key, row in probabilities.items()}

    def expected(self, probabilities: Probabilities) -> tuple[dict[Key, Tensor], dict[int, Tensor] | None]:
        """Expected widths by key, and expected depth gates by layer (None where depth is not chosen), differentiable.

        The cost of expected widths is the expected cost: keys are independent and no parameter has an axis twice.
        """
        widths = {
            key: row @ self.get_buffer(f"widths_{axis_of(key)}").to(row)
            for key, row in probabilities.items()
            if key != DEPTH
        }
        if DEPTH not in probabilities:
            return widths, None
        gates = probabilities[DEPTH] @ self.get_buffer(f"prefixes_{DEPTH}").to(probabilities[DEPTH])
        return widths, dict(enumerate(gates))

    def budget_loss(self, budget: Budget, probabilities: Probabilities, tolerance: float = 0.05) -> Tensor:
        """How far the expected cost is from the target: |cost / target - 1|.

        A nested model pays nothing within the tolerance. The full model always pays, and in addition 10 times the squared
        error between its probabilities and the choice of everything, mean over an axis, summed over axes.
        """
        widths, layers = self.expected(probabilities)
        error = (budget.cost(self.layout, widths, layers) / budget.target - 1).abs()
        if not budget.is_full:
            return torch.where(error > tolerance, error, torch.zeros_like(error))
        for keys in self._keys.values():
            rows = torch.stack(
                [probabilities[key] for key in keys]
            )  # (blocks, C); candidates descend, so the first is all
            error = (
                error
                + FULL_WEIGHT * (rows - F.one_hot(torch.zeros_like(rows[:, 0]).long(), rows.shape[1])).square().mean()
            )
        return error

    def freeze(self, budget: Budget, tolerance: float = 0.05, *, tau: float = 1.0, scale: float = 1.0) -> Frozen:
        """The most probable combination of widths whose cost is within ``tolerance`` of the target: see ``router_freeze``.

        ``tau`` and ``scale`` change the probability that is told, not the choice.

        Raises:
            UnknownNameError: no such budget.
            BudgetMissed: nothing is inside the tolerance; says by how much, and what is nearest.
        """
        return freeze(
            self.combinations, budget, self.log_probabilities(budget.name, tau=tau, scale=scale), tolerance
        )

    @torch.no_grad()
    def log_probabilities(
        self, budget: str | Mapping[str, float], *, tau: float = 1.0, scale: float = 1.0
    ) -> dict[Key, list[float]]:
        """Logarithms of ``probabilities``, in fp64, as numbers."""
        logits = {key: row.double() * scale / tau for key, row in self._keyed(self._logits(budget)).items()}
        return {key: row.log_softmax(dim=-1).tolist() for key, row in logits.items()}

    def save(self, folder: Path | str) -> None:
        """Write ``router.safetensors`` into a folder."""
        settings = {
            "fingerprint": self.layout.fingerprint,
            "candidates": self.candidates,
            "budgets": [router_files.describe_budget(self.budgets[n]) if n in self.budgets else n for n in self.names],
            "per_layer": self.per_layer,
            "hidden": self.hidden,
            "depth_order": self.depth_order,
        }
        router_files.write(folder, settings, self.state_dict())

    @classmethod
    def load(cls, folder: Path | str, layout: Layout) -> Router:
        """Read a router back; latency budgets come without their table.

        Args:
            folder: that holds ``router.safetensors``.
            layout: table of the parent that it was trained with.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        settings, weights = router_files.read(folder)
        if settings.pop("fingerprint", None) != layout.fingerprint:
            raise CheckpointError(f"{Path(folder) / router_files.FILE_NAME} is the router of another model")
        try:
            router = cls(layout, **settings)
            router.load_state_dict(weights)
        except (ElasticError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{Path(folder) / router_files.FILE_NAME} is damaged: {reason}") from None
        return router
