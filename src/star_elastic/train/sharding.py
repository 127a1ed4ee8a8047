"""One model over several processes: each holds a part of every large tensor, and gathers whole units only while they run.

PyTorch's ``fully_shard`` does the work, one group per decoder layer; embedding, final norm and head belong to the root, because a
tied head is the embedding, and because the loss reads the head's matrix after the model has run. Lenses see nothing of it: a
unit's tensors are whole by the time its forward runs.

What is small stays whole everywhere: norms, biases, and router gates. So gates and norms are never rounded with the matrices
beside them, and a group's tensors have one dtype, which ``fully_shard`` requires. Their gradients, like the width router's, are
averaged by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from star_elastic.elastic import ElasticModel
from star_elastic.errors import RecipeError
from star_elastic.train.ranks import Ranks

How = Literal["full", "hybrid", "off"]


@dataclass(frozen=True)
class Sharded:
    """A model, and what the processes have to do together for its gradients.

    Attributes:
        model: What was sharded.
        ranks: The processes.
        whole: Parameters that every process holds in full.
    """

    model: ElasticModel
    ranks: Ranks
    whole: tuple[nn.Parameter, ...] = ()

    def begin_backward(self, is_last: bool) -> None:
        """Say before a backward pass whether it is a step's last through its layers: copies of a model hear of each other then.

        Within a copy gradients are shared out after every pass; keeping them until the last would take a whole model's memory.
        """
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(is_last)

    def average_gradients(self) -> None:
        """Average the gradients that ``fully_shard`` does not care for, once per step."""
        self.ranks.average(parameter.grad for parameter in self.whole if parameter.grad is not None)


def device_mesh(device: torch.device, ranks: Ranks, how: How, group: int | None = None) -> DeviceMesh | None:
    """How the processes share a model; all of them call this together.

    Args:
        device: Where they train.
        ranks: The processes.
        how: ``full``: every process holds its share. ``hybrid``: groups of processes hold a copy each, which saves traffic
            between machines. ``off``: every process holds everything.
        group: Processes that share one copy in ``hybrid``; those of a machine by default.

    Returns:
        A line of shares, or copies x shares; None where every process holds everything.
    """
    if ranks.size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)  # where fully_shard and NCCL work
    if ranks.size == 1 or how == "off":
        return None
    if how == "full":
        return init_device_mesh(device.type, (ranks.size,))
    group = group or ranks.local_size
    return init_device_mesh(device.type, (ranks.size // group, group), mesh_dim_names=("copies", "shares"))


def check_group(ranks: Ranks, how: How, group: int | None) -> None:
    """Raise RecipeError unless groups of ``hybrid`` divide the processes."""
    if how == "hybrid" and ranks.size % (group := group or ranks.local_size):
        raise RecipeError(
            f"shard: hybrid puts {group} processes in a group, which do not divide {ranks.size} processes: "
            "give a shard_group that does"
        )


def shard(model: ElasticModel, ranks: Ranks, mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> Sharded:
    """Spread a model over the processes, in place; every process holds the same weights before.

    A model on the CPU moves to the mesh's device unit by unit, so that it never has to fit there whole. Afterwards, run it
    through ``features`` or by calling it; ``model.model`` alone would not be gathered.

    Args:
        model: A model that all processes have loaded.
        ranks: The processes.
        mesh: Of ``device_mesh``.
        dtype: In which matrices of layers are gathered; the one in which autocast multiplies, so that nothing is rounded that
            would not be anyway. None keeps the weights' own.
    """
    trained = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    if mesh is None:
        return Sharded(model, ranks, trained if ranks.size > 1 else ())
    small = small_parameters(model)
    for parameter in small:  # fully_shard leaves them where they are
        parameter.data = parameter.data.to(mesh.device_type)
    layers = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    root = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in model.layout.units:
        if unit.layer is not None:
            fully_shard(model.model.get_submodule(unit.module), mesh=mesh, mp_policy=layers, ignored_params=small)
    fully_shard(model, mesh=mesh, mp_policy=root, ignored_params=small)
    register_fsdp_forward_method(model, "features")
    return Sharded(model, ranks, tuple(parameter for parameter in trained if parameter in small))


def small_parameters(model: ElasticModel) -> set[nn.Parameter]:
    """What stays whole: everything of one dimension, what the table keeps in fp32, and router gates."""
    return {
        model.model.get_parameter(unit.name(row))
        for unit, row in model.layout.tensors()
        if not row.buffer and unit.stays_whole(row)
    }


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients down to a norm, over all parameters and all processes; return the norm before."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds: list[list[Tensor]] = [
        [grad for grad in grads if isinstance(grad, DTensor) == spread] for spread in (True, False)
    ]
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in kinds if kind]
    total = norms[0] if len(norms) == 1 else torch.stack([norm.to(norms[0]) for norm in norms]).norm()
    scale = (largest / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local(grad).mul_(scale.to(grad.dtype))
    return total


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its parts, on every process; all processes call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_into(target: nn.Module | None, source: nn.Module) -> None:
    """Copy the weights of a sharded model, one after the other, into a whole one; only the main process has a target."""
    for name, parameter in source.named_parameters():
        tensor = whole(parameter)
        if target is not None:
            target.get_parameter(name).copy_(tensor)
    if target is not None:
        for name, buffer in source.named_buffers():  # every process has them whole
            target.get_buffer(name).copy_(buffer)
