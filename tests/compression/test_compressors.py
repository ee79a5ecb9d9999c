"""Every compressor: exact sizes, equal bytes and numbers everywhere, finite results, its bound."""

from __future__ import annotations

import pytest
import torch

from dpcsgp.compression import Compressor, frames, parse_compressor
from dpcsgp.compression.base import naming_gradient_step
from dpcsgp.errors import ConfigError, DivergenceError, WireError
from dpcsgp.randomness import PublicRandomness, torch_seed

SPECS = [
    *("none", "rand:0.5", "rand:0.1", "top:0.01", "top:0.6", "sign", "sign:64"),
    *("rot:1", "rot:2", "rot:3", "rot:4"),
    *("gsgd:2", "gsgd:3/100", "gsgd:4/64", "gsgd:8", "gsgd:8/512", "gsgd:13/33", "gsgd:16"),
]
DIMS = [1, 2, 7, 8, 33, 650, 1001]
LONG_DIM = 70_001  # several cache tiles, and no power of two divides it

every_compressor = pytest.mark.parametrize(
    "compressor", [parse_compressor(spec) for spec in SPECS], ids=SPECS
)


def gaussian(num_rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    with torch_seed(seed, "test vectors"):
        return torch.randn(num_rows, dim)


def sent(
    compressor: Compressor, x_ND: torch.Tensor, random: PublicRandomness, round_: int = 0
) -> torch.Tensor:
    return compressor.decode(compressor.encode(x_ND, random, round_), x_ND.shape[1], random, round_)


@every_compressor
def test_spec_is_canonical(compressor: Compressor) -> None:
    assert parse_compressor(compressor.spec) == compressor


@every_compressor
@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_size_is_exact(compressor: Compressor, num_nodes: int, dim: int) -> None:
    random = PublicRandomness(1, range(num_nodes))
    wire = compressor.encode(gaussian(num_nodes, dim), random, round_=5)
    assert wire.dtype == torch.uint8
    assert tuple(wire.shape) == (num_nodes, compressor.num_bytes(dim))
    assert compressor.encode(torch.zeros(num_nodes, dim), random, round_=5).shape == wire.shape
    decoded = compressor.decode(wire, dim, random, round_=5)
    assert decoded.dtype == torch.float32
    assert tuple(decoded.shape) == (num_nodes, dim)
    assert (
        compressor.paper_bits(dim) <= 8 * compressor.num_bytes(dim) < compressor.paper_bits(dim) + 8
    )


@every_compressor
@pytest.mark.parametrize("dim", [1, 33, 650, LONG_DIM])
def test_rows_do_not_see_each_other(compressor: Compressor, dim: int) -> None:
    nodes = [3, 0, 7, 4]
    x = gaussian(4, dim)
    random = PublicRandomness(1, nodes)
    wire = compressor.encode(x, random, round_=2)
    decoded = compressor.decode(wire, dim, random, round_=2)
    for row, node in enumerate(nodes):
        alone = PublicRandomness(1, [node])
        assert torch.equal(
            compressor.encode(x[row : row + 1], alone, round_=2), wire[row : row + 1]
        )
        assert torch.equal(
            compressor.decode(wire[row : row + 1], dim, alone, round_=2), decoded[row : row + 1]
        )


@every_compressor
@pytest.mark.parametrize("dim", [650, LONG_DIM])
def test_threads_change_nothing(compressor: Compressor, dim: int) -> None:
    x, random, before = gaussian(2, dim), PublicRandomness(1, [0, 1]), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            wire = compressor.encode(x, random, round_=0)
            results.append((wire, compressor.decode(wire, dim, random, round_=0)))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    for wire, decoded in results[1:]:
        assert torch.equal(wire, results[0][0])
        assert torch.equal(decoded, results[0][1])


@every_compressor
def test_encoding_repeats_and_keeps_its_input(compressor: Compressor) -> None:
    x, random = gaussian(2, 1001), PublicRandomness(1, [0, 1])
    before = x.clone()
    first = compressor.encode(x, random, round_=3)
    assert torch.equal(first, compressor.encode(x, random, round_=3))
    assert torch.equal(x, before)
    kept = first.clone()
    x.zero_()
    assert torch.equal(first, kept)  # the wire is not a view of the vector


@every_compressor
def test_decoding_reads_payloads_inside_frames(compressor: Compressor) -> None:
    dim, nodes = 651, [4, 2, 9]
    random = PublicRandomness(1, nodes)
    wire = compressor.encode(gaussian(3, dim), random, round_=1)
    joined = frames.join(nodes, 1, torch.ones(3, 1, dtype=torch.float64), wire)
    _, payload = frames.split(joined, nodes, 1, compressor.num_bytes(dim))
    assert torch.equal(
        compressor.decode(payload, dim, random, 1), compressor.decode(wire, dim, random, 1)
    )


@every_compressor
def test_vectors_that_are_not_contiguous_encode_the_same(compressor: Compressor) -> None:
    x, random = gaussian(3, 102), PublicRandomness(1, range(3))
    assert torch.equal(
        compressor.encode(x.t().contiguous().t(), random, 0), compressor.encode(x, random, 0)
    )
    assert torch.equal(
        compressor.encode(x[:, 1:], random, 0), compressor.encode(x[:, 1:].clone(), random, 0)
    )


@every_compressor
def test_zero_stays_zero(compressor: Compressor) -> None:
    for dim in DIMS:
        assert not sent(compressor, torch.zeros(2, dim), PublicRandomness(1, [0, 1])).any()


EXTREMES = {
    "one-hot": lambda x: torch.zeros_like(x).index_fill_(1, torch.tensor([x.shape[1] // 2]), 1.0),
    "flat": lambda x: torch.full_like(x, -0.25),
    "denormal": lambda x: x * 1e-40,
    "smallest": lambda x: torch.full_like(x, 1e-45),
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e37,
    "largest": lambda x: torch.full_like(x, torch.finfo(torch.float32).max),
    "mixed": lambda x: x * torch.logspace(-44, 37, x.shape[1]),
}


@every_compressor
@pytest.mark.parametrize("shape", EXTREMES)
def test_extreme_values_stay_finite_and_close(compressor: Compressor, shape: str) -> None:
    for dim in DIMS:
        x = EXTREMES[shape](gaussian(2, dim))
        result = sent(compressor, x, PublicRandomness(1, [0, 1]))
        assert torch.isfinite(result).all()
        error = (result.double() - x.double()).norm(dim=1)
        # Dithered rounding may err by one step per coordinate; all others never make the error
        # longer than the vector.
        limit = dim**0.5 if compressor.spec.startswith("gsgd") else 1.001
        assert (error <= limit * x.double().norm(dim=1)).all()


@every_compressor
@pytest.mark.parametrize("dim", [1, 650, LONG_DIM])
def test_values_that_are_not_finite_are_refused_by_name(compressor: Compressor, dim: int) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = gaussian(3, dim)
        x[1, dim // 3] = bad
        with pytest.raises(DivergenceError, match=r"node 5, round 77"):
            compressor.encode(x, PublicRandomness(1, [2, 5, 8]), round_=77)


@every_compressor
def test_scales_that_are_not_finite_are_refused_by_name(compressor: Compressor) -> None:
    random = PublicRandomness(1, [2, 5])
    wire = compressor.encode(gaussian(2, 650), random, round_=77)
    # NaN in every layout: numbers come first
    wire[1, :4] = torch.tensor([0, 0, 0xC0, 0x7F], dtype=torch.uint8)
    with pytest.raises(DivergenceError, match=r"node 5, round 77"):
        compressor.decode(wire, 650, random, round_=77)


def test_the_gradient_step_joins_the_round_in_an_error() -> None:
    x = torch.tensor([[1.0], [float("nan")]])
    words = r"^gradient step 40, node 5, round 7: the message holds a value that is not finite"
    with pytest.raises(DivergenceError, match=words), naming_gradient_step(40):
        parse_compressor("none").encode(x, PublicRandomness(1, [2, 5]), round_=7)


@every_compressor
def test_wrong_shapes_are_refused(compressor: Compressor) -> None:
    random = PublicRandomness(1, [2, 5])
    wire = compressor.encode(gaussian(2, 650), random, round_=7)
    with pytest.raises(WireError, match=r"\(2, 5\) in round 7"):
        compressor.decode(wire[:, :-1], 650, random, round_=7)
    with pytest.raises(WireError, match="round 7"):
        compressor.decode(wire.to(torch.int32), 650, random, round_=7)
    with pytest.raises(ConfigError, match="float32"):
        compressor.encode(gaussian(2, 650).double(), random, round_=7)
    with pytest.raises(ConfigError, match="one node per row"):
        compressor.encode(gaussian(3, 650), random, round_=7)


def shapes(dim: int) -> dict[str, torch.Tensor]:
    x = gaussian(1, dim, seed=5)[0]
    one_hot = torch.zeros(dim).index_fill_(0, torch.tensor([dim // 2]), 1.0)
    return {"gaussian": x, "one-hot": one_hot, "flat": torch.ones(dim), "heavy": x**5}


@every_compressor
@pytest.mark.parametrize("dim", [9, 650])
@pytest.mark.parametrize("shape", ["gaussian", "one-hot", "flat", "heavy"])
def test_error_is_within_omega(compressor: Compressor, dim: int, shape: str) -> None:
    """E|Q(v) - v|^2 <= omega^2 |v|^2, up to scatter (and 2 % for short rotated columns)."""
    vector, num_draws = shapes(dim)[shape], 200 if dim == 9 else 60
    result = sent(compressor, vector.expand(num_draws, dim), PublicRandomness(1, range(num_draws)))
    ratios = (result.double() - vector).square().sum(1) / vector.double().square().sum()
    scatter = 4 * ratios.std().item() / num_draws**0.5
    assert ratios.mean().item() <= 1.02 * compressor.omega_squared(dim) + scatter + 1e-9


@every_compressor
@pytest.mark.parametrize("dim", [65, 1001])
def test_moments_are_the_measured_ones(compressor: Compressor, dim: int) -> None:
    """For Gaussian vectors the mean and the variance of Q(v) are those of `moments`."""
    moments = compressor.moments(dim)
    if moments is None:
        assert compressor.spec.startswith(("top", "sign"))
        return
    num_draws = 400
    x = gaussian(num_draws, dim, seed=9)
    result = sent(compressor, x, PublicRandomness(4, range(num_draws))).double()
    squares = x.double().square().sum(1)
    gains = (result * x).sum(1) / squares
    noises = (result - moments.gain * x).square().sum(1) / squares
    short = dim < 100 and compressor.spec.startswith("rot")  # its law is that of long vectors
    for measured, predicted in ((gains, moments.gain), (noises, moments.noise)):
        scatter = 4 * measured.std().item() / num_draws**0.5
        assert (
            abs(measured.mean().item() - predicted)
            <= scatter + (0.05 if short else 0.002) * predicted + 1e-9
        )


@every_compressor
def test_errors_of_nodes_and_steps_are_unrelated(compressor: Compressor) -> None:
    if compressor.moments(4096) is None or compressor.spec == "none":
        return
    moments = compressor.moments(4096)
    assert moments is not None
    x = gaussian(1, 4096).expand(2, -1)
    errors = [
        sent(compressor, x, PublicRandomness(1, [0, 1]), round_) - moments.gain * x
        for round_ in (0, 1)
    ]
    pairs = [(errors[0][0], errors[0][1]), (errors[0][0], errors[1][0])]
    for first, second in pairs:
        correlation = torch.nn.functional.cosine_similarity(first, second, dim=0).item()
        assert abs(correlation) < 5 / 64
