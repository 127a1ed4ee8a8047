"""``datasets`` and the Hugging Face hub as we want them: silent, and quick to say that a name does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from star_elastic.errors import DataError
from star_elastic.train.recipe import SourceRecipe

TIMEOUT_SECONDS = 10.0


def answers(recipe: SourceRecipe) -> bool:
    """Ask the hub once whether it has a dataset: ``load_dataset`` would ask again and again for half a minute.

    Returns:
        False where the hub cannot be reached; then only a copy in the cache can be read. True also for what lies on this disk.

    Raises:
        DataError: there is no such dataset, or no such revision of it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name = str(recipe.hub)
    if Path(name).exists():
        return True
    try:
        HfApi().dataset_info(name, revision=recipe.revision, timeout=TIMEOUT_SECONDS)
    except RepositoryNotFoundError:
        raise DataError(
            f"{recipe.name} does not exist on the hub, or is private to others, and there is no {name} on this disk"
        ) from None
    except RevisionNotFoundError:
        raise DataError(f"{recipe.name} has no revision {recipe.revision!r}") from None
    except (HFValidationError, HfHubHTTPError):  # load_dataset knows other names, and tells any other answer
        return True
    except Exception:  # whatever the network raises, which depends on the library's version
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """``datasets`` reads from its cache and asks nobody while the block runs."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """``datasets`` and the hub's client without progress bars and log lines, put back as they were.

    They log an error before they raise it, and each new try before they make it.
    """
    import datasets
    import huggingface_hub

    libraries = (datasets.logging, huggingface_hub.logging)
    silent, before = datasets.are_progress_bars_disabled(), [library.get_verbosity() for library in libraries]
    datasets.disable_progress_bars()
    for library in libraries:
        library.set_verbosity(library.CRITICAL)
    try:
        yield datasets
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()
