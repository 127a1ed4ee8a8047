"""A tokenizer for tiny models of 128 tokens: one token per printable ASCII character, space and newline."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write_tokenizer(folder: Path, extra: int = 0) -> None:
    """Save it into a folder; ``extra`` adds special tokens ``<extra0>``, ... from id 99 on."""
    symbols = ["<pad>", "<bos>", "<eos>", *(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]
    symbols += [f"<extra{number}>" for number in range(extra)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    wrapped.add_special_tokens({"additional_special_tokens": symbols[99:]})
    wrapped.save_pretrained(folder)
