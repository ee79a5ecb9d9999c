"""What a run left, for whoever called it from Python.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.privacy import ReleaseEvent, read_ledgers, releases_by_node
from dpcsgp.runs.onnx_export import Arguments, write_onnx
from dpcsgp.runs.user_settings import filled_module


@final
@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """What a run left.

    Models are post-processing of what was released: they may be shown to anybody.

    `summary` holds eps as verified from the ledger, bytes as sent, and the metrics; `history` one
    row per evaluation. `classes[k]` is the label that output k stands for, where labels were mapped
    (also in `classes.json`); None: targets were numbers.
    """

    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    nodes: tuple[int, ...]
    _module: nn.Module
    _models_ND: Tensor
    _average_D: Tensor | None  # None: this process cannot know it
    classes: tuple[Any, ...] | None = None
    _arguments: Arguments | None = None  # of the model's forward, for two made-up examples

    @cached_property
    def models(self) -> dict[int, nn.Module]:
        """Node -> its own de-biased model, of the nodes that this process hosts."""
        return {
            node: filled_module(self._module, self._models_ND[row])
            for row, node in enumerate(self.nodes)
        }

    @cached_property
    def model(self) -> nn.Module:
        """The average of all nodes' models."""
        if self._average_D is None:
            raise DataError(
                "the average model is known only where all nodes' models are, and these processes "
                f"share no disk; use result.models[node] with one of {sorted(self.models)}"
            )
        return filled_module(self._module, self._average_D)

    def state_dict(self, node: int | None = None) -> dict[str, Tensor]:
        """Return the parameters and buffers of the average model, or of one node's, by name."""
        return self._model_of(node).state_dict()

    def _model_of(self, node: int | None) -> nn.Module:
        if node is not None and node not in self.nodes:
            listed = ", ".join(map(str, self.nodes))
            raise DataError(f"node = {node}: this process has the models of nodes {listed}")
        return self.model if node is None else self.models[node]

    def to_onnx(
        self, path: Path | str, *, node: int | None = None, example: Any | None = None
    ) -> Path:
        """Write the average model, or one node's, as an ONNX file.

        Args:
            path: the file.
            node: whose model; None: the average of all nodes.
            example: a tensor with two inputs; None: made up in the form of the training data.
        """
        model = self._model_of(node)
        arguments = self._arguments if example is None else ((example,), {})
        if arguments is None:
            raise ConfigError("to_onnx: give example=..., a tensor with two inputs of the model")
        return write_onnx(model, arguments, Path(path))

    @property
    def epsilon(self) -> float:
        """The largest eps over the nodes, verified from the ledger."""
        return float(self.summary["epsilon"])

    @property
    def ledger(self) -> Path:
        """The folder of the ledgers, one file per node; `dpcsgp account FOLDER` prints them."""
        return self.folder / "ledger"

    def releases(self) -> dict[int, list[tuple[ReleaseEvent, int]]]:
        """Read and verify the ledgers: node -> what it released and how often."""
        return releases_by_node(read_ledgers(self.ledger))

    def __repr__(self) -> str:
        means = [
            f"{key.removesuffix('_node_mean')} {value:.4g}"
            for key, value in self.summary.items()
            if key.endswith("_node_mean")
        ]
        return f"Result({', '.join([*means, f'epsilon {self.epsilon:.4g}', str(self.folder)])})"
