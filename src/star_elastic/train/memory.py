"""How much memory a stage of a run takes on each device: a formula over the table, with what it assumes.

Exact, since it counts tensors: the student's weights, their gradients, AdamW's moments, the running average and the teacher.
Matrices are divided by the number of devices that share a copy; vectors, buffers and what is always fp32 stay whole everywhere.

Estimated, for what lives only during a step:

- *activations*: what autograd keeps per token. Of a unit: the input and output of every matrix, of an expert's matrices as
  often as a token visits one, and two fp32 vectors per norm. Recomputed, a unit keeps its input, and one unit at a time the
  rest. Fused attention and fused Mamba kernels are assumed on a GPU; their stand-in in plain PyTorch keeps about
  ``SCAN_FACTOR`` times as much of a Mamba layer's own matrices.
- *gathered weights*: sharded, two layers at a time whole, in the dtype of matrix products, and one layer's gradient in fp32;
  embedding and head, the student's in the dtype of its weights with their gradients in fp32, and the teacher's.
- *copies of weights*: on one device, autocast's copies in its dtype; in a search the masked copies. Of all units, or of one at
  a time where activations are recomputed (autocast keeps its copies through a second forward pass of the same step).
- *loss*: ``LOSS_TENSORS`` of [chunk, vocabulary] in fp32, the head's gradient and its two copies, three of [tokens, hidden].
- *optimizer step*: one tensor like each weight; it comes after the above is gone, so that only the larger of the two counts.

Left out: the router (a few thousand numbers per axis), the allocator's fragments, CUDA's own half to one GiB.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Literal

from star_elastic import cost
from star_elastic.layout import Layout, Row, Unit
from star_elastic.train.stages import Stage

MOMENTS = 2  # AdamW's, in the dtype of the weights
LOSS_TENSORS = 6  # of [chunk, V], as ``distill.chunked_kl`` holds
SCAN_FACTOR = 4.0  # measured on tiny models, 3.6 to 4.6
AHEAD = 2  # units that are whole at one time: the one that runs, and the next
FP32 = 4

Bytes = float


@dataclass(frozen=True)
class Setting:
    """How a run holds its numbers.

    Attributes:
        world_size: Devices.
        shares: Devices that share one copy of the models.
        master: Bytes per number of the student's weights, gradients and moments.
        compute: Bytes per number of matrix products.
        teacher: Format of the teacher's weights, as in ``cost.weight_bytes``; None where its answers come from a cache.
        fused: Whether fused Mamba kernels run.
        checkpointing: Recompute units in backward; ``auto`` in search stages.
        average: Whether a running average of the weights is kept.
        frozen: Names of parameters that are not trained.
        kl_chunk_tokens: Tokens whose logits exist at one time.
    """

    world_size: int = 1
    shares: int = 1
    master: int = 4
    compute: int = 2
    teacher: Literal["fp32", "bf16"] | None = "bf16"
    fused: bool = True
    checkpointing: bool | Literal["auto"] = "auto"
    average: bool = False
    frozen: Collection[str] = ()
    kl_chunk_tokens: int = 1024

    def checkpoints(self, stage: Stage) -> bool:
        """Whether a stage recomputes."""
        return stage.recomputes(self.checkpointing)


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device in one stage; see this module's introduction. ``total`` is the peak."""

    weights: Bytes
    gradients: Bytes
    moments: Bytes
    average: Bytes
    teacher: Bytes
    gathered: Bytes
    copies: Bytes
    activations: Bytes
    loss: Bytes
    optimizer_step: Bytes

    @property
    def state(self) -> Bytes:
        """What lives through the whole stage; gradients from the first backward pass of a step to its end."""
        return self.weights + self.gradients + self.moments + self.average + self.teacher

    @property
    def total(self) -> Bytes:
        """State, and the larger of what the passes and the optimizer's step need."""
        return self.state + max(self.gathered + self.copies + self.activations + self.loss, self.optimizer_step)

    def as_json(self) -> dict[str, int]:
        """Whole bytes by name, ``total`` last."""
        return {name: math.ceil(value) for name, value in {**asdict(self), "total": self.total}.items()}


def stage_memory(layout: Layout, stage: Stage, setting: Setting) -> StageMemory:
    """Bytes on each device while a stage trains the whole model, which is the most that it needs.

    Args:
        layout: The parent's table.
        stage: Batch, sequence length, parts, phase.
        setting: Devices and dtypes.
    """
    learning = [(unit, row) for unit, row in parameters(layout) if unit.name(row) not in setting.frozen]
    trained = sum(held(unit, row, setting) * (FP32 if row.fp32 else setting.master) for unit, row in learning)
    tokens = rows_per_pass(stage, setting.world_size) * stage.sequence_length
    return StageMemory(
        weights=resident(layout, setting, "fp32" if setting.master == FP32 else "bf16"),
        gradients=trained,
        moments=MOMENTS * trained,
        average=FP32 * sum(held(unit, row, setting) for unit, row in learning) if setting.average else 0,
        teacher=0 if setting.teacher is None else resident(layout, setting, setting.teacher),
        gathered=_gathered(layout, setting),
        copies=_copies(layout, stage, setting),
        activations=tokens * activations_per_token(layout, setting, checkpointing=setting.checkpoints(stage)),
        loss=loss_bytes(layout, tokens, setting),
        optimizer_step=trained,
    )


