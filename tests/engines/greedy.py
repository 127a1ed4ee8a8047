"""The reference that engines are compared with: transformers' greedy tokens, and how sure it was of each."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

NEW_TOKENS = 64
NEAR_TIE = 1e-2
KEEP = {"output_scores": True, "return_dict_in_generate": True}


@dataclass(frozen=True)
class Greedy:
    """One prompt's continuation: tokens, and by how much each beat the second best logit."""

    tokens: list[int]
    margins: list[float]

    @property
    def until_near_tie(self) -> int:
        """Number of tokens before the first that another arithmetic may decide otherwise."""
        return next((n for n, margin in enumerate(self.margins) if margin < NEAR_TIE), len(self.tokens))


def greedy(folder: Path, prompts: list[list[int]], never: list[int] | None = None) -> list[Greedy]:
    """Continue prompts with transformers' ``generate`` in fp32; tokens of ``never`` are not taken."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, suppress_tokens=never)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **KEEP)
        best = torch.cat(answer.scores).topk(2).values
        tokens = answer.sequences[0, len(prompt) :].tolist()
        assert len(tokens) == NEW_TOKENS
        found.append(Greedy(tokens, (best[:, 0] - best[:, 1]).tolist()))
    return found


def run_engine(python: str, script: str, model: Path, prompts: list[list[int]], scratch: Path) -> list[list[int]]:
    """The same from an engine, in an environment of its own; prints its versions."""
    job, answer = scratch / "job.json", scratch / "answer.json"
    job.write_text(json.dumps({"prompts": prompts, "new_tokens": NEW_TOKENS}))
    program = [python, str(Path(__file__).with_name(script)), str(model), str(job), str(answer)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(answer.read_text())
    print(told["versions"])
    tokens: list[list[int]] = told["tokens"]
    return tokens
