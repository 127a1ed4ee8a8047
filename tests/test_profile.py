"""Measuring units: what is called and counted, with a clock that ticks as told; no test depends on real time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import refused
from tiny import FAMILIES, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from star_elastic.cli import main
from star_elastic.errors import UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.latency import Conditions, LatencyTable, Machine
from star_elastic.layout import Layout, Unit
from star_elastic.profile import default_ladders, measure_table, print_table, profile_model, read_ladders, spread
from star_elastic.selection import RequestError
from star_elastic.skeleton import child_config, saved_tensors
from star_elastic.submodel import Submodel
from star_elastic.unit_timer import Intervals, Timing, UnitTimer, needed_layers

HERE = Machine(device="cpu", name="abacus", threads=1, torch="2")


def conditions(**changes: Any) -> Conditions:
    fields = {"phase": "decode", "batch": 2, "context": 6, "dtype": "float32", "warmup": 1, "repeats": 3}
    return Conditions(**{**fields, **changes})


class CountingClock:
    """A clock that ticks at each mark, and when somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def between(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_unit_by_unit_with_the_cut_shapes(family: str, phase: str) -> None:
    config = FAMILIES[family]().config
    layout = layout_of(config.to_dict())
    timer = UnitTimer(
        config, layout, conditions(phase=phase), device=torch.device("cpu"), dtype=torch.float32, clock=CountingClock()
    )
    ladders = default_ladders(layout)
    for unit in layout.units:
        axes = {axis for row in unit.rows for axis in row.axes}
        least = {axis: widths[0] for axis, widths in ladders.items() if axis in axes}
        timing = timer(unit, least)
        assert len(timing.unit) == len(timing.outside) == 3
        assert timing.unit == [1.0] * 3  # between the two marks around this unit, nothing else marks
        model, paths = timer.build(Submodel(widths=least, layers=needed_layers(layout, unit)))
        module = model.get_submodule(next(path for one, path in paths if one.module == unit.module))
        real = {name: tuple(tensor.shape) for name, tensor in saved_tensors(module)}
        assert real == {row.name: row.cut_shape(layout.complete(least)) for row in unit.rows}


def test_a_unit_is_timed_in_a_model_that_needs_attention_only_for_its_cache() -> None:
    layout = layout_of(tiny_config("MEM*E").to_dict())
    by_path = {unit.module: unit for unit in layout.units}
    assert needed_layers(layout, by_path["model.layers.2"]) == (2, 3)
    assert needed_layers(layout, by_path["model.layers.3"]) == (3,)
    assert needed_layers(layout, by_path["lm_head"]) == (3,)
    llama = layout_of(FAMILIES["llama"]().config.to_dict())
    assert needed_layers(llama, llama.units[0]) == (0,)


class Layer(nn.Module):
    def __init__(self, clock: CountingClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        return x


class Stack(nn.Module):
    def __init__(self, clock: CountingClock) -> None:
        super().__init__()
        self.clock, self.first, self.second = clock, Layer(clock, 10), Layer(clock, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 3000
        return self.second(self.first(x))


def test_intervals_are_from_entering_a_module_to_leaving_it() -> None:
    clock = CountingClock()
    model = Stack(clock)
    intervals = Intervals(model, ["first", "second"], clock)
    for _ in range(2):
        whole, parts = intervals.of(lambda: model(torch.zeros(1)))
        assert parts == {"first": 11.0, "second": 201.0}
        assert whole == 3000 + 10 + 200 + 5  # five marks follow the first


def counted(layout: Layout) -> Any:
    """A measurement that says, as seconds, how many numbers the unit's tensors hold; outside units it is always 7."""

    def measure(unit: Unit, widths: Mapping[str, int]) -> Timing:
        numbers = float(sum(row.numel(layout.complete(widths)) for row in unit.rows))
        return Timing([numbers - 1, numbers, 10 * numbers], [7.0] * 3)

    return measure


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_sums_to_the_whole_model_at_every_measured_width(family: str) -> None:
    model = FAMILIES[family]()
    layout = layout_of(model.config.to_dict())
    ladders = default_ladders(layout)
    table = measure_table(layout, ladders, conditions(), HERE, counted(layout))
    real = sum(
        tensor.numel() for _, tensor in saved_tensors(model)
    )  # a tied head is run, and counted, as a unit of its own
    assert table.cost(layout, {}) == real + 7
    least = {axis: widths[0] for axis, widths in ladders.items()}
    with torch.device("meta"):
        child = AutoModelForCausalLM.from_config(child_config(model, layout, Submodel(widths=least)))
    assert table.cost(layout, least) == sum(tensor.numel() for _, tensor in saved_tensors(child)) + 7


def test_units_of_one_shape_are_measured_once() -> None:
    layout = layout_of(tiny_config("MEM*EM").to_dict())
    calls: list[tuple[str, dict[str, int]]] = []

    def measure(unit: Unit, widths: Mapping[str, int]) -> Timing:
        calls.append((unit.module, dict(widths)))
        return Timing([1.0], [0.0])

    table = measure_table(layout, {"hidden": [32, 64], "experts": [4, 8]}, conditions(), HERE, measure)
    assert [group.units for group in table.units][1:4] == [
        ("model.layers.0", "model.layers.2", "model.layers.5"),
        ("model.layers.1", "model.layers.4"),
        ("model.layers.3",),
    ]
    experts = [widths for path, widths in calls if path == "model.layers.1"]
    pairs = [(widths["hidden"], widths["experts"]) for widths in experts]
    assert pairs == [(32, 4), (32, 8), (64, 4), (64, 8)]
    assert {widths["expert_ffn"] for widths in experts} == {32}
    assert [widths for path, widths in calls if path == "lm_head"] == [{"hidden": 32}, {"hidden": 64}]


def test_spread_is_the_interquartile_range() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == 2.0  # quartiles 2 and 4
    assert spread([3.0]) == 0.0


def test_ladders_hold_the_parents_width_and_refuse_what_cannot_be_built() -> None:
    layout = layout_of(tiny_config().to_dict())
    assert read_ladders(layout, ["hidden=32, 48"]) == {"hidden": [32, 48, 64]}
    with pytest.raises(WidthError, match="hidden width 33 is illegal"):
        read_ladders(layout, ["hidden=33"])
    with pytest.raises(UnknownNameError, match="did you mean 'hidden'"):
        read_ladders(layout, ["hiden=32"])
    with pytest.raises(RequestError, match="names hidden twice"):
        read_ladders(layout, ["hidden=32", "hidden=48"])
    granite = layout_of(FAMILIES["granitemoehybrid"]().config.to_dict())
    with pytest.raises(WidthError, match="not every combination of these widths can be built"):
        read_ladders(granite, ["hidden=48"])
    # Coupled axes (hidden and the Mamba heads' channels) at 0.75 do not fit the others, so by default they stay whole.
    assert set(default_ladders(granite)) == {"heads", "experts", "expert_ffn", "shared_ffn"}
    assert read_ladders(granite, ["hidden=32"]) == {"hidden": [32, 64]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but config.json."""
    path = tmp_path_factory.mktemp("profile") / "model"
    tiny_config(max_position_embeddings=64).save_pretrained(path)
    return path


def test_the_command_writes_a_table_and_prints_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.json"
    words = [
        "profile",
        str(folder),
        str(out),
        "--width",
        "hidden=32",
        "--context",
        "8",
        "--repeats",
        "2",
        "--batch",
        "2",
    ]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "decode, batch 2, context 8, bfloat16" in said and "the whole model: " in said
    layout = layout_of({**tiny_config().to_dict(), "dtype": "bfloat16"})
    table = LatencyTable.load(out)
    assert table.cost(layout, {"hidden": 48}) > 0
    assert table.machine.device == "cpu" and table.machine.name
    group = next(group for group in table.units if group.kind == "moe")
    assert group.ladder == {"hidden": (32, 64), "experts": (8,), "expert_ffn": (32,), "shared_ffn": (48,)}
    assert str(tmp_path) not in out.read_text() and json.loads(out.read_text())["tool"].startswith("star-elastic ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--width", "hidden=33"], "hidden width 33 is illegal"),
        (["--width", "hidden"], "cannot read --width 'hidden': want AXIS=N,N,..."),
        (["--width", "ffn=8"], "this model has no axis 'ffn'"),
        (["--context", "60"], "context 60 needs 83 positions, the model's max_position_embeddings is 64"),
        (["--device", "tpu9"], "device 'tpu9' cannot be used here"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_built(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    message = refused(["profile", str(folder), str(tmp_path / "t.json"), *words], capsys)
    assert said in message and list(tmp_path.iterdir()) == []


def test_targets_are_checked_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text("mine")
    assert "exists" in refused(["profile", str(folder), str(tmp_path / "t.json")], capsys)
    assert (tmp_path / "t.json").read_text() == "mine"
    assert "does not exist" in refused(["profile", str(tmp_path / "no"), str(tmp_path / "u.json")], capsys)


def test_an_interrupt_leaves_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: UnitTimer, unit: Unit, widths: Mapping[str, int]) -> Timing:
        raise KeyboardInterrupt

    monkeypatch.setattr(UnitTimer, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_model(folder, tmp_path / "t.json", context=8, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_noisy_points_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    layout = layout_of(tiny_config().to_dict())
    for steady, said in (([1.0, 1.01, 1.02], False), ([1.0, 1.5, 9.0], True)):
        table = measure_table(layout, {}, conditions(), HERE, lambda unit, widths, s=steady: Timing(s, [0.0]))  # type: ignore[misc]
        print_table(table, Console(width=150))
        assert ("note: at 6 of 6 points the repeats differ by more than 25%" in capsys.readouterr().out) == said


def test_medians_are_of_the_repeats_without_warm_up() -> None:
    layout = layout_of(tiny_config().to_dict())
    table = measure_table(layout, {}, conditions(), HERE, counted(layout))
    embedding = layout.units[0].rows[0].numel({})
    assert table.units[0].points[0].seconds == statistics.median([embedding - 1, embedding, 10 * embedding])
