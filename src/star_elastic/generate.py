"""Text from any nested model of a checkpoint, run on views of the parent's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from star_elastic.checkpoint import Checkpoint
from star_elastic.elastic import ElasticModel
from star_elastic.errors import DataError
from star_elastic.loading import check_batches, check_tokenizer, choose_device, choose_dtype, load_model
from star_elastic.quant import ANY
from star_elastic.rewrite import locate
from star_elastic.submodel import FULL, open_elastic
from star_elastic.train.documents import load_tokenizer

COLDEST = 1e-4  # below, dividing logits by the temperature overflows, and sampling is greedy anyway


def generate_text(
    folder: Path | str,
    prompt: str,
    submodel: str | None = None,
    *,
    preset: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    stream: bool = False,
) -> str:
    """Continue a prompt with one nested model.

    Args:
        folder: an elastic checkpoint, or any model folder of a known family, with its tokenizer.
        prompt: text to continue, taken as it is: no chat template.
        submodel: name of the nested model; None for the whole one.
        preset: take the names from this published family, where the folder has no ``elastic.json``.
        max_new_tokens: stop after this many tokens, if the model does not end before.
        temperature: 0 always takes the most probable token; above, samples (with the folder's own top-p and top-k).
        seed: of the sampling; torch's global generators are left alone.
        device: ``auto`` takes a GPU where there is one.
        dtype: ``auto`` keeps the stored one.
        stream: also print the text while it is made.

    Returns:
        The continuation, without the prompt and special tokens.

    Raises:
        UnknownNameError: no such submodel or preset; found before weights are loaded.
        CheckpointError: the folder, its weights or its tokenizer are missing or damaged.
        DataError: the prompt holds no token, or the tokenizer is another model's.

    Example:
        >>> generate_text("elastic", "2 + 3 =", submodel="small", max_new_tokens=8)  # doctest: +SKIP
        ' 5'
    """
    check_prompt(prompt)
    _, layout, elastic = open_elastic(folder, preset=preset, per_layer=True)
    elastic.get(submodel or FULL)
    locate(layout, Checkpoint.open(folder), quantized=ANY)
    where, kind = choose_device(device), choose_dtype(dtype)
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, layout)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise DataError(f"the prompt {prompt!r} holds no token: give it some text")
    check_batches([inputs], layout)

    model: Any = ElasticModel(load_model(folder, device=where, dtype=kind), elastic).submodel(submodel or FULL)
    model.generation_config = _settings(model.generation_config, tokenizer, temperature)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.generate(**inputs.to(where), max_new_tokens=max_new_tokens, streamer=streamer)
    return str(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def check_prompt(prompt: str) -> None:
    """Raise DataError for a prompt that is no text: bytes of another encoding on the command line."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise DataError(f"the prompt {prompt!a} is not UTF-8 text") from None


def _settings(stored: GenerationConfig, tokenizer: Any, temperature: float) -> GenerationConfig:
    """Settings for one call. Sampling fields of the folder beside greedy decoding would only draw warnings."""
    end = stored.eos_token_id if stored.eos_token_id is not None else tokenizer.eos_token_id
    special = {
        "eos_token_id": end,
        "bos_token_id": stored.bos_token_id,
        "pad_token_id": tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    }
    if temperature < COLDEST:
        return GenerationConfig(do_sample=False, **special)
    return GenerationConfig(do_sample=True, temperature=temperature, top_p=stored.top_p, top_k=stored.top_k, **special)
