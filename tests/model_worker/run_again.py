"""A recorder for a device without graphs: to replay is to run again."""

from collections.abc import Callable

from model_worker.graphs.recorder import Replay


class RunAgain:
    """See `Recorder`. `num_recorded` and `num_replays` count."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay
