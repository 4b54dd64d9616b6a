"""Files of JSON lines that long commands continue: whole lines only, one process at a time, and errors with a name.

.venv/bin/python -m pytest tests/test_growing_file.py
"""

import resource

import pytest

from hyperdflash.common.growing_file import GrowingFile


class Rows(GrowingFile):
    def __init__(self, path):
        super().__init__(path)
        self.found = []

    def take(self, row, start):
        self.found.append((row["id"], start))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Rows(path) as rows:
        for i in range(3):
            rows.append({"id": i, "text": "\u2028"})
    return path


@pytest.mark.parametrize("cut", [0, 1, 10])
def test_lines_that_are_whole_are_there_again_and_a_torn_one_is_not(path, cut):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[: -cut or None])
    with Rows(path) as rows:
        left = [0, 1] if cut else [0, 1, 2]
        assert rows.found == [(i, i * len(lines[0])) for i in left]
        assert path.read_bytes() == b"".join(lines[: len(left)])
        rows.append({"id": 7})
    assert path.read_bytes() == b"".join(lines[: len(left)]) + b'{"id": 7}\n'


def test_one_process_at_a_time_holds_the_file(path):
    with Rows(path), pytest.raises(OSError, match=r"another run is writing to .*rows\.jsonl"), Rows(path):
        pass
    with Rows(path):
        pass


@pytest.mark.parametrize("line", ["{", "[]", "{}", "3", "null", "\xff"])
def test_a_broken_line_is_named_and_the_file_is_free_again(path, line):
    content = path.read_bytes()
    path.write_bytes(content + line.encode("latin-1") + b"\n" + content)
    for _ in range(2):  # the first did not keep the lock
        with pytest.raises(ValueError, match=r"rows\.jsonl:4 is broken: remove the line"):
            Rows(path).__enter__()
    path.write_bytes(content)
    with Rows(path) as rows:
        assert len(rows.found) == 3


def test_a_full_disk_is_named_and_costs_no_whole_line(path):
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with (
            pytest.raises(OSError, match=r"rows\.jsonl cannot be written \(File too large\): make room"),
            Rows(path) as rows,
        ):
            rows.append({"id": 3, "text": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes().startswith(before)
    with Rows(path) as rows:
        assert [i for i, _ in rows.found] == [0, 1, 2]
    assert path.read_bytes() == before
