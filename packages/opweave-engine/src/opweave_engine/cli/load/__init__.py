"""Load generator for a running server."""

from opweave_engine.cli.load.client import Answer, Client
from opweave_engine.cli.load.plan import Load, arrivals, prompts
from opweave_engine.cli.load.summary import Summary, summarize

__all__ = ["Answer", "Client", "Load", "Summary", "arrivals", "prompts", "summarize"]
