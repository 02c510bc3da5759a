"""``opweave bench``: compare kernels (``bench OP``); the engine adds ``bench serve``."""

from __future__ import annotations

from cyclopts import App

from opweave.cli.bench_op import bench_op
from opweave.cli.companions import add_commands

bench = App(name="bench", help="Compare the kernels of an op, or load-test a running server.")
bench.help_format = "plaintext"
bench.default(bench_op)
add_commands(bench, "bench")
