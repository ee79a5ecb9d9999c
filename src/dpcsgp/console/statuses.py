"""The status of a party as tables; nothing here needs more than the facts of its status file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpcsgp.federation.status_file import waited_for


def status_view(found: Mapping[str, Any]) -> Group:
    """Show the status of a party: its own figures, its peers, the last log lines."""
    parts: list[RenderableType] = [
        _figures(found),
        _peers(found["peers"], found["updated"] + found["age"]),
    ]
    troubles = [f"{peer['name']}: {peer['problem']}" for peer in found["peers"] if peer["problem"]]
    if troubles and found["phase"] != "ended":  # then others may leave
        parts.append(Text("\n".join(troubles), style="yellow"))
    if found["log"]:
        parts.append(Text("\n".join(found["log"][-5:]), style="dim"))
    return Group(*parts)


def _figures(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"party {found['party']}", show_header=False, title_justify="left")
    for name, value in _figure_rows(found).items():
        table.add_row(name, escape(value))
    return table


def _figure_rows(found: Mapping[str, Any]) -> dict[str, str]:
    state = found["phase"]
    if not found["running"] and state not in ("ended", "interrupted", "failed"):
        state = f"not running; last seen {_ago(found['age'])}, {state}"
    rows = {
        "state": state,
        "round": f"{found['round']} of {found['rounds']}",
        "step": f"{found['step']} of {found['steps']}, {found['releases']} releases",
        "eps": f"{float(found['epsilon']):.4f} of {found['epsilon_budget']:g} "
        f"(delta {found['delta']:g})",
        "sent per edge": f"{found['bytes_per_edge'] / 1e6:.3f} MB",
    }
    if (colluders := found.get("max_colluders", "all")) != "all":
        rows["eps holds against"] = f"all messages together with any {colluders} other parties"
    if found["metric"]:
        scored = f"{float(found['score']):.4g} on its public test data"
        rows[found["metric"]] = f"{scored} (step {found['scored_at']})"
    rows["spent waiting"] = f"{100 * found['waiting_share']:.0f} % of this start"
    if found["page"] and found["running"]:
        rows["page"] = found["page"]
    if found["waiting_for"]:
        waited = f"for {found['waiting_seconds']:.0f} s"
        behind = {peer["name"]: peer.get("waits_for", ()) for peer in found["peers"]}
        names = [waited_for(name, behind.get(name, ())) for name in found["waiting_for"]]
        rows["waiting for"] = f"{', '.join(names)}, {waited}"
    return rows


def _peers(peers: Sequence[Mapping[str, Any]], now: float) -> Table:
    """One row per neighbour."""
    table = Table(title="peers", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("party", "connected", "last heard", "lag", "in", "out", "edges"):
        table.add_column(name, overflow="fold")
    for peer in peers:
        heard = peer["last_heard"]
        table.add_row(
            escape(peer["name"]),
            "yes" if peer["connected"] else "no",
            "never" if heard is None else _ago(max(now - heard, 0.0)),
            f"{peer['lag']} rounds",
            f"{peer['bytes_in'] / 1e3:.1f} kB",
            f"{peer['bytes_out'] / 1e3:.1f} kB",
            _edges(peer),
        )
    return table


def _edges(peer: Mapping[str, Any]) -> str:
    if peer["sends"] and peer["hears"]:
        return "both ways"
    return "is heard" if peer["sends"] else "hears"


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"
