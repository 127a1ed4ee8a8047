"""ElasticModel: a transformers causal LM that also runs as any of its nested models.

The parent stays what it is, module for module. Two lenses look at the same parameters: the sliced lens computes what the
exported slice computes, on views (``at``); the masked lens computes at full width under masks (``masked``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from star_elastic.checkpoint import Checkpoint, target_folder
from star_elastic.errors import ElasticError, nearest
from star_elastic.families import FAMILIES, layout_of
from star_elastic.gates import keep_gates_fp32
from star_elastic.layout import Layout
from star_elastic.lens_masked import MaskedLens
from star_elastic.lens_sliced import SlicedLens
from star_elastic.loading import choose_dtype, transformers_reads
from star_elastic.loading_per_layer import load_per_layer
from star_elastic.masks import Masks
from star_elastic.per_layer import own_table
from star_elastic.quant import ANY
from star_elastic.quant.load import is_quantized, load_dequantized
from star_elastic.rewrite import locate
from star_elastic.routing import ActiveRouter
from star_elastic.skeleton import check_tied, compare_shapes
from star_elastic.submodel import ElasticConfig, Submodel, check_named, open_elastic, read_json
from star_elastic.switch import Lens, install
from star_elastic.views import ViewModel


class ElasticModel(nn.Module):
    """A causal LM and its nested models, on one set of parameters.

    Args:
        model: a transformers model of a known family. It is patched, not copied or wrapped: it stays usable by itself.
        config: the nested models by name; None for none but ``full``.

    Attributes:
        model: the parent.
        config: the nested models.
        layout: the parent's table.

    Raises:
        UnknownNameError: no family file describes the model.
        CheckpointError: ``config`` is for another family, or lists a nested model that this parent cannot be cut to; or the
            model's config ties tensors that its weights keep apart.
        ElasticError: parameters of the model are offloaded to CPU or disk.

    Example:
        >>> elastic = ElasticModel(model)                                            # doctest: +SKIP
        >>> elastic.add("small", Submodel(widths={"hidden": 48}))                    # doctest: +SKIP
        >>> loss = elastic(input_ids, labels=input_ids, submodel="small").loss       # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel, config: ElasticConfig | None = None) -> None:
        super().__init__()
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ElasticError(
                "parameters are on the meta device (offloaded to CPU or disk?): load the model into memory"
            )
        self.layout: Layout = layout_of({**model.config.to_dict(), "dtype": str(model.dtype)})
        self.config = config or ElasticConfig(family=self.layout.family)
        if self.config.own_widths:
            self.layout = own_table(self.layout, self.config.own_widths)
        self.config.check(self.layout)
        compare_shapes(model, self.layout, Submodel())
        check_tied(model, self.layout)
        self.model = model
        self.training = model.training
        self._frames = ("", model.base_model_prefix)
        self._switch = install(model, [unit.module for unit in self.layout.units], self._frames)
        keep_gates_fp32(model.get_submodule(path) for unit in self.layout.units if (path := unit.router_path()))
        self._lenses: dict[str, SlicedLens] = {}
        self._views: dict[str, ViewModel] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        submodels: Mapping[str, Submodel] | None = None,
        preset: str | None = None,
        **kwargs: Any,
    ) -> ElasticModel:
        """Load a folder, with its nested models from ``elastic.json``, a preset, and ``submodels``.

        Everything that can be checked without weights is checked before they are loaded. Code that comes with a checkpoint is
        never run. A slice whose layers differ in width, which transformers cannot load, loads here like any other folder.

        Args:
            folder: a transformers folder; ``elastic.json`` is optional.
            submodels: further nested models by name.
            preset: take the nested models of this published model.
            **kwargs: passed on to transformers: ``dtype``, ``device_map``, ``attn_implementation``, ... A quantized folder is
                dequantized to ``dtype`` (config.json's if left out) and takes no other ``device_map`` than one device. A slice
                whose layers differ takes ``dtype``, ``device`` and ``attn_implementation``; it is dequantized too.

        Raises:
            CheckpointError: the folder is missing, damaged, or its files disagree.
            UnknownNameError: unknown family, axis or preset.
            WidthError: a submodel that this parent cannot be cut to.
            ElasticError: an option that loading a slice whose layers differ does not have.
        """
        _, layout, config = open_elastic(folder, preset=preset, submodels=submodels, per_layer=True)
        locate(layout, Checkpoint.open(folder), quantized=ANY)
        if config.own_widths:
            return cls(load_per_layer(folder, layout, **_known_options(folder, kwargs)), config)
        with transformers_reads(folder):
            if is_quantized(folder):
                return cls(load_dequantized(folder, **_places(kwargs)), config)
            model = AutoModelForCausalLM.from_pretrained(
                folder, **{"dtype": "auto", **kwargs, "trust_remote_code": False}
            )
        return cls(model, config)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write an ordinary transformers folder with ``elastic.json`` beside it; it appears whole or not at all.

        Raises:
            TargetError: ``folder`` exists and is not empty.
        """
        with target_folder(folder) as target:
            self.model.save_pretrained(target)
            written = read_json(target / "config.json")
            full = {**written, **FAMILIES[self.layout.family].json_fields(written)}
            (target / "config.json").write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
            self.config.save(target)

    def add(self, name: str, submodel: Submodel) -> None:
        """Register a nested model under a name; the name of an existing one is given a new meaning.

        Raises:
            WidthError, UnknownNameError: the parent cannot be cut so.
            ReservedNameError: ``full``, which always means the whole model.
        """
        check_named(name, submodel, self.layout)
        self.config = self.config.model_copy(update={"submodels": {**self.config.submodels, name: submodel}})

    @contextmanager
    def at(self, name: str) -> Iterator[ElasticModel]:
        """Run as a nested model inside a ``with`` block; blocks nest, and exceptions restore what was before.

        Raises:
            UnknownNameError: no such nested model.
        """
        with self._switch.through(self._lens(name)):
            yield self

    @contextmanager
    def masked(self, masks: Masks) -> Iterator[ElasticModel]:
        """Run the whole model under masks inside a ``with`` block.

        Args:
            masks: axis -> mask [size], or (axis, layer) -> mask [size]; ``depth`` has one entry per decoder layer.

        Raises:
            UnknownNameError, WidthError: a mask that does not fit the model.
        """
        with self._switch.through(MaskedLens(self.model, self.layout, masks)):
            yield self

    def forward(self, *args: Any, submodel: str | None = None, **kwargs: Any) -> Any:
        """The parent's forward, as the nested model ``submodel``, or as what the ``with`` block around the call says."""
        with self._as(submodel):
            return self.model(*args, **kwargs)

    def submodel(self, name: str) -> PreTrainedModel:
        """A nested model as an ordinary transformers model in evaluation mode, whose parameters are views of the parent's.

        The same object comes back at each call, brought up to date. Tensors that cannot be views (see ``copied_bytes``) are
        gathered again where the parent has changed; call this again after training steps or after moving the model.

        Raises:
            UnknownNameError: no such nested model.
            ElasticError: the parent is spread over several devices.
        """
        return self._view(self.config.get(name)).fresh()

    def copied_bytes(self, name: str) -> int:
        """Bytes that ``submodel(name)`` holds beyond the parent's storage."""
        view = self._view(self.config.get(name))
        view.fresh()
        return view.copied_bytes()

    def generate(self, *args: Any, submodel: str | None = None, **kwargs: Any) -> Any:
        """transformers' ``generate``, as the nested model ``submodel``, or as what the ``with`` block around the call says."""
        with self._as(submodel):
            lens = self._switch.lens
            # Caches are laid out by the config of the model that generates, so a nested model generates by itself.
            model = self._view(lens.submodel).fresh() if isinstance(lens, SlicedLens) else self.model
            return model.generate(*args, **kwargs)

    def features(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, submodel: str | None = None
    ) -> torch.Tensor:
        """The last hidden states after the final norm, [B, T, D], with D the nested model's width; the head reads them.

        A divisor of the logits, where the model has one, is applied here, so that logits are ``features @ head_weight.T``.
        """
        with self._as(submodel):
            output = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states if self.layout.logits_divisor == 1 else states / self.layout.logits_divisor

    def head_weight(self, submodel: str | None = None) -> torch.Tensor:
        """The head's matrix [V, D], differentiable: logits are ``features @ head_weight.T``."""
        head = next(unit for unit in self.layout.units if unit.kind == "head")
        with self._as(submodel):
            lens, weight = self._switch.lens, head.rows[0]
            if isinstance(lens, SlicedLens):
                return lens.part(head.module, weight.name)
            return self.model.get_parameter(head.name(weight))

    def routers(self) -> Iterator[ActiveRouter]:
        """The expert routers as they compute under the lens in force."""
        lens = self._switch.lens
        if isinstance(lens, SlicedLens | MaskedLens):
            yield from lens.routers()
            return
        for unit in self.layout.units:
            if unit.router is not None:
                experts = list(range(self.layout.axes[unit.router.axis].size))
                module = self.model.get_submodule(unit.router_path())
                yield ActiveRouter(unit, module, experts, experts)

    @property
    def checkpointing(self) -> bool:
        """Whether each unit keeps only its input for backward, and is computed again there; saves memory, costs a forward."""
        return self._switch.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self._switch.checkpointing = on

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticModel:
        # Skeletons and views are made anew: a deep copy of a view would be a copy of the parent's tensor.
        return ElasticModel(copy.deepcopy(self.model, memo), self.config.model_copy(deep=True))

    @contextmanager
    def _as(self, submodel: str | None) -> Iterator[None]:
        """The lens of ``submodel``, or the one already in force."""
        if submodel is None:
            yield
        else:
            with self._switch.through(self._lens(submodel)):
                yield

    def _lens(self, name: str) -> Lens | None:
        submodel = self.config.get(name).completed(self.layout)
        if submodel.is_full(self.layout):
            return None
        if (key := submodel.model_dump_json()) not in self._lenses:
            self._lenses[key] = SlicedLens(self.model, self.layout, submodel, self._frames)
        self._lenses[key].follow()
        return self._lenses[key]

    def _view(self, submodel: Submodel) -> ViewModel:
        submodel = submodel.completed(self.layout)
        if (key := submodel.model_dump_json()) not in self._views:
            self._views[key] = ViewModel(self.model, self.layout, submodel)
        return self._views[key]


def _known_options(folder: Path | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse what ``load_per_layer`` does not take: silently left out, it would surprise later."""
    known = {"dtype", "device", "attn_implementation"}
    for name in options:
        if name not in known:
            raise ElasticError(f"{folder} differs in width by layer and loads without {name!r}: {nearest(name, known)}")
    return {**options, "dtype": _dtype(options)}


def _places(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a folder that is dequantized here.

    Raises:
        ElasticError: a ``device_map`` that spreads the model.
    """
    place = kwargs.pop("device_map", "cpu")
    if isinstance(place, dict) or place in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ElasticError(
            f"device_map {place!r} cannot be used with quantized weights, which are dequantized here: name one device"
        )
    return {**kwargs, "dtype": _dtype(kwargs), "device": torch.device(place)}


def _dtype(kwargs: Mapping[str, Any]) -> torch.dtype | str:
    dtype = kwargs.get("dtype", "auto")
    return choose_dtype(dtype) if isinstance(dtype, str) else dtype
