"""llama.cpp's converter as it is, but for tokenizers: it takes only those whose hash is in its list, and ours are home-made.

Run in place of ``convert_hf_to_gguf.py``; the variable ``LLAMA_CPP`` says where that lies.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    script = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(script.parent), str(script.parent / "gguf-py")]
    base: Any = __import__("conversion.base").base
    base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "gpt-2"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
