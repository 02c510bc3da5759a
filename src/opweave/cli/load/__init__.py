"""Load generator for a running server."""

from opweave.cli.load.client import Answer, Client
from opweave.cli.load.plan import Load, arrivals, prompts
from opweave.cli.load.summary import Summary, summarize

__all__ = ["Answer", "Client", "Load", "Summary", "arrivals", "prompts", "summarize"]
