"""The table of request fields: which ones are supported, harmless or refused, by endpoint.

It covers the request schemas of OpenAI's API and of vLLM. Requests are checked against it first,
and the documentation is generated from it.
"""

from opweave_engine.server.request_fields.check import FieldTable
from opweave_engine.server.request_fields.endpoints import ENDPOINTS, Endpoint
from opweave_engine.server.request_fields.row import Row, Status

__all__ = ["ENDPOINTS", "Endpoint", "FieldTable", "Row", "Status"]
