"""The small files that travel with a model: tokenizer, chat template, generation settings, licence.

A list of what is taken, not of what is left: unknown files of a parent may be large, stale or code.
"""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

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


def is_companion(name: str) -> bool:
    """Whether a file of this relative name is taken along."""
    parts = name.split("/")
    return PurePosixPath(name).suffix not in NEVER and any(
        len(parts) == len(pattern.split("/")) and fnmatchcase(name, pattern) for pattern in PATTERNS
    )


def copy_companions(source: Path, target: Path, *, code_files: bool = False) -> list[str]:
    """Copy the files that match PATTERNS, and ``*.py`` only where asked; return their relative names."""
    names = {path.relative_to(source) for pattern in PATTERNS for path in source.glob(pattern) if path.is_file()}
    chosen = {name for name in names if name.suffix not in NEVER}
    if code_files:
        chosen |= {path.relative_to(source) for path in source.glob("*.py")}
    for name in sorted(chosen):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return [str(name) for name in sorted(chosen)]
