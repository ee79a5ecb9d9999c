"""Read what objects hold, down to the last list, so that two states can be compared.

Contents are flat lists of tokens. No code of the object runs: containers are read through the
built-in types, attributes through `vars` and slots. What deep copies take along (`own`) is told
from what all copies have in common (`shared`): variables that functions close over, their
defaults, the globals they name, attributes of classes.

Legend: token: a whole number as it is, anything else as a string or a digest.
"""

from __future__ import annotations

import dis
import hashlib
import random
import struct
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

Token = int | str | bytes
Tokens = tuple[Token, ...]

_MOST_TOKENS: Final = 100_000  # per attribute: a large vocabulary still fits
_MOST_BYTES: Final = 2**28  # of one tensor; beyond that ends and a sample are read
_SAMPLE: Final = 2**22
_LIBRARIES: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy", "scipy", "dpcsgp"}) - {
    "__main__"
}
_STREAMS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_BARE: Final = (
    str, bytes, bytearray, float, complex, bool, type(None), type(Ellipsis), torch.dtype,
    torch.device,
)  # fmt: skip


def own(root: Any) -> dict[tuple[str, str], Tokens]:
    """Return the contents of an object by (layer, attribute): all that a deep copy takes along."""
    if isinstance(root, types.MethodType):
        return own(root.__self__)
    if isinstance(root, nn.Module):
        # what every module has, apart from hooks: a hook is code that could remember
        usual = vars(nn.Module()).keys() - {name for name in vars(nn.Module()) if "hooks" in name}
        parts = {
            (name, key): value
            for name, layer in root.named_modules()
            for key, value in vars(layer).items()
            if key not in usual
        }
        parts |= {("", f"parameter {name}"): value for name, value in root.named_parameters()}
        parts |= {("", f"buffer {name}"): value for name, value in root.named_buffers()}
    elif hasattr(root, "__dict__") and not isinstance(root, types.FunctionType | partial | type):
        parts = {("", key): value for key, value in vars(root).items()} | {("", ""): root}
    else:
        parts = {("", ""): root}
    hashes: dict[int, bytes] = {}
    return {place: _Reader(hashes).read(value) for place, value in parts.items()}


def shared(root: Any) -> dict[str, Tokens]:
    """Return by description what copies of an object have in common and its code could write to."""
    hashes: dict[int, bytes] = {}
    first = _Reader(hashes, streams=False)
    first.visit_module(root) if isinstance(root, nn.Module) else first.visit(root)
    # Breadth first through functions and classes: the values they keep name further code.
    waiting, done = deque(first.code), set[int]()
    found: dict[str, Tokens] = {}
    while waiting and len(done) < _MOST_TOKENS // 100:
        code = waiting.popleft()
        if id(code) in done:
            continue
        done.add(id(code))
        for description, value in _variables(code):
            reader = _Reader(hashes, streams=False)
            # two functions may have the same name: their place in the walk tells them apart
            found[f"{description}#{len(found)}"] = reader.read(value)
            waiting.extend(reader.code)
    return found


