"""A cheap hash over a sample of a model's weights: it tells trained models apart, and reads a few megabytes of any."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from star_elastic.checkpoint.reader import Checkpoint, TensorInfo
from star_elastic.errors import CheckpointError

PIECES = 16
PIECE_BYTES = 256


def weights_sample_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 over name, dtype, shape and evenly spaced pieces of every tensor, whatever files they lie in.

    Training moves every piece; a change of a few numbers between the pieces of a large tensor is not seen.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    files: dict[Path, int] = {}
    try:
        for name, info in sorted(checkpoint.tensors.items()):
            if info.path not in files:
                files[info.path] = os.open(info.path, os.O_RDONLY)
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
            for offset, length in pieces(info):
                digest.update(os.pread(files[info.path], length, offset))
    except OSError as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be read: {error.strerror or error}") from None
    finally:
        for file in files.values():
            os.close(file)
    return digest.hexdigest()


def pieces(info: TensorInfo) -> list[tuple[int, int]]:
    """Byte ranges (offset, length) in the file that stand for a tensor: all of a small one, else first, last and between."""
    if info.nbytes <= PIECES * PIECE_BYTES:
        return [(info.offset, info.nbytes)]
    last = info.nbytes - PIECE_BYTES
    return [(info.offset + last * n // (PIECES - 1), PIECE_BYTES) for n in range(PIECES)]
