"""The small files that travel with a model: tokenizer, chat template, generation settings, licence.

A list of what is taken, not of what is left: unknown files of a parent may be large, stale or code. Code stays behind, and so
does what points to it: transformers' own tokenizers read these files, and a name of code that is not there would stop them.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from star_elastic.submodel import read_json

PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "*.spm",
    "sentencepiece.bpe.model",
    "spiece.model",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
)
NEVER = frozenset({".py", ".bin", ".pt", ".pth", ".pkl", ".safetensors"})
TOKENIZER_CONFIG = "tokenizer_config.json"
CODE_FIELD = "auto_map"  # names classes in files of the folder, or of another one on the hub


def is_companion(name: str) -> bool:
    """Whether a file of this relative name is taken along."""
    parts = name.split("/")
    return PurePosixPath(name).suffix not in NEVER and any(
        len(parts) == len(pattern.split("/")) and fnmatchcase(name, pattern) for pattern in PATTERNS
    )


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the files that match PATTERNS, without the ``auto_map`` of tokenizer_config.json; return their relative names.

    Raises:
        CheckpointError: a tokenizer_config.json with an ``auto_map`` that cannot be read as JSON.
    """
    names = {path.relative_to(source) for pattern in PATTERNS for path in source.glob(pattern) if path.is_file()}
    chosen = sorted(name for name in names if name.suffix not in NEVER)
    for name in chosen:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    if Path(TOKENIZER_CONFIG) in chosen and CODE_FIELD.encode() in (source / TOKENIZER_CONFIG).read_bytes():
        content = read_json(source / TOKENIZER_CONFIG)
        content.pop(CODE_FIELD, None)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (target / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    return [str(name) for name in chosen]
