"""``opweave serve``: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from opweave.cli.compilation import CompilationOption, apply_compilation
from opweave.cli.errors import CliError
from opweave.cli.flag import Flag
from opweave.cli.output import print_text, show_error
from opweave.cli.plugin_options import PluginOption, apply_plugins
from opweave.cli.priorities import (
    PriorityOption,
    TuningFileOption,
    apply_priorities,
    apply_tuning,
)
from opweave.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, environment
from opweave.config.engine import LoadFormat, ModelImpl
from opweave.config.log import choose_log
from opweave.ir.errors import notes
from opweave_engine.cli.model_options import given, loading_bar
from opweave_engine.cli.serve_file import OptionSources
from opweave_engine.server.output_formats import ReasoningParser, ToolCallParser

_log = logging.getLogger(__name__)

_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_sources = OptionSources()
serve_app = App(name="serve", config=_sources, help_format="plaintext")


@serve_app.default
def serve(
    directory: Path | None = None,
    /,
    *,
    model: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    uds: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    api_key: Annotated[list[str] | None, Parameter(negative=())] = None,
    served_model_name: Annotated[list[str] | None, Parameter(negative=())] = None,
    chat_template: str | None = None,
    trust_request_chat_template: Flag = False,
    tool_call_parser: ToolCallParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    io_processor: str | None = None,
    root_path: str = "",
    cors: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    model_impl: ModelImpl = "auto",
    seed: int = 0,
    generation_config: str = "auto",
    cpu_threads: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    scheduling_policy: str | None = None,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    data_parallel_address: str | None = None,
    block_size: int | None = None,
    kv_cache_memory: int | None = None,
    gpu_memory_utilization: float | None = None,
    prefix_caching: bool | None = None,
    enforce_eager: Flag = False,
    max_requests: int = 1024,
    max_body_size: int = 16 * 1024 * 1024,
    body_timeout: float = 30.0,
    request_timeout: float = 600.0,
    drain_timeout: float = 60.0,
    log_level: Level | None = None,
    log_format: Literal["text", "json"] = "text",
    log_prompts: Flag = False,
    config: Path | None = None,
    ir_op_priority: PriorityOption = None,
    tuning_file: TuningFileOption = None,
    compilation_config: CompilationOption = None,
    plugin: PluginOption = None,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API.

    SIGTERM and Ctrl-C finish accepted requests before the server stops; a second one stops at once.

    Parameters
    ----------
    directory
        A directory with config.json, safetensors and tokenizer.json; or a GGUF file.
    model
        The model directory, as an option instead of an argument.
    host
        The address to listen on; 0.0.0.0 is all interfaces.
    port
        The port to listen on; 0 chooses a free one and prints it.
    uds
        Listen on a Unix domain socket at this path instead.
    ssl_keyfile
        The private key of the certificate, if it is not in the file of --ssl-certfile.
    ssl_certfile
        Serve HTTPS with the certificate in this file, in PEM format.
    api_key
        API key that requests must have; repeatable. Also OPWEAVE_API_KEY.
    served_model_name
        Name of the model for clients; repeatable.
    chat_template
        A Jinja file, the template itself, or the name of one of the checkpoint's templates, such as
        tool_use, instead of the checkpoint's default.
    trust_request_chat_template
        Allow chat templates in requests. Templates are programs, and may use unbounded CPU time.
    tool_call_parser
        Format of the model's tool calls; auto detects it from the chat template.
    reasoning_parser
        Format of the model's reasoning; auto detects it from the chat template.
    io_processor
        The I/O processor plugin. The default is io_processor_plugin in config.json.
    root_path
        The path prefix that a proxy adds, such as /api.
    cors
        Allowed CORS origin, such as https://example.com; * allows all.
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights; dummy uses random weights.
    model_impl
        Implementation of the model: opweave, transformers, or auto, which prefers opweave's.
    seed
        Seed for requests that do not set one.
    generation_config
        Source of sampling defaults: auto (the checkpoint's generation_config.json), none, or
        another directory with a generation_config.json.
    cpu_threads
        Number of CPU threads per rank. The default is OMP_NUM_THREADS, else torch's choice.
    max_model_len
        Maximum number of tokens of a prompt and its answer.
    max_num_seqs
        Maximum number of requests in a batch.
    max_num_batched_tokens
        Maximum number of tokens in a batch.
    scheduling_policy
        fcfs (first come, first served) or priority (the lowest number first).
    tensor_parallel_size
        Number of tensor-parallel ranks.
    data_parallel_size
        Number of replicas of the model; each is a Ray actor.
    data_parallel_address
        host:port of a Ray cluster, or auto for the local one. The default is RAY_ADDRESS, else a
        new local cluster.
    block_size
        Tokens per KV cache block.
    kv_cache_memory
        Size of the KV cache in bytes.
    gpu_memory_utilization
        Fraction of the device's memory for the model and the KV cache, such as 0.9. On the CPU, use
        --kv-cache-memory.
    prefix_caching
        Reuse the KV cache of common prompt prefixes.
    enforce_eager
        Disable compilation and graphs of decode steps, regardless of other settings.
    max_requests
        Maximum number of running and waiting requests; others get a 429.
    max_body_size
        Maximum size of a request body in bytes.
    body_timeout
        Timeout in seconds for reading a request's headers, and then its body.
    request_timeout
        Timeout in seconds for a complete answer.
    drain_timeout
        Timeout in seconds for finishing accepted requests at shutdown.
    log_level
        DEBUG, INFO, WARNING, ERROR or CRITICAL. The default is OPWEAVE_LOGGING_LEVEL, else INFO.
    log_format
        text, or json for one JSON object per line.
    log_prompts
        Log the text of prompts.
    config
        A .yaml, .json or .toml file with options by name. The command line takes precedence.
    """
    level = log_level or environment.logging_level() or "INFO"
    choose_log(level, as_json=log_format == "json", others={"uvicorn": "WARNING"})
    from opweave_engine import ChatTemplate, Checkpoint, open_engine
    from opweave_engine.dependencies import require
    from opweave_engine.parallel.executor import is_follower, is_launched
    from opweave_engine.request.io_processor import IOProcessors
    from opweave_engine.tokenization.special_tokens import SpecialTokens

    for package in _PACKAGES:
        require(package)
    from opweave_engine.server import ServerConfig, create_app, listen, listen_unix, run
    from opweave_engine.server.run import url
    from opweave_engine.server.tls import check_certificate

    path = _only_one(directory, model)
    if uds is not None and not {"--host", "--port"}.isdisjoint(_sources.given):
        raise CliError("Give --uds, or --host and --port, not both.")

    settings = ServerConfig(
        api_keys=tuple(api_key or environment.api_keys()),
        served_model_names=tuple(served_model_name or ()),
        root_path=root_path,
        cors_origins=tuple(cors or ()),
        max_requests=max_requests,
        max_body_bytes=max_body_size,
        body_timeout=body_timeout,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        log_prompts=log_prompts,
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    check_certificate(settings)
    apply_plugins(plugin)
    apply_priorities(ir_op_priority)
    apply_tuning(tuning_file)
    apply_compilation(
        {
            **(compilation_config or {}),
            **({"mode": "0", "cudagraph_capture_sizes": ()} if enforce_eager else {}),
        }
    )
    engine_config = EngineConfig(
        dtype=dtype,
        load_format=load_format,
        model_impl=model_impl,
        seed=seed,
        generation_config=generation_config,
        cpu_threads=cpu_threads,
        scheduler=given(
            SchedulerConfig,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=scheduling_policy,
        ),
        cache=given(
            CacheConfig,
            block_size=block_size,
            memory_bytes=kv_cache_memory,
            memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=prefix_caching,
        ),
        parallel=given(
            ParallelConfig,
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            data_parallel_address=data_parallel_address,
        ),
    )
    checkpoint = Checkpoint(path)
    template = (
        ChatTemplate.given(chat_template, checkpoint)
        if chat_template is not None
        else ChatTemplate.of(checkpoint)
    )
    processor = IOProcessors(checkpoint, engine_config).find(io_processor)
    parallel = engine_config.parallel
    launched = parallel.data_parallel_size == 1 and is_launched(parallel.tensor_parallel_size)
    if launched and is_follower(parallel.tensor_parallel_size):
        open_engine(path, config=engine_config)  # ends the process when rank 0 stops
    # Bind first: loading the model takes longer than finding out that the address is in use.
    bound = listen(host, port) if uds is None else listen_unix(uds)
    _log_options()
    if gpu_memory_utilization is not None:
        _check_utilization()
    with bound:
        with loading_bar(engine_config) as loading:
            engine = open_engine(path, config=engine_config, progress=loading)
        if parallel.data_parallel_size == 1:
            _log_threads(cpu_threads)
        app = create_app(engine, settings, template, processor, SpecialTokens.of(checkpoint).named)
        run(
            app,
            bound,
            lambda: print_text(f"opweave serves {engine.model_name} on {url(bound, settings)}"),
            ends_with_engine=launched,  # torchrun only sees that a process ended
        )
    if (failure := engine.dead_with) is not None:
        show_error(f"the engine died: {failure}{notes(failure)}")
        sys.exit(1)


def _only_one(directory: Path | None, model: Path | None) -> Path:
    """Return the checkpoint directory, which may be an argument or an option."""
    if directory is not None and model is not None and directory != model:
        raise CliError(f"The model is given twice: {directory}, and --model {model}. Give it once.")
    found = directory or model
    if found is None:
        raise CliError("MODEL is missing. Give a checkpoint directory: opweave serve DIR.")
    return found


def _check_utilization() -> None:
    from opweave import platforms

    platform = platforms.current_platform
    if platform.capabilities.unified_memory:
        _log.warning(
            "--gpu-memory-utilization has no effect on %s, which shares the host's memory; use "
            "--kv-cache-memory BYTES",
            platform.name,
        )


def _log_options() -> None:
    for name, values in _sources.given.items():
        _log.info("option %s: %s", name, values)


def _log_threads(given: int | None) -> None:
    import torch

    set_by = "OMP_NUM_THREADS" if os.environ.get("OMP_NUM_THREADS") else "torch"
    origin = set_by if given is None else "--cpu-threads"
    _log.info("CPU threads per rank: %d (%s)", torch.get_num_threads(), origin)
