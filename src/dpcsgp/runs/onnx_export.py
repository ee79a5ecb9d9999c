"""A trained model as an ONNX file, for programs without torch: `pip install "dpcsgp[onnx]"`.

Legend: J examples.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.tasks.trees import Packing, UnpackInput

# positional and keyword arguments of a module's forward
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def example_arguments(module: nn.Module, inputs: Packing) -> Arguments:
    """Return the arguments of `forward` for two made-up examples: zeros of the data's form."""
    rows = torch.zeros(2, *inputs.shape, dtype=inputs.dtype)
    if inputs.skeleton is None:
        return (rows,), {}
    return UnpackInput(inputs, module)(module, (rows,), {})


def write_onnx(module: nn.Module, arguments: Arguments, path: Path) -> Path:
    """Write a module as ONNX; the number of examples in a call stays open where the model allows.

    Args:
        module: in eval() mode.
        arguments: of `forward`, for two examples.
        path: the file.

    Raises:
        ConfigError: ONNX is not installed, or the file cannot be written.
        ModelError: torch cannot express the model.
    """
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "to_onnx: the packages onnx and onnxscript are not installed; "
            'pip install "dpcsgp[onnx]"'
        ) from None
    args, kwargs = arguments
    # The first axis counts examples; what else it may be is for torch to find out.
    shapes = tree_map(_open_axis, (args, kwargs))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter's own changes
            program = torch.onnx.export(
                module, args, kwargs=kwargs, dynamo=True, dynamic_shapes=_spread(*shapes),
                verbose=False,
            )  # fmt: skip
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"to_onnx: torch cannot write this model as ONNX: {reason}") from error
    try:
        assert program is not None
        program.save(str(path))
    except OSError as error:
        raise ConfigError(f"to_onnx: {path} cannot be written: {error.strerror}") from None
    return path


def _open_axis(value: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None


def _spread(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return shapes as torch wants them: by name where there are names."""
    return kwargs if kwargs and not args else args
