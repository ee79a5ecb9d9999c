"""A user's own task: the data of the hosted nodes, and the checks before any release.

The checks are of model, loss and data.

The model is probed on test data or on random inputs, never on private data; data errors name node
and example and are raised where the data are.

Legend: J examples.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ConfigError, DataError, DpcsgpError, ModelError
from dpcsgp.modes import evaluation_mode
from dpcsgp.privacy.model_probes import check_examples_independent, check_gradients_reach
from dpcsgp.runs.facts import Facts
from dpcsgp.tasks import LossPerExample, Supervised
from dpcsgp.tasks.node_data import NodeData, check_labels, count_examples, stack_examples
from dpcsgp.tasks.supervised import EVALUATION_BATCH, LOSSES, Metric


@final
@dataclass(frozen=True)
class UserData:
    """The examples of the hosted nodes, public test data, and what is measured on these."""

    parts: dict[int, tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor] | None
    loss: LossPerExample
    metrics: Mapping[str, Metric]
    facts: Facts

    @classmethod
    def collect(
        cls,
        node_data: Sequence[NodeData],
        hosted: Sequence[int],
        test_data: NodeData,
        loss: LossPerExample,
        metrics: Mapping[str, Metric],
        num_examples: Sequence[int] | None = None,
        test_examples: int = 0,
    ) -> UserData:
        """Read the data of the hosted nodes; of the others at most the lengths are looked at.

        `test_examples` keeps only so many of the test examples (0: all).
        """
        # Lengths first: they are cheap, and wrong ones are refused before anything is read.
        sizes = _sizes(node_data, hosted, num_examples)
        _warn_about_shared_data(node_data, test_data)
        held = {node: count_examples(node_data[node], f"node {node}") for node in hosted}
        parts = {
            node: stack_examples(node_data[node], f"node {node}") for node in hosted if held[node]
        }
        test = (
            stack_examples(test_data, "test_data")
            if count_examples(test_data, "test_data")
            else None
        )
        # All that was read must agree in shapes and number formats.
        known = {
            **{f"node {node}": part for node, part in parts.items()},
            **({"test_data": test} if test else {}),
        }
        if not known:
            raise ConfigError(
                f"nodes {', '.join(map(str, hosted))} of this process have no data: give "
                "test_data, so that it knows shapes"
            )
        _refuse_differences(known)
        if test and test_examples:
            test = test[0][:test_examples], test[1][:test_examples]
        inputs, _ = next(iter(known.values()))
        return cls(parts, test, loss, metrics, Facts(tuple(inputs.shape[1:]), 0, sizes))

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """Zeros of the shapes and formats of one example."""
        inputs, targets = next(iter(self.parts.values()), self.test) or (
            torch.zeros(1),
            torch.zeros(1),
        )
        return torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])

    def task(self, module: nn.Module, nodes: Sequence[int]) -> Supervised:
        """Return the task of these nodes for the run's module."""
        # A node without data has tensors of length 0 of the right shape.
        empty = tuple(part[None][:0] for part in self.example)
        parts = [self.parts.get(node, empty) for node in nodes]
        inputs, targets = (torch.cat([part[kind] for part in parts]) for kind in (0, 1))
        sizes = tuple(self.facts.num_examples[node] for node in nodes)
        held = tuple(len(part[0]) for part in parts)
        return Supervised(module, inputs, targets, sizes, self.test, self.loss, self.metrics, held)

    def check(self, module: nn.Module, batch_sizes: Sequence[int] = ()) -> None:
        """Refuse a model, loss or labels that do not fit together or cannot be trained privately.

        `batch_sizes` are the expected ones of the run: what happens only in batches of such a size
        is found too.
        """
        # Probes with public or random inputs: what mixes examples or remembers them is refused.
        inputs, targets = self.example
        sizes = sorted(set(batch_sizes), reverse=True)
        try:
            check_examples_independent(module, inputs, self.test[0] if self.test else None, sizes)
            check_gradients_reach(module, self.loss, (inputs, targets), self.test, sizes)
            if self.loss is LOSSES["cross_entropy"][0]:
                self._check_labels(module)
        # Refusals of ours say what to do; anything else means that model and data do not fit.
        except DpcsgpError:
            raise
        except Exception as error:
            tried = (
                "test inputs"
                if self.test
                else "random inputs (give test_data to have it tried on real ones)"
            )
            raise ModelError(
                f"model and loss fail on {tried} of shape {tuple(inputs.shape)} ({inputs.dtype}) "
                "with targets of "
                f"shape {tuple(targets.shape)} ({targets.dtype}): {error}"
            ) from error
        # Whole numbers are looked up in tables: one outside of a table fails only when it is met.
        if not inputs.is_floating_point() or not targets.is_floating_point():
            self._check_whole_numbers(module)

    def _check_whole_numbers(self, module: nn.Module) -> None:
        """Refuse examples that model or loss choke on, before anything is released.

        A word past the vocabulary is such an example.
        """
        probe = copy.deepcopy(module).eval()
        for node, (inputs, targets) in self.parts.items():
            for start in range(0, len(inputs), EVALUATION_BATCH):
                rows = slice(start, start + EVALUATION_BATCH)
                if self._fails(probe, inputs[rows], targets[rows]) is None:
                    continue
                # The batch fails: look for the example that does it, to name it.
                for index in range(start, min(start + EVALUATION_BATCH, len(inputs))):
                    error = self._fails(
                        probe, inputs[index : index + 1], targets[index : index + 1]
                    )
                    if error is not None:
                        raise DataError(
                            f"node {node}, example {index}: model and loss fail on it ({error})"
                        )

    def _fails(self, probe: nn.Module, inputs: Tensor, targets: Tensor) -> Exception | None:
        try:
            with torch.no_grad():
                self.loss(probe(inputs), targets)
        except Exception as error:
            return error
        return None

    def _check_labels(self, module: nn.Module) -> None:
        # eval() for one forward pass, so that Dropout and the like keep quiet.
        with torch.no_grad(), evaluation_mode(module):
            num_outputs = module(self.example[0][None]).shape[1]
        for node, (_, labels) in self.parts.items():
            check_labels(labels, num_outputs, f"node {node}")
        if self.test is not None:
            check_labels(self.test[1], num_outputs, "test_data")


