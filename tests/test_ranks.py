"""What processes tell each other, and how they end together."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
from processes import Processes, run

from star_elastic.errors import DataError, ElasticError, RecipeError, StoppedElsewhere
from star_elastic.train.ranks import Ranks, joined


def test_one_process_alone_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as ranks:
        assert ranks == Ranks() and ranks.is_main and not dist.is_initialized()
        ranks.barrier()
        tensor = torch.tensor([1.0, 2.0])
        ranks.average([tensor])
        assert tensor.tolist() == [1, 2]
        assert ranks.largest(3) == 3 and ranks.gather("a") == ["a"]
        assert ranks.from_main({"a": (1,)}) == {"a": (1,)}  # as it is, not through text
        ranks.same("numbers", [tensor])
        with ranks.in_turn():
            pass
        with pytest.raises(RecipeError, match="mine"), ranks.agreed():
            raise RecipeError("mine")


def test_torchrun_with_one_process_is_one_process_alone(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with joined() as ranks:
        assert ranks == Ranks() and not dist.is_initialized()


def talk(folder):
    with joined() as ranks:
        assert dist.is_initialized() and ranks.size == 3
        told = {}
        tensors = [
            torch.full((2, 2), float(ranks.rank)),
            torch.arange(3.0) * (ranks.rank + 1),
            torch.tensor(5.0).double(),
        ]
        ranks.average([tensors[0].T, *tensors[1:]])  # the first is not contiguous
        told["average"] = [tensor.tolist() for tensor in tensors]
        told["largest"] = ranks.largest([4, 9, -1][ranks.rank])
        told["gather"] = ranks.gather(["", "zwölf", "a\nb"][ranks.rank])
        told["from_main"] = ranks.from_main({"step": [1, None]} if ranks.is_main else None)
        log = folder / "turns"
        with ranks.in_turn(), log.open("a") as file:
            file.write(f"{ranks.rank} in ")
            file.flush()
            file.write(f"{ranks.rank} out ")
        ranks.barrier()
        told["turns"] = log.read_text()
        ranks.same("numbers", [torch.ones(2)])
        with pytest.raises(RuntimeError, match="different weights"):
            ranks.same("weights", [torch.ones(2), torch.tensor(float(ranks.rank == 2))])
        (folder / f"told-{ranks.rank}.json").write_text(json.dumps(told))
    assert not dist.is_initialized()


def test_processes_talk(tmp_path):
    run(tmp_path, 3, talk, tmp_path)
    for rank in range(3):
        assert json.loads((tmp_path / f"told-{rank}.json").read_text()) == {
            "average": [[[1, 1], [1, 1]], [0, 2, 4], 5],
            "largest": 9,
            "gather": ["", "zwölf", "a\nb"],
            "from_main": {"step": [1, None]},
            "turns": "0 in 0 out 1 in 1 out 2 in 2 out ",
        }


def disagree(wrong):
    """A mistake that only some processes see."""
    rank = int(os.environ["RANK"])
    try:
        with joined() as ranks:
            with ranks.agreed():
                pass
            with ranks.agreed():
                if rank in wrong:
                    raise DataError(f"seen by {rank}")
            print("went on")
    except StoppedElsewhere as error:
        assert rank > 0
        print(f"silent: {error}")
    except ElasticError as error:
        assert rank == 0
        print(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("wrong", "first", "second"),
    [
        ((), "went on", "went on"),
        ((1,), "ElasticError: seen by 1", "silent: seen by 1"),
        ((0, 1), "DataError: seen by 0", "silent: seen by 0"),
        ((0,), "DataError: seen by 0", "silent: seen by 0"),
    ],
)
def test_a_mistake_that_one_process_sees_ends_all_and_is_told_once(tmp_path, wrong, first, second):
    ended = run(tmp_path, 2, disagree, wrong)
    assert [process.out.strip() for process in ended] == [first, second]


def all_fail():
    with joined():
        raise RecipeError("the same everywhere")


def test_what_all_processes_find_is_raised_as_it_is_by_the_main_one_only(tmp_path):
    ended = Processes(tmp_path, 2, all_fail).wait()
    assert [process.code for process in ended] == [1, 1]
    assert "RecipeError: the same everywhere" in ended[0].err
    assert "StoppedElsewhere" in ended[1].err
