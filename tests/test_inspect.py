"""``inspect`` against real models, published numbers, and widths counted by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_config, tiny_folder, tiny_model
from transformers import NemotronHForCausalLM

from star_elastic.axes import Axis, Rule
from star_elastic.cli import main
from star_elastic.elastic import ElasticModel
from star_elastic.families import layout_of
from star_elastic.inspect import copies, describe, legal_text
from star_elastic.submodel import ElasticConfig, Submodel

NANO = "nemotron-3-nano-30b-a3b"


def config_folder(path: Path, **edits: object) -> Path:
    """A folder that holds only a config.json."""
    path.mkdir()
    tiny_config(**edits).save_pretrained(path)
    return path


def meta_params(**edits: object) -> int:
    """Parameters of transformers' own model, built without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in NemotronHForCausalLM(tiny_config(**edits)).parameters())


def test_preset_has_the_published_counts() -> None:
    sizes = describe(preset=NANO).submodels
    assert list(sizes) == ["30b", "23b", "12b"]
    parent = sizes["30b"]
    assert parent.params == 31_577_937_344
    assert parent.active_params == 3_580_073_408
    assert parent.active_params_without_embedding == 3_227_751_872
    assert [round(sizes[name].bytes["bf16"] / 2**30, 1) for name in sizes] == [58.8, 44.1, 23.2]
    # All three keep heads and Mamba whole, so caches have equal shapes and every tensor is a view.
    assert len({(s.kv_bytes_per_token, s.state_bytes_per_sequence) for s in sizes.values()}) == 1
    assert all(s.copied_bytes == 0 and s.copied_axes == () for s in sizes.values())


def test_preset_caches_by_hand() -> None:
    parent = describe(preset=NANO).submodels["30b"]
    assert parent.kv_bytes_per_token == 6 * 2 * 2 * 128 * 2  # layers, K and V, heads, channels, bytes
    conv = (64 * 64 + 2 * 8 * 128) * 4 * 2
    ssm = 64 * 64 * 128 * 4  # the SSM state is fp32
    assert parent.state_bytes_per_sequence == 23 * (conv + ssm)


