"""One data folder, one holder."""

from pathlib import Path

import pytest

from services.cli.data_folder import DataFolder, DataFolderInUse


def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    with folder.lock(), pytest.raises(DataFolderInUse, match=r"in use by another `tessera up` \(process \d+\)"):
        folder.lock()
    folder.lock().close()  # free again


def test_everything_lies_below_the_folder(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.lock().close()
    for path in (folder.redis, folder.log("worker").parent, folder.ready_file("worker").parent):
        assert path.is_dir() and tmp_path in path.parents
