"""The reference that engines are compared with: transformers' greedy tokens, and how sure it was of each."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

NEW_TOKENS = 64
KEEP = {"output_scores": True, "return_dict_in_generate": True}


@dataclass(frozen=True)
class Greedy:
    """One prompt's continuation: tokens, and by how much each beat the second best logit."""

    tokens: list[int]
    margins: list[float]

    def until_near_tie(self, moved: list[float]) -> int:
        """Number of tokens before the first that another arithmetic may decide otherwise.

        Args:
            moved: by how much that arithmetic moves the logits at each token. Two of them may move against each other, and what
                once was moved (by another choice of experts) stays in the caches.
        """
        most = accumulate(moved, max)
        ties = (n for n, (margin, by) in enumerate(zip(self.margins, most, strict=True)) if margin <= 2 * by)
        return next(ties, len(self.tokens))


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


def moved_by_bf16(folder: Path, prompts: list[list[int]], answers: list[Greedy]) -> list[list[float]]:
    """By how much BF16 moves the logits that chose each token: the largest difference of any, in transformers itself."""
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    moved = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.tokens])
        with torch.no_grad():
            difference = exact(ids).logits - rounded(ids).logits.float()
        moved.append(difference[0, len(prompt) - 1 : -1].abs().amax(-1).tolist())
    return moved


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