def held(unit: Unit, row: Row, setting: Setting) -> float:
    """Numbers of a parameter or buffer that one device holds: a share of a matrix, all of anything smaller."""
    return row.numel({}) / (1 if unit.stays_whole(row) else setting.shares)


def resident(layout: Layout, setting: Setting, dtype: str) -> Bytes:
    """Bytes of a model's weights and buffers on one device."""
    rows = ((unit, row) for unit, row in layout.tensors() if row.alias is None)
    return sum(held(unit, row, setting) * cost.bytes_per_number(row, dtype) for unit, row in rows)


def rows_per_pass(stage: Stage, world_size: int) -> int:
    """Rows that a device runs at one time."""
    return math.ceil(stage.batch_size / (world_size * stage.accumulate))


def activations_per_token(layout: Layout, setting: Setting, *, checkpointing: bool) -> Bytes:
    """Bytes that autograd keeps per token for the whole model."""
    units = [unit for unit in layout.units if unit.kind != "head"]  # the loss has its own account
    kept = [unit_activations(layout, unit, setting) for unit in units]
    if not checkpointing:
        return sum(kept)
    # Under autocast the residual stream stays in the dtype of the embedding's weights.
    return setting.master * layout.stream.size * len(units) + max(kept)


def unit_activations(layout: Layout, unit: Unit, setting: Setting) -> Bytes:
    """Bytes that autograd keeps per token for one unit."""
    if unit.kind == "embedding":
        return 8  # the token's id
    states = frozenset[str]().union(*(dim.axes for state in unit.states if not state.per_token for dim in state.dims))
    total: Bytes = 0
    for row in unit.rows:
        if row.norm is not None:
            total += 2 * FP32 * row.shape[0]
        elif is_matrix(row):
            visits = layout.top_k or 1 if row.routed else 1
            scanned = SCAN_FACTOR if row.axes & states and not setting.fused else 1
            total += visits * scanned * setting.compute * (row.shape[-1] + row.shape[-2])
    return total


def is_matrix(row: Row) -> bool:
    """Whether a row is a matrix, or one for each expert; a convolution's kernel is none, each of its channels is by itself."""
    return not row.buffer and len(row.dims) >= 2 and row.shape[-2] > 1


def loss_bytes(layout: Layout, tokens: int, setting: Setting) -> Bytes:
    """Bytes of the distillation loss: logits of a chunk, what the head takes, and hidden states with their gradient."""
    vocabulary, hidden = layout.units[0].rows[0].shape[0], layout.stream.size
    logits = LOSS_TENSORS * FP32 * min(setting.kl_chunk_tokens, tokens) * vocabulary
    copied = 2 * setting.compute if setting.compute < setting.master else 0
    return logits + (FP32 + copied) * vocabulary * hidden + 3 * setting.compute * tokens * hidden


def parameters(layout: Layout) -> list[tuple[Unit, Row]]:
    """Every parameter once."""
    return [(unit, row) for unit, row in layout.tensors() if not row.buffer and row.alias is None]


def unit_numbers(layout: Layout) -> list[int]:
    """Parameters of each unit."""
    return [sum(row.numel({}) for row in unit.rows if not row.buffer and row.alias is None) for unit in layout.units]


def _gathered(layout: Layout, setting: Setting) -> Bytes:
    if setting.shares == 1:
        return 0
    numbers = dict(zip(layout.units, unit_numbers(layout), strict=True))
    layer = max(count for unit, count in numbers.items() if unit.layer is not None)
    around = sum(count for unit, count in numbers.items() if unit.layer is None)
    teacher = {None: 0, "bf16": 2, "fp32": FP32}[setting.teacher]
    return layer * (AHEAD * setting.compute + FP32) + around * (setting.master + FP32 + teacher)


def _copies(layout: Layout, stage: Stage, setting: Setting) -> Bytes:
    numbers = unit_numbers(layout)
    whole, largest = sum(numbers), max(numbers)
    checkpointing, sharded = setting.checkpoints(stage), setting.shares > 1
    held = largest if checkpointing else whole
    total: Bytes = 0
    if not sharded and setting.compute < setting.master:
        again = stage.accumulate > 1 or stage.budgets_per_step > 1  # then gradients exist in a forward pass, too
        total += setting.compute * (whole if again else held)
    if stage.phase == "search":
        total += (setting.compute if sharded else setting.master) * held
    return total
