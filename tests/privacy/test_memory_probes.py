"""What remembers data is refused by name.

Caches by shape, counters and constants are let through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.privacy.contents import own, shared
from dpcsgp.privacy.model_probes import check_examples_independent, check_gradients_reach

EXAMPLE = torch.zeros(4), torch.tensor(0)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Notebook:
    """A plain object that modules do not know of."""

    def __init__(self) -> None:
        self.pages: Any = []


class Slotted:
    __slots__ = ("__page",)

    def write(self, value: Any) -> None:
        self.__page = value


class Keeper(nn.Module):
    """Hands its input on and gives it to a function as well."""

    def __init__(self, keep: Callable[[Keeper, Tensor], object]) -> None:
        super().__init__()
        self.last, self.keep = nn.Linear(4, 3), keep
        self.books, self.page, self.calls, self.sizes = [Notebook()], Slotted(), 0, [0]
        self.table: dict[int, Tensor] = {}
        self.recent: deque[Any] = deque(maxlen=3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.keep(self, inputs.detach())
        return self.last(inputs)


class Common(Keeper):
    """Keeps what it sees for all instances."""

    everything: list[Any] = []  # noqa: RUF012


SEEN: list[Any] = []


def hoard_in_a_global(model: Keeper, inputs: Tensor) -> None:
    SEEN.append(inputs)


KEEPING: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "plain object in a list": (
        lambda model, x: model.books[0].pages.append(x),
        r"'body\.1' \(Keeper\).*'books'",
    ),
    "numbers of an array": (
        lambda model, x: setattr(model.books[0], "pages", x.numpy().copy()),
        "'books'",
    ),
    "slot": (lambda model, x: model.page.write(float(x.sum())), "'page'"),
    "deque": (lambda model, x: model.recent.append(x.sum().item()), "'recent'"),
    "first batch alone": (lambda model, x: vars(model).setdefault("scale", x.mean()), "'scale'"),
    "rows that are not finite": (
        lambda model, x: vars(model).update(bad=bool(x.isnan().any())),
        "'bad'",
    ),
    "buffer": (lambda model, x: model.count.add_(int(x.sum() > 0)), r"buffer 'body\.1\.count'"),
    "parameter, by the same in every call": (
        lambda model, x: model.last.weight.data.mul_(0.5),
        r"parameter 'body\.1\.last",
    ),
    "attribute of a parameter": (
        lambda model, x: setattr(model.last.weight, "seen", x),
        r"'body\.1\.last\.weight'",
    ),
    "attribute of a class": (lambda model, x: model.everything.append(x), r"'Common\.everything'"),
    "global": (hoard_in_a_global, "global variable 'SEEN'"),
    "default argument": (lambda model, x, seen=[]: seen.append(x), "default arguments"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_model_that_keeps_data_anywhere_is_refused_by_name(name: str) -> None:
    keep, words = KEEPING[name]
    body = nn.Sequential(nn.Linear(4, 4), (Common if "class" in name else Keeper)(keep))
    module = nn.Sequential()
    module.add_module("body", body)
    with pytest.raises(ModelError, match=f"{words}.*past the noise"):
        check_examples_independent(module, torch.zeros(4))


def test_one_bit_of_a_batch_is_found_whatever_the_model() -> None:
    """It is the same for two batches in a third of all models; for eight it hardly ever is."""
    keep = KEEPING["buffer"][0]
    for seed in range(40):
        torch.manual_seed(seed)
        with pytest.raises(ModelError, match="past the noise"):
            check_examples_independent(nn.Sequential(nn.Linear(4, 4), Keeper(keep)), torch.zeros(4))


def test_a_hook_that_keeps_data_is_refused() -> None:
    seen: list[Any] = []
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda layer, args, output: seen.append(output))
    with pytest.raises(ModelError, match=r"variable 'seen'.*past the noise"):
        check_examples_independent(module, torch.zeros(4))


def count_shapes(model: Keeper, inputs: Tensor) -> None:
    model.calls += 1
    model.sizes.append(len(inputs))
    model.count += 1
    model.table.setdefault(len(inputs), torch.arange(len(inputs)))


def count_in_an_object(model: Keeper, inputs: Tensor) -> None:
    model.books[0].pages = [len(inputs)]


@pytest.mark.parametrize("keep", [count_shapes, count_in_an_object])
def test_counters_and_caches_by_shape_are_fine(keep: Callable[[Any, Tensor], object]) -> None:
    check_examples_independent(Keeper(keep), torch.zeros(4))
    check_gradients_reach(Keeper(keep), entropy, EXAMPLE)


class Rotary(nn.Module):
    """Attention with rotary positions, whose table grows with the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.last = nn.Linear(4, 12), nn.Linear(4, 3)
        self.table: tuple[Tensor, Tensor] | None = None

    def _turn(self, part: Tensor) -> Tensor:
        if self.table is None or len(self.table[0]) < part.shape[1]:
            angles = torch.outer(
                torch.arange(part.shape[1]).float(), torch.tensor([1.0, 0.1])
            ).repeat(1, 2)
            self.table = angles.cos(), angles.sin()
        cosine, sine = (table[: part.shape[1]] for table in self.table)
        return part * cosine + torch.cat([-part[..., 2:], part[..., :2]], dim=-1) * sine

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.into(inputs).chunk(3, dim=-1)
        return self.last(
            F.scaled_dot_product_attention(self._turn(query), self._turn(key), value).mean(1)
        )


