"""Float32 as it is written: every operation rounded once, whatever the caller has set.

The bound on an example's influence counts roundings (`privacy.passes`). Libraries offer to round
products more coarsely for speed, by settings of torch and by variables of the environment; the
settings are undone while gradients are computed, and products are tried before the first release.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping import products

# Not a number of bfloat16 or TF32, whose fractions have 8 and 11 digits; float32 has 24.
_FINE: Final = 1 + 2.0**-20
_DENORMAL: Final = 2.0**-140
_OF_A_THREAD: Final = 2**16  # numbers of which torch gives every thread some
_WIDTH: Final = 256  # so large that libraries take their kernels for large products


@contextmanager
def fixed_arithmetic(device: torch.device, threads: int) -> Iterator[None]:
    """Keep float32, its smallest numbers and the number of threads, whatever the caller has set.

    Half precision, TF32 or flushed denormals would break the bound; another number of threads is
    not what was checked.
    """
    kind = device.type if device.type in ("cpu", "cuda") else "cpu"
    flushed, before = _flush_denormals(1), torch.get_num_threads()
    with ExitStack() as undo:
        undo.enter_context(torch.autocast(kind, enabled=False))
        undo.enter_context(_FULL_PRECISION)
        if flushed:
            undo.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
        if before != threads:
            undo.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads)
        yield


def _flush_denormals(count: int) -> bool:
    """Tell whether the smallest numbers become zero; so many of them go to several threads."""
    tiny = torch.full((count,), _DENORMAL, dtype=torch.float32, device="cpu")
    return bool((tiny * 1.0 == 0.0).any())


@final
class _FullPrecision:
    """Lets no product be rounded more coarsely than to float32: not on CPUs, not on GPUs.

    The settings are those of the process: the first of several threads changes them, the last one
    puts them back.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._undo = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._undo = _settings_changed()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo.close()


_FULL_PRECISION: Final = _FullPrecision()


def _settings_changed() -> ExitStack:
    """Change torch's settings; return what puts them back.

    Torch has two generations of them, and refuses to tell the older ones where only the newer ones
    were used. So the older ones are changed where they can be read: what a model reads inside, as
    `cudnn.flags` does, must go on working. The newer ones are changed where that is not enough.
    """
    cpu, gpu, library = (getattr(torch.backends, name) for name in ("mkldnn", "cuda", "cudnn"))
    places = [(cpu, ("matmul", "conv", "rnn")), (gpu, ("matmul",)), (library, ("conv", "rnn"))]
    kinds: list[Any] = [getattr(place, kind, None) for place, names in places for kind in names]
    settings = [kind for kind in kinds if hasattr(kind, "fp32_precision")]  # since torch 2.9
    undo = ExitStack()
    for setting in settings:  # put back last: the older ones change the newer ones
        undo.callback(setattr, setting, "fp32_precision", _own_value(setting))

    def change(place: Any, name: str, value: object) -> None:
        with suppress(RuntimeError):
            before = getattr(place, name)
            if before != value:
                undo.callback(setattr, place, name, before)
                setattr(place, name, value)

    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
        if matmul != "highest":
            undo.callback(torch.set_float32_matmul_precision, matmul)
            torch.set_float32_matmul_precision("highest")
    change(library, "enabled", True)
    change(library, "benchmark", False)  # which times kernels and takes another one the next time
    change(library, "allow_tf32", False)
    for setting in settings:
        if setting.fp32_precision not in ("ieee", "none"):
            setting.fp32_precision = "ieee"
    return undo


def _own_value(setting: Any) -> str:
    """Return what was set here: "none" where a precision follows from that of all kinds."""
    value = setting.fp32_precision
    setting.fp32_precision = "none"
    if setting.fp32_precision == value:
        return "none"
    setting.fp32_precision = value
    return value


def _convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the product as a convolution with kernels of one point."""
    images = rows.t().reshape(1, _WIDTH, 16, -1)
    return F.conv2d(images, weight[:, :, None, None]).view(len(weight), -1).t()


Product = Callable[[Tensor, Tensor], Tensor]  # of rows (R, I) and a weight (O, I)
PRODUCTS: Final[dict[str, Product]] = {
    "matrices": lambda rows, weight: rows @ weight.t(),
    "batches of matrices": lambda rows, weight: torch.bmm(rows[None], weight.t()[None])[0],
    "a vector and a matrix": lambda rows, weight: (rows[0] @ weight.t()).expand(_WIDTH, -1),
    "linear layers": products.linear,
    "convolutions": _convolved,
}


def check_products(device: torch.device, ways: Mapping[str, Product] = PRODUCTS) -> None:
    """Try every kind of product with numbers that coarser formats round, on all threads.

    Raises:
        ModelError: if one of them is not float32: something outside of torch decides that. Or if
            threads of torch flush the smallest numbers: they keep what they were born with.
    """
    rows = torch.full((_WIDTH, _WIDTH), _FINE, dtype=torch.float32, device=device)
    weight = torch.eye(_WIDTH, dtype=torch.float32, device=device)
    threads = torch.get_num_threads()
    with fixed_arithmetic(device, threads), torch.no_grad():
        coarse = [name for name, way in ways.items() if not torch.equal(way(rows, weight), rows)]
        flushed = _flush_denormals(threads * _OF_A_THREAD)
    if coarse:
        raise ModelError(
            f"products of {coarse[0]} are rounded more coarsely than float32 on this machine; the "
            "bound on an example's influence counts roundings. Unset ONEDNN_DEFAULT_FPMATH_MODE "
            "and DNNL_DEFAULT_FPMATH_MODE in the environment"
        )
    if flushed:
        raise ModelError(
            "torch.set_flush_denormal(True) was called before torch made its threads, which flush "
            "the smallest numbers ever since; the bound on an example's influence counts "
            "roundings. Start a new process without that call"
        )