def test_folder_without_weights_counts_like_the_real_model(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "parent")
    submodels = {"half": Submodel(widths={"hidden": 32, "expert_ffn": 16, "shared_ffn": 24})}
    ElasticConfig(family="nemotron_h", submodels=submodels, sorted_axes=("hidden",)).save(folder)
    found = describe(folder).submodels
    assert list(found) == ["full", "half"]
    assert found["full"].params == meta_params()
    half = {"hidden_size": 32, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
    assert found["half"].params == meta_params(**half)
    unused = 2 * (8 - 2) * 2 * 32 * 16  # MoE layers, idle experts, matrices, hidden, expert width
    assert found["half"].active_params == meta_params(**half) - unused
    assert found["half"].active_params_without_embedding == found["half"].active_params - 128 * 32


def test_without_elastic_json_only_full_is_shown(tmp_path: Path) -> None:
    assert list(describe(config_folder(tmp_path / "parent")).submodels) == ["full"]


def test_config_json_itself_may_be_given(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "parent")
    assert describe(folder / "config.json").submodels == describe(folder).submodels


def test_published_model_is_recognised_by_its_shapes(tmp_path: Path) -> None:
    from star_elastic.presets import get_preset

    (tmp_path / "config.json").write_text(json.dumps(get_preset(NANO).config))
    assert list(describe(tmp_path).submodels) == ["30b", "23b", "12b"]


def test_submodel_that_is_the_whole_model_stands_for_full(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "parent")
    ElasticConfig(family="nemotron_h", submodels={"big": Submodel(widths={"hidden": 64})}).save(folder)
    assert list(describe(folder).submodels) == ["big"]


@pytest.mark.parametrize(
    ("widths", "numbers", "axes"),
    [
        ({"hidden": 32}, 0, ()),
        ({"experts": 4, "expert_ffn": 16, "shared_ffn": 24, "hidden": 48}, 0, ()),
        # 4 of 8 heads in 2 KV groups: q rows and o columns of the one attention layer.
        ({"heads": 4}, 2 * (4 * 8) * 64, ("heads",)),
        # Two Mamba layers, 4 of 8 heads in 2 groups. in_proj has z, x, B, C, dt rows; conv x, B, C lanes and a bias;
        # A_log, D, dt_bias; the gated norm; out_proj's columns.
        (
            {"mamba_heads": 4},
            2 * ((32 + 32 + 16 + 16 + 4) * 64 + (32 + 16 + 16) * (4 + 1) + 3 * 4 + 32 + 64 * 32),
            ("mamba_heads",),
        ),
    ],
)
def test_copied_bytes_by_hand(widths: dict[str, int], numbers: int, axes: tuple[str, ...]) -> None:
    layout = layout_of(tiny_config().to_dict())
    assert copies(layout, Submodel(widths=widths)) == (2 * numbers, axes)


@pytest.mark.parametrize(
    "widths", [{"heads": 4}, {"mamba_head_dim": 8, "hidden": 32}, {"mamba_heads": 4, "heads": 2, "experts": 4}]
)
def test_copied_bytes_are_those_of_a_submodel_in_memory(widths: dict[str, int]) -> None:
    # bf16 rows are whole 16-byte units: multiples of 8, so channels of 16 here.
    model = tiny_model(mamba_head_dim=16).to(torch.bfloat16)
    elastic = ElasticModel(model)
    elastic.add("cut", Submodel(widths=widths))
    assert copies(elastic.layout, Submodel(widths=widths))[0] == elastic.copied_bytes("cut")


def test_copied_bytes_count_kept_layers_only() -> None:
    layout = layout_of(tiny_config().to_dict())
    both, _ = copies(layout, Submodel(widths={"mamba_heads": 4}))
    one, _ = copies(layout, Submodel(widths={"mamba_heads": 4}, layers=(0, 1, 2)))
    assert one * 2 == both


def test_legal_text() -> None:
    assert legal_text(Axis("a", 64, 1, (Rule("rows", 8, 8),))) == "8..64 step 8"
    assert legal_text(Axis("a", 60, 1, (Rule("rows", 8, 8),))) == "8..56 step 8, or 60"
    assert legal_text(Axis("a", 5)) == "1..5"
    assert legal_text(Axis("a", 4, 4, (Rule("groups", 4, 4),))) == "4 only"


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--preset", NANO, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    small = out["submodels"]["12b"]
    assert small["widths"]["hidden"] == 1920 and small["widths"]["expert_ffn"] == 960
    assert {"params", "active_params", "active_params_without_embedding", "bytes"} <= small.keys()
    assert small["bytes"].keys() == {"bf16", "fp8", "nvfp4"}
    assert small["bytes"]["bf16"] > small["bytes"]["fp8"] > small["bytes"]["nvfp4"]
    assert out["axes"]["heads"]["legal"] == {
        "minimum": 2,
        "step": 2,
        "text": "2..32 step 2",
        "why": ["heads are cut equally inside each of 2 KV groups"],
    }


def test_tables_show_every_axis_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--preset", NANO]) == 0
    out = capsys.readouterr().out
    for word in ("mamba_head_dim", "8..2688 step 8", "30b", "23b", "12b", "31.578B", "23.16 GiB", "KV groups"):
        assert word in out


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from star_elastic.cli import main;"
        f"assert main(['inspect', '--preset', '{NANO}']) == 0;"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "nemotronh"}', "did you mean 'nemotron_h'"),
        ('{"model_type": "nemotron_h"}', "neither layers_block_type nor hybrid_override_pattern"),
        ('{"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}', "layer 1 is 'X'"),
        ('{"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "hidden_size": -3}', "hidden_size must be"),
    ],
)
def test_bad_configs_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_damaged_elastic_json_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path / "parent")
    content = {"format_version": 1, "family": "nemotron_h", "submodels": {"a": {"widths": {"hidden": 3}}}}
    (folder / "elastic.json").write_text(json.dumps(content))
    assert main(["inspect", str(folder)]) == 2
    assert "hidden width 3 is illegal" in capsys.readouterr().err


def test_weights_are_not_looked_at(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent")
    before = describe(folder).submodels
    (folder / "model.safetensors").write_bytes(b"junk")
    assert describe(folder).submodels == before
