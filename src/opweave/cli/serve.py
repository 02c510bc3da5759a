"""``opweave serve``: answer requests of OpenAI's API over HTTP."""

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
from opweave.cli.model_options import given
from opweave.cli.output import print_text, show_error
from opweave.cli.plugin_options import PluginOption, apply_plugins
from opweave.cli.priorities import PriorityOption, apply_priorities
from opweave.cli.progress import loading_bar
from opweave.cli.serve_file import OptionSources
from opweave.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, environment
from opweave.config.log import choose_log
from opweave.config.output_formats import ReasoningParser, ToolCallParser
from opweave.ir.errors import notes

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
    load_format: Literal["auto", "dummy"] = "auto",
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
    compilation_config: CompilationOption = None,
    plugin: PluginOption = None,
) -> None:
    """Answer requests over HTTP, as OpenAI's API has them, with the model in a directory.

    SIGTERM and Ctrl-C finish the requests that were accepted; a second one stops at once.

    Parameters
    ----------
    directory
        A directory with config.json, safetensors and tokenizer.json.
    model
        The same, as an option.
    host
        The address to listen on; 0.0.0.0 is every network.
    port
        The port to listen on; 0 takes one that is free, and prints it.
    uds
        Listen on a Unix domain socket at this path instead.
    ssl_keyfile
        The private key of the certificate, if the file of --ssl-certfile does not hold it.
    ssl_certfile
        Serve HTTPS with the certificate in this file, in PEM format.
    api_key
        A key that requests must bring; give it several times for several. Also OPWEAVE_API_KEY.
    served_model_name
        The name by which clients ask for the model; give it several times for several.
    chat_template
        A Jinja file, the template itself, or the name of one of the checkpoint's templates, such as
        tool_use, instead of the checkpoint's default.
    trust_request_chat_template
        Let requests bring chat templates of their own. These are programs, which may use a
        processor for as long as they like.
    tool_call_parser
        The format in which the model writes tool calls; auto takes it from the chat template.
    reasoning_parser
        The format in which the model writes its reasoning; auto takes it from the chat template.
    io_processor
        The plugin that answers requests of a form of its own; the default is the one that
        config.json names as io_processor_plugin.
    root_path
        The path under which a proxy shows the server, such as /api.
    cors
        A web page's origin that may call the server, such as https://example.com; * is all.
    dtype
        auto (the checkpoint's), float32, bfloat16 or float16.
    load_format
        auto reads the weights; dummy makes random ones up.
    seed
        Seeds the sampling of requests that bring no seed.
    generation_config
        Where sampling defaults come from: auto is the checkpoint's generation_config.json, none
        disables them, anything else is a directory with another such file.
    cpu_threads
        How many threads kernels on the CPU use, in each rank. The default is OMP_NUM_THREADS, else
        what torch chooses.
    max_model_len
        The most tokens of a prompt and its answer together.
    max_num_seqs
        How many requests are computed together.
    max_num_batched_tokens
        The most tokens of one forward.
    scheduling_policy
        fcfs (first come, first served) or priority (the lowest number first).
    tensor_parallel_size
        Over how many devices the model is divided.
    data_parallel_size
        How many replicas of the model share the requests, each an actor of Ray.
    data_parallel_address
        host:port of a Ray cluster, or auto for this machine's. The default is RAY_ADDRESS, else Ray
        is started.
    block_size
        Tokens in one block of the cache.
    kv_cache_memory
        The memory for the cache, in bytes.
    gpu_memory_utilization
        The share of a device's memory for model and cache together, such as 0.9. On the CPU, use
        --kv-cache-memory.
    prefix_caching
        Whether prompts that begin alike share what was computed of them.
    enforce_eager
        Compile nothing, whatever the other settings say.
    max_requests
        How many answers may be worked on and wait; more are refused with 429.
    max_body_size
        The size of the largest request, in bytes.
    body_timeout
        Seconds within which the head of a request must have arrived, and then its body.
    request_timeout
        Seconds within which a request must have been answered.
    drain_timeout
        Seconds that accepted requests get to finish when the server is told to stop.
    log_level
        DEBUG, INFO, WARNING, ERROR or CRITICAL. The default is OPWEAVE_LOGGING_LEVEL, else INFO.
    log_format
        text, or json for one JSON object per line.
    log_prompts
        Log the text of prompts.
    config
        A file of options by name: .yaml, .json or .toml. The command line is stronger.
    """
    level = log_level or environment.logging_level() or "INFO"
    choose_log(level, as_json=log_format == "json", others={"uvicorn": "WARNING"})
    from opweave.engine import ChatTemplate, Checkpoint, open_engine
    from opweave.engine.dependencies import require
    from opweave.engine.parallel.executor import is_follower, is_launched
    from opweave.engine.request.io_processor import IOProcessors
    from opweave.engine.tokenization.special_tokens import SpecialTokens

    for package in _PACKAGES:
        require(package)
    from opweave.server import ServerConfig, create_app, listen, listen_unix, run
    from opweave.server.run import url
    from opweave.server.tls import check_certificate

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
    apply_compilation({**(compilation_config or {}), **({"mode": "0"} if enforce_eager else {})})
    engine_config = EngineConfig(
        dtype=dtype,
        load_format=load_format,
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
        open_engine(path, config=engine_config)  # which ends the process when rank 0 stops
    # Before the model, which takes a while to load: whether the address is free shows at once.
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
            ends_with_engine=launched,  # the end of a process is all that torchrun sees
        )
    if (failure := engine.dead_with) is not None:
        show_error(f"the engine died: {failure}{notes(failure)}")
        sys.exit(1)


def _only_one(directory: Path | None, model: Path | None) -> Path:
    """Return the directory of the checkpoint, which may be given in two ways."""
    if directory is not None and model is not None and directory != model:
        raise CliError(f"The model is given twice: {directory}, and --model {model}. Give it once.")
    found = directory or model
    if found is None:
        raise CliError("MODEL is missing. Give the directory of a checkpoint: opweave serve DIR.")
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
    _log.info(
        "threads of kernels on the CPU, in each rank: %d (%s)", torch.get_num_threads(), origin
    )
