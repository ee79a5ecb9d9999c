"""A user's own examples: a map-style dataset of (input, target) pairs or two tensors, stacked once.

Errors name the node and the example; they are raised on the machine that holds the data, before it
connects to any other.

Legend: J examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpcsgp.errors import DataError

NodeData = (
    Dataset[Any] | Sequence[Any] | tuple[Tensor, Tensor] | tuple[np.ndarray, np.ndarray] | None
)


def count_examples(data: NodeData, where: str) -> int:
    """Return the number of examples; None has none. `where` names the data in errors."""
    if data is None:
        return 0
    pair = _pair(data)
    try:
        return len(pair[0]) if pair else len(data)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"{where}: {type(data).__name__} has no length; give a map-style dataset (with "
            "__len__ and __getitem__) or a pair of tensors (inputs, targets)"
        ) from None


def stack_examples(data: NodeData, where: str) -> tuple[Tensor, Tensor]:
    """Return inputs (J, ...) and targets (J, ...) of one node.

    Floating-point numbers become float32, whole ones int64; inputs of bytes stay bytes.
    """
    pair = _pair(data)
    if pair is None:
        items = [_item(data, index, where) for index in range(count_examples(data, where))]
        pair = (
            _stacked([item[0] for item in items], "input", where),
            _stacked([item[1] for item in items], "target", where),
        )
    inputs, targets = (torch.as_tensor(part) for part in pair)
    if len(inputs) != len(targets):
        raise DataError(
            f"{where}: {len(inputs)} inputs but {len(targets)} targets; give one target per input"
        )
    return _plain(inputs, keep_bytes=True), _plain(targets)


def check_labels(labels: Tensor, num_outputs: int, where: str) -> None:
    """Refuse class labels that the model has no output for."""
    if labels.is_floating_point() or not len(labels):
        return  # probabilities of classes
    wrong = ((labels < 0) | (labels >= num_outputs)).reshape(len(labels), -1).any(dim=1)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise DataError(
            f"{where}, example {index}: label {labels[index].tolist()}, but the model has "
            f"{num_outputs} outputs; labels run from 0 to {num_outputs - 1}"
        )


def _pair(data: Any) -> tuple[Any, Any] | None:
    """Return (inputs, targets) if the data are whole tensors or arrays already."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if (
        isinstance(data, tuple)
        and len(data) == 2
        and all(isinstance(part, Tensor | np.ndarray) for part in data)
    ):
        return data[0], data[1]
    return None


def _item(data: Any, index: int, where: str) -> tuple[Tensor, Tensor]:
    try:
        item = data[index]
    except Exception as error:
        raise DataError(
            f"{where}, example {index}: cannot be read ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"{where}, example {index}: expected a pair (input, target), got {type(item).__name__}"
        )
    where = f"{where}, example {index}"
    return _tensor(item[0], f"{where}: input"), _tensor(item[1], f"{where}: target")


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic | int | float):
        return torch.as_tensor(value)
    raise DataError(
        f"{where} is of type {type(value).__name__}; expected a tensor, an array or a number "
        "(for images, for example, add torchvision's ToTensor() as the dataset's transform)"
    )


def _stacked(parts: list[Tensor], name: str, where: str) -> Tensor:
    for index, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise DataError(
                f"{where}, example {index}: {name} has the shape {tuple(part.shape)}, example 0 "
                f"has {tuple(parts[0].shape)}; all examples need the same shape (crop, resize or "
                "pad them)"
            )
    return torch.stack(parts) if parts else torch.zeros(0)


def _plain(values: Tensor, keep_bytes: bool = False) -> Tensor:
    """Return detached values in the number formats that models are trained in."""
    values = values.detach()
    if values.is_floating_point():
        return values.to(torch.float32)
    return values if values.dtype == torch.uint8 and keep_bytes else values.to(torch.int64)
