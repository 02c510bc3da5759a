"""Options of ``vllm serve`` that ``opweave serve`` does not have, and what to use instead."""

from __future__ import annotations

_NO_CODE = "opweave does not run code from checkpoints."
_OWN_TOKENIZER = "The tokenizer is the checkpoint's: put its files into that directory."
_LOCAL = "opweave loads local directories; download the checkpoint first."
_ALWAYS = "It is always on; leave the option out."
_NO_LORA = "LoRA adapters are not supported; merge them into the checkpoint."
_NO_MEDIA = "The server takes text only."
_NO_DRAFTS = "Speculative decoding is not supported."
_NO_PIPELINE = "Use --tensor-parallel-size or --data-parallel-size."
_QUANTIZED = (
    "Leave it out: the checkpoint says how it is quantized. To quantize one, run opweave quantize."
)

# The option, and a sentence that follows "Unknown option: --name."
REPLACEMENTS = {
    "--allow-credentials": "--cors does not allow cookies; clients send --api-key in a header.",
    "--allowed-headers": "Use --cors ORIGIN, which allows all headers.",
    "--allowed-local-media-path": _NO_MEDIA,
    "--allowed-methods": "Use --cors ORIGIN, which allows all methods.",
    "--allowed-origins": "Use --cors ORIGIN.",
    "--api-server-count": "One process serves HTTP; use --data-parallel-size for more engines.",
    "--async-scheduling": "Leave it out: opweave has one scheduler.",
    "--chat-template-content-format": "It is detected from the chat template; leave it out.",
    "--code-revision": _NO_CODE,
    "--disable-access-log-for-endpoints": "Use --log-level WARNING.",
    "--disable-fastapi-docs": "Leave it out: with --api-key, /docs needs an API key.",
    "--disable-frontend-multiprocessing": "Leave it out: one process serves HTTP.",
    "--disable-log-requests": "Prompts are not logged unless --log-prompts is given.",
    "--disable-log-stats": "Leave it out: statistics are at /metrics, not in the log.",
    "--disable-uvicorn-access-log": "Use --log-level WARNING.",
    "--distributed-executor-backend": "Ranks are processes on this machine, or torchrun's.",
    "--download-dir": _LOCAL,
    "--enable-auto-tool-choice": "Leave it out: tool calls are parsed where the request has tools.",
    "--enable-chunked-prefill": _ALWAYS,
    "--no-enable-chunked-prefill": "Use --max-num-batched-tokens with the length of the context.",
    "--enable-expert-parallel": "Use --tensor-parallel-size.",
    "--enable-log-requests": "Use --log-prompts.",
    "--enable-lora": _NO_LORA,
    "--enable-prefix-caching": "Use --prefix-caching, which is the default.",
    "--no-enable-prefix-caching": "Use --no-prefix-caching.",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-server-load-tracking": "The load is at /metrics.",
    "--enable-ssl-refresh": "Restart the server when the certificate changes.",
    "--guided-decoding-backend": "There is one implementation; leave it out.",
    "--hf-config-path": _LOCAL,
    "--hf-overrides": "Edit config.json in the checkpoint.",
    "--hf-token": _LOCAL,
    "--kv-cache-dtype": "The cache has the dtype of the model; use --dtype.",
    "--kv-cache-memory-bytes": "Use --kv-cache-memory BYTES.",
    "--limit-mm-per-prompt": _NO_MEDIA,
    "--logits-processor-pattern": "Requests cannot bring code; write a plugin.",
    "--logits-processors": "A platform plugin names the sampler.",
    "--lora-modules": _NO_LORA,
    "--max-logprobs": "Requests may ask for up to 20; leave it out.",
    "--max-log-len": "Use --log-prompts, which logs whole prompts.",
    "--max-loras": _NO_LORA,
    "--max-parallel-loading-workers": "Leave it out: tensors are read sequentially.",
    "--max-seq-len-to-capture": "Use --compilation-config.",
    "--middleware": "Plugins add routes, not middleware; put a proxy before the server.",
    "--mm-processor-kwargs": _NO_MEDIA,
    "--num-gpu-blocks-override": "Use --kv-cache-memory BYTES.",
    "--num-speculative-tokens": _NO_DRAFTS,
    "--optimization-level": "Use --compilation-config.mode.",
    "--override-generation-config": "Use --generation-config with a directory of your own.",
    "--pipeline-parallel-size": _NO_PIPELINE,
    "--quantization": _QUANTIZED,
    "--response-role": "Answers have the role assistant.",
    "--return-tokens-as-token-ids": "Requests have the field return_tokens_as_token_ids.",
    "--revision": _LOCAL,
    "--rope-scaling": "Edit rope_scaling in the checkpoint's config.json.",
    "--rope-theta": "Edit rope_theta in the checkpoint's config.json.",
    "--runner": "It follows from the model: encoders embed, others generate.",
    "--scheduler-cls": "A platform plugin names the scheduler.",
    "--scheduler-delay-factor": "Leave it out: requests are not delayed.",
    "--skip-tokenizer-init": "Leave it out: requests may send token ids.",
    "--speculative-config": _NO_DRAFTS,
    "--speculative-model": _NO_DRAFTS,
    "--ssl-ca-certs": "Clients are known by --api-key; put a proxy before the server for this.",
    "--ssl-cert-reqs": "Clients are known by --api-key; put a proxy before the server for this.",
    "--structured-outputs-config": "There is one implementation; leave it out.",
    "--swap-space": "Preempted requests are computed again; leave it out.",
    "--task": "It follows from the model: encoders embed, others generate.",
    "--tokenizer": _OWN_TOKENIZER,
    "--tokenizer-mode": _OWN_TOKENIZER,
    "--tokenizer-revision": _OWN_TOKENIZER,
    "--tool-parser-plugin": "Use --tool-call-parser.",
    "--tool-server": "The server calls no tools; it returns the calls.",
    "--trust-remote-code": _NO_CODE,
    "--uvicorn-log-level": "Use --log-level.",
    "--worker-cls": "A platform plugin names the worker.",
    "-O": "Use --compilation-config.mode.",
    "-dp": "Use --data-parallel-size.",
    "-pp": _NO_PIPELINE,
    "-q": _QUANTIZED,
    "-tp": "Use --tensor-parallel-size.",
}


def replacement(option: str) -> str | None:
    """Return the hint for an option of vLLM, or None if it is unknown."""
    name = option.partition("=")[0].replace("_", "-")
    return REPLACEMENTS.get(name)
