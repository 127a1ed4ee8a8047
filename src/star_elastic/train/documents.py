"""From a document to tokens: raw text as the tokenizer reads it, conversations through its chat template, thoughts included.

Every document ends with the end-of-sequence token, so that a model sees where it stops, packed or not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from star_elastic.errors import CheckpointError, DataError
from star_elastic.train.rows import THOUGHT_KEYS, Message
from star_elastic.train.sources import Source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Of which every folder with a tokenizer has at least one."""


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a model folder; code that came with the folder is never run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        DataError: it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever the readers of a dozen formats raise
        if not any((Path(folder) / name).exists() for name in TOKENIZER_FILES):
            raise CheckpointError(f"{folder} holds no tokenizer: copy {TOKENIZER_FILES[0]} and its companions there") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{folder} holds no tokenizer that can be read: {reason}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {folder} has no end-of-sequence token; set eos_token in tokenizer_config.json")
    return tokenizer


class Documents:
    """A source as token lists with random access.

    Args:
        source: The documents.
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, source: Source, tokenizer: Any) -> None:
        self.source = source
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> list[int]:
        """Tokens of one document, ending with end-of-sequence; no tokens for an empty one.

        Raises:
            DataError: a conversation that the chat template refuses; names the place.
        """
        document = self.source[index]
        if isinstance(document, str):
            ids = self._tokenize(document, special=True) if document.strip() else []
        else:
            try:
                ids = self._tokenize(render_chat(document, self._tokenizer), special=False) if document else []
            except DataError as error:
                raise DataError(f"{self.source.place(index)}: {error}") from None
        if ids and ids[-1] != self._tokenizer.eos_token_id:
            ids.append(self._tokenizer.eos_token_id)
        return ids

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        # verbose=False: a document longer than the model is cut into rows, and is no reason for a warning
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def render_chat(messages: list[Message], tokenizer: Any) -> str:
    """A conversation as the text the model was trained on.

    Thoughts (``reasoning_content`` or ``thinking`` of a message) go to the template under the name that it reads; where it reads
    neither they stand before the content as ``<think>\\n...\\n</think>``.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    template = tokenizer.chat_template
    if not template:
        raise DataError("a conversation needs a chat template and the tokenizer has none; add chat_template.jinja, or use text")
    thought_key = _thought_key(str(template))
    turns = [_with_thoughts(message, thought_key) for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # templates raise jinja errors of any kind
        raise DataError(f"the chat template refuses the conversation: {str(error).splitlines()[0]}") from None


def _thought_key(template: str) -> str | None:
    """The message key that a template reads thoughts from, if it does.

    Only ``.thinking`` and ``['thinking']`` count: many templates have a switch called ``enable_thinking``.
    """
    for key in THOUGHT_KEYS:
        if re.search(rf"""\.{key}\b|\[\s*['"]{key}['"]\s*\]|['"]{key}['"]\s+in\b|get\(\s*['"]{key}['"]""", template):
            return key
    return None


def _with_thoughts(message: Message, thought_key: str | None) -> Message:
    """The message without empty fields (tables fill absent ones with None), its thoughts where they are read."""
    turn = {key: value for key, value in message.items() if value is not None and key not in THOUGHT_KEYS}
    thoughts = next((message[key] for key in THOUGHT_KEYS if message.get(key) is not None), None)
    turn.setdefault("content", "")
    if thoughts is None:
        return turn
    if thought_key is not None:
        return {**turn, thought_key: thoughts}
    inlined = f"<think>\n{str(thoughts).strip()}\n</think>\n\n" if str(thoughts).strip() else ""
    return {**turn, "content": f"{inlined}{turn['content']}"}
