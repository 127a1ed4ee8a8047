"""Greedy tokens from llama.cpp. Run by a Python that has xllamacpp: ``run_llama.py FILE.gguf JOB.json ANSWER.json``.

A job is ``{"prompts": [[token, ...], ...], "new_tokens": N}``, the answer ``{"versions": ..., "tokens": [[...], ...]}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp


def main(model: str, job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 256
    params.n_gpu_layers = 0
    params.n_parallel = 1
    params.warmup = False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it mixes in F16
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # F16 alone moves logits by tenths
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    tokens = []
    for prompt in job["prompts"]:
        request = {
            "prompt": prompt,
            "n_predict": job["new_tokens"],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        body = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(request).encode())
        with urllib.request.urlopen(body) as answer:
            tokens.append(json.load(answer)["tokens"])
    versions = {"xllamacpp": importlib.metadata.version("xllamacpp"), "llama.cpp": xllamacpp.BUILD_INFO}
    Path(answer_file).write_text(json.dumps({"versions": versions, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
