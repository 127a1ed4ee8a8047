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


def slow_scores(
    model: Any, rows: Rows, kept: int | None = None, per_expert: bool = False, published: bool = False
) -> dict[str, torch.Tensor]:
    """Every width axis by its default, or as published where that is another. ``kept``: channels of a Mamba head that count."""
    channels, routed = hear_all(model, rows)
    scores: dict[str, torch.Tensor] = {"hidden": sum(v for k, v in channels.items() if "norm" in k)}  # type: ignore[dict-item]
    for name, one in channels.items():
        layer = name.rsplit(".", 1)[0]
        if name.endswith("o_proj"):
            heads = one.split(len(one) // model.config.num_attention_heads)
            scores[f"{layer}.heads"] = torch.tensor([length(head) for head in heads])
        elif name.endswith("in_proj"):
            width = math.prod(mamba_sizes(model.config))
            scores |= mamba_scores(model.config, layer, one[width : 2 * width], kept)  # behind z
        elif name.endswith(("out_proj", "adding")):
            continue
        elif "norm" not in name and (per_expert or ".experts." not in name):
            scores[name] = one
    if not published:
        scores |= {key: one for key, one in slow_weighted(model, rows, kept).items() if "mamba" in key or "heads" in key}
    return scores | {f"{layer}.experts": reap(seen, size) for layer, (seen, size) in routed.items()}


def mamba_scores(config: Any, layer: str, x: torch.Tensor, kept: int | None) -> dict[str, torch.Tensor]:
    """Channels of a head, and heads, from the importance of all channels of all heads, head by head."""
    heads, size = mamba_sizes(config)
    per_channel = [length(torch.stack([x[h * size + p] for h in range(heads)])) for p in range(size)]
    best = sorted(range(size), key=lambda p: -per_channel[p])[: kept or size]
    per_head = [length(torch.stack([x[h * size + p] for p in best])) for h in range(heads)]
    return {f"{layer}.mamba_head_dim": torch.tensor(per_channel), f"{layer}.mamba_heads": torch.tensor(per_head)}


READS = {
    "norm": ("in_proj", "q_proj", "k_proj", "v_proj", "gate", "up_proj", "fc1_latent_proj"),
    "input_layernorm": ("in_proj", "q_proj", "k_proj", "v_proj"),
    "post_attention_layernorm": ("gate", "router", "gate_proj", "up_proj", "gate_up_proj", "input_linear"),
}


def slow_weighted(model: Any, rows: Rows, kept: int | None = None) -> dict[str, torch.Tensor]:
    """Every axis of channels by the length, over all tokens, of what each adds to all that reads it; Mamba behind its scan."""
    channels, _ = hear_all(model, rows, energy=True)
    scores: dict[str, torch.Tensor] = {"hidden": torch.zeros(model.config.hidden_size, dtype=torch.float64)}
    for name, one in channels.items():
        if "norm" in name:
            place, number = name.split()
            scores["hidden"] += one * column_lengths(model, int(number), READS[place], len(one))
            continue
        _, number, inside, *expert = name.split(".")
        layer = f"layers.{number}"
        if inside in ("o_proj", "out_proj"):
            added = one * column_lengths(model, int(number), (inside,), len(one))
            if inside == "out_proj":
                scores |= mamba_scores(model.config, layer, added, kept)
            else:
                heads = added.split(len(one) // model.config.num_attention_heads)
                scores[f"{layer}.heads"] = torch.tensor([length(head) for head in heads], dtype=torch.float64)
        elif inside in ("ffn", "shared_ffn"):
            scores[name] = one * column_lengths(model, int(number), ("down_proj", "output_linear"), len(one), inside)
        elif expert[1:] == ["adding"]:
            down = last_matrix(model, int(number))[int(expert[0])]
            added = one * torch.tensor([length(column) for column in down.T], dtype=torch.float64)
            scores[f"{layer}.experts.{expert[0]}.expert_ffn"] = added
            before = scores.get(f"{layer}.expert_ffn", torch.zeros_like(added))
            scores[f"{layer}.expert_ffn"] = (before**2 + added**2).sqrt()
    return scores


def column_lengths(model: Any, layer: int, names: tuple[str, ...], size: int, axis: str = "") -> torch.Tensor:
    """For each of ``size`` columns, its length through all matrices of a layer that are called so."""
    squares = torch.zeros(size, dtype=torch.float64)
    for name, weight in model.model.layers[layer].named_parameters():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        right = axis != "shared_ffn" or "shared" in name
        if leaf in names and right and weight.ndim > 1 and weight.shape[-1] == size:
            for line in weight.detach().double().reshape(-1, size):
                squares += line**2
    assert squares.min() > 0
    return squares.sqrt()


def last_matrix(model: Any, layer: int) -> torch.Tensor:
    """The last matrix of all experts of a layer, (E, D, F), fp64."""
    weights = dict(model.model.layers[layer].named_parameters())
    [down] = [weight for name, weight in weights.items() if name.endswith("experts.down_proj")]
    return down.detach().double()


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


def hear_all(
    model: Any, rows: Rows, energy: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[list[tuple[int, float, float]], int]]]:
    """Importance of channels by name, or the length of their activations over all tokens; and of routed experts everything that
    was seen, by layer."""
    heard: Heard = defaultdict(list)
    routed: dict[str, tuple[list[tuple[int, float, float]], int]] = {}
    hooks = [
        hook for number, layer in enumerate(model.model.layers) for hook in _hooks(model, number, layer, heard, routed)
    ]
    squares: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for row in rows:
            heard.clear()
            model(torch.tensor([row]))
            for name, pieces in heard.items():
                tokens = torch.cat(pieces).double()
                more = (tokens**2).sum(0) if energy else tokens.abs().mean(0) ** 2
                squares[name] = squares.get(name, torch.zeros_like(more)) + more
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
        if leaf in ("o_proj", "out_proj"):
            hear(module, f"layers.{number}.{leaf}")
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
                    lambda m, i, o, n=number, logits=logits, seen=seen: _routed(
                        model.config, heard, seen, n, m, i, logits[-1]
                    )
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
            heard[f"layers.{layer}.experts.{expert}.adding"].append(gate * inner[None])
            seen.append((expert, gate, length(experts.down_proj[expert].double() @ inner)))


def inside(experts: Any, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """What enters an expert's last matrix for one token, fp64 (F,)."""
    if hasattr(experts, "gate_up_proj"):
        both = experts.gate_up_proj[expert].double() @ hidden
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        return torch.nn.functional.silu(gate) * up
    return torch.relu(experts.up_proj[expert].double() @ hidden) ** 2


def slow_removal(model: Any, rows: Rows, held: set[int], by: Any = None) -> tuple[list[int], list[float]]:
    """Iterative removal by real logits: order of removal and errors. The last layer of ``held`` goes after all others.

    ``by``: the error of logits by row and full logits by row; default: of squared logits.
    """
    error = by or squared_error
    layers = list(range(len(model.model.layers)))
    removed: list[int] = []
    errors: list[float] = []
    full = [logits_without(model, row, []) for row in rows]
    while len(removed) < len(layers):
        left = [layer for layer in layers if layer not in removed]
        free = [layer for layer in left if layer not in held or len(held & set(left)) > 1]
        found = {
            layer: error([logits_without(model, row, [*removed, layer]) for row in rows], full)
            for layer in free or left
        }
        best = min(found, key=lambda layer: found[layer])
        removed.append(best)
        errors.append(found[best])
    return removed, errors


def squared_error(logits: list[torch.Tensor], full: list[torch.Tensor]) -> float:
    """Squared change of logits over squared full logits."""
    change = sum(float(((one - whole) ** 2).sum()) for one, whole in zip(logits, full, strict=True))
    return change / sum(float((whole**2).sum()) for whole in full)


def divergence(logits: list[torch.Tensor], full: list[torch.Tensor]) -> float:
    """KL of what the whole model predicts from what is predicted, the mean over tokens."""
    found = []
    for one, whole in zip(torch.cat(logits), torch.cat(full), strict=True):
        p, q = torch.softmax(whole, 0), torch.softmax(one, 0)
        found.append(float((p * (p / q).log()).sum()))
    return sum(found) / len(found)


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
