"""The program of a rank that an engine starts.

The engine runs ``python -m opweave_engine.parallel.spawned_rank``.
Its arguments are the number of the socket to the engine, and the port of the store.
"""

import sys
from functools import partial
from multiprocessing.connection import Connection

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from opweave_engine.parallel.executor import HOST
from opweave_engine.parallel.rank import follow

if __name__ == "__main__":
    descriptor, port = map(int, sys.argv[1:])
    sys.exit(follow(Connection(descriptor), partial(TCPStore, HOST, port, is_master=False)))
