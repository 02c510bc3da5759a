"""``opweave serve``: an OpenAI-compatible server."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from cyclopts import App, Argument, ArgumentCollection
from cyclopts.config import Dict

from opweave.cli.options import Flag, RunOptions
from opweave.cli.output import CliError, print_text, show_error
from opweave.config import CacheConfig, SchedulerConfig, environment
from opweave.config.terminal import choose_log
from opweave.ir.errors import did_you_mean, notes
from opweave_engine.cli.options import ModelOptions, configured, loading_bar
from opweave_engine.server.state import ServerConfig

# Option files of ``opweave serve --config``.


_M_ARENA_MAX = -8  # from glibc's malloc.h


class OptionSources:
    """Reads options from the ``--config`` file, and records the source of each option.

    Attributes:
        values: the value and the source of each option, for the log.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the file's options; cyclopts calls this between parsing and conversion."""
        for argument in arguments:
            if argument.name == "--config" and argument.tokens:
                path = argument.tokens[0].value
                values = _read(Path(path).expanduser())
                _check_names(values, arguments, path)
                file = Dict(values, source=path, use_commands_as_keys=False)
                file(app, commands, arguments)
        self.values = {
            argument.name: _value_and_source(argument) for argument in arguments if argument.tokens
        }


def _value_and_source(argument: Argument) -> str:
    source = argument.tokens[0].source
    values = [".".join([*token.keys, token.value]) for token in argument.tokens]
    value = "***" if argument.name == "--api-key" else ", ".join(values)
    return f"{value} ({'command line' if source == 'cli' else source})"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = _parser(path)(text)
    except OSError as error:
        raise CliError(f"Cannot read --config {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CliError(f"--config {path} is malformed: {error}.") from error
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise CliError(f"--config {path} must hold options by name, such as port: 8000.")
    return {str(name).replace("_", "-"): _flat(value) for name, value in values.items()}


def _parser(path: Path) -> Callable[[str], Any]:
    if path.suffix == ".json":
        return json.loads
    if path.suffix == ".toml":
        return tomllib.loads
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml
    raise CliError(f"--config {path}: its name must end in .yaml, .yml, .json or .toml.")


def _parse_yaml(text: str) -> Any:
    from opweave_engine.errors import require

    yaml = require("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _flat(value: Any) -> Any:
    """Join lists inside tables with commas, as on the command line."""
    if not isinstance(value, Mapping):
        return value
    return {
        str(key): ",".join(map(str, item)) if isinstance(item, list) else _flat(item)
        for key, item in value.items()
    }


def _check_names(values: Mapping[str, Any], arguments: ArgumentCollection, path: str) -> None:
    options = {
        name.removeprefix("--")
        for argument in arguments
        for name in argument.names
        if name.startswith("--") and name != "--config" and "_" not in name
    }
    if (name := next((name for name in values if name not in options), None)) is not None:
        raise CliError(f"--config {path}: unknown option {name!r}. {did_you_mean(name, options)}")


# Options of ``vllm serve`` that ``opweave serve`` does not have, and what to use instead.


@cache
def replacements() -> Mapping[str, str]:
    """Return the hints, by option: sentences that follow "Unknown option: --name."."""
    text = (resources.files(__package__) / "vllm_options.toml").read_text("utf-8")
    return {option: hint for hint, options in tomllib.loads(text).items() for option in options}


def replacement(option: str) -> str | None:
    """Return the hint for an option of vLLM, or None if it is unknown."""
    return replacements().get(option.partition("=")[0].replace("_", "-"))


# The command.


_log = logging.getLogger(__name__)

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_SERVER, _RUNNING, _OPTIONS = ServerConfig(), ModelOptions(), RunOptions()
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
    chat_template: str | None = None,
    io_processor: str | None = None,
    settings: ServerConfig = _SERVER,
    running: ModelOptions = _RUNNING,
    seed: int = 0,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    scheduling_policy: str | None = None,
    data_parallel_size: int | None = None,
    data_parallel_address: str | None = None,
    block_size: int | None = None,
    kv_cache_memory: int | None = None,
    gpu_memory_utilization: float | None = None,
    prefix_caching: bool | None = None,
    enforce_eager: Flag = False,
    log_level: Level | None = None,
    log_format: Literal["text", "json"] = "text",
    config: Path | None = None,
    options: RunOptions = _OPTIONS,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API.

    SIGTERM and Ctrl-C finish accepted requests before the server stops; a second one stops at once.

    Parameters
    ----------
    directory
        A checkpoint's directory, a GGUF file, or the id of a repository on the Hugging Face hub.
    model
        The model directory, as an option instead of an argument.
    host
        The address to listen on; 0.0.0.0 is all interfaces.
    port
        The port to listen on; 0 chooses a free one and prints it.
    uds
        Listen on a Unix domain socket at this path instead.
    chat_template
        A Jinja file, the template itself, or the name of one of the checkpoint's templates, such as
        tool_use, instead of the checkpoint's default.
    io_processor
        The I/O processor plugin. The default is io_processor_plugin in config.json.
    seed
        Seed for requests that do not set one.
    max_model_len
        Maximum number of tokens of a prompt and its answer.
    max_num_seqs
        Maximum number of requests in a batch.
    max_num_batched_tokens
        Maximum number of tokens in a batch.
    scheduling_policy
        fcfs (first come, first served) or priority (the lowest number first).
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
    log_level
        DEBUG, INFO, WARNING, ERROR or CRITICAL. The default is OPWEAVE_LOGGING_LEVEL, else INFO.
    log_format
        text, or json for one JSON object per line.
    config
        A .yaml, .json or .toml file with options by name. The command line takes precedence.
    """
    level = log_level or environment.logging_level() or "INFO"
    choose_log(level, as_json=log_format == "json", others={"uvicorn": "WARNING"})
    limit_arenas()
    from opweave_engine import ChatTemplate, Checkpoint, open_engine
    from opweave_engine.errors import require
    from opweave_engine.parallel.rank import launch_of
    from opweave_engine.prompts import IOProcessors
    from opweave_engine.tokenizer import SpecialTokens

    for package in ("fastapi", "prometheus_client", "uvicorn"):
        require(package)
    from opweave_engine.server import create_app, listen, listen_unix, run
    from opweave_engine.server.connection import check_certificate
    from opweave_engine.server.run import url

    if directory is not None and model is not None and directory != model:
        raise CliError(f"The model is given twice: {directory}, and --model {model}. Give it once.")
    path = directory or model
    if path is None:
        raise CliError("MODEL is missing. Give a checkpoint directory: opweave serve DIR.")
    if uds is not None and not {"--host", "--port"}.isdisjoint(_sources.values):
        raise CliError("Give --uds, or --host and --port, not both.")

    if not settings.api_keys:
        settings = replace(settings, api_keys=tuple(environment.api_keys()))
    check_certificate(settings)
    if enforce_eager:
        eager = {"mode": "0", "cudagraph_capture_sizes": ()}
        compilation = {**(options.compilation_config or {}), **eager}
        options = replace(options, compilation_config=compilation)
    options.apply()
    engine_config = running.config(
        {"data_parallel_size": data_parallel_size, "data_parallel_address": data_parallel_address},
        seed=seed,
        scheduler=configured(
            SchedulerConfig, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens, policy=scheduling_policy,
        ),
        cache=configured(
            CacheConfig, block_size=block_size, memory_bytes=kv_cache_memory,
            memory_utilization=gpu_memory_utilization, enable_prefix_caching=prefix_caching,
        ),
    )  # fmt: skip
    checkpoint = Checkpoint(path)
    if chat_template is None:
        template = ChatTemplate.of(checkpoint)
    else:
        template = ChatTemplate.given(chat_template, checkpoint)
    processor = IOProcessors(checkpoint, engine_config).find(io_processor)
    parallel = engine_config.parallel
    is_alone = parallel.data_parallel_size == 1
    launch = launch_of(parallel.tensor_parallel_size) if is_alone else None
    if launch is not None and launch.rank > 0:
        open_engine(path, config=engine_config)  # ends the process when rank 0 stops
    # Bind first: an address that is in use is found before the model is loaded.
    bound = listen(host, port) if uds is None else listen_unix(uds)
    for name, value in _sources.values.items():
        _log.info("option %s: %s", name, value)
    if gpu_memory_utilization is not None:
        _check_utilization()
    with bound:
        with loading_bar(engine_config) as loading:
            engine = open_engine(path, config=engine_config, progress=loading)
        if is_alone:
            _log_threads(running.cpu_threads)
        app = create_app(engine, settings, template, processor, SpecialTokens.of(checkpoint).named)
        run(
            app,
            bound,
            lambda: print_text(f"opweave serves {engine.model_name} on {url(bound, settings)}"),
            ends_with_engine=launch is not None,  # torchrun only sees that a process ended
        )
    if (failure := engine.dead_with) is not None:
        show_error(f"the engine died: {failure}{notes(failure)}")
        sys.exit(1)


def _check_utilization() -> None:
    from opweave import platforms

    platform = platforms.current_platform
    if platform.capabilities.unified_memory:
        _log.warning(
            "--gpu-memory-utilization has no effect on %s, which shares the host's memory; use "
            "--kv-cache-memory BYTES",
            platform.name,
        )


def limit_arenas() -> None:
    """Let all threads of this process allocate from one arena, where glibc is the C library.

    Each further arena keeps what the largest request of a thread freed, for that thread only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _log_threads(cpu_threads: int | None) -> None:
    import torch

    default = "OMP_NUM_THREADS" if os.environ.get("OMP_NUM_THREADS") else "torch"
    origin = default if cpu_threads is None else "--cpu-threads"
    _log.info("CPU threads per rank: %d (%s)", torch.get_num_threads(), origin)
