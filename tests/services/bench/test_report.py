"""The report as people see it, letter by letter."""

import math
from dataclasses import replace

from outcomes import answered, failed, interrupted

from services.bench.figures import Level, figures_of, spread_of
from services.bench.objectives import parse_objective
from services.bench.report import full_report, row, row_heads, warnings_of

LEVEL = Level(
    "2 requests/s",
    2.0,
    began_s=0.0,
    outcomes=(
        answered(0, 0.5, [1.0, 1.25, 2.0], arrival_s=0.5, queue_ms=5.0),
        answered(1, 1.0, [3.0], arrival_s=0.75),
        failed(2, 1.5, 1.625, "RESOURCE_EXHAUSTED", "the queue is full"),
        failed(3, 1.5, 4.0, "UNAVAILABLE"),
    ),
    num_cut=3,
    num_skipped=4,
    client_cpu_s=0.002,
)

FULL = """\
load                  2 requests/s, for 4.0 s
requests              2 ok, 1 rejected, 1 UNAVAILABLE; 0.50/s, 4 at once at most
prompt tokens         200, 50 of them cached; 50.0/s
output tokens         4; 1.0/s
goodput               0.25/s, 25% of all, within ttft:500
                            mean       p50       p90       p95       p99       max
TTFT, ms                   1,250     1,250     1,850     1,925     1,985     2,000
TPOT, ms                  500.00    500.00    500.00    500.00    500.00    500.00
ITL, ms                   500.00    500.00    700.00    725.00    745.00    750.00
end to end, ms             1,750     1,750     1,950     1,975     1,995     2,000
in the queue, ms            3.00      3.00      4.60      4.80      4.96      5.00
sent late by, ms          125.00    125.00    225.00    237.50    247.50    250.00
this client           0.00 cores, 500 us for each output token"""

HEADS = (
    "load                        ok failed   req/s out tok/s  TTFT p50   p99 ms  TPOT p50   p99 ms  ITL p99   e2e p99  good/s"
)
ROW = "2 requests/s                 2      2    0.50       1.0    1250.0   1985.0     500.0    500.0    745.0    1995.0    0.25"


def test_one_level_in_full() -> None:
    assert full_report(figures_of(LEVEL, [parse_objective("ttft:500")]), "ttft:500") == FULL


def test_what_was_not_measured_has_no_line() -> None:
    text = full_report(figures_of(Level("8 at once", 8, 0.0, [interrupted(index, 0.0, 1.5) for index in range(8)])))
    assert "for 1.5 s" in text and "0 ok, 8 interrupted; 0.00/s, 8 at once at most" in text
    assert not any(name in text for name in ("TTFT", "goodput", "sent late", "retries", "made room"))


def test_a_row_for_each_of_several() -> None:
    assert (row_heads(), row(figures_of(LEVEL, [parse_objective("ttft:500")]))) == (HEADS, ROW)
    assert row(figures_of(Level("x", 1, 0.0, ()))).split() == ["x", "0", "0", "0.00", "0.0", *"-------"]


def test_what_makes_figures_other_than_they_seem_is_said() -> None:
    assert list(warnings_of(figures_of(LEVEL))) == [
        "3 requests were cut to what the model has room for",
        "4 requests were left out, being longer than the model has room for",
        "the first UNAVAILABLE said nothing",
        "the first rejected said: the queue is full",
        "this client sent late (p99 248 ms): the load was not what was asked for; give it a core of its own, or share the rate between several",
    ]


def test_all_at_once_cannot_be_late() -> None:
    figures = replace(figures_of(LEVEL), num_cut=0, num_skipped=0, messages={}, load_value=math.inf)
    assert figures.lag_ms is not None and list(warnings_of(figures)) == []


def test_a_client_that_is_the_bottleneck_is_said() -> None:
    figures = replace(figures_of(LEVEL), num_cut=0, num_skipped=0, messages={}, lag_ms=spread_of([1.0, 2.0]))
    assert list(warnings_of(figures)) == []
    (warning,) = warnings_of(replace(figures, client_cpu=0.95))
    assert warning.startswith("this client computed on 0.95 cores")
