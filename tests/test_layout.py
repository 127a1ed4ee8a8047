"""The table against real models of transformers: names, shapes, defaults; and its grammar against hand-worked cases."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cut import CASES
from safetensors import safe_open
from tiny import FAMILIES, tiny_config, tiny_granitemoehybrid, tiny_model, tiny_qwen3_moe
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from star_elastic.axes import Axis
from star_elastic.errors import CheckpointError
from star_elastic.families import family_of, layout_of
from star_elastic.families.nemotron_h import DEFAULTS
from star_elastic.layout import parse_dims, runs
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel, read_json

VARIANTS = [
    {"pattern": "ME*ME"},
    {"pattern": "ME*-E"},
    {"pattern": "M*-", "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    {"pattern": "ME*E", "moe_latent_size": 24, "mlp_bias": True},
    {"pattern": "ME*E", "n_group": 2, "topk_group": 1},
]


PARENTS = {
    **{str(variant): functools.partial(tiny_model, **variant) for variant in VARIANTS},
    **{name: case.parent for name, case in CASES.items()},
}


@pytest.mark.parametrize("build", PARENTS.values(), ids=PARENTS)
def test_the_table_names_every_tensor_in_memory_with_its_shape(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    table = {unit.name(row): row.shape for unit, row in layout_of(model.config.to_dict()).tensors()}
    assert table == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("build", PARENTS.values(), ids=PARENTS)
def test_the_table_names_every_tensor_on_disk_with_its_shape(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    layout = layout_of(read_json(tmp_path / "config.json"))
    on_disk = [name for unit, row in layout.tensors() if row.alias is None for name in unit.disk_names(row)]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(on_disk) == sorted(file.keys())
        for name in file.keys():  # noqa: SIM118
            located = layout.find(name)
            assert located is not None and located.renamed() == name
            assert [dim.size for dim in located.dims] == file.get_slice(name).get_shape()


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, Qwen3Config, Qwen3MoeConfig, MixtralConfig, GraniteMoeHybridConfig]
)
def test_a_config_of_nothing_but_its_family_means_what_transformers_means(config_class: type[PreTrainedConfig]) -> None:
    config = config_class()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for described in ({"model_type": config.model_type}, config.to_dict()):
        layout = layout_of(described)
        assert {unit.name(row): row.shape for unit, row in layout.tensors()} == real
        assert layout.top_k == getattr(config, "num_experts_per_tok", None)
        assert layout.logits_divisor == getattr(config, "logits_scaling", 1)


def test_published_spellings_mean_the_same() -> None:
    moe = tiny_qwen3_moe().config.to_dict()
    published = {"num_experts" if name == "num_local_experts" else name: value for name, value in moe.items()}
    assert layout_of(published).fingerprint == layout_of(moe).fingerprint
    granite = tiny_granitemoehybrid().config.to_dict()
    older = {**granite, "mamba_d_head": "auto", "layer_types": ["mamba", "attention", "mamba", "attention"]}
    assert layout_of(older).fingerprint == layout_of(granite).fingerprint


@pytest.mark.parametrize(
    ("family", "edits", "words"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ("llama", {"hidden_size": "64"}, "hidden_size must be a positive whole number, not '64'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number, not 0"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types must be 4 of"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_groups 3 does not divide mamba_n_heads 8"),
    ],
)
def test_impossible_configs_are_refused_in_one_line(family: str, edits: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        layout_of({**FAMILIES[family]().config.to_dict(), **edits})
    assert "\n" not in str(caught.value)


def test_fields_that_a_config_leaves_out_mean_what_transformers_means() -> None:
    theirs = NemotronHConfig().to_dict()
    del theirs["layers_block_type"]
    assert {name: theirs[name] for name in theirs if name in DEFAULTS} == {
        name: value for name, value in DEFAULTS.items() if name != "layers_block_type"
    }


def test_the_older_pattern_string_means_the_same_layers() -> None:
    config = tiny_config("ME*-E").to_dict()
    older = {**config, "hybrid_override_pattern": "ME*-E", "layers_block_type": None}
    legacy = {**config, "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"]}
    assert layout_of(config).fingerprint == layout_of(older).fingerprint == layout_of(legacy).fingerprint


def test_the_fingerprint_tells_architectures_apart() -> None:
    one = layout_of(tiny_config().to_dict()).fingerprint
    assert one != layout_of(tiny_config(num_experts_per_tok=3).to_dict()).fingerprint
    assert one != layout_of(tiny_config(hidden_size=68).to_dict()).fingerprint


def test_segments_and_factors_index_row_major() -> None:
    """Rows z, x (2 groups of 2 heads, 2 channels each), one constant of 3, dt; keep head 0 of each group, channel 0."""
    axes = {"h": Axis("h", 4, groups=2), "p": Axis("p", 2)}
    (dim,) = parse_dims("h*p + h!*p! + c + h", axes, {"c": 3})
    kept = {"h": axes["h"].members(2), "p": axes["p"].members(1)}
    assert kept == {"h": [0, 2], "p": [0]}
    assert dim.size == 8 + 8 + 3 + 4
    assert dim.index(kept) == [0, 4, 8, 12, 16, 17, 18, 19, 21]
    assert dim.width({"h": 2, "p": 1}) == 2 + 2 + 3 + 2
    assert dim.index({"other": [0]}) is None
    assert dim.masked_axes == {"h", "p"}


def test_a_permutation_is_the_same_reading_as_a_cut() -> None:
    axes = {"h": Axis("h", 2), "p": Axis("p", 3)}
    (dim,) = parse_dims("h*p", axes, {})
    names = [f"h{h}p{p}" for h in range(2) for p in range(3)]
    index = dim.index({"h": [1, 0], "p": [2, 0, 1]})
    assert index is not None
    assert [names[i] for i in index] == ["h1p2", "h1p0", "h1p1", "h0p2", "h0p0", "h0p1"]


def test_every_axis_is_masked_exactly_once_on_every_path() -> None:
    """In each unit the axes with a mask site are those that the unit writes, each at one weight (and its biases)."""
    layout = layout_of(tiny_config("ME*-E").to_dict())
    sites = {
        unit.kind: {
            row.name: sorted(axis for dim in row.dims for axis in dim.masked_axes)
            for row in unit.rows
            if any(dim.masked_axes for dim in row.dims)
        }
        for unit in layout.units
    }
    assert sites == {
        "embedding": {"weight": ["hidden"]},
        "linear_attention": {
            "mixer.in_proj.weight": ["mamba_head_dim", "mamba_heads"],
            "mixer.conv1d.bias": ["mamba_head_dim", "mamba_heads"],
            "mixer.out_proj.weight": ["hidden"],
        },
        "full_attention": {"mixer.o_proj.weight": ["heads", "hidden"]},
        "moe": {
            "mixer.experts.down_proj": ["expert_ffn", "hidden"],
            "mixer.shared_experts.down_proj.weight": ["hidden", "shared_ffn"],
        },
        "mlp": {"mixer.down_proj.weight": ["ffn", "hidden"]},
        "final_norm": {},
        "head": {},
    }


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        (
            "llama",
            {
                "attention+mlp": {
                    "self_attn.o_proj.weight": ["heads", "hidden"],
                    "mlp.down_proj.weight": ["ffn", "hidden"],
                }
            },
        ),
        (
            "qwen3_moe",
            {
                "attention+mlp": {
                    "self_attn.o_proj.weight": ["heads", "hidden"],
                    "mlp.down_proj.weight": ["ffn", "hidden"],
                },
                "attention+moe": {
                    "self_attn.o_proj.weight": ["heads", "hidden"],
                    "mlp.experts.down_proj": ["expert_ffn", "hidden"],
                },
            },
        ),
        (
            "granitemoehybrid",
            {
                "mamba+moe": {
                    "mamba.in_proj.weight": ["mamba_head_dim", "mamba_heads"],
                    "mamba.conv1d.bias": ["mamba_head_dim", "mamba_heads"],
                    "mamba.out_proj.weight": ["hidden"],
                    "block_sparse_moe.experts.down_proj": ["expert_ffn", "hidden"],
                    "shared_mlp.output_linear.weight": ["hidden", "shared_ffn"],
                },
                "attention+moe": {
                    "self_attn.o_proj.weight": ["heads", "hidden"],
                    "block_sparse_moe.experts.down_proj": ["expert_ffn", "hidden"],
                    "shared_mlp.output_linear.weight": ["hidden", "shared_ffn"],
                },
            },
        ),
    ],
)
def test_axes_are_masked_once_in_other_families_too(family: str, wanted: dict[str, dict[str, list[str]]]) -> None:
    layout = layout_of(FAMILIES[family]().config.to_dict())
    sites = {
        unit.kind: {
            row.name: sorted(axis for dim in row.dims for axis in dim.masked_axes)
            for row in unit.rows
            if any(dim.masked_axes for dim in row.dims)
        }
        for unit in layout.units
    }
    assert sites == {**wanted, "embedding": {"weight": ["hidden"]}, "final_norm": {}, "head": {}}


def test_runs_compress_to_contiguous_stretches() -> None:
    assert runs([]) == []
    assert runs([3]) == [(3, 1)]
    assert runs([0, 1, 2]) == [(0, 3)]
    assert runs([0, 1, 4, 5, 6, 2]) == [(0, 2), (4, 3), (2, 1)]


def test_a_childs_config_loads_in_transformers_with_the_cut_shapes() -> None:
    parent = tiny_config("ME*-E")
    widths = {
        "hidden": 32,
        "heads": 4,
        "mamba_heads": 4,
        "mamba_head_dim": 4,
        "experts": 4,
        "expert_ffn": 16,
        "ffn": 24,
    }
    config = parent.to_dict() | {"auto_map": {"AutoConfig": "x.Y"}}
    written = family_of(config).child_config(config, widths, [0, 1, 2, 3])
    assert "auto_map" not in written
    assert (
        written["hybrid_override_pattern"] == "ME*-" and written["num_hidden_layers"] == 4 and written["head_dim"] == 8
    )
    child = NemotronHConfig.from_dict(written)
    with torch.device("meta"):
        from transformers import NemotronHForCausalLM

        model = NemotronHForCausalLM(child)
    cut = layout_of(parent.to_dict())
    table = {unit.name(row): row.cut_shape(widths) for unit, row in cut.tensors([0, 1, 2, 3])}
    assert table == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def child_folder(parent: Path, widths: dict[str, int], layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """config.json of a slice, after transformers has loaded the folder with every key in place."""
    slice_checkpoint(parent, parent.with_name("out"), Submodel(widths=widths, layers=layers))
    _, info = AutoModelForCausalLM.from_pretrained(parent.with_name("out"), output_loading_info=True)
    assert not any(info.values()), info
    return read_json(parent.with_name("out") / "config.json")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "granitemoehybrid"])
def test_head_dim_is_written_where_the_parents_config_lets_one_guess(family: str, tmp_path: Path) -> None:
    """Case 19: a head is 64 / 8 = 8 channels in the parent, and not 32 / 8 = 4 in the child."""
    FAMILIES[family](head_dim=8).save_pretrained(tmp_path / "parent")
    config = read_json(tmp_path / "parent" / "config.json")
    config.pop("head_dim")
    (tmp_path / "parent" / "config.json").write_text(json.dumps(config))
    assert child_folder(tmp_path / "parent", {"hidden": 32})["head_dim"] == 8


def test_published_qwen3_moe_configs_name_experts_otherwise(tmp_path: Path) -> None:
    tiny_qwen3_moe().save_pretrained(tmp_path / "parent")
    config = read_json(tmp_path / "parent" / "config.json")
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "parent" / "config.json").write_text(json.dumps(config))
    written = child_folder(tmp_path / "parent", {"experts": 5})
    assert written["num_experts"] == written["num_local_experts"] == 5


def test_window_layers_by_number_become_a_list() -> None:
    """Which layers see a window follows from their number in the parent, so a depth cut must spell it out."""
    config = Qwen3Config(num_hidden_layers=6, use_sliding_window=True, max_window_layers=3)
    given = {"num_hidden_layers": 6, "use_sliding_window": True, "max_window_layers": 3}
    kept = [0, 2, 4, 5]
    for fields in (given, config.to_dict()):
        assert family_of(config.to_dict()).config_edits(fields, {}, kept)["layer_types"] == [
            config.layer_types[number] for number in kept
        ]
    assert family_of(config.to_dict()).config_edits({**given, "use_sliding_window": False}, {}, kept)["layer_types"] == [
        "full_attention"
    ] * 4
