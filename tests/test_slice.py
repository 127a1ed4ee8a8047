"""Slices: every axis against a child cut by hand, and folders that transformers loads without a word."""

from __future__ import annotations

import ast
import json
import socket
from pathlib import Path

import pytest
import torch
from reference import child_of, rearranged
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import KINDS, tiny_config, tiny_folder, tiny_model, tokens
from transformers import AutoModelForCausalLM, NemotronHForCausalLM
from transformers.utils import logging as hf_logging

from star_elastic.card import retitled
from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import CheckpointError, TargetError, UnknownNameError, WidthError
from star_elastic.slice import plan_slice, slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel

# width, members kept (written by hand), config field
CUTS = {
    "hidden": (48, list(range(48)), "hidden_size"),
    "heads": (4, [0, 1, 4, 5], "num_attention_heads"),  # 2 KV groups of 4
    "mamba_heads": (6, [0, 1, 2, 4, 5, 6], "mamba_num_heads"),  # 2 SSM groups of 4
    "mamba_head_dim": (4, [0, 1, 2, 3], "mamba_head_dim"),
    "experts": (5, [0, 1, 2, 3, 4], "n_routed_experts"),
    "expert_ffn": (20, list(range(20)), "moe_intermediate_size"),
    "shared_ffn": (28, list(range(28)), "moe_shared_expert_intermediate_size"),
    "ffn": (36, list(range(36)), "intermediate_size"),
}
PATTERN = "ME*-EM"
LAYERS = (0, 2, 3, 4)


