"""Files of tensors: a full disk is the system's error, whichever library writes."""

import errno
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.core.files import replacing
from fedsim.core.sparse_file import write_sparse
from fedsim.core.tensor_file import write_tensors

TENSORS = {"generator.a": torch.arange(1000.0)}


@contextmanager
def little_space():
    """A process that may write 512 bytes to a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


WRITERS = {
    "plain": lambda path: write_tensors(path, TENSORS, {}),
    "sparse": lambda path: write_sparse(TENSORS, [], path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(name, tmp_path):
    def write():
        with little_space(), replacing(tmp_path / "file") as partial:
            WRITERS[name](partial)

    with pytest.raises(OSError, match="File too large") as refusal:
        write()
    assert refusal.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_no_other_room_writes_such_files_itself():
    """The library's class of errors would end as a traceback."""
    source = Path(fedsim.__file__).parent
    writers = {str(path.relative_to(source)) for path in source.rglob("*.py") if "import save_file" in path.read_text()}
    assert writers == {"core/tensor_file.py"}
