"""The identity of a run: contents of files and of the user's code, without any of it being executed."""

import sys
from importlib.util import spec_from_file_location

import pytest

from fedsim.settings.identity import changed_content, digest_of_config, identity_of


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of the user's, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place, **files):
    """Write modules by their names, in which ``__`` stands for a dot, and ``INIT`` for a package's own file."""
    for name, text in files.items():
        path = (place / name.replace("__", "/").replace("INIT", "__init__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def config_with(*paths, **data):
    callbacks = [{"class_path": path, "init_args": {}} for path in paths]
    return {"trainer": {"callbacks": callbacks}, "model": {}, "data": data}


def test_the_content_of_a_file_counts_and_not_its_place(place):
    (place / "a.csv").write_text("1")
    (place / "b.csv").write_text("1")
    one, same = (identity_of(config_with(manifest=str(place / f"{name}.csv")))["files"] for name in "ab")
    assert [*one] == ["data.manifest"]
    assert one == same
    (place / "b.csv").write_text("2")
    assert identity_of(config_with(manifest="b.csv"))["files"] != one
    assert identity_of(config_with(manifest="none.csv"))["files"] == {}
    weights = {"class_path": "fedsim.models.ResNet", "init_args": {"weights": "a.csv"}}
    assert identity_of({"model": {"backbone": weights}})["files"] == {"model.backbone.weights": one["data.manifest"]}
    weights["init_args"]["weights"] = "IMAGENET1K_V1"
    assert identity_of({"model": {"backbone": weights}})["files"] == {}


def test_the_users_code_and_all_that_it_imports_counts(place):
    own = "import helper\nfrom pack import inner\nfrom pack.deep import X\nimport torch, json\n"
    write(
        place, mine=own, helper="A = 1", pack__inner="B = 1", pack__near="C = 1", pack__further="Y = 1", other="D = 1"
    )
    write(place, pack__deep="from . import near\nfrom .further import Y\nX = 1")
    (place / "pack" / "__init__.py").write_text("from pack import later\n")
    write(place, pack__later="Z = 1")
    first = identity_of(config_with("mine.Callback"))["code"]
    assert [*first] == ["mine"]
    for name in ("mine", "helper", "pack__inner", "pack__deep", "pack__near", "pack__further", "pack__later"):
        path = (place / name.replace("__", "/")).with_suffix(".py")
        text = path.read_text()
        path.write_text(text + "\nE = 2\n")
        assert identity_of(config_with("mine.Callback"))["code"] != first, name
        path.write_text(text)
        assert identity_of(config_with("mine.Callback"))["code"] == first
    write(place, other="D = 2")
    assert identity_of(config_with("mine.Callback"))["code"] == first


def test_packages_around_a_module_count_and_all_that_they_import(place):
    write(place, pack__INIT="from constants import RATE", pack__deep__INIT="", pack__deep__nets="class Net: pass")
    write(place, constants="RATE = 1", beside="A = 1")
    first = identity_of(config_with("pack.deep.nets.Net"))["code"]
    for name, text in {"pack__INIT": "from constants import RATE, B", "constants": "RATE = 2"}.items():
        write(place, **{name: text})
        changed = identity_of(config_with("pack.deep.nets.Net"))["code"]
        assert changed != first, name
        first = changed
    write(place, beside="A = 2", pack__other="B = 1")
    assert identity_of(config_with("pack.deep.nets.Net"))["code"] == first


def test_installed_code_counts_if_a_configuration_names_it(place, monkeypatch):
    installed = place / "venv" / "site-packages"
    monkeypatch.syspath_prepend(installed)
    write(installed, lab__INIT="", lab__nets="from lab import layers\nimport big", lab__layers="A = 1")
    write(installed, big__INIT="B = 1")
    write(place, mine="import lab.layers\nimport big")
    named, importing = (identity_of(config_with(name))["code"] for name in ("lab.nets.Net", "mine.Net"))
    assert ([*named], [*importing]) == (["lab.nets"], ["mine"])
    write(installed, big__INIT="B = 2")
    assert identity_of(config_with("lab.nets.Net"))["code"] == named, "of another distribution"
    write(installed, lab__layers="A = 2")
    assert identity_of(config_with("mine.Net"))["code"] == importing, "as libraries of others do not count"
    assert identity_of(config_with("lab.nets.Net"))["code"] != named


def test_code_that_is_installed_for_editing_counts(place, monkeypatch):
    class Editable:  # as setuptools' finder, which adds nothing to sys.path
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "lab":
                return None
            folder = place / "src" / "lab"
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])

    monkeypatch.setattr("sys.meta_path", [*sys.meta_path, Editable])
    write(place, src__lab__INIT="", src__lab__nets="A = 1")
    first = identity_of(config_with("lab.nets.Net"))["code"]
    assert [*first] == ["lab.nets"]
    write(place, src__lab__nets="A = 2")
    assert identity_of(config_with("lab.nets.Net"))["code"] != first


def test_code_of_any_place_of_a_configuration_counts(place):
    write(place, mine="", losses="", sets="", nets="")
    config = config_with("mine.A", source=[{"class_path": "sets.Mine"}])
    config["model"] = {"objective": {"metric": {"class_path": "losses.Mine"}}, "module": {"class_path": "nets.Net"},
                       "method": {"class_path": "fedsim.methods.FedPav"}}  # fmt: skip
    assert [*identity_of(config)["code"]] == ["losses", "mine", "nets", "sets"]


def test_a_nested_class_and_a_function_count_by_the_file_that_has_them(place):
    write(place, mine="class Outer:\n    class Halve: pass", pack__acts="def act(x): return x", other="", data="")
    config = config_with("mine.Outer.Halve", "elsewhere.Outer.Halve", source="data.csv")
    config["model"] = {"backbone": {"class_path": "fedsim.models.SmallCNN", "init_args": {"act": "pack.acts.act"}},
                       "module": "other.Class", "texts": ["other.x", "a.b", "pack..acts", "1.5"]}  # fmt: skip
    first = identity_of(config)["code"]
    assert [*first] == ["mine", "pack.acts"]
    for name in ("mine", "pack__acts"):
        write(place, **{name: (place / f"{name.replace('__', '/')}.py").read_text() + "\nA = 1"})
        changed = identity_of(config)["code"]
        assert [m for m in first if first[m] != changed[m]] == [name.replace("__", ".")]
        first = changed
    write(place, other="from pack.acts import act as Class")
    assert [*identity_of(config)["code"]] == ["mine", "other", "pack.acts"]


def test_nothing_is_executed(place):
    write(
        place, mine="import evil\nraise SystemExit(3)", evil="open('ran', 'w')", broken="def (", circle="import circle"
    )
    code = identity_of(config_with("mine.A", "broken.B", "circle.C", "gone.D", "json.E"))["code"]
    assert [*code] == ["broken", "circle", "mine"]
    assert not (place / "ran").exists()


def test_the_hash_of_a_configuration_has_all_settings_but_those_of_a_start():
    config = {"seed_everything": 1, "run_dir": "a", "ckpt_path": None, "overwrite": False, "model": {"threads": 1}}
    first = digest_of_config(config)
    assert digest_of_config(config | {"run_dir": "b", "ckpt_path": "c", "overwrite": True}) == first
    assert digest_of_config(config | {"seed_everything": 2}) != first
    assert digest_of_config(config | {"model": {"threads": 2}}) != first


def test_changed_contents_are_those_that_both_have():
    old = {"files": {"a": "1", "b": "1"}, "code": {"mine": "1"}}
    new = {"files": {"a": "2", "c": "1"}, "code": {"mine": "2"}}
    assert changed_content(old, new) == {"a": ("1", "2"), "code of mine": ("1", "2")}
    assert changed_content({}, new) == changed_content(old, old) == {}


def test_two_files_that_change_their_contents_are_other_code(place):
    write(place, mine="import one\nimport two", one="A = 1", two="A = 2")
    first = identity_of(config_with("mine.Callback"))["code"]
    write(place, one="A = 2", two="A = 1")
    assert identity_of(config_with("mine.Callback"))["code"] != first
