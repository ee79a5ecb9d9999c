"""Float32 as it is written: every operation rounded once, whatever the caller has set.

The bound on an example's influence counts roundings (`privacy.passes`). Libraries offer to round
products more coarsely for speed, by settings of torch and by variables of the environment; the
settings are undone while gradients are computed, and products are tried before the first release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping import products

# Not a number of bfloat16 or TF32, whose fractions have 8 and 11 digits; float32 has 24.
_FINE: Final = 1 + 2.0**-20
_WIDTH: Final = 256  # so large that libraries take their kernels for large products


@contextmanager
def fixed_arithmetic(device: torch.device, threads: int) -> Iterator[None]:
    """Keep float32, its smallest numbers and the number of threads, whatever the caller has set.

    Half precision, TF32 or flushed denormals would break the bound; another number of threads is
    not what was checked.
    """
    kind = device.type if device.type in ("cpu", "cuda") else "cpu"
    flushed, before = float(torch.tensor(2.0**-140) * 1.0) == 0.0, torch.get_num_threads()
    with ExitStack() as undo:
        undo.enter_context(torch.autocast(kind, enabled=False))
        undo.enter_context(_full_precision())
        if flushed:
            undo.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
        if before != threads:
            undo.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads)
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
    """Let no product be rounded more coarsely than to float32: not on CPUs, not on GPUs."""
    with ExitStack() as undo:
        if not hasattr(torch.backends.mkldnn, "matmul"):  # before torch 2.9
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        for place, name, value in _settings():
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


@functools.cache
def _settings() -> list[tuple[Any, str, Any]]:
    """Return where torch keeps what decides how products are rounded, and what it has to be.

    `benchmark` times kernels and takes another one the next time.
    """
    cpu, gpu, library = (getattr(torch.backends, name) for name in ("mkldnn", "cuda", "cudnn"))
    found: list[tuple[Any, str, Any]] = [(library, "enabled", True), (library, "benchmark", False)]
    if not hasattr(cpu, "matmul"):
        return [*found, (library, "allow_tf32", False)]
    kinds = [cpu.matmul, cpu.conv, cpu.rnn, gpu.matmul, library.conv, library.rnn]
    return [*found, *((kind, "fp32_precision", "ieee") for kind in kinds)]


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
    """Try every kind of product with numbers that coarser formats round.

    Raises:
        ModelError: if one of them is not float32: something outside of torch decides that.
    """
    rows = torch.full((_WIDTH, _WIDTH), _FINE, device=device)
    weight = torch.eye(_WIDTH, device=device)
    with fixed_arithmetic(device, torch.get_num_threads()), torch.no_grad():
        coarse = [name for name, way in ways.items() if not torch.equal(way(rows, weight), rows)]
    if coarse:
        raise ModelError(
            f"products of {coarse[0]} are rounded more coarsely than float32 on this machine; the "
            "bound on an example's influence counts roundings. Unset ONEDNN_DEFAULT_FPMATH_MODE "
            "and DNNL_DEFAULT_FPMATH_MODE in the environment"
        )
