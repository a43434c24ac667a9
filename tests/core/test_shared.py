"""Files that processes of a machine share: the counter, tensors of clients, arrays that one fills and all map."""

import os
import resource

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.core.shared import Counter, is_roomy, memory_folder, shared_array
from fedsim.core.store import STORABLE, FileStore, make_store


def in_processes(count, act):
    """Call ``act(number)`` in processes of their own; all must end well."""
    children = []
    for number in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                act(number)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * count


# -- the counter -------------------------------------------------------------------------------------------------------


def test_processes_that_count_together_get_each_number_once(tmp_path):
    def count(number):
        counter = Counter(tmp_path / "counter")
        np.save(tmp_path / f"{number}.npy", [counter.take(1) for _ in range(500)])

    in_processes(3, count)
    taken = np.concatenate([np.load(tmp_path / f"{number}.npy") for number in range(3)])
    assert sorted(taken) == list(range(1500))


def test_a_deal_begins_at_zero_and_ends_the_one_before(tmp_path):
    a, b = (Counter(tmp_path / "counter") for _ in range(2))
    assert [a.take(1), b.take(1), b.take(2), b.take(2)] == [0, 1, 0, 1]
    assert a.take(1) > 10**9  # late: nothing of it is left
    assert a.take(2) == 2


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path):
    """Two views of one file, which has no name any more."""
    path = tmp_path / "states"
    both = [FileStore(path, ["a", "b", "c"]) for _ in range(2)]
    path.unlink()
    return both


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_others_read_what_one_has_written(stores):
    one, other = stores
    assert other.read("a") == {}
    states = {name: {"state": torch.randn(5), "kept.n": torch.tensor(k)} for k, name in enumerate("abc")}
    for name in "cab":
        one.write(name, states[name])
    for name in "abc":
        assert_same(other.read(name), states[name])
    other.write("b", {"state": torch.arange(5.0), "kept.n": torch.tensor(9)})
    assert_same(one.read("b"), {"state": torch.arange(5.0), "kept.n": torch.tensor(9)})
    assert_same(one.read("c"), states["c"])


def test_a_client_may_change_its_layout(stores):
    one, other = stores
    for tensors in (
        {"state": torch.randn(4)},
        {"state": torch.randn(4), "mask": torch.rand(7) > 0.5},
        {"state": torch.randn(3, 2), "mask": torch.rand(7) > 0.5},
        {"mask": torch.zeros(0, dtype=torch.bool)},
        {},
        {"state": torch.randn(4)},
    ):
        one.write("b", tensors)
        one.write("c", {"state": torch.ones(2)})
        assert_same(other.read("b"), tensors)
        assert_same(other.read("c"), {"state": torch.ones(2)})


@pytest.mark.parametrize("dtype", STORABLE)
def test_every_storable_type_comes_back(stores, dtype):
    tensor = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    stores[0].write("a", {"x": tensor, "part": tensor[:, 1]})  # a view that is not contiguous
    assert_same(stores[1].read("a"), {"x": tensor, "part": tensor[:, 1]})


def test_what_is_read_is_a_copy(stores):
    stores[0].write("a", {"x": torch.zeros(3)})
    stores[0].read("a")["x"].add_(1)
    assert_same(stores[1].read("a"), {"x": torch.zeros(3)})


def test_tensors_that_stay_alike_take_no_more_room(tmp_path):
    store = FileStore(tmp_path / "states", ["a"])
    for value in range(5):
        store.write("a", {"x": torch.full((100,), float(value))})
        if value == 0:
            size = (tmp_path / "states").stat().st_size
    assert (tmp_path / "states").stat().st_size == size


def test_tensors_whose_number_changes_in_each_round_find_room_again(tmp_path):
    store, sizes = FileStore(tmp_path / "states", ["a"]), []
    for turn in range(60):
        clusters = 80 + turn * 37 % 40  # 80 to 119
        store.write("a", {"centroids": torch.zeros(clusters, 4), "labels": torch.zeros(clusters * 3).bool()})
        sizes.append((tmp_path / "states").stat().st_size)
    assert sizes[-1] == sizes[39]
    assert sizes[-1] < 6 * (119 * 16 + 119 * 3)


def test_a_store_on_disk_has_no_name():
    store = make_store("disk", torch.device("cpu"), ["a", "b"])
    store.write("b", {"x": torch.arange(4.0)})
    assert_same(store.read("b"), {"x": torch.arange(4.0)})
    assert not store._path.parent.exists()


def test_processes_that_write_at_once_do_not_get_the_same_room(tmp_path):
    names = [f"client{k}" for k in range(90)]

    def value(name, turn):
        return {"x": torch.full((17 + turn,), float(names.index(name)))}  # a new layout each time

    def write(number):
        store = FileStore(tmp_path / "states", names)
        for turn in range(4):
            for name in names[number::3]:
                store.write(name, value(name, turn))

    in_processes(3, write)
    store = FileStore(tmp_path / "states", names)
    for name in names:
        assert_same(store.read(name), value(name, 3))


def test_a_full_file_system_is_named_with_the_client(tmp_path):
    def fill(number):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        store = FileStore(tmp_path / "states", ["a"])
        with pytest.raises(ConfigError, match=r"^model.client_store: no room for the private tensors of a in "):
            store.write("a", {"x": torch.zeros(10_000)})

    in_processes(1, fill)


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_one_fills_an_array_and_others_map_it(tmp_path):
    with shared_array(tmp_path, "town0 (8, 4)", (3, 2)) as (mine, is_new):
        assert is_new
        mine.copy_(torch.arange(6).view(3, 2))
        with shared_array(tmp_path, "town1 (8, 4)", (3, 2)) as (_, is_new):
            assert is_new
    with shared_array(tmp_path, "town0 (8, 4)", (3, 2)) as (its, is_new):
        assert not is_new
    for path in tmp_path.iterdir():
        path.unlink()
    assert its.tolist() == mine.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_an_array_that_could_not_be_filled_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="damaged"), shared_array(tmp_path, "x", (2,)):
        raise ValueError("damaged image")
    with shared_array(tmp_path, "x", (2,)) as (_, is_new):
        assert is_new


def test_without_room_everybody_has_an_array_of_its_own(tmp_path):
    def fill(number):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for _ in range(2):
            with shared_array(tmp_path, "x", (20_000,)) as (pixels, is_new):
                assert is_new
                pixels.fill_(7)

    in_processes(1, fill)
    assert list(tmp_path.iterdir()) == []


def test_room_is_wanted_twice():
    free = os.statvfs(memory_folder())
    assert is_roomy(0)
    assert not is_roomy(free.f_bavail * free.f_frsize)
