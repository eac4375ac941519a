"""The process of a rank other than 0: `python -m services.worker.rank_process FD`, FD being its end of the line to rank 0."""

import sys
from multiprocessing.connection import Connection

import structlog
import torch

from model_worker.group import ALONE, GroupBroken
from model_worker.kv_blocks import LocalBlocks
from model_worker.memory_profile import MemoryProfile
from model_worker.ranks.crew import RankLost
from model_worker.ranks.orders import Answer, Join, PoolSize, receive, send
from model_worker.ranks.shard import Shard
from services.rpc.logs import configure_logs
from services.worker.drafter import load_head
from services.worker.expert_peers import ExpertPeers
from services.worker.model_part import ModelPart, device_choice, load_part, memory_profile
from services.worker.rank_groups import rank_group
from services.worker.rank_processes import RankSetup

_log = structlog.get_logger()


def main(line: Connection) -> None:
    """Load this rank's part, say so, and serve rank 0 until it is gone. Rank 0 hears why where the part cannot be loaded."""
    setup: RankSetup = receive(line)
    configure_logs(f"worker rank {setup.rank}", setup.config.log_level)
    config = setup.config
    try:
        choice = device_choice(config)
        if choice.is_gpu:
            torch.cuda.set_device(choice.device_of(setup.rank))
        group = rank_group(choice).at_file(setup.store, setup.rank, config.tensor_parallel_size)
        peers = ExpertPeers(config, setup.rank, choice) if config.experts.expert_parallel_size > 1 else None
        profile = memory_profile(choice, setup.rank)
        loaded = load_part(config, group, peers.group if peers is not None else ALONE, choice)
        head = load_head(config.speculation, loaded)
    except Exception as error:  # noqa: BLE001 - rank 0 ends with it
        send(line, Answer(failure=f"{type(error).__name__}: {error}"))
        receive(line)  # nothing comes: rank 0 ends, and may have more to say than that a rank is lost
        return
    send(line, Answer())
    first: Join = receive(line)
    group.join(first.generation)
    if peers is not None:
        peers.join()
    part = ModelPart(loaded, config, group, head.kv_shape if head is not None else None)
    if profile is not None and config.kv_cache_bytes is None:
        send(line, _measured(part, profile))
    size: PoolSize = receive(line)
    kv = part.serving_pool(size)
    model = part.recorded(kv)
    _log.info("rank ready", rank=group.rank, kv_blocks=kv.num_blocks)
    placement = loaded.kernels.placement
    Shard(model, kv, LocalBlocks(kv, size.num_host_blocks), group, head, placement).serve(line)


def _measured(part: ModelPart, profile: MemoryProfile) -> Answer:
    try:
        return Answer(memory=part.measure(profile))
    except Exception as error:  # noqa: BLE001 - as above
        return Answer(failure=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])))
    except (GroupBroken, RankLost) as error:
        sys.exit(f"Error: {error}")
    except (EOFError, OSError):
        pass  # rank 0 is gone, and has said why
