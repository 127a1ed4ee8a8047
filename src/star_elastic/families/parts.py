"""Parts that families are put together from: axes, attention, MLPs with a gate, experts with a gate, Mamba-2, a whole decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.axes import DEPTH, Axis, Rule
from star_elastic.families.base import Config, Table, aligned, divides, positive
from star_elastic.layout import Layout, Norm, Row, State, Tap, Unit

QUANTIZED = frozenset({"fp8", "nvfp4"})
SPARED: frozenset[str] = frozenset()

MATRIX_ROWS = ("hidden", "ffn", "expert_ffn", "shared_ffn", "mamba_head_dim")
"""Axes that form the rows of matrices, whose widths are bound to whole 16-byte units."""


def completed(config: Config, defaults: Config) -> dict[str, Any]:
    """The config of a transformer with its defaults filled in, its sizes checked, and KV heads and head_dim spelled out.

    Raises:
        CheckpointError: a size is impossible.
    """
    full = {**defaults, **config}
    positive(full, *(name for name, value in defaults.items() if type(value) is int))
    full["num_key_value_heads"] = full["num_key_value_heads"] or full["num_attention_heads"]
    full["head_dim"] = full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    positive(full, "num_key_value_heads", "head_dim")
    divides(full, "num_key_value_heads", "num_attention_heads")
    return full


class AxisMaker:
    """Makes axes of the sizes in a config.

    Args:
        config: with every field filled in.
        fields: axis -> config field.
    """

    def __init__(self, config: Config, fields: Mapping[str, str]) -> None:
        self._config = config
        self._fields = fields
        self._row_rules = aligned(config, *MATRIX_ROWS)

    def axis(self, name: str, *rules: Rule, groups: int = 1, scope: str = "layer") -> Axis:
        """An axis with its own rules, and the one for matrix rows where it forms them."""
        own = (self._row_rules[name],) if name in self._row_rules else ()
        return Axis(name, self._config[self._fields[name]], groups, rules + own, scope)

    def grouped(self, name: str, groups: int, what: str) -> Axis:
        """An axis that is cut equally inside each of ``groups`` groups."""
        rule = Rule(f"{name} are cut equally inside each of {groups} {what}", groups, groups)
        return self.axis(name, rule, groups=groups)

    def heads(self) -> Axis:
        """Query heads, inside KV groups."""
        return self.grouped("heads", self._config["num_key_value_heads"], "KV groups")

    def experts(self) -> Axis:
        """Routed experts without expert groups: what stays must offer every token its top-k."""
        top_k = self._config["num_experts_per_tok"]
        return self.axis("experts", Rule(f"every token chooses {top_k} experts", 1, top_k))


def attention_rows(
    table: Table, prefix: str, formats: frozenset[str] = QUANTIZED, *, biases: bool = False, qk_norm: bool = False
) -> list[Row]:
    """Attention: heads are masked at the columns of o_proj (a masked query would still attend, uniformly)."""
    rows = [
        table.row(f"{prefix}.q_proj.weight", "heads*head_dim, hidden", formats=formats),
        table.row(f"{prefix}.k_proj.weight", "kv*head_dim, hidden", formats=formats),
        table.row(f"{prefix}.v_proj.weight", "kv*head_dim, hidden", formats=formats),
        table.row(f"{prefix}.o_proj.weight", "hidden!, heads!*head_dim", formats=formats),
    ]
    if biases:
        rows += [
            table.row(f"{prefix}.q_proj.bias", "heads*head_dim"),
            table.row(f"{prefix}.k_proj.bias", "kv*head_dim"),
            table.row(f"{prefix}.v_proj.bias", "kv*head_dim"),
            table.row(f"{prefix}.o_proj.bias", "hidden!"),
        ]
    if qk_norm:
        rows += [table.row(f"{prefix}.{name}.weight", "head_dim", norm=Norm()) for name in ("q_norm", "k_norm")]
    return rows


def kv_state(table: Table) -> State:
    """Keys and values of one attention layer."""
    return State("kv", table.row("kv", "2, kv, head_dim").dims, per_token=True)


def attention_taps(prefix: str) -> list[Tap]:
    """Where the importance of query heads is read."""
    return [Tap("heads", f"{prefix}.o_proj", "input")]


def gated_mlp_rows(table: Table, prefix: str, axis: str, *, biases: bool = False) -> list[Row]:
    """down(act(gate x) * up x); its channels are masked at the columns of down, where a mask enters once."""
    rows = [
        table.row(f"{prefix}.gate_proj.weight", f"{axis}, hidden", formats=QUANTIZED),
        table.row(f"{prefix}.up_proj.weight", f"{axis}, hidden", formats=QUANTIZED),
        table.row(f"{prefix}.down_proj.weight", f"hidden!, {axis}!", formats=QUANTIZED),
    ]
    if biases:
        rows += [table.row(f"{prefix}.{name}_proj.bias", axis) for name in ("gate", "up")]
        rows.append(table.row(f"{prefix}.down_proj.bias", "hidden!"))
    return rows


def gated_expert_rows(table: Table, prefix: str, gate_up: str | tuple[str, str], down: str) -> list[Row]:
    """Routed experts with a gate, gate and up fused in memory.

    Args:
        table: the family's words.
        prefix: module of the experts.
        gate_up: on-disk name of the fused tensor, or names of gate and up where they are stored apart.
        down: on-disk name.
    """
    marks: dict[str, Any] = {"routed": True, "formats": QUANTIZED}
    return [
        table.row(f"{prefix}.gate_up_proj", "experts, expert_ffn + expert_ffn, hidden", on_disk=gate_up, **marks),
        table.row(f"{prefix}.down_proj", "experts, hidden!, expert_ffn!", on_disk=down, **marks),
    ]


def expert_taps(module: str) -> list[Tap]:
    """Where the importance of routed experts and of their channels is read."""
    return [Tap("experts", module, "experts"), Tap("expert_ffn", module, "experts")]


def mamba_rows(
    table: Table, prefix: str, groups: int, formats: frozenset[str] = QUANTIZED, *, bias: bool, conv_bias: bool
) -> list[Row]:
    """Mamba-2 mixer. Masks act on x before the gated norm: on its rows of in_proj and its lanes of the conv bias."""
    inner, masked = "mamba_heads*mamba_head_dim", "mamba_heads!*mamba_head_dim!"
    in_rows = f"{inner} + {masked} + groups*state + groups*state + mamba_heads"
    biases = [table.row(f"{prefix}.in_proj.bias", in_rows), table.row(f"{prefix}.out_proj.bias", "hidden!")]
    conv = table.row(f"{prefix}.conv1d.bias", f"{masked} + groups*state + groups*state")
    return [
        table.row(f"{prefix}.in_proj.weight", f"{in_rows}, hidden", formats=formats),
        table.row(f"{prefix}.conv1d.weight", f"{inner} + groups*state + groups*state, 1, kernel"),
        *([conv] if conv_bias else []),
        *(table.row(f"{prefix}.{name}", "mamba_heads") for name in ("A_log", "D", "dt_bias")),
        table.row(f"{prefix}.norm.weight", inner, norm=Norm(groups=groups, fused_in=prefix)),
        table.row(f"{prefix}.out_proj.weight", f"hidden!, {inner}", formats=formats),
        *(biases if bias else []),
    ]


def mamba_states(table: Table, ssm_itemsize: int) -> list[State]:
    """Caches of a Mamba-2 layer: the last inputs of the convolution, and the SSM state of ``ssm_itemsize`` bytes a number."""
    conv = table.row("conv", "mamba_heads*mamba_head_dim + groups*state + groups*state, kernel").dims
    ssm = table.row("ssm", "mamba_heads, mamba_head_dim, state").dims
    return [State("conv", conv, per_token=False), State("ssm", ssm, per_token=False, itemsize=ssm_itemsize)]


def mamba_taps(prefix: str) -> list[Tap]:
    """Where the importance of Mamba channels, and of heads on their kept channels, is read: as x leaves the input projection, as
    published, or behind convolution, scan, gate and norm, as it enters the output projection."""
    x, out = f"{prefix}.in_proj", f"{prefix}.out_proj"
    return [
        Tap("mamba_head_dim", x, "output", method="activation"),
        Tap("mamba_heads", x, "output", over="mamba_head_dim", method="activation"),
        Tap("mamba_head_dim", out, "input", method="output"),
        Tap("mamba_heads", out, "input", over="mamba_head_dim", method="output"),
    ]


def norm_rows(table: Table) -> list[Row]:
    """The pre-norms of a layer with two blocks: a mixer and an MLP."""
    names = ("input_layernorm", "post_attention_layernorm")
    return [table.row(f"{name}.weight", "hidden", norm=Norm()) for name in names]


def norm_taps(mixer: str, *mlps: str) -> list[Tap]:
    """Where the importance of hidden channels is read in such a layer, whose modules are a mixer and what stands behind it."""
    return [
        Tap("hidden", "input_layernorm", "output", readers=(mixer,)),
        Tap("hidden", "post_attention_layernorm", "output", readers=mlps),
    ]


def decoder(family: str, table: Table, layers: Sequence[Unit], config: Config, **facts: Any) -> Layout:
    """A whole model by Llama's names around its layers; ``facts`` as in ``Layout``."""
    tied = "model.embed_tokens.weight" if config["tie_word_embeddings"] else None
    embedding = Unit("model.embed_tokens", "model.embed_tokens", "embedding", (table.row("weight", "vocab, hidden!"),))
    norm = Unit("model.norm", "model.norm", "final_norm", (table.row("weight", "hidden", norm=Norm()),))
    head = Unit("lm_head", "lm_head", "head", (table.row("weight", "vocab, hidden", alias=tied),))
    return Layout(family=family, axes=table.axes, units=(embedding, *layers, norm, head), **facts)


def layer(kind: str, number: int, rows: Sequence[Row], **marks: Any) -> Unit:
    """A decoder layer by Llama's names; ``marks`` as in ``Unit``."""
    return Unit("model.layers.{}", "model.layers.{}", kind, tuple(rows), number, **marks)


def common_constants(config: Config) -> dict[str, int]:
    """Sizes that no axis indexes, in every transformer."""
    return {
        "vocab": config["vocab_size"],
        "kv": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
    }


def named(axes: Sequence[Axis], num_layers: int) -> dict[str, Axis]:
    """Axes by name, with ``depth``."""
    return {axis.name: axis for axis in (*axes, Axis(DEPTH, num_layers, scope="model"))}


def kept(layers: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Numbers of the layers that stay."""
    return range(num_layers) if layers is None else layers


def width_edits(
    fields: Mapping[str, str], config: Config, widths: Mapping[str, int], num_layers: int
) -> dict[str, Any]:
    """Config fields of a nested model that follow from its widths and number of layers.

    ``head_dim`` is always written: readers that guess it from ``hidden`` guess wrong.
    """
    return {
        **{fields[name]: width for name, width in widths.items()},
        "head_dim": config["head_dim"],
        "num_hidden_layers": num_layers,
    }
