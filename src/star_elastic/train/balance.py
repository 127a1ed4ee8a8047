"""Even loads for the experts, without a loss for it (arXiv 2408.15664), for models that are trained from scratch.

Routers of the sigmoid kind select experts by score plus a bias of their own, which no gradient reaches. After each step the bias
of an expert that got fewer tokens than its fair share rises by a fixed amount, and that of an expert that got more falls by it.

What is unusual here: a step may run several nested models. Each is asked to share its tokens evenly among the experts that it
keeps, and only their biases move; the errors of all are added before the sign is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from star_elastic.elastic import ElasticModel
from star_elastic.errors import RecipeError
from star_elastic.layout import Layout, Unit
from star_elastic.train.ranks import Ranks


def bias_rows(layout: Layout) -> dict[str, str]:
    """Where the selection bias of each expert router lies: unit's module path -> the buffer's full name.

    Raises:
        RecipeError: a router without one, or no router at all.
    """
    found = {unit.module: _bias_row(unit) for unit in layout.units if unit.router is not None}
    if not found or None in found.values():
        why = "its routers select experts without a bias" if found else "it has no routed experts"
        raise RecipeError(
            f"balance_experts: nothing to move in a model of family {layout.family}: {why}; remove the key"
        )
    return {module: name for module, name in found.items() if name is not None}


def _bias_row(unit: Unit) -> str | None:
    """A buffer of the router with one number per expert."""
    assert unit.router is not None
    for row in unit.rows:
        if row.buffer and row.name.startswith(f"{unit.router.module}.") and row.axes == {unit.router.axis}:
            return unit.name(row)
    return None


class ExpertBalance:
    """Counts the tokens that each expert gets, and moves the selection bias against the error.

    Args:
        model: Whose experts; its parent's buffers are moved in place, so they are saved with it.
        step: How far a bias moves per update.
        ranks: The processes whose tokens are counted together.

    Raises:
        RecipeError: routers without a selection bias.

    Example:
        >>> balance = ExpertBalance(elastic, step=1e-3)                              # doctest: +SKIP
        >>> with elastic.at("small"), balance.counting():                            # doctest: +SKIP
        ...     loss = elastic(input_ids, labels=input_ids).loss
        >>> loss.backward()                                                          # doctest: +SKIP
        >>> balance.update()                                                         # doctest: +SKIP
    """

    def __init__(self, model: ElasticModel, step: float, ranks: Ranks | None = None) -> None:
        self.model, self.step, self.ranks = model, step, ranks or Ranks.here()
        self._biases = {module: model.model.get_buffer(name) for module, name in bias_rows(model.layout).items()}
        self._missing = self._zeros()

    def _zeros(self) -> dict[str, Tensor]:
        return {module: torch.zeros_like(bias, dtype=torch.float64) for module, bias in self._biases.items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is routed inside the block, under the lens in force.

        Only the forward belongs inside: layers that are computed again for their backward would be counted twice.
        """
        padding: list[Tensor | None] = [None]

        def note_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            padding[0] = kwargs.get("attention_mask")

        counts = self._zeros()
        hooks = [self.model.model.base_model.register_forward_pre_hook(note_padding, with_kwargs=True)]
        routers = list(self.model.routers())
        for router in routers:
            count = _Count(counts[router.unit.module], router.members, padding)
            hooks.append(router.module.register_forward_hook(count))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for router in routers:
            got = counts[router.unit.module][router.kept]
            self._missing[router.unit.module][router.kept] += got.mean() - got

    def around(self, view: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[None]]:
        """The same view of the model, counting."""
        return functools.partial(self._around, view)

    @contextmanager
    def _around(self, view: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        with view(), self.counting():
            yield

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by what was counted since the last update; every process moves them alike."""
        self.ranks.average(self._missing.values())
        for module, bias in self._biases.items():
            # A mean over experts is no whole number: what is left of it by rounding is no error.
            bias += self.step * self._missing[module].round(decimals=6).sign().to(bias.dtype)
        self._missing = self._zeros()


class _Count:
    """A forward hook of a router: adds the tokens that each expert gets to ``counts`` [E], numbered as in the parent."""

    def __init__(self, counts: Tensor, members: list[int], padding: list[Tensor | None]) -> None:
        self._counts, self._padding = counts, padding
        self._members = torch.tensor(members, device=counts.device)

    @torch.no_grad()
    def __call__(self, module: Any, args: Any, output: Any) -> None:
        chosen = output[2]  # [B*T, k], see routing.Route
        if self._padding[0] is not None:
            chosen = chosen[self._padding[0].reshape(-1) != 0]
        got = torch.bincount(chosen.flatten(), minlength=len(self._members))
        self._counts.index_add_(0, self._members, got.to(self._counts.dtype))
