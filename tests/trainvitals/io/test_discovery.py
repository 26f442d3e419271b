"""Files in a run's directory in shared memory, by which a rank and its agent find each other."""

import pytest

from trainvitals.io.discovery import NOTICE_FILE, write_notice


def test_a_notice_that_cannot_be_written_leaves_no_temporary_file(tmp_path):
    (tmp_path / NOTICE_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        write_notice(tmp_path, "rows were dropped")
    assert [NOTICE_FILE] == [path.name for path in tmp_path.iterdir()]
