"""A whole system of simulated processes, a plan of faults, and what must hold once it has come to rest."""

from dataclasses import dataclass, replace

from tessera.values.config import Config
from tests.simulation.client_actor import Manner, SimClient
from tests.simulation.faults import Fault, strike
from tests.simulation.gateway_actor import SimGateway, session_clock
from tests.simulation.oracle import Oracle
from tests.simulation.plans import draw_faults
from tests.simulation.scheduler_actor import SimScheduler
from tests.simulation.store_actor import SimStore
from tests.simulation.worker_actor import SimWorker
from tests.simulation.workload import draw_ask, draw_prompts, expected_answer, model_output, with_logprobs
from tests.simulation.world import Violation, World

SECOND = 1_000_000
ARRIVALS_BEGIN, ARRIVALS_END = 2_500_000, 6_500_000
FAULTS_BEGIN = 2_800_000
"""The first leader waits for two lease times, since the store is empty."""

CALM_MAX = 60 * SECOND
"""So long after the last fault and the last arrival everything must be done."""

LOOK_EVERY = 50_000

CONFIG = Config(
    max_num_seqs=6,
    max_num_batched_tokens=24,
    gateway_grace_ms=8_000,
    result_retention_ms=2_500,
    journal_wait_ms=100,
    journal_backlog_max=40,
)

SWAPPING = {"preemption_mode": "swap", "preemption_policy": "shortest_remaining"}


@dataclass(frozen=True)
class Outcome:
    """How a run went. `failure` is None where everything held."""

    seed: int
    failure: str | None
    faults: tuple[Fault, ...]
    simulated_s: float
    num_events: int
    num_requests: int
    num_takeovers: int
    num_recomputed: int
    num_swap_outs: int
    num_untold: int
    transcript: list[str]


class System:
    """Built from a seed, with the faults of a plan. `swaps`: who has to make room is swapped out. `logprobs`: clients ask for
    log-probabilities."""

    def __init__(self, seed: int, plan: str, is_traced: bool = False, swaps: bool = False, logprobs: bool = False) -> None:
        self.world = World(seed, is_traced)
        rng = self.world.rng
        self.faults = draw_faults(rng, plan, FAULTS_BEGIN)
        is_strict = all(fault.spares_workers_and_store for fault in self.faults)
        self.oracle = Oracle(self.world, is_strict)
        self.store = SimStore(self.world)
        num_blocks = rng.choice((17, 18, 20, 28))
        self.workers = [
            SimWorker(self.world, f"worker-{index}", num_blocks, self.oracle, 16 if swaps else 0)
            for index in range(rng.choice((1, 2)))
        ]
        config = replace(CONFIG, **SWAPPING) if swaps else CONFIG
        names = [worker.name for worker in self.workers]
        self.schedulers = [
            SimScheduler(self.world, f"scheduler-{index}", names, config, self.oracle) for index in range(rng.choice((2, 2, 3)))
        ]
        detach_grace_ms = rng.choice((0, 3000))
        scheduler_names = [scheduler.name for scheduler in self.schedulers]
        self.gateways = [SimGateway(self.world, f"gateway-{index}", scheduler_names, detach_grace_ms) for index in range(2)]
        self.clients = []
        beginnings = draw_prompts(rng)
        manners = (
            [Manner.RESUMES] * 5
            + [Manner.RETRIES, Manner.CANCELS, Manner.ABORTS]
            + ([Manner.LEAVES] if detach_grace_ms else [])
        )
        for number in range(rng.randint(8, 20)):
            ask = draw_ask(rng, number, beginnings)
            if logprobs:
                ask = with_logprobs(ask, number)
            expected = expected_answer(ask, num_blocks * 4)
            self.oracle.expects(ask.client_request_id, model_output(ask, num_blocks * 4)[0])
            client = SimClient(self.world, ask, expected, rng.choice(manners), self.gateways, may_detach=detach_grace_ms > 0)
            self.clients.append(client)
            client.later(rng.randrange(ARRIVALS_BEGIN, ARRIVALS_END), client.start)
        for fault in self.faults:
            self.world.schedule(fault.at, None, None, lambda fault=fault: strike(fault, self))

    def run(self) -> None:
        """Raises whatever broke."""
        last = max([ARRIVALS_END, *(fault.ends_at for fault in self.faults)])
        self._until(self._is_answered, last + CALM_MAX, "not every client has its answer")
        self._until(lambda: self.world.now >= last, last + CALM_MAX, "")
        rest = self.world.now + CALM_MAX
        self._until(self._is_bare, rest, "something is left")
        self.check_rest()

    def check_rest(self) -> None:
        """Nothing is left of anything, and all parts tell one story."""
        leaders = [scheduler.term.leader for scheduler in self.schedulers if scheduler.term is not None]
        assert len(leaders) == 1 and leaders[0] is not None, f"{len(leaders)} lead"
        leaders[0].scheduler.check_integrity()

    def _is_answered(self) -> bool:
        return all(client.is_done for client in self.clients)

    def _is_bare(self) -> bool:
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        """What is still held anywhere, in words."""
        left = [f"{gateway.name} has {gateway.num_live} requests" for gateway in self.gateways if gateway.num_live]
        terms = [scheduler.term for scheduler in self.schedulers if scheduler.term is not None]
        if len(terms) != 1 or terms[0].leader is None:
            return [*left, f"{len(terms)} terms"]
        scheduler = terms[0].leader.scheduler
        load = scheduler.load()
        requests = [
            (sequence.request_id.hex()[:4], sequence.status.value, sequence.output_len) for sequence in scheduler.requests()
        ]
        if requests:
            left.append(f"requests {requests}")
        if load.num_free_blocks != load.num_blocks:
            left.append(f"{load.num_blocks - load.num_free_blocks} blocks are held")
        held = [(worker.name, slot) for worker in self.workers for slot in worker.machine.slots]
        if held:
            left.append(f"slots {held} are held")
        if not self.store.memory.is_bare:
            left.append("the store is not bare")
        if not terms[0].leader.is_written:
            left.append("the journal is not acknowledged")
        return left

    def _until(self, is_over: object, deadline: int, complaint: str) -> None:
        assert callable(is_over)
        if not is_over():
            self.world.schedule(deadline, None, None, lambda: None)
            self.world.run(lambda: self.world.now >= deadline or is_over(), LOOK_EVERY)
        if not is_over():
            waiting = [client.name for client in self.clients if not client.is_done]
            raise Violation(f"{complaint}: {self.leftovers()}, waiting: {waiting}")


def simulate(seed: int, plan: str, is_traced: bool = False, swaps: bool = False, logprobs: bool = False) -> Outcome:
    """One run from its seed to its rest."""
    system = System(seed, plan, is_traced, swaps, logprobs)
    failure = None
    try:
        with session_clock(system.world):
            system.run()
    except Exception as error:  # noqa: BLE001 - whatever breaks is the finding
        failure = _described(error)
    world = system.world
    return Outcome(
        seed=seed,
        failure=failure,
        faults=system.faults,
        simulated_s=world.now / SECOND,
        num_events=world.num_events,
        num_requests=len(system.clients),
        num_takeovers=system.oracle.num_takeovers,
        num_recomputed=system.oracle.num_recomputed,
        num_swap_outs=sum(worker.machine.num_swap_outs for worker in system.workers),
        num_untold=sum(client.num_untold for client in system.clients),
        transcript=world.transcript or [],
    )


def _described(error: Exception) -> str:
    """Kind, text and place of an error, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace is not None else "?"
    text = str(error) or "assertion"
    return f"{type(error).__name__} at {place}: {text}"
