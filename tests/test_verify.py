"""Verification: a slice is damaged in every way that folders get damaged, and each damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from quantized import quantized_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_folder

from star_elastic import Submodel, slice_checkpoint
from star_elastic.cli import main
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.submodel import ElasticConfig
from star_elastic.verify import Verification, verify_folder
from star_elastic.verify.numbers import NOT_FINITE

INDEX = "model.safetensors.index.json"
CUT = Submodel(widths={"hidden": 48, "expert_ffn": 20, "experts": 5}, layers=(0, 1, 2, 4))
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent and a slice of it in several shards."""
    home = tmp_path_factory.mktemp("verify")
    tiny_folder(home / "parent")
    slice_checkpoint(home / "parent", home / "slice", CUT, max_shard_bytes=40_000)
    slice_checkpoint(home / "parent", home / "single", CUT)
    return home


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Path:
    """A slice in shards, to be damaged."""
    return shutil.copytree(home / "slice", tmp_path / "slice")


@pytest.fixture
def single(home: Path, tmp_path: Path) -> Path:
    """A slice in one file, to be damaged."""
    return shutil.copytree(home / "single", tmp_path / "single")


def failed(report: Verification) -> dict[str, list[str]]:
    """Faults by check."""
    assert not report.ok
    return {check.name: [str(fault) for fault in check.faults] for check in report.checks if check.faults}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the only weight file."""
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_whole_folders_pass_every_check(home: Path) -> None:
    for name in ("slice", "single"):
        report = verify_folder(home / name, against=home / "parent", forward=True)
        assert report.ok, report.faults
        names = [check.name for check in report.checks]
        assert names == [
            *("model", "files", "names", "shapes", "dtypes", "config", "record", "numbers", "parent", "forward")
        ]
    assert verify_folder(home / "parent").ok


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "nemotron_h"])
def test_slices_of_every_family_pass(family: str, tmp_path: Path) -> None:
    FAMILIES[family]().save_pretrained(tmp_path / "parent")
    widths = {"hidden": 32} if family != "granitemoehybrid" else {"mamba_heads": 4}
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths=widths, layers=(0, 1, 3)))
    report = verify_folder(tmp_path / "out", against=tmp_path / "parent", forward=True)
    assert report.ok, report.faults


def test_a_missing_shard(copy: Path) -> None:
    gone = shards(copy)[1]
    gone.unlink()
    faults = failed(verify_folder(copy))
    assert f"{gone.name}: expected a file that {INDEX} names, found nothing" in faults["files"]
    assert len(faults["files"]) == 1 and all("expected a tensor, found none" in fault for fault in faults["names"])


def test_a_truncated_file(copy: Path) -> None:
    path = shards(copy)[0]
    path.write_bytes(path.read_bytes()[:-5])
    assert failed(verify_folder(copy))["files"][0].startswith(
        f"{path.name}: expected a whole safetensors file, found it"
    )


def test_a_damaged_header(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    assert "expected a whole safetensors file" in failed(verify_folder(single))["files"][0]


def test_a_stale_index(copy: Path) -> None:
    first, second = (path.name for path in shards(copy)[:2])
    moved = next(name for name, shard in json.loads((copy / INDEX).read_text())["weight_map"].items() if shard == first)
    edit_json(copy / INDEX, lambda index: index["weight_map"].update({moved: second, "old.weight": first}))
    faults = failed(verify_folder(copy))["files"]
    assert f"{INDEX}: {moved}: expected the file that holds it, '{second}', found {first}" in faults
    assert f"{INDEX}: old.weight: expected the file that holds it, '{first}', found it nowhere" in faults


def test_a_wrong_total_size(copy: Path) -> None:
    edit_json(copy / INDEX, lambda index: index["metadata"].update(total_size=12))
    assert "total_size" in failed(verify_folder(copy))["files"][0]


def test_an_index_that_is_none(copy: Path) -> None:
    (copy / INDEX).write_text("{}")
    assert failed(verify_folder(copy))["files"] == [f"{INDEX}: expected an index, found no weight_map in it"]


@pytest.mark.parametrize("name", ["model-00009-of-00009.safetensors", "pytorch_model.bin", "adapter.safetensors"])
def test_stray_weights(name: str, copy: Path) -> None:
    if name.endswith("bin"):
        (copy / name).write_bytes(b"x")
    else:
        save_file({"x": torch.zeros(1)}, copy / name)
    assert [fault.partition(":")[0] for fault in failed(verify_folder(copy))["files"]] == [name]


def test_a_single_file_beside_an_index(copy: Path, home: Path) -> None:
    shutil.copy(home / "single" / "model.safetensors", copy)
    assert (
        f"{INDEX}: expected an index or model.safetensors, found both: one is stale"
        in failed(verify_folder(copy))["files"]
    )


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert failed(verify_folder(single))["files"] == [
        "model.safetensors: expected weights in it, or an index, found neither"
    ]


def test_missing_extra_and_doubled_tensors(single: Path) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        del state[HEAD]
        state["mtp.layers.0.weight"] = torch.zeros(2)
        state["model.norm_f.weight"] = state["backbone.norm_f.weight"].clone()

    edit_tensors(single, edit)
    assert sorted(failed(verify_folder(single))["names"]) == [
        "backbone.norm_f.weight: expected one tensor, model.norm_f.weight, found it a second time",
        f"{HEAD}: expected a tensor, found none",
        "mtp.layers.0.weight: expected no such tensor in a nemotron_h of this config, found one",
    ]


def test_a_wrong_shape(single: Path) -> None:
    edit_tensors(single, lambda state: state.update({HEAD: state[HEAD][:, :40].contiguous()}))
    assert failed(verify_folder(single)) == {"shapes": [f"{HEAD}: expected shape [128, 48], found [128, 40]"]}


def test_a_wrong_dtype(single: Path) -> None:
    edit_tensors(single, lambda state: state.update({HEAD: state[HEAD].half()}))
    assert failed(verify_folder(single)) == {"dtypes": [f"{HEAD}: expected dtype F32, found F16"]}


def test_vectors_and_routers_may_stay_in_fp32(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "model", dtype="bfloat16")
    edit_json(tmp_path / "model" / "config.json", lambda config: config.update(dtype="bfloat16"))

    def edit(state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            state[name] = tensor if tensor.ndim < 2 or name.endswith("gate.weight") else tensor.bfloat16()

    edit_tensors(tmp_path / "model", edit)
    assert verify_folder(tmp_path / "model").ok


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite(value: float, dtype: torch.dtype, single: Path) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state[HEAD] = state[HEAD].to(dtype)
        state[HEAD][3, 7] = state[HEAD][5, 0] = value

    edit_tensors(single, edit)
    assert failed(verify_folder(single))["numbers"] == [
        f"{HEAD}: expected finite numbers, found 2 NaN or infinite, the first at [3, 7]"
    ]


def test_every_code_of_every_dtype_is_judged_as_torch_does() -> None:
    torch_names = {
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    for name, dtype in torch_names.items():
        kind, bits = NOT_FINITE[name]
        codes = np.arange(np.iinfo(kind).max + 1).astype(kind)
        wanted = ~torch.isfinite(torch.from_numpy(codes.copy()).view(dtype).float()).numpy()
        np.testing.assert_array_equal((codes & kind(bits)) == bits, wanted, err_msg=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hybrid_override_pattern", "MEEE"), ("num_hidden_layers", 5), ("auto_map", {"AutoConfig": "code.Config"})],
)
def test_an_edited_config_that_contradicts_itself(field: str, value: object, single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update({field: value}))
    faults = failed(verify_folder(single))["config"]
    assert len(faults) == 1 and faults[0].startswith(f"config.json: {field}: ") and repr(value) in faults[0]


def test_a_config_edited_to_another_width(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(moe_intermediate_size=24))
    faults = failed(verify_folder(single))
    assert (
        "backbone.layers.1.mixer.experts.0.up_proj.weight: expected shape [24, 48], found [20, 48]" in faults["shapes"]
    )
    assert "README.md: width of expert_ffn: expected 24, as config.json says, found 20" in faults["record"]


@pytest.mark.parametrize("text", ["{", '{"model_type": "gpt_oss"}', '{"model_type": "nemotron_h", "hidden_size": -1}'])
def test_a_config_that_describes_no_model(text: str, single: Path) -> None:
    (single / "config.json").write_text(text)
    report = verify_folder(single)
    assert list(failed(report)) == ["model"]
    assert {check.name for check in report.checks if check.skipped} == {"names", "shapes", "dtypes", "config", "record"}


def test_a_tied_head_with_numbers_of_its_own(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path / "model")
    edit_tensors(tmp_path / "model", lambda state: state.update({HEAD: state["model.embed_tokens.weight"].clone()}))
    assert verify_folder(tmp_path / "model").ok
    edit_tensors(tmp_path / "model", lambda state: state[HEAD][0].zero_())
    assert "tie_word_embeddings" in failed(verify_folder(tmp_path / "model"))["config"][0]


@pytest.mark.parametrize(
    "record",
    [
        "twelve",
        "{widths: [1]}",
        "{widths: {hidden: 48}, layers: 3}",
        "{widths: {}, layers: [[0]]}",
        "{widths: {}, layer_widths: {expert_ffn: 3}}",
    ],
)
def test_a_record_that_is_none(record: str, single: Path) -> None:
    (single / "README.md").write_text(f"---\nstar_elastic: {record}\n---\n")
    assert "README.md: star_elastic: expected widths, layers and params" in failed(verify_folder(single))["record"][0]


def test_elastic_json_of_another_model(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "parent", tmp_path / "parent")
    (folder / "elastic.json").write_text(
        '{"format_version": 1, "family": "nemotron_h", "submodels": {"s": {"widths": {"hidden": 512}}}}'
    )
    assert "elastic.json: expected nested models" in failed(verify_folder(folder))["record"][0]


def test_swapped_and_changed_tensors_are_found_against_the_parent(single: Path, home: Path) -> None:
    one, other = (f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight" for expert in (0, 3))

    def edit(state: dict[str, torch.Tensor]) -> None:
        state[one], state[other] = state[other].clone(), state[one].clone()
        state[HEAD][127, 47] += 1e-3

    edit_tensors(single, edit)
    assert verify_folder(single).ok
    report = verify_folder(single, against=home / "parent", forward=True)
    assert sorted(failed(report)["parent"]) == [
        f"{one}: expected the parent's cut, bit for bit, found other numbers, the first at [0, 0]",
        f"{other}: expected the parent's cut, bit for bit, found other numbers, the first at [0, 0]",
        f"{HEAD}: expected the parent's cut, bit for bit, found other numbers, the first at [127, 47]",
    ]
    assert report.checks[-1].skipped == "what failed above comes first"


def test_a_config_that_is_not_the_parents_is_found_against_it(single: Path, home: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(routed_scaling_factor=1.0))
    assert failed(verify_folder(single, against=home / "parent")) == {
        "parent": ["config.json: routed_scaling_factor: expected 2.5, found 1.0"]
    }


def test_the_forward_pass_tells_models_apart(single: Path, home: Path) -> None:
    """The comparison itself, without the byte check that would come first."""
    from star_elastic.families import layout_of
    from star_elastic.verify.forward import forward_faults

    layout = layout_of(json.loads((single / "config.json").read_text()))
    edit_tensors(single, lambda state: state["backbone.norm_f.weight"].mul_(1.01))
    faults, _ = forward_faults(single, layout, home / "parent", CUT)
    assert len(faults) == 1 and "apart" in str(faults[0])
    edit_tensors(single, lambda state: state["backbone.norm_f.weight"].fill_(float("nan")))
    assert "NaN or infinite" in str(forward_faults(single, layout, None, None)[0][0])


def test_kept_layers_come_from_the_card(single: Path, home: Path) -> None:
    (single / "README.md").write_text("# no record\n")
    with pytest.raises(ElasticError, match="4 of the 5 layers of .*README.md does not say which"):
        verify_folder(single, against=home / "parent")


def test_another_models_parent_is_refused(single: Path, tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path / "llama")
    with pytest.raises(ElasticError, match="is a nemotron_h and .* a llama: give its own parent"):
        verify_folder(single, against=tmp_path / "llama")
    tiny_folder(tmp_path / "narrow", hidden_size=32)
    with pytest.raises(ElasticError, match="cannot have been cut from .*narrow: hidden width 48"):
        verify_folder(single, against=tmp_path / "narrow")


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_quantized_slices(form: str, tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", form)
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 32}))
    report = verify_folder(tmp_path / "out", against=source, forward=True)
    assert report.ok, report.faults
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        scale = next(name for name in file.keys() if name.endswith("weight_scale"))  # noqa: SIM118

    def spoil(state: dict[str, torch.Tensor]) -> None:
        numbers = state[scale].float()
        numbers.view(-1)[-1] = float("nan")
        state[scale] = numbers.to(state[scale].dtype).reshape(state[scale].shape)

    edit_tensors(tmp_path / "out", spoil)
    assert failed(verify_folder(tmp_path / "out"))["numbers"][0].startswith(f"{scale}: expected finite numbers")
    edit_tensors(tmp_path / "out", lambda state: state.pop(scale))
    assert scale in failed(verify_folder(tmp_path / "out"))["quantization"][0]


def test_the_verb(single: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(single), "--against", str(home / "parent")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines) and len(lines) == 9
    edit_tensors(single, lambda state: state[HEAD][0].fill_(float("nan")))
    assert main(["verify", str(single)]) == 1
    assert f"FAILED   numbers: {HEAD}: expected finite numbers, found 48 NaN" in capsys.readouterr().out
    assert main(["verify", str(single), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    fault = next(check for check in told["checks"] if check["name"] == "numbers")["faults"][0]
    assert told["ok"] is False and fault["what"] == HEAD and fault["expected"] == "finite numbers"


@pytest.mark.parametrize("arguments", [["nowhere"], ["README.md"], ["."], ["parent", "--against", "nowhere"]])
def test_mistakes_of_the_user(
    arguments: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["verify", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no config.json"):
        verify_folder(tmp_path)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("family", "widths"),
    [("nemotron_h", {"hidden": 48, "experts": 5, "expert_ffn": 16, "shared_ffn": 24}), ("qwen3_moe", {"ffn": 32})],
)
def test_a_cut_that_leaves_no_layer_of_a_kind(
    family: str, widths: dict[str, int], recorded: bool, tmp_path: Path
) -> None:
    parent, cut = tmp_path / "parent", Submodel(widths=widths, layers=(0, 2, 3))
    FAMILIES[family]().save_pretrained(parent)
    ElasticConfig(family=family, submodels={"shallow": cut}).save(parent)
    slice_checkpoint(parent, tmp_path / "out", cut)
    if not recorded:
        (tmp_path / "out" / "README.md").write_text("# no record\n")
    report = verify_folder(tmp_path / "out", against=parent, forward=True)
    assert report.ok, report.faults
    if recorded:  # an axis that only looks like a lost one is still told
        whole = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
        whole["star_elastic"] |= {"layers": None}
        (tmp_path / "out" / "README.md").write_text(f"---\n{yaml.safe_dump(whole)}---\n")
        assert any("as config.json says" in fault for fault in failed(verify_folder(tmp_path / "out"))["record"])
