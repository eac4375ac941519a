"""Everything that happens to a cluster in a chaos run, one small function each. After it the cluster must be whole again."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.stage import Stage
from tests.system.role_process import RoleProcess

FREEZE_S = 10.0
CUT_S = 5.0
FULL_S = 5.0
SETTLE_S = 1.5
"""Between two graceful restarts of workers: time to take up load again."""

KILL_BUDGET_S = 3.0
FREEZE_BUDGET_S = 5.0
GRACEFUL_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """`act` does it, and returns when every process serves again. `pause_budget_s` bounds the 99th percentile of the streams' pauses."""

    name: str
    act: Callable[[Stage, random.Random], None]
    pause_budget_s: float | None = None
    is_scheduler_kill: bool = False
    loses_worker: bool = False  # what it held is computed again
    in_quick: bool = False  # one of those that `make chaos QUICK=1` runs

    @property
    def about(self) -> str:
        """One line for people."""
        return (self.act.__doc__ or "").strip().splitlines()[0]


# -- kill -9


def kill_gateway(stage: Stage, _: random.Random) -> None:
    """kill -9 of a gateway: its clients resume at the other one."""
    victim = stage.cluster.gateways[0]
    stage.kill(victim)
    stage.restart(victim)


def kill_leader(stage: Stage, _: random.Random) -> None:
    """kill -9 of the leading scheduler: the standby takes over."""
    victim = stage.cluster.leader()
    stage.kill(victim)
    leader = stage.cluster.leader()
    stage.say(f"{leader.name} leads")
    stage.restart(victim)


def kill_standby(stage: Stage, _: random.Random) -> None:
    """kill -9 of the standby: nothing happens."""
    victim = stage.cluster.standby()
    stage.kill(victim)
    stage.restart(victim)


def kill_worker(stage: Stage, _: random.Random) -> None:
    """kill -9 of a worker: its requests go on at the other one."""
    victim = stage.cluster.workers[0]
    stage.kill(victim)
    stage.restart(victim)


def kill_redis(stage: Stage, _: random.Random) -> None:
    """kill -9 of Redis, restarted on its file after two seconds."""
    stage.kill_redis()
    stage.pass_time(2.0)
    stage.start_redis()


def kill_leader_and_worker(stage: Stage, _: random.Random) -> None:
    """kill -9 of the leader and a worker at the same moment."""
    leader, worker = stage.cluster.leader(), stage.cluster.workers[1]
    stage.kill(leader)
    stage.kill(worker)
    stage.cluster.leader()
    stage.restart(leader)
    stage.restart(worker)


def kill_everything(stage: Stage, _: random.Random) -> None:
    """kill -9 of every process, Redis too; all are started again, only clients remember."""
    for process in stage.cluster.processes:
        stage.kill(process)
    stage.kill_redis()
    stage.start_redis()
    for process in stage.cluster.processes:
        process.start()
    stage.cluster.wait_ready()


# -- SIGSTOP, SIGCONT


def freeze_gateway(stage: Stage, _: random.Random) -> None:
    """A gateway is stopped for ten seconds and goes on."""
    with stage.frozen(stage.cluster.gateways[0]):
        stage.pass_time(FREEZE_S)


def freeze_leader(stage: Stage, _: random.Random) -> None:
    """The leader is stopped for ten seconds and goes on in a world that has another one."""
    with stage.frozen(stage.cluster.leader()):
        stage.pass_time(FREEZE_S)


def freeze_standby(stage: Stage, _: random.Random) -> None:
    """The standby is stopped for ten seconds and goes on."""
    with stage.frozen(stage.cluster.standby()):
        stage.pass_time(FREEZE_S)


def freeze_worker(stage: Stage, _: random.Random) -> None:
    """A worker is stopped for ten seconds; its late output must count for nothing."""
    with stage.frozen(stage.cluster.workers[0]):
        stage.pass_time(FREEZE_S)


def freeze_redis(stage: Stage, _: random.Random) -> None:
    """Redis is paused for ten seconds: serving goes on without it."""
    with stage.redis_frozen():
        stage.pass_time(FREEZE_S)


# -- the network


def _cut(stage: Stage, *links: str) -> None:
    with stage.cut(*links):
        stage.pass_time(CUT_S)


def cut_client_gateway(stage: Stage, _: random.Random) -> None:
    """Nothing passes between the clients and a gateway for five seconds."""
    _cut(stage, f"client-{stage.cluster.gateways[0].name}")


def cut_gateway_leader(stage: Stage, _: random.Random) -> None:
    """Nothing passes between a gateway and the leader for five seconds."""
    _cut(stage, f"{stage.cluster.gateways[0].name}-{stage.cluster.leader().name}")


def cut_gateway_standby(stage: Stage, _: random.Random) -> None:
    """Nothing passes between a gateway and the standby for five seconds."""
    _cut(stage, f"{stage.cluster.gateways[0].name}-{stage.cluster.standby().name}")


def cut_scheduler_worker(stage: Stage, _: random.Random) -> None:
    """Nothing passes between the schedulers and a worker for five seconds."""
    _cut(stage, f"scheduler-{stage.cluster.workers[0].name}")


def cut_leader_redis(stage: Stage, _: random.Random) -> None:
    """Nothing passes between the leader and Redis for five seconds: the standby sees the lease end."""
    _cut(stage, f"{stage.cluster.leader().name}-redis")


def cut_standby_redis(stage: Stage, _: random.Random) -> None:
    """Nothing passes between the standby and Redis for five seconds."""
    _cut(stage, f"{stage.cluster.standby().name}-redis")


def cut_all_redis(stage: Stage, _: random.Random) -> None:
    """Nothing passes between Redis and anybody for five seconds."""
    _cut(stage, *(f"{scheduler.name}-redis" for scheduler in stage.cluster.schedulers))


