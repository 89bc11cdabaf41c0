"""A ``FleetAccount`` as a short table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from qfleet.telemetry.fleet import FleetAccount, ShardAccount
from qfleet.telemetry.formatting import format_rate
from qfleet.telemetry.timers import KINDS

LABEL = "{:<14}"


def fleet_lines(account: FleetAccount, baseline_env_steps_per_s: float | None = None) -> list[str]:
    """Return the lines of the table; rows that do not apply are left out."""
    lines = [
        LABEL.format("fleet") + _size(account),
        LABEL.format("processors") + _processors(account),
        LABEL.format("") + "".join(f"{kind:>15}" for kind in ("steps/s", *KINDS)),
    ]
    everybody = [_row(*row) for row in account.rows]
    if len(account.workers) > 1:
        everybody.insert(len(account.workers), _row("all", account.env_steps_per_s, account.shares))
    lines += everybody
    rows = [
        *((f"shard {shard.number}", _gave(shard)) for shard in account.shards),
        ("straggler", _straggler(account)),
        ("restarts", _restarts(account)),
        ("staleness", _staleness(account)),
        ("dropped", ", ".join(f"{why} ×{count}" for why, count in account.dropped.items())),
        ("sent", _way(account.bytes_sent, account.saved_sent) + _packing(account)),
        ("received", _way(account.bytes_received, account.saved_received)),
        ("messages", _messages(account)),
        ("speed-up", _speed_up(account, baseline_env_steps_per_s)),
    ]
    return lines + [LABEL.format(name) + text for name, text in rows if text]


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
    busy = account.processors_busy
    at_once = "" if busy is None else f", {busy:.2f} at a time"
    return f"{account.processor_s:.1f} s in {account.wall_s:.1f} s of wall time{at_once}"


def _straggler(account: FleetAccount) -> str:
    ratio = account.straggler_ratio
    if ratio is None:
        return (
            ""
            if account.straggler is None
            else f"{account.member} {account.straggler} made no step"
        )
    which = "the slowest {}" if account.straggler is None else f"{{}} {account.straggler}"
    who = which.format(account.member)
    return f"{who} takes {ratio:.2f} times the median's time for a step"


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
    return f"{ages.mean:.2f} updates in the mean, 95 % up to {ages.p95}, at most {ages.largest}"


def _messages(account: FleetAccount) -> str:
    if not account.messages:
        return ""
    cost = account.message_cost
    if cost is None:
        return f"{account.messages:,}"
    per_byte = ""
    if cost.bandwidth_bytes_per_s is not None:
        per_byte = f" + bytes at {cost.bandwidth_bytes_per_s / 1e6:,.4g} MB/s"
    well = "" if cost.explained is None else f", {cost.explained:.0%} explained"
    # A worker sends to all servers at once, and waits for the last reply.
    servers = len(account.servers)
    what = "one" if servers <= 1 else f"one to each of {servers} servers"
    return (
        f"{account.messages:,}; {what} takes {cost.latency_s * 1e3:.3g} ms{per_byte} "
        f"({_several(cost.messages, 'message')} measured{well})"
    )


def _packing(account: FleetAccount) -> str:
    seconds = sum(worker.packing_s for worker in account.workers)
    # Actors compress too, but their time for it is counted as sending.
    return f" in {seconds:.2f} s of packing" if account.saved_sent and seconds else ""


def _speed_up(account: FleetAccount, baseline: float | None) -> str:
    speed_up, efficiency = account.speed_up(baseline), account.efficiency(baseline)
    if speed_up is None or efficiency is None or baseline is None:
        return ""
    return (
        f"{speed_up:.2f} over one {account.member} ({format_rate(baseline)} steps/s), "
        f"{efficiency:.0%} of ideal"
    )


def _row(name: str, rate: float | None, shares: Mapping[str, float | None]) -> str:
    cells = ["–" if rate is None else format_rate(rate)]
    for kind in KINDS:
        share = shares[kind]
        cells.append("–" if share is None else f"{share:.0%}")
    return LABEL.format(name) + "".join(f"{cell:>15}" for cell in cells)


def _gave(shard: ShardAccount) -> str:
    return (
        f"{shard.env_steps:,} steps in ({shard.bytes_in:,} bytes), "
        f"{shard.samples:,} samples out ({shard.bytes_out:,} bytes)"
    )


def _way(count: int, saved: float | None) -> str:
    if not count:
        return ""
    return f"{count:,} bytes" + (f", {saved:.0%} saved by compression" if saved else "")


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
