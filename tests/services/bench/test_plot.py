"""Pictures of benchmarks: they are there, of a size to read, and show what they are given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib import image
from outcomes import answered, failed

from services.bench.figures import Figures, Level, figures_of
from services.bench.objectives import parse_objective
from services.bench.plot import draw_curve, draw_level


def level(load: float, count: int = 30, slowness: float = 1.0) -> Level:
    outcomes = [
        answered(index, sent := 0.1 * index, [sent + slowness * (0.1 + 0.02 * piece) for piece in range(1 + index % 7)])
        for index in range(count)
    ]
    return Level(f"{load:g} requests/s", load, 0.0, [*outcomes, failed(count, 0.5, 0.7, "UNAVAILABLE")])


def curve(slowness: float = 1.0) -> list[Figures]:
    return [figures_of(level(load, slowness=slowness * load), [parse_objective("ttft:200")]) for load in (1.0, 4.0, 16.0)]


DRAWINGS: dict[str, Callable[[float, Path], None]] = {
    "curve of rates": lambda slowness, path: draw_curve(curve(slowness), "m: 100 in", "requests per second, offered", path),
    "curve of concurrencies": lambda slowness, path: draw_curve(curve(slowness), "m: 100 in", "requests at once", path),
    "one level": lambda slowness, path: draw_level(level(2.0, slowness=slowness), "m: 100 in", path),
}


def pixels(path: Path) -> np.ndarray:
    read: np.ndarray = image.imread(path)
    return read[..., :3]


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_has_a_readable_size_and_shows_its_values(name: str, tmp_path: Path) -> None:
    DRAWINGS[name](1.0, tmp_path / "one.png")
    DRAWINGS[name](3.0, tmp_path / "slower.png")
    one, slower = pixels(tmp_path / "one.png"), pixels(tmp_path / "slower.png")
    height, width, _ = one.shape
    assert width >= 1500 and height >= 1000
    inked = (one < 0.9).any(axis=2)
    assert 0.01 < inked.mean() < 0.5
    quarters = [part for half in np.array_split(inked, 2) for part in np.array_split(half, 2, axis=1)]
    assert all(part.mean() > 0.005 for part in quarters), "no part of it is blank"
    assert (one != slower).mean() > 0.001, "other values look otherwise"


def test_objectives_are_lines(tmp_path: Path) -> None:
    draw_curve(curve(), "m", "requests at once", tmp_path / "without.png")
    draw_curve(
        curve(), "m", "requests at once", tmp_path / "with.png", [parse_objective("ttft:300"), parse_objective("tpot:40")]
    )
    without, with_lines = pixels(tmp_path / "without.png"), pixels(tmp_path / "with.png")
    upper, lower = np.array_split((without != with_lines).any(axis=2), 2)
    assert all(half.sum() > 500 for half in np.array_split(upper, 2, axis=1)) and not lower[50:].any()


@pytest.mark.parametrize(
    "outcomes",
    [
        (),
        (failed(0, 0.0, 1.0, "UNAVAILABLE"),),
        (answered(0, 0.0, [1.0]),),
        (answered(0, 0.0, [1.0, 1.0, 1.0]),),
        tuple(answered(index, 0.0, [0.001 * 4**index, 20.0]) for index in range(7)),
    ],
)
def test_hardly_anything_and_long_tails_can_be_drawn_too(outcomes: tuple, tmp_path: Path) -> None:
    few = Level("1 at once", 1, 0.0, outcomes)
    draw_level(few, "m", tmp_path / "level.png")
    draw_curve([figures_of(few), figures_of(level(2.0))], "m", "requests at once", tmp_path / "curve.png")
    assert pixels(tmp_path / "level.png").std() > 0 and pixels(tmp_path / "curve.png").std() > 0
