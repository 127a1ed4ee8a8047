"""Tensors that lie spread over processes, written to a folder and read back by another number of processes.

PyTorch's distributed checkpoint decides who writes and who reads what. Its files are safetensors, one per process, whose headers
say where in the whole tensor each part belongs; so no pickle is written, and none is read. A single process reads them too, and
without ``torch.distributed``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from star_elastic.errors import CheckpointError


def save_sharded(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a folder; all processes call this together, each with its parts of the same names.

    What every process holds in full is written once.

    Raises:
        CheckpointError: any process could not write.
    """
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _one_line(f"cannot write {folder}"):
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def load_sharded(folder: Path, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors of a folder; all processes call this together.

    Args:
        folder: What ``save_sharded`` filled, on any number of processes.
        places: Tensors whose distribution those of the same name take over, and those of the name with one more part
            (``weight`` gives it to ``weight.exp_avg``) if they have its shape. All others come in full, on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _one_line(f"{folder} cannot be read"):
        entries = reader.read_metadata().state_dict_metadata
        found = {
            name: _room(entry, places.get(name, places.get(name.rpartition(".")[0])))
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(dict(found), storage_reader=reader, no_dist=not dist.is_initialized())
    return found


def spread(tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that every process holds in full, distributed as their places are; see ``load_sharded``."""
    found = {}
    for name, tensor in tensors.items():
        place = places.get(name, places.get(name.rpartition(".")[0]))
        if isinstance(place, DTensor) and place.shape == tensor.shape:
            # Each process takes its part of its own tensor: nothing is sent.
            on_device = tensor.to(place.device)
            tensor = distribute_tensor(on_device, place.device_mesh, place.placements, src_data_rank=None)
        found[name] = tensor
    return found


def _room(entry: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """An empty tensor to read into."""
    dtype = entry.properties.dtype
    if like is None or like.shape != entry.size:
        return torch.empty(entry.size, dtype=dtype)
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Tell in one line what the distributed checkpoint raises, on all processes alike."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            yield
    except dcp.api.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what}: {' '.join(str(reason).split())}") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{what}: {' '.join(str(error).split())}") from None