def test_attention_with_a_table_of_positions_is_fine() -> None:
    example = torch.zeros(5, 4), torch.tensor(0)
    check_examples_independent(Rotary(), example[0])
    check_gradients_reach(Rotary(), entropy, example)


class RunningMean:
    """Divides by a slow running mean of the losses."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = entropy(outputs, targets)
        self.mean = 0.999 * self.mean + 0.001 * float(losses.detach().mean())
        return losses / self.mean


class RunningModule(nn.Module):
    """The same in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = entropy(outputs, targets)
        self.mean.lerp_(losses.detach().mean(), 0.001)
        return losses / self.mean


def running_closure() -> Callable[[Tensor, Tensor], Tensor]:
    mean = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal mean
        losses = entropy(outputs, targets)
        mean = 0.999 * mean + 0.001 * float(losses.detach().mean())
        return losses / mean

    return loss


def counting_hits() -> Callable[[Tensor, Tensor], Tensor]:
    hits = [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        hits[0] += int((outputs.nan_to_num() > 0).sum())  # a whole number, but no counter of calls
        return entropy(outputs, targets)

    return loss


def running_function(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = entropy(outputs, targets)
    mean = 0.999 * getattr(running_function, "mean", 1.0) + 0.001 * float(losses.detach().mean())
    vars(running_function)["mean"] = mean
    return losses / mean


def hoarding_loss(outputs: Tensor, targets: Tensor, seen: list[Tensor]) -> Tensor:
    seen.append(targets)
    return entropy(outputs, targets)


REMEMBERING: dict[str, tuple[Callable[[], Callable[[Tensor, Tensor], Tensor]], str]] = {
    "object": (RunningMean, "attribute 'mean'"),
    "method": (lambda: RunningMean().__call__, "attribute 'mean'"),
    "module": (RunningModule, "buffer mean"),
    "closure": (running_closure, "variable 'mean' of running_closure"),
    "counter of hits": (counting_hits, "variable 'hits' of counting_hits"),
    "function": (lambda: running_function, "'mean' of function running_function"),
    "partial": (lambda: partial(hoarding_loss, seen=[]), "something it holds"),
    "lambda around an object": (
        lambda: (lambda mean: lambda o, t: mean(o, t))(RunningMean()),
        "variable 'mean'",
    ),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_loss_that_remembers_is_refused(name: str) -> None:
    build, words = REMEMBERING[name]
    with pytest.raises(ModelError, match=f"loss: .*{words}.*past the noise"):
        check_gradients_reach(nn.Linear(4, 3), build(), EXAMPLE)


def test_memory_out_of_sight_shows_in_what_is_computed() -> None:
    hidden = np.random  # stands for a library with a state of its own

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = entropy(outputs, targets)
        mean = 0.999 * getattr(hidden, "probe_mean", 1.0) + 0.001 * float(losses.detach().mean())
        hidden.probe_mean = mean  # pyright: ignore[reportAttributeAccessIssue]
        return losses / mean

    with pytest.raises(
        ModelError,
        match=r"loss: the same batch gives other values after other batches.*past the noise",
    ):
        check_gradients_reach(nn.Linear(4, 3), loss, EXAMPLE)
    del hidden.probe_mean  # pyright: ignore[reportAttributeAccessIssue]


class Weighted:
    """Weighs classes by public constants, and counts its calls."""

    def __init__(self) -> None:
        self.weights, self.calls = torch.tensor([1.0, 5.0, 2.0]), 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets, weight=self.weights, reduction="none")


def counting_closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls, table = {"calls": 0}, {}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls["calls"] += 1
        table.setdefault(len(targets), torch.ones(len(targets)))
        return entropy(outputs, targets) * table[len(targets)]

    return loss


class Annealed:
    """Grows with the number of calls, which follows the number of examples drawn."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return entropy(outputs, targets) * (1 + 1e-7 * self.calls)


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        partial(F.cross_entropy, reduction="none", label_smoothing=0.1),
        partial(F.cross_entropy, reduction="none", weight=torch.tensor([1.0, 5.0, 2.0])),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]), reduction="none"),
        Weighted(),
        Weighted().__call__,
        counting_closure(),
    ],
    ids=["function", "partial", "weights", "module", "object", "method", "closure"],
)
def test_losses_that_hold_constants_or_counters_pass(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    check_gradients_reach(nn.Linear(4, 3), loss, EXAMPLE)


def test_a_schedule_by_calls_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"loss: the same batch gives other values.*schedule by calls"
    ):
        check_gradients_reach(nn.Linear(4, 3), Annealed(), EXAMPLE)


def test_contents_follow_every_way_an_object_holds_values() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    values: list[Any] = [
        {"a": [1, (2.0, {3})]}, {"a": [1, (2.0, {4})]}, {"a": [1, (2.5, {3})]},
        np.arange(3), np.arange(3) + 1, torch.ones(2), torch.zeros(2),
        partial(max, 1), partial(max, 2), deque([1]), deque([2]), ring, iter([1, 2]),
    ]  # fmt: skip
    contents = [own(value)["", ""] for value in values]
    assert len(set(contents)) == len(values)
    assert contents == [own(value)["", ""] for value in values]


def test_shared_contents_are_those_the_code_can_reach() -> None:
    calls = 0

    def loss() -> None:
        nonlocal calls
        calls += 1
        SEEN.clear()

    found = {key.partition("#")[0] for key in shared(loss)}
    assert "global variable 'SEEN'" in found
    assert any("variable 'calls' of" in key for key in found)
