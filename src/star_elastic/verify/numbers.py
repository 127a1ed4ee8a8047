"""Numbers of tensors that are not finite, streamed.

No torch and no float arithmetic: a number is NaN or infinite if all bits of its exponent are set (E4M3 has only one such code).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from star_elastic.checkpoint import TensorInfo
from star_elastic.checkpoint.compare import stored_blocks
from star_elastic.verify.report import Fault

NOT_FINITE = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "C64": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF),
}
"""dtype -> how to read it as whole numbers, and the bits that are all set where a number is not finite."""


def number_faults(tensors: Mapping[str, TensorInfo], advance: Callable[[int], None]) -> list[Fault]:
    """Tensors that hold NaN or infinity; every byte is read once.

    Args:
        tensors: to look at.
        advance: called with the number of bytes read.
    """
    faults = []
    for name, info in tensors.items():
        count, first = _not_finite(info, advance)
        if count:
            place = [int(number) for number in np.unravel_index(first, info.shape or (1,))]
            faults.append(Fault(name, "finite numbers", f"{count:,} NaN or infinite, the first at {place}"))
    return faults


def _not_finite(info: TensorInfo, advance: Callable[[int], None]) -> tuple[int, int]:
    """How many numbers are not finite, and the position of the first."""
    count, first, position = 0, 0, 0
    kind, bits = NOT_FINITE.get(info.dtype, (np.uint8, 0))
    for block in stored_blocks(info):
        if bits:
            codes = np.frombuffer(block, kind)
            bad = (codes & kind(bits)) == bits
            here = int(np.count_nonzero(bad))
            if here and not count:
                first = position + int(np.argmax(bad))
            count += here
            position += len(codes)
        advance(len(block))
    return count, first
