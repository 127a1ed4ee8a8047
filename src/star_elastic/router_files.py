"""``router.safetensors``: a router's weights, with what it chooses from as JSON in the file's header.

It lies beside the weights of an elastic checkpoint. Nothing at inference needs it: the widths that it chose are in
``elastic.json``. It allows to choose for budgets between the trained ones, and to train on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from star_elastic.budget import Budget
from star_elastic.errors import CheckpointError

FILE_NAME = "router.safetensors"
FORMAT_VERSION = 1
_BUDGET_FIELDS = ("name", "kind", "target", "fraction", "context", "batch", "dtype")


def describe_budget(budget: Budget) -> dict[str, Any]:
    """A budget as JSON; measured times are not part of it."""
    return {name: getattr(budget, name) for name in _BUDGET_FIELDS}


def write(folder: Path | str, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write ``router.safetensors`` into a folder.

    Args:
        folder: where.
        settings: plain data; ``budgets`` holds names or what ``describe_budget`` gives.
        weights: by name.
    """
    text = json.dumps({"format_version": FORMAT_VERSION, **settings})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, Path(folder) / FILE_NAME, metadata={"router": text})


def read(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of a folder's router; budgets that were described are ``Budget`` objects again.

    Raises:
        CheckpointError: missing, damaged, of a newer version, or without settings.
    """
    path = Path(folder) / FILE_NAME
    try:
        with safe_open(path, "pt") as file:
            settings = json.loads((file.metadata() or {})["router"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        version = settings.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version {version!r}; this version of star-elastic reads {FORMAT_VERSION}"
            )
        settings["budgets"] = [one if isinstance(one, str) else Budget(**one) for one in settings["budgets"]]
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} holds no settings of a router: {error}") from None
    return settings, weights
