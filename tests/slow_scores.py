"""Importance, slowly: one unpadded row at a time through transformers' own modules, read out of hooks, added in loops, in fp64.

Modules are found by their names in transformers, not by the package's table, so that a wrong tap shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

Rows = list[list[int]]
Heard = dict[str, list[torch.Tensor]]


def slow_scores(model: Any, rows: Rows, kept: int | None = None, per_expert: bool = False) -> dict[str, torch.Tensor]:
    """Every width axis. ``kept``: channels of a Mamba head by which heads are judged."""
    channels, routed = hear_all(model, rows)
    scores: dict[str, torch.Tensor] = {"hidden": sum(v for k, v in channels.items() if "norm" in k)}  # type: ignore[dict-item]
    for name, one in channels.items():
        layer = name.rsplit(".", 1)[0]
        if name.endswith("o_proj"):
            size = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
            scores[f"{layer}.heads"] = torch.tensor([length(one[h * size : (h + 1) * size]) for h in range(len(one) // size)])
        elif name.endswith("in_proj"):
            scores |= mamba_scores(model.config, layer, one, kept)
        elif "norm" not in name and (per_expert or ".experts." not in name):
            scores[name] = one
    return scores | {f"{layer}.experts": reap(seen, size) for layer, (seen, size) in routed.items()}


def mamba_scores(config: Any, layer: str, one: torch.Tensor, kept: int | None) -> dict[str, torch.Tensor]:
    """Channels of a head, and heads, from the importance of all outputs of in_proj: z, x, B, C, dt."""
    heads, size = mamba_sizes(config)
    x = one[heads * size : 2 * heads * size]
    per_channel = [length(torch.stack([x[h * size + p] for h in range(heads)])) for p in range(size)]
    best = sorted(range(size), key=lambda p: -per_channel[p])[: kept or size]
    per_head = [length(torch.stack([x[h * size + p] for p in best])) for h in range(heads)]
    return {f"{layer}.mamba_head_dim": torch.tensor(per_channel), f"{layer}.mamba_heads": torch.tensor(per_head)}


def mamba_sizes(config: Any) -> tuple[int, int]:
    """Heads and channels per head, under the names of either family."""
    if hasattr(config, "mamba_num_heads"):
        return config.mamba_num_heads, config.mamba_head_dim
    return config.mamba_n_heads, config.mamba_d_head


def length(values: torch.Tensor) -> float:
    return math.sqrt(sum(float(value) ** 2 for value in values))


def reap(seen: list[tuple[int, float, float]], size: int) -> torch.Tensor:
    """The mean of gate times length of output over (expert, gate, length) triples; NaN for experts without any."""
    means = []
    for expert in range(size):
        products = [gate * norm for e, gate, norm in seen if e == expert]
        means.append(sum(products) / len(products) if products else math.nan)
    return torch.tensor(means, dtype=torch.float64)


def hear_all(model: Any, rows: Rows) -> tuple[dict[str, torch.Tensor], dict[str, tuple[list[tuple[int, float, float]], int]]]:
    """Importance of channels by name, and of routed experts everything that was seen, by layer."""
    heard: Heard = defaultdict(list)
    routed: dict[str, tuple[list[tuple[int, float, float]], int]] = {}
    hooks = [hook for number, layer in enumerate(model.model.layers) for hook in _hooks(model, number, layer, heard, routed)]
    squares: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for row in rows:
            heard.clear()
            model(torch.tensor([row]))
            for name, pieces in heard.items():
                mean = torch.cat(pieces).double().abs().mean(0)
                squares[name] = squares.get(name, torch.zeros_like(mean)) + mean**2
    for hook in hooks:
        hook.remove()
    return {name: total.sqrt() for name, total in squares.items()}, routed


def _hooks(model: Any, number: int, layer: Any, heard: Heard, routed: Any) -> list[Any]:
    hooks = []

    def hear(module: Any, name: str, output: bool = False) -> None:
        hooks.append(module.register_forward_hook(lambda m, i, o: heard[name].append((o if output else i[0])[0])))

    for path, module in layer.named_modules():
        leaf = path.rsplit(".", 1)[-1]
        if path in ("norm", "input_layernorm", "post_attention_layernorm"):
            hear(module, f"{path} {number}", output=True)
        if leaf == "in_proj":
            hear(module, f"layers.{number}.in_proj", output=True)
        if leaf == "o_proj":
            hear(module, f"layers.{number}.o_proj")
        if leaf in ("down_proj", "output_linear") and isinstance(module, torch.nn.Linear):
            hear(module, f"layers.{number}.{'shared_ffn' if 'shared' in path else 'ffn'}")
        if leaf == "experts":
            router = next(m for p, m in layer.named_modules() if p.rsplit(".", 1)[-1] in ("gate", "router"))
            logits: list[torch.Tensor] = []
            hooks.append(router.register_forward_hook(lambda m, i, o, logits=logits: logits.append(_logits(m, i[0]))))
            seen: list[tuple[int, float, float]] = []
            routed[f"layers.{number}"] = (seen, module.down_proj.shape[0])
            hooks.append(
                module.register_forward_hook(
                    lambda m, i, o, n=number, logits=logits, seen=seen: _routed(model.config, heard, seen, n, m, i, logits[-1])
                )
            )
    return hooks


def _logits(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).double() @ router.weight.double().T


def gates_of(config: Any, logits: torch.Tensor, chosen: list[int]) -> list[float]:
    """What multiplies the outputs of one token's chosen experts, from its router logits (E,), by each family's published rule."""
    kind = config.model_type
    if kind == "granitemoehybrid":
        exponents = [math.exp(float(logits[expert])) for expert in chosen]
        return [exponent / sum(exponents) for exponent in exponents]
    scores = torch.sigmoid(logits) if kind == "nemotron_h" else torch.softmax(logits, 0)
    gates = [float(scores[expert]) for expert in chosen]
    if kind == "mixtral" or config.norm_topk_prob:
        gates = [gate / sum(gates) for gate in gates]
    return [gate * getattr(config, "routed_scaling_factor", 1.0) for gate in gates]


def _routed(config: Any, heard: Heard, seen: Any, layer: int, experts: Any, inputs: Any, logits: torch.Tensor) -> None:
    hidden, choice = inputs[0].double(), inputs[1]
    for token in range(hidden.shape[0]):
        chosen = choice[token].tolist()
        for expert, gate in zip(chosen, gates_of(config, logits[token], chosen), strict=True):
            inner = inside(experts, expert, hidden[token])
            heard[f"layers.{layer}.expert_ffn"].append(inner[None])
            heard[f"layers.{layer}.experts.{expert}.expert_ffn"].append(inner[None])
            seen.append((expert, gate, length(experts.down_proj[expert].double() @ inner)))


def inside(experts: Any, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """What enters an expert's last matrix for one token, fp64 (F,)."""
    if hasattr(experts, "gate_up_proj"):
        both = experts.gate_up_proj[expert].double() @ hidden
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        return torch.nn.functional.silu(gate) * up
    return torch.relu(experts.up_proj[expert].double() @ hidden) ** 2


