"""The process of a rank other than 0: `python -m services.worker.rank_process FD`, FD being its end of the line to rank 0."""

import sys
from multiprocessing.connection import Connection

import structlog

from model_worker.group import ALONE, GroupBroken
from model_worker.kv_blocks import LocalBlocks
from model_worker.ranks.crew import RankLost
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.orders import Answer, PoolSize, receive, send
from model_worker.ranks.shard import Shard
from services.rpc.logs import configure_logs
from services.worker.drafter import load_head
from services.worker.expert_peers import ExpertPeers
from services.worker.loading import load_part, part_pool
from services.worker.rank_processes import RankSetup

_log = structlog.get_logger()


def main(line: Connection) -> None:
    """Load this rank's part, say so, and serve rank 0 until it is gone. Rank 0 hears why where the part cannot be loaded."""
    setup: RankSetup = receive(line)
    configure_logs(f"worker rank {setup.rank}", setup.config.log_level)
    group = GlooGroup.at_file(setup.store, setup.rank, setup.config.tensor_parallel_size)
    peers = ExpertPeers(setup.config, setup.rank) if setup.config.experts.expert_parallel_size > 1 else None
    try:
        loaded = load_part(setup.config, group, peers.group if peers is not None else ALONE)
        head = load_head(setup.config.speculation, loaded)
    except Exception as error:  # noqa: BLE001 - rank 0 ends with it
        send(line, Answer(failure=f"{type(error).__name__}: {error}"))
        receive(line)  # nothing comes: rank 0 ends, and may have more to say than that a rank is lost
        return
    send(line, Answer())
    size: PoolSize = receive(line)
    kv = part_pool(loaded.model, group, setup.config, size, head.kv_shape if head is not None else None)
    group.join(0)
    if peers is not None:
        peers.join()
    _log.info("rank ready", rank=group.rank, kv_blocks=kv.num_blocks)
    Shard(loaded.model, kv, LocalBlocks(kv, size.num_host_blocks), group, head).serve(line)


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])))
    except (GroupBroken, RankLost) as error:
        sys.exit(f"Error: {error}")
    except (EOFError, OSError):
        pass  # rank 0 is gone, and has said why
