"""Quantized checkpoints: FP8 and NVFP4 as ModelOpt writes them. Recognised, cut, and turned back into ordinary numbers.

Cutting needs nothing but the table: ``formats`` says how the dimensions of a matrix become those of the tensors it is stored as,
and everything that cuts tensors by their dimensions cuts these too::

    quantized = read_quantized(layout, Checkpoint.open("parent"))
    layout = bound_layout(layout, quantized.parts)        # legal widths keep blocks of 16 whole
    layout.axes["hidden"].check(24)                       # WidthError: ... nearest legal: 16 and 32

``numbers`` needs torch and turns packed tensors into floats; nothing else here imports it.
"""

from star_elastic.quant.bound import bound_layout
from star_elastic.quant.declared import SECTION, SIDECAR, Declared, read_declared
from star_elastic.quant.folder import ANY, Quantized, layout_in_folder, read_quantized
from star_elastic.quant.formats import FLOATS, FORMATS, LocatedPart
from star_elastic.quant.parts import quantized_parts
from star_elastic.quant.rename import renamed_files

__all__ = [
    "ANY",
    "FLOATS",
    "FORMATS",
    "SECTION",
    "SIDECAR",
    "Declared",
    "LocatedPart",
    "Quantized",
    "bound_layout",
    "layout_in_folder",
    "quantized_parts",
    "read_declared",
    "read_quantized",
    "renamed_files",
]
