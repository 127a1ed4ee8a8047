"""Model folders in and out, tensor by tensor: nothing here ever holds a model, or even one large tensor, in memory.

Reading maps the files; writing streams blocks; a folder is written beside its final place and renamed at the end::

    source = Checkpoint.open("parent")
    cuts = [TensorCut(info, name, dims, members), ...]
    with target_folder("out", source.folder, size=sum(cut.nbytes for cut in cuts)) as folder:
        write_weights(folder, cuts)
        copy_companions(source.folder, folder)

No torch: weights are moved as raw bytes, and numpy does that.
"""

from star_elastic.checkpoint.companions import copy_companions
from star_elastic.checkpoint.cut import TensorCut
from star_elastic.checkpoint.journal import Journal
from star_elastic.checkpoint.onepass import Output, Source, Unit, plan_units, write_units
from star_elastic.checkpoint.reader import Checkpoint, TensorInfo
from star_elastic.checkpoint.sample import weights_sample_sha256
from star_elastic.checkpoint.target import check_space, check_target, scratch_folder, target_folder
from star_elastic.checkpoint.writer import MAX_SHARD_BYTES, WeightFiles, write_weights

__all__ = [
    "MAX_SHARD_BYTES",
    "Checkpoint",
    "Journal",
    "Output",
    "Source",
    "TensorCut",
    "TensorInfo",
    "Unit",
    "WeightFiles",
    "check_space",
    "check_target",
    "copy_companions",
    "plan_units",
    "scratch_folder",
    "target_folder",
    "weights_sample_sha256",
    "write_units",
    "write_weights",
]
