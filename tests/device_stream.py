"""A device on the CPU: tensor operations are queued and run later, in order, on their own thread.

Inside ``Device.rules()`` the host runs ahead of the data as it does with CUDA. Views and fresh
memory exist at once; whatever reads or writes elements is queued, its result handed out at once
with the right shape and strides and filled when the queue comes to it. The metadata come from the
CPU kernel itself, run once per signature on dummies. Work below autograd is all there is to
intercept, so backward passes and fused optimizers need no care. What would make CUDA's host wait
raises. Not seen: ``torch.manual_seed`` inside the rules, pointers handed to foreign code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReadError(Exception):
    """The host asked for the value of a device tensor, which would stall a real device."""


class Stream:
    """A thread that runs closures in order. After the first error it only sets events."""

    def __init__(self, name: str) -> None:
        self.name, self.doing = name, "nothing"
        self.error: BaseException | None = None
        self._queue: SimpleQueue[tuple[str, Callable[[], object], bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def put(self, what: str, run: Callable[[], object], always: bool = False) -> None:
        self._queue.put((what, run, always))

    def record(self) -> threading.Event:
        """An event that is set when the stream has come to this point, or has failed."""
        event = threading.Event()
        self.put("an event", event.set, always=True)
        return event

    def drain(self) -> None:
        """Wait until everything queued has run.

        Raises:
            the first error of the stream.
        """
        self.record().wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def __str__(self) -> str:
        return f"{self.name}: at {self.doing}, {self._queue.qsize()} behind it"

    @torch.no_grad()
    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            self.doing, run, always = item
            if self.error is not None and not always:
                continue
            try:
                run()
            except BaseException as error:
                self.error = self.error or error
            # A closure keeps its tensors alive; drop it before waiting for the next one.
            del item, run
            self.doing = "nothing"


class BorrowedError(Exception):
    """An operation touched memory that something else is still at work on."""


@dataclass(frozen=True, eq=False)
class Borrowed:
    """Memory that operations may not write, or not even read, for a while."""

    tensor: Tensor
    readable: bool
    owner: str


class Device:
    """The compute stream of a rank, and the rules under which the host may use it."""

    def __init__(self) -> None:
        self.stream = Stream("compute stream")
        self.active = False
        self.reads_left: float = 0
        self.borrowed: list[Borrowed] = []

    @contextmanager
    def rules(self, host_reads: int = 0) -> Iterator[None]:
        """Queue all tensor operations in this block, which may read ``host_reads`` values."""
        assert not self.active, "the rules of a device do not nest"
        self.active, self.reads_left = True, host_reads
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            self.active = False
        self.stream.drain()

    @contextmanager
    def host_reads_allowed(self) -> Iterator[None]:
        """Let host reads in this block wait for the stream instead of raising."""
        before, self.reads_left = self.reads_left, float("inf")
        try:
            yield
        finally:
            self.reads_left = before

    def before_host_read(self, what: str) -> None:
        if self.reads_left < 1:
            raise HostReadError(
                f"{what} needs a value on the host, which would wait for all queued work. "
                "Keep it on the device, or read it where the step ends"
            )
        self.reads_left -= 1
        self.stream.drain()

    def refuse_borrowed(self, func: Any, given: Iterable[Tensor], written: list[Tensor]) -> None:
        """Raise if an operation touches what is lent out; strided views count as what they span."""
        for tensor in given:
            for loan in self.borrowed:
                writes = any(tensor is t for t in written)
                if (writes or not loan.readable) and overlap(tensor, loan.tensor):
                    how = "writes" if writes else "reads"
                    what = f"{func} {how} the buffer of {loan.owner}"
                    raise BorrowedError(f"{what} before its wait()")


# --- what the host may not do ------------------------------------------------------------------

_HOST_READS = {
    getattr(Tensor, name): f"Tensor.{name}"
    for name in ("tolist", "numpy", "cpu", "__array__", "__dlpack__", "__repr__", "pin_memory")
}
_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_rng = threading.Lock()


class _Functions(TorchFunctionMode):
    """Catches the host reads that reach no operator on a CPU tensor."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            self.device.before_host_read(_HOST_READS[func])
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports the compiler, 1.2 s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self.device.stream
        if stream.error is not None:
            raise stream.error
        kind = _kind(func, args)
        if self.device.borrowed and kind in ("read", "in place", "functional"):
            given, written = (args, *kwargs.values()), tuple(_written(func, args, kwargs).values())
            self.device.refuse_borrowed(func, _tensors(given), _tensors(written))
        match kind:
            case "read":
                self.device.before_host_read(str(func))
                return func(*args, **kwargs)
            case "now":
                return func(*args, **kwargs)
            case "memory":
                return _poisoned(func(*args, **kwargs))
            case "in place":
                return _queue_in_place(stream, func, args, kwargs)
            case _:
                return _queue_functional(stream, func, args, kwargs)


def _kind(func: Any, args: tuple[Any, ...]) -> str:
    name = func._schema.name.removeprefix("aten::")
    if name in _INDEXING:
        return "read" if _selects_by_mask(name, args) else _static_kind(func, indexing=True)
    kind = _static_kind(func)
    return "now" if kind == "functional" and not _tensors(args) and not _seeded(func) else kind