def _variables(code: types.FunctionType | type) -> Iterator[tuple[str, Any]]:
    """Yield description and value of everything a function or class keeps or names."""
    if isinstance(code, type):
        for key, value in vars(code).items():
            if isinstance(value, types.FunctionType) or not key.startswith("__"):
                yield f"class attribute '{code.__name__}.{key}'", value
        yield "", code.__bases__
        return
    name = code.__qualname__
    yield "", getattr(code, "__wrapped__", None)
    for variable, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        yield f"variable '{variable}' of {name}", _content(cell)
    yield f"default arguments of {name}", (code.__defaults__, code.__kwdefaults__)
    yield from (
        (f"attribute '{key}' of function {name}", value) for key, value in vars(code).items()
    )
    for variable in sorted(_global_names(code.__code__) & code.__globals__.keys()):
        yield f"global variable '{variable}'", code.__globals__[variable]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _global_names(code: types.CodeType) -> set[str]:
    """Return the globals that a function or one defined inside it reads or writes."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname.endswith(("_GLOBAL", "_NAME"))
    }
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return names.union(*map(_global_names, inner))


def _is_users(code: Any) -> bool:
    return str(getattr(code, "__module__", None)).partition(".")[0] not in _LIBRARIES


class _Reader:
    """Turn one value into tokens; keep the functions and classes of the user met on the way."""

    def __init__(self, hashes: dict[int, bytes], streams: bool = True) -> None:
        self.tokens: list[Token] = []
        self.code: list[types.FunctionType | type] = []
        self._hashes = hashes
        self._streams = streams
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id belongs to one object only as long as that lives

    def read(self, value: Any) -> Tokens:
        self.visit(value)
        return tuple(self.tokens)

    def visit_module(self, module: nn.Module) -> None:
        """Meet the code of all layers, of their hooks and of what they hold."""
        for layer in module.modules():
            self._meet(type(layer))
            for key, value in vars(layer).items():
                if key not in ("_parameters", "_buffers", "_modules"):
                    self.visit(value)

    def visit(self, value: Any) -> None:
        if len(self.tokens) >= _MOST_TOKENS:
            return
        if isinstance(value, int) and not isinstance(value, bool):
            self.tokens.append(int(value))
        elif isinstance(value, _BARE):
            # floats by their bits: NaN equals itself, and zero is not minus zero
            self.tokens.append(struct.pack("d", value) if isinstance(value, float) else repr(value))
        elif isinstance(value, types.ModuleType):
            self.tokens.append(value.__name__)
        elif id(value) in self._seen:  # also ends cycles
            self.tokens.append(f"again {self._seen[id(value)]}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self.tokens.append(type(value).__qualname__)
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        kind = type(value)
        reader = next((read for kinds, read in _READERS if isinstance(value, kinds)), None)
        self._meet(kind)
        if reader is not None:
            reader(self, value)
        elif isinstance(value, _STREAMS):
            self._visit_stream(value)
        elif not _is_users(kind) and not isinstance(value, nn.Module):
            self._visit_foreign(value)
            return
        if _is_users(kind) or isinstance(value, Tensor | nn.Module):
            self._visit_attributes(value)

    def _visit_attributes(self, value: Any) -> None:
        """Read attributes and slots without asking the object."""
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._visit_mapping(attributes)
        for kind in type(value).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType) and _is_users(kind):
                    self.tokens.append(name)
                    try:
                        self.visit(member.__get__(value))
                    except AttributeError:  # a slot without value
                        self.tokens.append("empty")

    def _visit_foreign(self, value: Any) -> None:
        """Read an object of a library (byte buffers, arrays, iterators) as it would be copied."""
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # locks, files, compiled code: nothing to read
            return
        self.visit(parts if isinstance(parts, str) else [_listed(part) for part in parts])

    def _visit_stream(self, value: Any) -> None:
        """Read the state of a random generator."""
        # Where copies share it, it moves whatever the data are.
        if self._streams:
            state = value.get_state() if isinstance(value, torch.Generator) else value.__reduce__()
            self.visit(state)

    def _visit_mapping(self, value: dict[Any, Any]) -> None:
        self.tokens.append(len(value))
        for key, part in list(dict.items(value)):
            self.visit(key)
            self.visit(part)

    def _visit_proxy(self, value: types.MappingProxyType[Any, Any]) -> None:
        self._visit_mapping(dict(value))

    def _visit_sequence(self, value: Any) -> None:
        # by the built-in type's own methods: a subclass might answer something else
        base: Any = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        self.tokens.append(base.__len__(value))
        for part in list(base.__iter__(value)):
            self.visit(part)

    def _visit_set(self, value: Any) -> None:
        parts = [_Reader(self._hashes, self._streams) for _ in range(len(value))]
        self.tokens.append(len(value))
        self.tokens.extend(
            sorted(repr(reader.read(part)) for reader, part in zip(parts, value, strict=True))
        )

    def _visit_tensor(self, value: Tensor) -> None:
        self.tokens.append(f"{value.dtype} {tuple(value.shape)}")
        if id(value) not in self._hashes:
            self._hashes[id(value)] = _tensor_hash(value)
        self.tokens.append(self._hashes[id(value)])

    def _visit_array(self, value: np.ndarray) -> None:
        self.tokens.append(f"{value.dtype} {value.shape}")
        if value.dtype.hasobject:
            self.visit(value.tolist())
        else:
            self.tokens.append(_bytes_hash(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))

    def _visit_function(self, value: types.FunctionType) -> None:
        self.tokens.append(value.__qualname__)
        self._meet(value)

    def _visit_class(self, value: type) -> None:
        self.tokens.append(value.__qualname__)
        self._meet(value)

    def _visit_method(self, value: types.MethodType) -> None:
        self.visit(value.__func__)
        self.visit(value.__self__)

    def _visit_builtin(self, value: types.BuiltinFunctionType) -> None:
        self.tokens.append(value.__name__)
        self.visit(value.__self__)

    def _visit_wrapped(self, value: Any) -> None:
        names = ("__func__", "fget", "func")  # static and class methods, properties, cached ones
        self.visit(next((getattr(value, name) for name in names if hasattr(value, name)), None))

    def _visit_partial(self, value: partial[Any]) -> None:
        self.visit((value.func, value.args, value.keywords))

    def _visit_reference(self, value: weakref.ref[Any]) -> None:
        self.visit(value())

    def _visit_generator(self, value: types.GeneratorType[Any, Any, Any]) -> None:
        self.visit(dict(value.gi_frame.f_locals) if value.gi_frame else None)

    def _meet(self, code: types.FunctionType | type) -> None:
        if _is_users(code):
            self.code.append(code)


_READERS: Final[tuple[tuple[Any, Callable[[_Reader, Any], None]], ...]] = (
    (Tensor, _Reader._visit_tensor),
    (np.ndarray, _Reader._visit_array),
    (dict, _Reader._visit_mapping),
    (types.MappingProxyType, _Reader._visit_proxy),
    ((list, tuple, deque), _Reader._visit_sequence),
    ((set, frozenset), _Reader._visit_set),
    (types.FunctionType, _Reader._visit_function),
    (type, _Reader._visit_class),
    (types.MethodType, _Reader._visit_method),
    (types.BuiltinFunctionType, _Reader._visit_builtin),
    ((staticmethod, classmethod, property), _Reader._visit_wrapped),
    (partial, _Reader._visit_partial),
    (weakref.ref, _Reader._visit_reference),
    (types.GeneratorType, _Reader._visit_generator),
)


def _listed(part: Any) -> Any:
    """Return the items that a copy would be filled with; reading them uses up nothing."""
    return list(part) if isinstance(part, Iterator) else part


def _tensor_hash(value: Tensor) -> bytes:
    try:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):  # sparse, quantised or without storage
        return repr(value).encode()
    return _bytes_hash(flat.numpy())


def _bytes_hash(content: np.ndarray) -> bytes:
    """Return a digest of all bytes, or of the ends and a sample where there are too many."""
    if len(content) > _MOST_BYTES:
        stride = len(content) // _SAMPLE
        content = np.concatenate([content[:_SAMPLE], content[-_SAMPLE:], content[::stride]])
    return hashlib.blake2b(content.data, digest_size=16).digest()