def load(folder: Path) -> NemotronHForCausalLM:
    """Load as a user would; any key that does not fit is an error."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def expected(source: Path, axes: list[str], layers: tuple[int, ...] | None = None) -> NemotronHForCausalLM:
    """The child cut by hand from the parent as transformers loads it."""
    parent = load(source)
    state = rearranged(parent, {axis: CUTS[axis][1] for axis in axes}, layers)
    edits: dict[str, object] = {CUTS[axis][2]: CUTS[axis][0] for axis in axes}
    if layers is not None:
        edits["layers_block_type"] = [parent.config.layers_block_type[number] for number in layers]
    return child_of(parent.config, state, **edits)


def check_equal(folder: Path, child: NemotronHForCausalLM) -> None:
    loaded = load(folder)
    ours, theirs = loaded.state_dict(), child.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, child(tokens()).logits)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("source") / "parent", pattern=PATTERN)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("source") / "sharded", sharded=True, pattern=PATTERN)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.mark.parametrize("axes", [*([axis] for axis in CUTS), ["hidden", "expert_ffn"], list(CUTS)], ids="+".join)
def test_a_slice_is_the_child_cut_by_hand(source: Path, tmp_path: Path, axes: list[str]) -> None:
    report = slice_checkpoint(source, tmp_path / "out", Submodel(widths={axis: CUTS[axis][0] for axis in axes}))
    child = expected(source, axes)
    check_equal(tmp_path / "out", child)
    assert report.params == sum(parameter.numel() for parameter in child.parameters())
    assert report.nbytes == sum(tensor.nbytes for tensor in child.state_dict().values())


@pytest.mark.parametrize("axes", [[], ["hidden", "experts", "mamba_heads"]], ids=["depth", "mixed"])
def test_dropped_layers_are_renumbered(sharded: Path, tmp_path: Path, axes: list[str]) -> None:
    cut = Submodel(widths={axis: CUTS[axis][0] for axis in axes}, layers=LAYERS)
    slice_checkpoint(sharded, tmp_path / "out", cut)
    check_equal(tmp_path / "out", expected(sharded, axes, LAYERS))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hybrid_override_pattern"] == "M*-E"
    assert config["layers_block_type"] == [KINDS[letter] for letter in "M*-E"]
    assert config["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    "edits",
    [
        {"moe_latent_size": 16},
        {"use_bias": True, "mlp_bias": True},
        {"use_conv_bias": False},
        {"n_group": 2, "topk_group": 2},
    ],
    ids=str,
)
def test_variants_of_the_family(tmp_path: Path, edits: dict[str, object]) -> None:
    folder = tiny_folder(tmp_path / "parent", pattern=PATTERN, **edits)
    axes = [axis for axis in CUTS if axis != "experts" or "n_group" not in edits]
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={axis: CUTS[axis][0] for axis in axes}))
    check_equal(tmp_path / "out", expected(folder, axes))


def test_experts_are_cut_inside_every_expert_group(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", n_group=2, topk_group=2)
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"experts": 4}))
    parent = load(folder)
    child = child_of(parent.config, rearranged(parent, {"experts": [0, 1, 4, 5]}), n_routed_experts=4)
    check_equal(tmp_path / "out", child)


def test_bfloat16_with_an_fp32_selection_bias(tmp_path: Path) -> None:
    model = tiny_model(pattern=PATTERN).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths={"hidden": 48, "expert_ffn": 16}))
    wide, narrow = load(tmp_path / "parent"), load(tmp_path / "out")
    kept = {"hidden": list(range(48)), "expert_ffn": list(range(16))}
    for name, tensor in rearranged(wide, kept).items():
        assert torch.equal(narrow.state_dict()[name], tensor) and narrow.state_dict()[name].dtype == tensor.dtype


def test_fused_experts_under_names_in_memory(tmp_path: Path) -> None:
    model = tiny_model(pattern=PATTERN)
    model.config.architectures = ["NemotronHForCausalLM"]
    model.config.save_pretrained(tmp_path / "parent")
    save_file(model.state_dict(), tmp_path / "parent" / "model.safetensors", metadata={"format": "pt"})
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths={axis: CUTS[axis][0] for axis in CUTS}))
    child = expected(tmp_path / "parent", list(CUTS))
    check_equal(tmp_path / "out", child)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.mixer.experts.up_proj").get_shape() == [5, 20, 48]


def test_generates_with_cache_what_the_child_generates(source: Path, tmp_path: Path) -> None:
    axes = ["hidden", "heads", "mamba_heads", "experts", "expert_ffn"]
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={axis: CUTS[axis][0] for axis in axes}))
    prompt = tokens(1, 8)
    ours = load(tmp_path / "out").generate(prompt, max_new_tokens=12, do_sample=False, use_cache=True)
    theirs = expected(source, axes).generate(prompt, max_new_tokens=12, do_sample=False, use_cache=True)
    assert torch.equal(ours, theirs)
    assert ours.shape == (1, 20)


def test_sharded_output_and_its_index(sharded: Path, tmp_path: Path) -> None:
    cut = Submodel(widths={axis: CUTS[axis][0] for axis in CUTS})
    slice_checkpoint(sharded, tmp_path / "many", cut, max_shard_bytes=20_000)
    check_equal(tmp_path / "many", expected(sharded, list(CUTS)))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    in_files = {}
    for shard in shards:
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            in_files |= dict.fromkeys(file.offset_keys(), shard)
    assert in_files == index["weight_map"]
    assert index["metadata"]["total_size"] == Checkpoint.open(tmp_path / "many").nbytes


def test_the_whole_model_is_copied_bit_for_bit(sharded: Path, tmp_path: Path) -> None:
    slice_checkpoint(sharded, tmp_path / "out", Submodel())
    check_equal(tmp_path / "out", load(sharded))


# --- cases reported by users of neighbouring tools ---------------------------------------------------------------


def test_query_heads_are_cut_inside_kv_groups(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", num_attention_heads=16, num_key_value_heads=4, head_dim=4)
    with pytest.raises(WidthError, match=r"heads width 6 .* 4 KV groups; nearest legal: 4 and 8"):
        slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"heads": 6}))
    assert not (tmp_path / "out").exists()
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"heads": 8}))
    parent = load(folder)
    state = rearranged(parent, {"heads": [0, 1, 4, 5, 8, 9, 12, 13]})
    check_equal(tmp_path / "out", child_of(parent.config, state, num_attention_heads=8))


def test_gated_norm_works_per_group_after_cutting_heads(source: Path, tmp_path: Path) -> None:
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"mamba_heads": 4, "mamba_head_dim": 4}))
    norm = load(tmp_path / "out").model.layers[0].mixer.norm
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(3, 16, generator=generator) for _ in range(2))
    gated = (x * torch.nn.functional.silu(gate)).reshape(3, 2, 8)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x, gate), normed.reshape(3, 16) * norm.weight, atol=1e-6, rtol=1e-5)


def test_head_dim_is_written_not_guessed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 48}))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == 16
    assert load(tmp_path / "out").model.layers[2].mixer.q_proj.weight.shape == (64, 48)


def test_cutting_expert_width_leaves_the_shared_expert_alone(source: Path, tmp_path: Path) -> None:
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"expert_ffn": 24}))
    config = load(tmp_path / "out").config
    assert (config.moe_intermediate_size, config.moe_shared_expert_intermediate_size, config.n_shared_experts) == (
        24,
        48,
        1,
    )


def test_loads_offline_and_without_warnings(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 32}, layers=LAYERS))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("loading a local folder used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    hf_logging.enable_propagation()
    try:
        load(tmp_path / "out")(tokens())
    finally:
        hf_logging.disable_propagation()
    said = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert [line for line in said if "reference PyTorch implementation" not in line] == []


def test_auto_map_goes_and_code_stays_behind(source: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    slice_checkpoint(source, parent, Submodel())
    config = json.loads((parent / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}
    (parent / "config.json").write_text(json.dumps(config))
    (parent / "modeling_nemotron_h.py").write_text("raise SystemExit('remote code ran')\n")
    slice_checkpoint(parent, tmp_path / "out", Submodel(widths={"hidden": 48}))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert list((tmp_path / "out").glob("*.py")) == []
    assert type(load(tmp_path / "out")) is NemotronHForCausalLM


def test_experts_have_no_gate_matrix(source: Path, tmp_path: Path) -> None:
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"experts": 4}))
    names = list(Checkpoint.open(tmp_path / "out").tensors)
    assert not [name for name in names if "gate_proj" in name]
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight" in names
    assert "backbone.layers.1.mixer.experts.4.up_proj.weight" not in names


def test_expand_is_kept_from_the_parent(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent", expand=3)
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 48, "mamba_heads": 6}))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["expand"] == 3
    assert load(tmp_path / "out").model.layers[0].mixer.out_proj.weight.shape == (48, 48)


# --- model card ---------------------------------------------------------------------------------------------------


def test_a_name_with_quotes_stays_a_string_of_python(source: Path, tmp_path: Path) -> None:
    name = 'naïve "small" 模型'
    slice_checkpoint(source, tmp_path / name, Submodel())
    card = (tmp_path / name / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0]
    given = [node.args[0] for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.args]
    assert [node.value for node in given if isinstance(node, ast.Constant)].count(name) == 2
    pushed = retitled(card, "org/small")
    assert pushed.count('from_pretrained("org/small"') == 2


def test_the_card_names_parent_cut_counts_and_licence(source: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    slice_checkpoint(source, parent, Submodel())
    (parent / "README.md").write_text("---\nlicense: other\nlicense_name: open-model\nlanguage:\n- en\n---\n# Parent\n")
    (parent / "LICENSE").write_text("the terms")
    ElasticConfig(
        family="nemotron_h", submodels={"small": Submodel(widths={"hidden": 48})}, provenance={"parent": "lab/parent"}
    ).save(parent)
    report = slice_checkpoint(parent, tmp_path / "out", Submodel(widths={"hidden": 48}))
    card = (tmp_path / "out" / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "license: other\nlicense_name: open-model\n" in head and "- en" in head
    assert "library_name: transformers" in head and "base_model: lab/parent" in head
    assert (
        f"({report.params:,})" in card
        and f"({report.active_params:,})" in card
        and f"({report.nbytes:,} bytes)" in card
    )
    assert "| hidden | 48 | 64 |" in card and "`small` of `lab/parent`" in card
    assert "open-model" in card.split("## License")[1]
    assert (tmp_path / "out" / "LICENSE").read_text() == "the terms"
    assert not (tmp_path / "out" / "elastic.json").exists()


@pytest.mark.parametrize(
    "readme", ["no front matter", "---\n: : [\n---\n", "---\n- a list\n---\n", "---\nlicense: mit"]
)
def test_a_strange_card_of_the_parent_does_not_stop_a_slice(source: Path, tmp_path: Path, readme: str) -> None:
    slice_checkpoint(source, tmp_path / "parent", Submodel())
    (tmp_path / "parent" / "README.md").write_text(readme)
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel())
    assert "That of `parent`" in (tmp_path / "out" / "README.md").read_text() or "license: mit" in readme


# --- what is refused ----------------------------------------------------------------------------------------------


def edited(source: Path, tmp_path: Path, edit: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a folder with tensors replaced, added or (None) removed."""
    model = load(source)
    model.save_pretrained(tmp_path / "edited")
    path = tmp_path / "edited" / "model.safetensors"
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name).clone() for name in file.offset_keys()}
    state = {name: tensor for name, tensor in {**state, **edit}.items() if tensor is not None}
    save_file(state, path, metadata={"format": "pt"})
    return tmp_path / "edited"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"lm_head.weight": torch.zeros(128, 60)},
            r"lm_head.weight has shape \[128, 60\]; config.json says \[128, 64\]",
        ),
        (
            {"lm_head.weight": torch.zeros(128, 64, dtype=torch.int32)},
            r"lm_head.weight is I32 \[128, 64\], which is no layout known here",
        ),
        ({"backbone.norm_f.weight": None}, "misses backbone.norm_f.weight that its config.json describes"),
        (
            {"backbone.layers.1.mixer.experts.7.up_proj.weight": None},
            "misses backbone.layers.1.mixer.experts.7.up_proj",
        ),
        ({"backbone.extra.weight": torch.zeros(3)}, "holds backbone.extra.weight that a nemotron_h of this config"),
        ({"model.norm_f.weight": torch.zeros(64)}, "holds model.norm_f.weight a second time as backbone.norm_f.weight"),
        (
            {"model.layers.1.mixer.experts.up_proj": torch.zeros(8, 32, 64)},
            r"experts.up_proj a second time as 8 tensors \(backbone",
        ),
    ],
)
def test_a_folder_that_is_not_what_its_config_says(
    source: Path, tmp_path: Path, edit: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = edited(source, tmp_path, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 48}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_many_unknown_tensors_are_named_in_short(source: Path, tmp_path: Path) -> None:
    folder = edited(source, tmp_path, {f"mtp.{number}": torch.zeros(1) for number in range(40)})
    with pytest.raises(CheckpointError, match=r"holds 40 tensors \(mtp\.\d+, mtp\.\d+, mtp\.\d+, \.\.\.\)"):
        slice_checkpoint(folder, tmp_path / "out", Submodel())


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        (Submodel(widths={"hidden": 50}), WidthError, "hidden width 50 is illegal: .*; nearest legal: 48 and 52"),
        (Submodel(widths={"hiden": 48}), UnknownNameError, "no axis 'hiden': did you mean 'hidden'"),
        (Submodel(widths={"experts": 1}), WidthError, "a token uses its top-2"),
        (Submodel(layers=(0, 1, 3)), WidthError, "hold no full_attention layer"),
        (Submodel(layers=(0, 9)), WidthError, "from 0 to 5"),
    ],
)
def test_impossible_cuts(source: Path, tmp_path: Path, cut: Submodel, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        slice_checkpoint(source, tmp_path / "deep" / "out", cut)
    assert list(tmp_path.iterdir()) == []


def test_targets_that_are_refused(source: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "keep").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for out in (full, full / "keep", source, source / "inside", source.parent, tmp_path / "link" / "inside"):
        with pytest.raises(TargetError):
            slice_checkpoint(source, out, Submodel())
    assert [path.name for path in full.iterdir()] == ["keep"]
    assert not (source / "inside").exists()


def test_a_config_that_does_not_follow_the_cut_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from star_elastic.families.base import Family

    original = Family.child_config
    monkeypatch.setattr(Family, "child_config", lambda self, config, widths, layers: original(self, config, {}, layers))
    with pytest.raises(CheckpointError, match=r"the cut gives .* shape \[128, 48\]; its config gives \(128, 64\)"):
        slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 48}))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_reads_no_weights(source: Path) -> None:
    from star_elastic.families import layout_of

    checkpoint = Checkpoint.open(source)
    cuts = plan_slice(layout_of(checkpoint.config), checkpoint, Submodel(widths={"hidden": 48}))
    shapes = {cut.name: cut.shape for cut in cuts}
    assert shapes["backbone.embeddings.weight"] == (128, 48)
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (64 + 64 + 16 + 16 + 8, 48)
    assert tiny_config().hidden_size == 64