@functools.cache
def _static_kind(func: Any, indexing: bool = False) -> str:
    schema, tags = func._schema, set(func.tags)
    if tags & _READ_TAGS and not indexing:
        return "read"
    if schema.name.removeprefix("aten::") in _MEMORY:
        return "memory"
    aliases = [r.alias_info for r in schema.returns]
    if torch.Tag.inplace_view in tags or any(a is not None and not a.is_write for a in aliases):
        return "now"
    if schema.is_mutable:
        return "in place"
    return "functional" if any("Tensor" in str(r.type) for r in schema.returns) else "now"


def _selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """True if the number of elements hangs on a mask; filling a mask with one value does not."""
    mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return mask and not (name.removeprefix("_").startswith("index_put") and args[2].numel() == 1)


def _seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _poisoned(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


# --- queueing ----------------------------------------------------------------------------------


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in its lists and tuples changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(v, change) for v in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in the lists and tuples of ``value``."""
    if isinstance(value, list | tuple):
        return [found for v in value for found in _tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def _closure(func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """The call, on aliases that later changes of metadata or version counters do not touch."""
    args = _map(args, lambda t: t.data)
    kwargs = {name: _map(value, lambda t: t.data) for name, value in kwargs.items()}

    def run() -> Any:
        if not _seeded(func):
            return func(*args, **kwargs)
        with _rng:
            return func(*args, **kwargs)

    return run


def _written(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that an operator changes, by the name that its schema gives their memory."""
    schema = func._schema
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {
        name: given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
        for name in a.alias_info.before_set
    }


def _queue_in_place(stream: Stream, func: Any, args: Any, kwargs: Any) -> Any:
    schema = func._schema
    if any(r.alias_info is None for r in schema.returns) or schema.name == "aten::resize_":
        raise NotImplementedError(f"{func} cannot be queued")
    written = _written(func, args, kwargs)
    stream.put(str(func), _closure(func, args, kwargs))
    results = [written[next(iter(r.alias_info.before_set))] for r in schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


def _queue_functional(stream: Stream, func: Any, args: Any, kwargs: Any) -> Any:
    expected = _outputs(func, args, kwargs)
    if expected is _ALIAS:
        return func(*args, **kwargs)
    results = _map_likes(expected, _Like.make)
    call, promised = _closure(func, args, kwargs), _map(results, lambda t: t.data)

    def run() -> None:
        _deliver(func, promised, call())

    stream.put(str(func), run)
    return results


def _deliver(func: Any, promised: Any, result: Any) -> None:
    """Move what an operator returned to where its result was promised."""
    if isinstance(promised, list | tuple):
        for p, r in zip(promised, result, strict=True):
            _deliver(func, p, r)
    elif isinstance(promised, Tensor):
        if _Like(promised) != _Like(result):
            raise AssertionError(f"{func} returned {_Like(result)}, expected {_Like(promised)}")
        promised.untyped_storage().copy_(result.untyped_storage())


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if the ranges of memory from the first to the last element meet."""
    if not a.numel() or not b.numel():
        return False
    return (
        a.data_ptr() < b.data_ptr() + _span(b) * b.element_size()
        and b.data_ptr() < a.data_ptr() + _span(a) * a.element_size()
    )


def _span(t: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


# --- metadata ----------------------------------------------------------------------------------

_ALIAS = object()
_known: dict[object, Any] = {}


class _Like:
    """The metadata of a tensor and the size of its storage."""

    def __init__(self, t: Tensor) -> None:
        self.dtype, self.size, self.stride = t.dtype, tuple(t.shape), t.stride()
        self.offset, self.nbytes = t.storage_offset(), t.untyped_storage().nbytes()

    def make(self) -> Tensor:
        storage = torch.UntypedStorage(self.nbytes)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return str(vars(self))


def _map_likes(value: Any, change: Callable[[_Like], Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map_likes(v, change) for v in value)
    return change(value) if isinstance(value, _Like) else value


def _outputs(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operator will return, or ``_ALIAS`` if that shares memory with an argument."""
    key = (func, _signature(args), _signature(tuple(kwargs.items())))
    if key not in _known:
        with torch.no_grad():
            _known[key] = _run_on_dummies(func, args, kwargs)
    return _known[key]


def _signature(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, list | tuple):
        return tuple(_signature(v) for v in value)
    # The result's metadata do not hang on the value of a learning rate.
    return float if isinstance(value, float) else value


def _run_on_dummies(func: Any, args: Any, kwargs: Any) -> Any:
    storages = set()

    def dummy(t: Tensor) -> Tensor:
        # Zero is an index into anything, and a float of 1 is no error anywhere.
        fill = torch.ones if t.is_floating_point() or t.is_complex() else torch.zeros
        flat = fill(_span(t) if t.numel() else 0, dtype=t.dtype)
        storages.add(flat.untyped_storage().data_ptr())
        return flat.as_strided(t.shape, t.stride())

    dummies = _map(args, dummy)
    named = {name: _map(value, dummy) for name, value in kwargs.items()}
    with _rng:
        state = torch.get_rng_state() if _seeded(func) else None
        result = func(*dummies, **named)
        if state is not None:
            torch.set_rng_state(state)
    if any(t.numel() and t.untyped_storage().data_ptr() in storages for t in _tensors(result)):
        return _ALIAS
    return _map(result, _Like)
