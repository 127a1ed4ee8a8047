"""Loading a transformers model from a folder, with its faults told in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from star_elastic.errors import CheckpointError, DataError, ElasticError, nearest
from star_elastic.families import layout_of
from star_elastic.families.base import itemsize
from star_elastic.layout import Layout
from star_elastic.loading_per_layer import load_per_layer
from star_elastic.submodel import open_elastic, own_widths_in

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceError(ElasticError, ValueError):
    """A device or dtype that does not exist here."""


class MissingDevice(DeviceError):
    """A device that other machines have."""


def choose_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the first GPU, or else the CPU.

    Raises:
        MissingDevice: no such device on this machine.
        DeviceError: no such device on any.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] == "meta":
        raise DeviceError("device 'meta' holds no numbers: say cpu or cuda")
    kind: type[DeviceError] = DeviceError
    try:
        device = torch.device(name)
        kind = MissingDevice
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise kind(f"device {name!r} cannot be used here: {reason}") from None
    return device


def choose_dtype(name: str) -> torch.dtype | str:
    """The dtype of a name; ``auto`` stays ``auto``, which loads weights as they are stored.

    Raises:
        DeviceError: unknown name.
    """
    if name == "auto":
        return name
    if name not in DTYPES:
        raise DeviceError(f"unknown dtype {name!r}: {nearest(name, [*DTYPES, 'auto'])}")
    return DTYPES[name]


def layout_in(kind: torch.dtype | str, config: Mapping[str, Any], layout: Layout) -> Layout:
    """The table for a dtype to run in. Where that is narrower than the stored one, fewer widths make rows of whole 16 bytes."""
    if not isinstance(kind, torch.dtype) or kind.itemsize >= itemsize(config):
        return layout
    return layout_of({**config, "dtype": str(kind).removeprefix("torch.")})


def load_model(folder: Path | str, *, device: torch.device, dtype: torch.dtype | str = "auto") -> Any:
    """Load a causal LM in eval mode, also a slice whose layers differ in width; code that came with the folder is never run.

    A quantized folder is dequantized.

    Raises:
        CheckpointError: tensors are missing or have the wrong shape, or are quantized in a way that is not known here.
    """
    from transformers import AutoModelForCausalLM

    from star_elastic.quant.load import is_quantized, load_dequantized

    if own_widths_in(folder):
        _, layout, _ = open_elastic(folder, per_layer=True)
        return load_per_layer(folder, layout, device=device, dtype=dtype)
    if is_quantized(folder):
        with transformers_reads(folder):
            return load_dequantized(folder, device=device, dtype=dtype)
    with no_bars(), transformers_reads(folder):
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    for fault in ("missing_keys", "mismatched_keys"):
        if info[fault]:
            first = sorted(map(str, info[fault]))[0]
            raise CheckpointError(f"{folder}: {fault.replace('_', ' ')}, among them {first}")
    return model.to(device).eval()


def check_tokenizer(tokenizer: Any, layout: Layout) -> None:
    """Raise DataError if a tokenizer has tokens without a row in the model's embedding: then it is another model's."""
    embedding = next(unit for unit in layout.units if unit.kind == "embedding")
    size = embedding.rows[0].shape[0]
    if len(tokenizer) > size:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} tokens, the model a vocabulary of {size}: it is another model's"
        )


def check_tokens(ids: torch.Tensor, layout: Layout) -> None:
    """Raise DataError if a token id has no row in the model's embedding: then the tokenizer is another model's."""
    embedding = next(unit for unit in layout.units if unit.kind == "embedding")
    size = embedding.rows[0].shape[0]
    if int(ids.max()) >= size:
        raise DataError(f"token {int(ids.max())} is outside the model's vocabulary of {size}: is this its tokenizer?")


def check_batches(batches: Iterable[Mapping[str, torch.Tensor]], layout: Layout) -> None:
    """``check_tokens`` of the ``input_ids`` of every batch."""
    for batch in batches:
        check_tokens(batch["input_ids"], layout)


@contextmanager
def transformers_reads(folder: Path | str) -> Iterator[None]:
    """Tell what transformers says about a folder that it cannot load, whatever it raises, in one line.

    Raises:
        CheckpointError: any error inside the block.
    """
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{folder} cannot be loaded by transformers: {type(error).__name__}: {reason}") from error


@contextmanager
def no_bars() -> Iterator[None]:
    """transformers without its own progress bars, put back as they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
