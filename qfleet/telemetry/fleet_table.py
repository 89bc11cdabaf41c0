"""A ``FleetAccount`` as a short table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from qfleet.telemetry.fleet import FleetAccount
from qfleet.telemetry.formatting import format_rate
from qfleet.telemetry.timers import KINDS


def fleet_lines(account: FleetAccount) -> list[str]:
    """Return the lines of the table; rows that do not apply are left out."""
    members = [_row(*row) for row in account.rows]
    if len(account.workers) > 1:
        members.insert(len(account.workers), _row("all", account.env_steps_per_s, account.shares))
    dropped: Counter[str] = Counter()
    for server in account.servers:
        dropped.update(server.dropped)
    rows = {
        "fleet": _size(account),
        "processors": _processors(account),
        "": "".join(f"{kind:>15}" for kind in ("steps/s", *KINDS)),
        **dict(members),
        **{
            f"shard {shard.number}": f"{shard.env_steps:,} steps in ({shard.bytes_in:,} bytes), "
            f"{shard.samples:,} samples out ({shard.bytes_out:,} bytes)"
            for shard in account.shards
        },
        "straggler": _straggler(account),
        "restarts": _restarts(account),
        "staleness": _staleness(account),
        "dropped": ", ".join(f"{reason} ×{count}" for reason, count in dropped.items()),
        "sent": _bytes(account, "sent"),
        "received": _bytes(account, "received"),
        "messages": _messages(account),
    }
    return [f"{name:<14}{text}" for name, text in rows.items() if text]


def _size(account: FleetAccount) -> str:
    hosts = len({worker.host for worker in account.workers if worker.host})
    parts = [
        account.update,
        _several(len(account.workers), account.member),
        _several(len(account.servers), "server") if account.servers else "",
        _several(len(account.shards), "shard") if account.shards else "",
        _several(hosts, "host"),
    ]
    return ", ".join(filter(None, parts))


def _processors(account: FleetAccount) -> str:
    used_s, wall_s = account.processor_s, account.wall_s
    busy = f", {used_s / wall_s:.2f} at a time" if wall_s > 0 else ""
    return f"{used_s:.1f} s in {wall_s:.1f} s of wall time{busy}"


def _row(
    name: str, rate: float | None, shares: Mapping[str, float] | Mapping[str, float | None]
) -> tuple[str, str]:
    cells = ["–" if rate is None else format_rate(rate)]
    for kind in KINDS:
        share = shares[kind]
        cells.append("–" if share is None else f"{share:.0%}")
    return name, "".join(f"{cell:>15}" for cell in cells)


def _straggler(account: FleetAccount) -> str:
    number, ratio = account.straggler, account.straggler_ratio
    name = f"the slowest {account.member}" if number is None else f"{account.member} {number}"
    if ratio is None:
        return "" if number is None else f"{name} made no step"
    return f"{name} takes {ratio:.2f} times the median's time for a step"


def _restarts(account: FleetAccount) -> str:
    parts = [
        (f"{account.member} {worker.number} ×{worker.restarts}", worker.restarts)
        for worker in account.workers
    ]
    for server in account.servers:
        least = "at least " if server.unknown else ""
        lost = f" ({least}{_several(server.lost, 'gradient')} lost)"
        parts.append((f"server {server.number} ×{server.restores}{lost}", server.restores))
    for shard in account.shards:
        lost = f" ({_several(shard.lost, 'transition')} lost)"
        parts.append((f"shard {shard.number} ×{shard.restarts}{lost}", shard.restarts))
    return ", ".join(text for text, count in parts if count)


def _staleness(account: FleetAccount) -> str:
    ages = account.staleness
    if ages.mean is None:
        return ""
    p95, most = ages.percentile(95), ages.percentile(100)
    return f"{ages.mean:.2f} updates in the mean, 95 % up to {p95}, at most {most}"


def _bytes(account: FleetAccount, way: str) -> str:
    count, saved = account.total(f"bytes_{way}"), account.saved(way)
    text = f"{count:,} bytes" if count else ""
    if count and saved:
        text += f", {saved:.0%} saved by compression"
    # Actors compress too, but their time for it is counted as sending.
    packing_s = account.total("packing_s") if saved and way == "sent" else 0.0
    return text + f" in {packing_s:.2f} s of packing" * bool(packing_s)


def _messages(account: FleetAccount) -> str:
    count, cost = account.total("messages"), account.message_cost
    if not count or cost is None:
        return f"{count:,}" if count else ""
    per_byte = ""
    if cost.bandwidth_bytes_per_s is not None:
        per_byte = f" + bytes at {cost.bandwidth_bytes_per_s / 1e6:,.4g} MB/s"
    explained = "" if cost.explained is None else f", {cost.explained:.0%} explained"
    # A worker sends to all servers at once, and waits for the last reply.
    servers = len(account.servers)
    what = "one" if servers <= 1 else f"one to each of {servers} servers"
    return (
        f"{count:,}; {what} takes {cost.latency_s * 1e3:.3g} ms{per_byte} "
        f"({_several(cost.messages, 'message')} measured{explained})"
    )


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
