"""What `tessera admin` shows to people."""

from collections.abc import Sequence

from tessera.client.admin import RequestInfo, Stats


def stats_text(stats: Stats) -> str:
    """The group in a few lines, and a table of its workers."""
    load = stats.load
    lines = [
        f"{stats.model}; scheduler of epoch {stats.epoch} leads for {_seconds(stats.uptime_ms)}",
        f"admission  {'PAUSED' if stats.admission_paused else 'open'}",
        f"store      {_store(stats)}",
        f"requests   {load.num_running} running (at most {load.max_running}), {load.num_waiting} waiting, {load.num_swapped} swapped",
        f"           {stats.num_submitted} came, {stats.num_ended} ended, {stats.num_preemptions} preemptions",
        f"tokens     {load.generation_tokens_per_s:.1f}/s, {stats.num_sampled_tokens} so far; "
        f"{load.num_waiting_uncached_tokens} waiting to be computed",
        f"KV cache   {_part(load.used_kv_tokens, load.total_kv_tokens)} tokens; {100 * load.prefix_hit_rate:.1f} % of prompt tokens found cached",
        "",
    ]
    rows = [
        (
            worker.address,
            worker.state.value,
            str(worker.num_running),
            str(worker.num_swapped),
            _part(worker.used_kv_tokens, worker.total_kv_tokens),
        )
        for worker in load.workers
    ]
    return "\n".join(lines) + _table(("WORKER", "STATE", "RUNNING", "SWAPPED", "KV TOKENS"), rows)


def requests_table(requests: Sequence[RequestInfo]) -> str:
    """One line a request."""
    rows = [
        (
            item.id,
            _printable(item.client_request_id),
            _printable(item.principal) or "-",
            item.state.value,
            str(item.prompt_tokens),
            str(item.cached_tokens),
            str(item.output_tokens),
            _seconds(item.age_ms),
            str(item.priority),
            item.worker or "-",
        )
        for item in requests
    ]
    head = ("ID", "REQUEST ID", "PRINCIPAL", "STATE", "PROMPT", "CACHED", "OUTPUT", "AGE", "PRIORITY", "WORKER")
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join(lines)


def _printable(text: str) -> str:
    """What a client chose, without what could move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"


def _part(used: int, total: int) -> str:
    return f"{used} of {total}" + (f" ({100 * used / total:.1f} %)" if total else "")


def _store(stats: Stats) -> str:
    if stats.durable:
        return f"durable; {stats.journal_lag_records} records behind"
    return f"NOT DURABLE: {stats.journal_lag_records} records behind, the oldest for {_seconds(stats.journal_lag_ms)}"
