"""The identity of a run: contents of files and of the user's code, without any of it being executed."""

import pytest

from fedsim.settings.identity import changed_content, digest_of_config, identity_of


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of the user's, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place, **files):
    """Write modules by their names, in which ``__`` stands for a dot."""
    for name, text in files.items():
        path = (place / name.replace("__", "/")).with_suffix(".py")
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