def slow_removal(model: Any, rows: Rows, held: set[int]) -> tuple[list[int], list[float]]:
    """Iterative removal by real logits: order of removal and errors. The last layer of ``held`` goes after all others."""
    layers = list(range(len(model.model.layers)))
    removed: list[int] = []
    errors: list[float] = []
    full = [logits_without(model, row, []) for row in rows]
    while len(removed) < len(layers):
        left = [layer for layer in layers if layer not in removed]
        free = [layer for layer in left if layer not in held or len(held & set(left)) > 1]
        found = {layer: _error(model, rows, full, [*removed, layer]) for layer in free or left}
        best = min(found, key=lambda layer: found[layer])
        removed.append(best)
        errors.append(found[best])
    return removed, errors


def _error(model: Any, rows: Rows, full: list[torch.Tensor], removed: list[int]) -> float:
    change = sum(float(((logits_without(model, r, removed) - f) ** 2).sum()) for r, f in zip(rows, full, strict=True))
    return change / sum(float((f**2).sum()) for f in full)


def logits_without(model: Any, row: list[int], removed: list[int]) -> torch.Tensor:
    """Logits (T, V) fp64 of a model some of whose layers give back what they were given."""

    def undo(_module: Any, inputs: Any, named: Any, _output: Any) -> Any:
        return inputs[0] if inputs else named["hidden_states"]

    hooks = [model.model.layers[layer].register_forward_hook(undo, with_kwargs=True) for layer in removed]
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0].double()
    for hook in hooks:
        hook.remove()
    return logits


def slow_cosines(model: Any, rows: Rows) -> list[float]:
    """For each layer, 1 - cosine of its input and output, the mean over all tokens."""
    found: dict[int, list[float]] = defaultdict(list)
    hooks = []
    for number, layer in enumerate(model.model.layers):

        def hear(_module: Any, inputs: Any, named: Any, output: Any, number: int = number) -> None:
            before = (inputs[0] if inputs else named["hidden_states"])[0].double()
            for x, y in zip(before, output[0].double(), strict=True):
                found[number].append(1 - float(x @ y) / (length(x) * length(y)))

        hooks.append(layer.register_forward_hook(hear, with_kwargs=True))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return [sum(found[n]) / len(found[n]) for n in range(len(found))]
