"""Run implementations of ops for another process: ``python -P -m opweave.worker``.

The program is a server. It imports torch and opweave, and forks a process for each request of the
program that started it, which has its standard input. ``opweave verify`` and ``opweave replay``
run implementations in such processes: the command line, the parent, the environment and the
modules of both are the same, so that an implementation cannot detect that it is verified.

Arguments are in memory that another process has filled, between two pages that cannot be accessed.
Results return as bytes and JSON: nothing that an implementation sends runs code in the receiver.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import pickle
import signal
import socket
import tempfile
import time
import weakref
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

import opweave.ir.ops  # noqa: F401
from opweave.config.child_process import end_with_parent
from opweave.ir.calls import Calls, group_for, raw, tensor_in
from opweave.ir.registry import current_registry

# Shared memory.


PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def shared_file() -> int:
    """Return the descriptor of a new file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("opweave")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pages(size: int) -> int:
    """Return the size of the pages that hold *size* bytes."""
    return -(-size // PAGE) * PAGE


def _guarded(file: int, start: int, size: int, at_end: bool, access: int) -> UntypedStorage:
    """Map a part of *file* between two pages that cannot be accessed.

    Args:
        file: the descriptor.
        start: the position of its first page.
        size: the number of bytes.
        at_end: the memory ends at a page, instead of beginning at one.
        access: whether it can be read only, or written too, as a flag of mmap.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    length = pages(size)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = _libc.mmap(None, length + 2 * PAGE, 0, private, -1, 0)
    inner = _libc.mmap(region + PAGE, length, access, mmap.MAP_SHARED | _MAP_FIXED, file, start)
    if _FAILED in (region, inner):
        raise OSError(ctypes.get_errno(), "mmap")
    buffer = (ctypes.c_char * size).from_address(inner + (length - size if at_end else 0))
    # torch keeps the buffer for as long as the storage.
    weakref.finalize(buffer, _libc.munmap, region, length + 2 * PAGE).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def storage_bytes(storage: UntypedStorage) -> memoryview:
    """Return the bytes of a storage, or of a copy if it is not in the memory of the CPU."""
    host: Any = storage  # torch declares no types for its methods
    data: Any = torch.empty(0, dtype=torch.uint8).set_(host.cpu()).numpy()
    return memoryview(data)


def write(file: int, data: memoryview, position: int) -> None:
    """Write all of *data*."""
    while len(data):
        count = os.pwrite(file, data, position)
        data, position = data[count:], position + count


def read(file: int, data: memoryview, position: int) -> None:
    """Fill *data*; raises EOFError if the file is shorter."""
    while len(data):
        count = os.preadv(file, [data], position)
        if not count:
            raise EOFError
        data, position = data[count:], position + count


# Requests: pickled arguments, whose tensors are in shared memory.


class CallRequest:
    """Arguments of a call, and the shared memory of their tensors."""

    def __init__(self, *values: Any, read_only: bool = False) -> None:
        self._storages: dict[int, tuple[UntypedStorage, str]] = {}
        self._places: list[tuple[UntypedStorage, int]] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = self._reference  # type: ignore[method-assign]
        pickler.dump(values)
        self.pickled = file.getvalue()
        self.file = shared_file()
        weakref.finalize(self, os.close, self.file)
        position, layout = 0, []
        # Both placements occur; the choice depends on the shapes only, as the inputs do.
        parity = zlib.crc32(self.pickled) & 1
        for storage, device in self._storages.values():
            size = storage.nbytes()
            at_end = size % 64 == 0 or bool(parity)
            self._places.append((storage, position + (pages(size) - size if at_end else 0)))
            written = not read_only or device != "cpu"  # others are copied back
            access = mmap.PROT_READ | mmap.PROT_WRITE if written else mmap.PROT_READ
            layout.append((position, size, at_end, access, device))
            position += pages(size)
        os.ftruncate(self.file, position)
        self.layout = pickle.dumps(layout)
        self.write()

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        storage = value.untyped_storage()
        self._storages.setdefault(storage.data_ptr(), (storage, value.device.type))
        place = list(self._storages).index(storage.data_ptr())
        return place, value.dtype, value.storage_offset(), tuple(value.shape), value.stride()

    @property
    def storages(self) -> list[UntypedStorage]:
        """The storages of the tensors."""
        return [storage for storage, _ in self._places]

    def write(self) -> None:
        """Write the numbers of the tensors to the shared memory."""
        for storage, position in self._places:
            write(self.file, storage_bytes(storage), position)

    def read(self) -> None:
        """Read the numbers of the tensors from the shared memory, which a call may have changed."""
        for storage, position in self._places:
            host = bytearray(storage.nbytes())
            read(self.file, memoryview(host), position)
            if host:
                raw(storage).copy_(torch.frombuffer(host, dtype=torch.uint8))


class Channel:
    """The end of a connection at which requests arrive, in the process that executes them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._results = recv_handle(connection)
        # By request: pairs of shared memory and the storage on the device.
        self._storages: list[tuple[UntypedStorage, UntypedStorage]] = []

    def receive(self) -> Any:
        """Return the values of the next request."""
        self._storages = []
        layout = pickle.loads(self._connection.recv_bytes())
        file = recv_handle(self._connection)
        for *geometry, device in layout:
            shared = _guarded(file, *geometry)
            moved = shared if device == "cpu" else shared.to(device=torch.device(device))
            self._storages.append((shared, moved))
        os.close(file)
        unpickler = pickle.Unpickler(io.BytesIO(self._connection.recv_bytes()))
        unpickler.persistent_load = self._tensor  # type: ignore[method-assign]
        return unpickler.load()

    def _tensor(self, reference: Any) -> Tensor:
        place, dtype, *geometry = reference
        return tensor_in(self._storages[place][1], dtype, *geometry)

    def send(self, result: Any) -> None:
        """Send the result of the last request."""
        for shared, moved in self._storages:
            if moved is not shared:
                shared.copy_(moved)
        # Tensors of one storage stay so, and those in the memory of an argument.
        places = {m.data_ptr(): i for i, (_, m) in enumerate(self._storages) if m.nbytes()}
        storages: dict[int, UntypedStorage] = {}
        described = _described(result, places, storages)
        position, sizes = 0, []
        for storage in storages.values():
            write(self._results, storage_bytes(storage), position)
            sizes.append((position, storage.nbytes(), storage.device.type))
            position += storage.nbytes()
        self._connection.send_bytes(json.dumps({"result": described, "sizes": sizes}).encode())

    def raised(self, error: BaseException) -> None:
        """Send an exception."""
        names = type(error).__name__, str(error)
        self._connection.send_bytes(json.dumps({"raised": names}).encode())


def _described(value: Any, places: Mapping[int, int], storages: dict[int, UntypedStorage]) -> Any:
    """Return *value* for JSON; *storages* receives those that are not at *places*."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address not in places:
            address = address or -1 - len(storages)  # empty ones are not the same
            storages.setdefault(address, storage)
            place = -1 - list(storages).index(address)
        else:
            place = places[address]
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [place, dtype, value.storage_offset(), value.shape, value.stride()]}
    if isinstance(value, (tuple, list, dict)):
        items = value.values() if isinstance(value, dict) else value
        parts = [_described(item, places, storages) for item in items]
        keys = list(value) if isinstance(value, dict) else None
        return {"items": parts, "keys": keys, "tuple": isinstance(value, tuple)}
    plain = value is None or type(value) in (bool, int, str)
    return value if plain else {"other": type(value).__name__}


# Replies, in the process that sent the request.


class Raised(Exception):  # noqa: N818
    """An exception of an implementation in another process; subclasses have its name."""


def decoded(reply: bytes, request: CallRequest, results: int) -> Any:
    """Return the result in a reply, or raise the exception that it describes.

    Args:
        reply: the reply.
        request: the request that it answers.
        results: the file with the memory of the results.

    Raises:
        Raised: the implementation raised.
        ValueError: the reply is not valid.
    """
    data = json.loads(reply)
    if "raised" in data:
        name, text = map(str, data["raised"])
        raise type(name, (Raised,), {})(text)
    storages = []
    for position, size, device in data["sizes"]:
        if position + size > os.fstat(results).st_size:
            raise ValueError(f"a result of {size} bytes is incomplete")
        buffer = bytearray(size)
        read(results, memoryview(buffer), position)
        host = torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0)
        storages.append(host.to(device).untyped_storage())
    return _decoded(data["result"], request.storages, storages)


def _decoded(value: Any, given: list[UntypedStorage], new: list[UntypedStorage]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        place, name, *geometry = value["tensor"]
        storage = given[place] if place >= 0 else new[-1 - place]
        return tensor_in(storage, getattr(torch, name), *geometry)
    if "other" in value:
        return type(str(value["other"]), (), {})()
    items = [_decoded(item, given, new) for item in value["items"]]
    if value["keys"] is not None:
        return dict(zip(value["keys"], items, strict=True))
    return tuple(items) if value["tuple"] else items


# The heap of the processes: glibc checks it, and fills new memory with large numbers.
#
# A write past the memory of a result ends the process, and elements that are not written are wrong.
# Since glibc 2.34, the checks are in a separate library that must be loaded first; see
# ``mallopt(3)``, ``M_CHECK_ACTION`` and ``M_PERTURB``.


_LIBRARY = "libc_malloc_debug.so.0"
_PRELOAD, _TUNABLES = "LD_PRELOAD", "GLIBC_TUNABLES"
_SETTINGS = "glibc.malloc.check=3:glibc.malloc.perturb=128"  # bytes of 0x7f


def checking_environment() -> dict[str, str]:
    """Return the environment variables that enable the checks in a new process.

    Empty if the library is missing, or if an allocator or a sanitizer is already preloaded.
    """
    if os.environ.get(_PRELOAD) or os.environ.get(_TUNABLES):
        return {}
    library = _library()
    return {} if library is None else {_PRELOAD: library, _TUNABLES: _SETTINGS}


def _leave_to_this_process() -> None:
    """Disable the checks for processes that this one starts, such as compilers."""
    if os.environ.get(_PRELOAD, "").endswith(_LIBRARY):
        del os.environ[_PRELOAD], os.environ[_TUNABLES]


def _library() -> str | None:
    """Return the path of the library, which is in the folder of the C library."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    files = (Path(line.split(maxsplit=5)[-1]) for line in mapped.splitlines())
    path = next((file.with_name(_LIBRARY) for file in files if file.name == "libc.so.6"), None)
    return str(path) if path and path.exists() else None


# The server.


def main() -> None:
    """Import a module, fork a process, or end the process that a request names."""
    connection = Connection(os.dup(0))
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # is the standard input now
    if os.fork():
        os._exit(0)  # so that the server is not a descendant of the program that uses it
    _leave_to_this_process()
    with suppress(EOFError, ConnectionError):  # the program was ended, such as by SIGTERM
        while True:
            request = connection.recv()
            if isinstance(request, str):
                importlib.import_module(request)
            elif isinstance(request, int):
                connection.send(_exit_code(request))
            else:
                ours, theirs = socket.socketpair()
                gc.freeze()  # what the children need not look through
                if not (process := os.fork()):
                    break
                connection.send(process)
                send_handle(connection, ours.fileno(), None)
                ours.close()
                theirs.close()
        connection.close()
        ours.close()
        end_with_parent()
        module, function = request
        getattr(importlib.import_module(module), function)(Connection(theirs.detach()))


def _exit_code(process: int) -> int:
    """Return the exit code of a process that has ended, or closed its connection, or is killed."""
    for _ in range(100):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def serve(connection: Connection) -> None:
    """Call the implementation that the first request names, until the connection is closed."""
    channel = Channel(connection)
    modules, op, provider, device = channel.receive()
    calls: Calls | None = None
    with ExitStack() as stack:
        while True:
            try:
                method, args, kwargs = channel.receive()
            except (EOFError, OSError):
                return
            try:
                if calls is None:
                    for module in modules:
                        importlib.import_module(module)
                    calls = Calls(current_registry().op(op), provider)
                    stack.enter_context(group_for(calls.op, device))
                result = getattr(calls, method)(*args, **kwargs)
            except (Exception, SystemExit) as error:
                channel.raised(error)
            else:
                channel.send(result)
                del result
            del args, kwargs


if __name__ == "__main__":
    main()
