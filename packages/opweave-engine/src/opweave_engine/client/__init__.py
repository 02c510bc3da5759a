"""Engines for asyncio, and the interface that a server uses."""
