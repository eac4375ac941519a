"""What blocks and tokens take in memory, by tracemalloc, with every full block published."""

import gc
import tracemalloc

from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable
from tests.benchmarks.control.desk import decoding, prompts

BLOCK_SIZE = 16
SEQS, CONTEXT, OUTPUT = 256, 768, 256


def bytes_per_block(num_blocks: int) -> float:
    """A pool all of whose blocks are published and free."""
    contents = prompts(num_blocks // 64, 64 * BLOCK_SIZE, 0, 3)
    tracemalloc.start()
    manager = BlockManager(num_blocks, BLOCK_SIZE, b"bench")
    tables = []
    for ids in contents:
        table = BlockTable()
        manager.allocate(table, manager.match(table, ids), len(ids))
        manager.publish(table, ids, len(ids), 1)
        manager.take_changes()
        tables.append(table)
    for table in tables:
        manager.free(table)
    del table, tables
    traced = _traced()
    tracemalloc.stop()
    assert len(manager.published()) == num_blocks // 64 * 64
    return traced / num_blocks


def bytes_per_token() -> float:
    """What goes when running requests are forgotten, the blocks that they leave cached aside: their prompts and outputs, tables, journal and
    stream, per token. A quarter of the tokens are output."""
    tracemalloc.start()
    desk = decoding(SEQS, CONTEXT, SEQS * (CONTEXT + 2 * OUTPUT) // BLOCK_SIZE)
    scheduler = desk.leader.scheduler
    while (load := scheduler.load()).num_running and min(s.output_len for s in scheduler.requests()) < OUTPUT:
        desk.step()
    held = sum(s.ledger.num_tokens for s in scheduler.requests())
    before = _traced()
    for request in list(scheduler.requests()):
        scheduler.abort(request.request_id, 0)
    while desk.is_computing:
        desk.step()
    scheduler.forget_finished(1 << 60)
    desk.settle()
    assert load.num_running == SEQS and not list(scheduler.requests())
    after = _traced()
    tracemalloc.stop()
    return (before - after) / held


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