def _sizes(
    node_data: Sequence[NodeData], hosted: Sequence[int], num_examples: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the declared number of examples of every node.

    Those of the hosted ones are checked against their data.
    """
    # Without a declaration the lengths are public.
    if num_examples is None:
        sizes = tuple(count_examples(data, f"node {node}") for node, data in enumerate(node_data))
    else:
        sizes = tuple(int(size) for size in num_examples)
        if len(sizes) != len(node_data):
            raise ConfigError(
                f"num_examples has {len(sizes)} values for {len(node_data)} nodes; "
                "give one per node"
            )
        for node in hosted:
            if (found := count_examples(node_data[node], f"node {node}")) > sizes[node]:
                raise ConfigError(
                    f"num_examples[{node}] = {sizes[node]}, but the data of node {node} have "
                    f"{found} examples; declare at least as "
                    "many as there are (the others count as blanks), or leave examples out"
                )
    if not any(sizes):
        raise ConfigError("node_data: no node has an example; at least one needs a dataset")
    return sizes


def _warn_about_shared_data(node_data: Sequence[NodeData], test_data: NodeData) -> None:
    """Warn where one object is given twice: its examples then pay in both places."""
    # Objects are compared and not their contents, which are private.
    first: dict[int, int] = {}
    for node, data in enumerate(node_data):
        if data is None:
            continue
        if (other := first.setdefault(id(data), node)) != node:
            warnings.warn(
                f"nodes {other} and {node} are given the same data: their examples are released "
                "by both, and the eps of both adds "
                "up for them; give every node examples of its own",
                stacklevel=4,
            )
    if test_data is not None and id(test_data) in first:
        warnings.warn(
            f"test_data are those of node {first[id(test_data)]}: what is measured on them is "
            "published and not private; use "
            "public data for testing",
            stacklevel=4,
        )


def _refuse_differences(known: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse data whose shapes or number formats differ between nodes, or from the test data's."""
    (first, (inputs, targets)), *others = known.items()
    for name, part in others:
        for kind, here, there in zip(("inputs", "targets"), part, (inputs, targets), strict=True):
            if (here.shape[1:], here.dtype) != (there.shape[1:], there.dtype):
                raise DataError(
                    f"{name}: {kind} are {here.dtype} of shape {tuple(here.shape[1:])}, those of "
                    f"{first} {there.dtype} "
                    f"of shape {tuple(there.shape[1:])}; all nodes and the test data need the same"
                )
