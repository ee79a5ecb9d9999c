"""`dpcsgp.take_part`: a model and data of one's own, two parties in two threads of this process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from made_parties import PLAN
from parties import free_address

import dpcsgp
from dpcsgp.errors import ConfigError, DataError, DpcsgpError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.party_folder import PartyFolder


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Two parties that approved a roster for a model of their own."""
    torch.manual_seed(0)
    start = build()
    torch.save(start.state_dict(), tmp_path / "start.pt")
    parties = [
        PartyFolder.create(tmp_path / name, name, free_address(), Promise(90, 4.0, 1e-3))
        for name in ("north", "south")
    ]
    (tmp_path / "plan.toml").write_text(PLAN)
    plan = Plan.load(tmp_path / "plan.toml")
    roster = found(plan, [party.card for party in parties], model=start).roster
    (tmp_path / "federation.toml").write_text(roster.text())
    for party in parties:
        approve(party, roster)
    return tmp_path


def start_of(here: Path) -> nn.Module:
    module = build()
    module.load_state_dict(torch.load(here / "start.pt", weights_only=True))
    return module


def join(here: Path, name: str) -> dpcsgp.Result:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(80, 4, generator=random)
    examples = inputs, inputs[:, :3].argmax(1)
    return dpcsgp.take_part(
        here / "federation.toml",
        here / name,
        model=start_of(here),
        data=examples,
        test_data=(inputs + 1.0, examples[1]),
    )


def test_two_parties_train_a_model_of_their_own(here: Path) -> None:
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda name: join(here, name), ("north", "south")))
    for node, result in enumerate(results):
        assert result.nodes == (node,) and result.summary["private"]
        assert result.summary["stopped_because"] == "completed" and result.epsilon <= 4.0
        loaded = dpcsgp.load_model(result.folder, start_of(here), node=node)
        x = torch.ones(2, 4)
        assert torch.equal(loaded(x), result.models[node](x))
        with pytest.raises(DataError, match=f"give node=k with one of {node}"):
            dpcsgp.load_model(result.folder, start_of(here))
    # The same call again finds it done, and spends nothing.
    again = join(here, "north")
    assert again.summary == {**results[0].summary, **again.summary}
    assert again.releases() == results[0].releases()


def test_another_model_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="lives in the parties' Python"):
        dpcsgp.take_part(here / "federation.toml", here / "north", data=None)
    wider = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    with pytest.raises(ConfigError, match="all parties need the same class"):
        dpcsgp.take_part(here / "federation.toml", here / "north", model=wider)
    with pytest.raises(DpcsgpError, match="initial_model"):
        dpcsgp.take_part(here / "federation.toml", here / "north", model=build)
    assert not (here / "north" / "runs").exists()
