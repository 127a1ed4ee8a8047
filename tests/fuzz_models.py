"""hypothesis strategies: a random tiny model of any family, and a random nested model of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from tiny import KINDS

from star_elastic.errors import WidthError
from star_elastic.layout import Layout
from star_elastic.submodel import Submodel

Draw = st.DrawFn
FLAGS = st.booleans()
WIDTHS = st.integers(1, 6).map(
    lambda number: 8 * number
)  # in bf16, torch multiplies experts only in rows of whole 16 bytes


@st.composite
def edits(draw: Draw, family: str) -> dict[str, Any]:
    """Fields of a random config: sizes, layer kinds, biases, ties, dtype."""
    groups = draw(st.integers(1, 3))
    shared = {
        "hidden_size": draw(st.integers(2, 10).map(lambda number: 8 * number)),
        "vocab_size": draw(st.sampled_from([64, 67, 128])),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from([4, 8, 16])),
        "tie_word_embeddings": draw(FLAGS),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    }
    return {**shared, **draw(OWN[family]())}


@st.composite
def _nemotron_h(draw: Draw) -> dict[str, Any]:
    groups, expert_groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    open_groups = draw(st.integers(1, expert_groups))
    per_group = draw(st.integers(2, 4))
    before, after = (draw(st.text(sorted(KINDS), max_size=2)) for _ in range(2))
    return {
        "pattern": f"{before}*{after}",  # transformers' default cache fails where there is no attention
        "tie_word_embeddings": False,  # the family has no tied head
        "intermediate_size": draw(WIDTHS),
        "n_groups": groups,
        "mamba_num_heads": groups * draw(st.integers(1, 4)),
        "mamba_head_dim": draw(st.sampled_from([4, 8])),
        "ssm_state_size": draw(st.sampled_from([4, 8, 16])),
        "conv_kernel": draw(st.integers(2, 4)),
        "chunk_size": draw(st.sampled_from([8, 16])),
        "use_conv_bias": draw(FLAGS),
        "use_bias": draw(FLAGS),
        "mlp_bias": draw(FLAGS),
        "n_group": expert_groups,
        "topk_group": open_groups,
        "n_routed_experts": per_group * expert_groups,
        "num_experts_per_tok": draw(st.integers(1, per_group * open_groups)),
        "norm_topk_prob": draw(FLAGS),
        "moe_intermediate_size": draw(WIDTHS),
        "moe_shared_expert_intermediate_size": draw(WIDTHS),
        "moe_latent_size": draw(st.sampled_from([None, 16, 24])),
    }


@st.composite
def _transformer(draw: Draw) -> dict[str, Any]:
    return {
        "num_hidden_layers": draw(st.integers(1, 4)),
        "intermediate_size": draw(WIDTHS),
        "attention_bias": draw(FLAGS),
    }


@st.composite
def _llama(draw: Draw) -> dict[str, Any]:
    groups = draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    return {
        **draw(_transformer()),
        "mlp_bias": draw(FLAGS),
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        "hidden_size": 8 * heads * draw(st.integers(1, 3)),  # transformers wants a multiple of the heads
    }


@st.composite
def _qwen3_moe(draw: Draw) -> dict[str, Any]:
    experts, layers = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    return {
        **draw(_transformer()),
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(WIDTHS),
        "norm_topk_prob": draw(FLAGS),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), max_size=layers - 1, unique=True)),
    }


@st.composite
def _mixtral(draw: Draw) -> dict[str, Any]:
    experts = draw(st.integers(2, 8))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(WIDTHS),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "sliding_window": draw(st.sampled_from([None, 5])),
    }


@st.composite
def _granite(draw: Draw) -> dict[str, Any]:
    groups, experts = draw(st.integers(1, 2)), draw(st.sampled_from([0, 2, 5, 8]))
    heads, expand = 4 * groups, draw(st.integers(1, 2))
    width = draw(st.sampled_from([4, 8]))
    return {
        "hidden_size": heads * width * 2 // expand,
        "mamba_expand": expand,
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * width,
        "mamba_n_groups": groups,
        "mamba_d_state": draw(st.sampled_from([4, 8])),
        "mamba_conv_bias": draw(FLAGS),
        "mamba_proj_bias": draw(FLAGS),
        "attention_bias": draw(FLAGS),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)) if experts else 0,
        "intermediate_size": draw(WIDTHS),
        "shared_intermediate_size": draw(WIDTHS),
        "position_embedding_type": draw(st.sampled_from([None, "rope"])),
    }


OWN = {
    "nemotron_h": _nemotron_h,
    "llama": _llama,
    "qwen3": _transformer,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "granitemoehybrid": _granite,
}
"""Family -> fields of its own, which replace shared ones."""


@st.composite
def submodels(draw: Draw, layout: Layout) -> Submodel:
    """Legal widths of some axes, and some of the layers."""
    widths: dict[str, int] = {}
    for name, axis in layout.width_axes.items():
        if draw(FLAGS):
            fitting = [width for width in axis.legal() if _fits(layout, {**widths, name: width}, None)]
            widths[name] = draw(st.sampled_from(fitting or [axis.size]))
    if not _fits(layout, widths, None):
        widths = {}
    layers = None
    if draw(FLAGS):
        chosen = draw(st.sets(st.integers(0, layout.num_layers - 1), min_size=1))
        layers = tuple(sorted(chosen)) if _fits(layout, widths, tuple(sorted(chosen))) else None
    return Submodel(widths=widths, layers=layers)


def _fits(layout: Layout, widths: Mapping[str, int], layers: tuple[int, ...] | None) -> bool:
    try:
        layout.check(widths, layers)
    except WidthError:
        return False
    return True
