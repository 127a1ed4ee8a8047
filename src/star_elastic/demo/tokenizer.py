"""The demo's tokenizer: one token per byte, one for each signed digit, and a chat template that shows thoughts.

A signed digit (``+3``) as one token makes a thought look up one thing per step instead of two, which halves the training time.
"""

from __future__ import annotations

import string
from pathlib import Path

SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<think>", "</think>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}<user>{{ message['content'] }}"
    "{%- else -%}<assistant><think>{{ message['reasoning_content'] }}</think>{{ message['content'] }}<eos>"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant><think>{%- endif -%}"
)


def write_tokenizer(folder: Path) -> None:
    """Save the tokenizer as an ordinary transformers tokenizer folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(sign, digit) for sign in "+-" for digit in string.digits]
    tokens = [*SPECIAL, *symbols, *(sign + digit for sign, digit in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
