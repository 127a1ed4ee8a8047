"""What one row of data may be: text, or a conversation; and how a row that is neither is told."""

from __future__ import annotations

import json
from typing import Any

from star_elastic.errors import DataError

Message = dict[str, Any]
CHAT_FIELD = "messages"
THOUGHT_KEYS = ("reasoning_content", "thinking")  # of a message: what was thought before its content
Document = str | list[Message]  # raw text, or a conversation


def choose_field(row: Any, place: str) -> str:
    """``messages`` where there is one, else ``text``.

    Raises:
        DataError: neither is there.
    """
    for field in (CHAT_FIELD, "text"):
        if field in row:
            return field
    raise DataError(f"{place}: neither 'messages' nor 'text'; name the field: one of {', '.join(sorted(row))}")


def check_document(value: Any, field: str, place: str) -> None:
    """Refuse what is neither text nor a conversation, text under the name of conversations, and text that is not Unicode.

    None counts as empty.

    Raises:
        DataError: names the place, the field and the type found.
    """
    where = f"{place}: field {field!r}"
    if not _is_unicode(value):
        raise DataError(f"{where}: not valid Unicode text, half of a surrogate pair stands alone (\\ud800 to \\udfff)")
    if value is None or (isinstance(value, str) and field != CHAT_FIELD):
        return
    if not isinstance(value, list):
        wanted = "a list of messages" if field == CHAT_FIELD else "text, or a list of messages"
        raise DataError(f"{where} holds {type(value).__name__}; it must be {wanted}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: a message must be an object with 'role' and 'content', not {str(message)[:60]!r}")
        for key in ("content", *THOUGHT_KEYS):
            if not isinstance(message.get(key), str | None):
                raise DataError(f"{where}: {key!r} of a message must be text, not {type(message[key]).__name__}")


def _is_unicode(value: Any) -> bool:
    """Whether a field holds only text that can be written down. JSON can escape half a surrogate pair; no tokenizer takes it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def holds_text(document: Document) -> bool:
    """Whether there is anything to learn from."""
    if isinstance(document, str):
        return bool(document.strip())
    return any(str(message.get("content") or "").strip() for message in document)


def parse_row(raw: bytes, place: str) -> dict[str, Any]:
    """One line of a JSON-lines file.

    Raises:
        DataError: not JSON, or not an object; names the place.
    """
    try:
        row = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise DataError(f"{place}: not valid JSON ({reason}); JSON lines hold one object in each line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: holds a JSON {type(row).__name__}; JSON lines hold one object in each line")
    return row