def reset_links(stage: Stage, _: random.Random) -> None:
    """Every connection of the cluster breaks, one link after the other."""
    for link in stage.cluster.link_names:
        stage.reset(link)
        stage.pass_time(0.3)


def slow_links(stage: Stage, _: random.Random) -> None:
    """Every link is 50 ms slower for five seconds."""
    with stage.slow(50, *stage.cluster.link_names):
        stage.pass_time(CUT_S)


# -- Redis


def redis_empty(stage: Stage, _: random.Random) -> None:
    """kill -9 of Redis, restarted without its file."""
    stage.kill_redis()
    stage.cluster.empty_redis()
    stage.start_redis()
    stage.pass_time(3.0)


def redis_empty_and_leader_killed(stage: Stage, rng: random.Random) -> None:
    """Redis loses everything; when its state is whole again, the leader is killed."""
    redis_empty(stage, rng)
    kill_leader(stage, rng)


def redis_full(stage: Stage, _: random.Random) -> None:
    """Redis refuses every write for want of memory, for five seconds."""
    with stage.redis_full():
        stage.pass_time(FULL_S)


# -- graceful


def restart_gateways(stage: Stage, _: random.Random) -> None:
    """SIGTERM and a new start of each gateway in turn."""
    for gateway in stage.cluster.gateways:
        stage.terminate(gateway)
        stage.restart(gateway)


def restart_schedulers(stage: Stage, _: random.Random) -> None:
    """SIGTERM and a new start of each scheduler in turn, the leader first."""
    leader = stage.cluster.leader()
    for scheduler in sorted(stage.cluster.schedulers, key=lambda scheduler: scheduler is not leader):
        stage.terminate(scheduler)
        stage.cluster.leader()
        stage.restart(scheduler)


def restart_workers(stage: Stage, _: random.Random) -> None:
    """SIGTERM and a new start of each worker in turn."""
    for worker in stage.cluster.workers:
        stage.terminate(worker)
        stage.restart(worker)
        stage.pass_time(SETTLE_S)


def restart_redis(stage: Stage, _: random.Random) -> None:
    """A graceful stop of Redis, and a new start on its file."""
    stage.fault("SIGTERM redis")
    stage.cluster.redis.stop()
    stage.start_redis()


# -- many


def random_kills(stage: Stage, rng: random.Random) -> None:
    """100 times kill -9 at random moments of whatever role, restarted at once; while one of a role is down, its twin is spared."""
    cluster, count = stage.cluster, stage.random_kills
    for number in range(1, count + 1):
        stage.pass_time(rng.uniform(0.05, 1.0))
        group = rng.choice([cluster.gateways, cluster.schedulers, cluster.workers, None])
        if group is None:
            stage.kill_redis()
            stage.pass_time(rng.uniform(0.0, 1.0))
            stage.start_redis()
        else:
            stage.wait(f"every {group[0].command[0]} serving", lambda group=group: all(map(_serves, group)))
            victim = rng.choice(group)
            stage.kill(victim)
            victim.start()
        progress = stage.load.progress()
        stage.say(f"kill {number} of {count}; {progress.finished} of {progress.started} streams over")
    cluster.wait_ready()


def _serves(process: RoleProcess) -> bool:
    return process.is_running and process.ready_file.exists()


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("kill-gateway", kill_gateway, KILL_BUDGET_S, in_quick=True),
        Scenario("kill-leader", kill_leader, KILL_BUDGET_S, is_scheduler_kill=True, in_quick=True),
        Scenario("kill-standby", kill_standby, KILL_BUDGET_S, is_scheduler_kill=True, in_quick=True),
        Scenario("kill-worker", kill_worker, KILL_BUDGET_S, loses_worker=True, in_quick=True),
        Scenario("kill-redis", kill_redis, KILL_BUDGET_S, in_quick=True),
        Scenario("kill-leader-and-worker", kill_leader_and_worker, loses_worker=True),
        Scenario("kill-everything", kill_everything),
        Scenario("freeze-gateway", freeze_gateway, FREEZE_BUDGET_S),
        Scenario("freeze-leader", freeze_leader, FREEZE_BUDGET_S),
        Scenario("freeze-standby", freeze_standby, FREEZE_BUDGET_S),
        Scenario("freeze-worker", freeze_worker, FREEZE_BUDGET_S, loses_worker=True),
        Scenario("freeze-redis", freeze_redis, FREEZE_BUDGET_S),
        Scenario("cut-client-gateway", cut_client_gateway),
        Scenario("cut-gateway-leader", cut_gateway_leader),
        Scenario("cut-gateway-standby", cut_gateway_standby),
        Scenario("cut-scheduler-worker", cut_scheduler_worker, loses_worker=True),
        Scenario("cut-leader-redis", cut_leader_redis),
        Scenario("cut-standby-redis", cut_standby_redis),
        Scenario("cut-all-redis", cut_all_redis),
        Scenario("reset-links", reset_links),
        Scenario("slow-links", slow_links),
        Scenario("redis-empty", redis_empty),
        Scenario("redis-empty-then-kill-leader", redis_empty_and_leader_killed, is_scheduler_kill=True),
        Scenario("redis-full", redis_full),
        Scenario("restart-gateways", restart_gateways, GRACEFUL_BUDGET_S),
        Scenario("restart-schedulers", restart_schedulers, GRACEFUL_BUDGET_S, is_scheduler_kill=True),
        Scenario("restart-workers", restart_workers, GRACEFUL_BUDGET_S, loses_worker=True),
        Scenario("restart-redis", restart_redis, GRACEFUL_BUDGET_S),
        Scenario("random-kills", random_kills),
    )
}
