"""Names that YAML takes for numbers, truth values, null and dates: they are names, in each field that holds names."""

import random
import string

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.federation.settings import Settings
from fedsim.methods import FedAvg
from fedsim.models import SmallCNN
from fedsim.parsing.command_line import checked
from fedsim.parsing.config_files import read_config
from fedsim.parsing.documents import as_yaml, parse_yaml
from fedsim.parsing.typed_names import with_quotes
from fedsim.sweep.file import read_content, sweep_of
from fedsim.sweep.sampling import command_of, samples
from fedsim.training.settings import ClientOverride
from sites import site
from small import refuse

TYPED = [
    "2021",
    "007",
    "no",
    "null",
    "1e3",
    "2021-01-01",
    "0x1F",
    "~",
    "true",
    "Off",
    "12:30",
    "1_000",
    "-5",
    "=",
    "9.",
]
BASE = """
seed_everything: 0
trainer: {{max_epochs: 1, check_val_every_n_epoch: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}}
model:
  method: FedPav
  backbone: {{class_path: SmallCNN, init_args: {{width: 4}}}}
  neck: {{kind: linear, dim: 8, dropout: 0.2}}
  client: {{batch_size: 4, optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.01}}}}}}
  clients: {clients}
data: {{source: {{class_path: MarketFolders, init_args: {{root: {root}{names}}}}}, val: none, size: [16, 8]{data}}}
"""


def drawn(seed, number):
    """Words without quotes, most of which YAML takes for a number, a date, a truth value or null."""
    draw = random.Random(seed)
    pieces = [*TYPED, *string.digits, *"_.-+:eEoxb", "inf", "nan", "yes", "T"]
    words = set()
    while len(words) < number:
        word = "".join(draw.choices(pieces, k=draw.randint(1, 4)))
        try:
            events = [event for event in yaml.parse(f"[{word}]") if isinstance(event, yaml.ScalarEvent)]
        except yaml.YAMLError:
            continue
        if len(events) == 1 and events[0].value == word:
            words.add(word)
    return sorted(words)


def test_drawn_words_are_names_in_every_field_and_the_text_stays_the_same():
    words = drawn(3, 600)
    typed = [word for word in words if word != "=" and not isinstance(yaml.safe_load(f"[{word}]")[0], str)]
    assert len(typed) > 80, "the draws are too easy"
    for word in words:
        lists = f"[town, {word}, 数]"
        text = (
            f"data: {{unseen: {lists}, source: [{{class_path: A, init_args: {{names: {lists}}}}}], public: {word}}}\n"
        )
        text += f"model:\n  clients:\n    {word}: {{batch_size: 8}}\n  hardware: {{clients: {{{word}: {{}}}}}}\n"
        content = yaml.safe_load(with_quotes(text))
        names = ["town", word, "数"]
        assert content["data"]["unseen"] == content["data"]["source"][0]["init_args"]["names"] == names
        assert content["data"]["public"] == (
            None if yaml.safe_load(f"[{word}]" if word != "=" else "[a]") == [None] else word
        )
        assert list(content["model"]["clients"]) == list(content["model"]["hardware"]["clients"]) == [word]
        assert content["model"]["clients"][word] == {"batch_size": 8}
        [joined, option, value] = checked([f"--data.unseen={lists}", "--data.source.names", lists])
        assert yaml.safe_load(joined.partition("=")[2]) == yaml.safe_load(value) == names
        assert option == "--data.source.names"


def test_other_values_stay_what_they_are():
    text = (
        "trainer: {max_epochs: 3, callbacks: [{init_args: {scheduling: {4: 2}}}]}\ndata: {public: null, size: [64, 32]}"
    )
    assert with_quotes(text) == text
    assert with_quotes("data: {unseen: [!!str 2021, &a 7, *a, 'no', \"1\", a]}") == (
        "data: {unseen: [!!str 2021, &a 7, *a, 'no', \"1\", a]}"
    )
    for broken in ("data: {unseen: [2021", "&a [*a]", "data:\n\t- x", ""):
        assert with_quotes(broken) == broken


@pytest.fixture
def folders(tmp_path):
    names = [name for name in TYPED if not name.startswith("-")]
    for name in [*names, "town"]:
        site(tmp_path / "d" / name)
    return tmp_path / "d", names


def write(folder, root, clients="null", names="", data=""):
    path = folder / "c.yaml"
    path.write_text(BASE.format(root=root, clients=clients, names=names, data=data))
    return path


def test_each_client_has_the_settings_under_its_name(folders, tmp_path, capsys):
    root, names = folders
    clients = f"{{{', '.join(f'{name}: {{batch_size: {2 + place % 3}}}' for place, name in enumerate(names))}}}"
    run = tmp_path / "2021"
    assert main(["fit", "--config", str(write(tmp_path, root, clients)), "--run_dir", str(run)]) == 0
    kept = read_config(str(run / "config.yaml"))["model"]["clients"]
    assert {name: client["batch_size"] for name, client in kept.items()} == {
        name: 2 + place % 3 for place, name in enumerate(names)
    }
    assert main(["fit", "--ckpt_path", str(run), "--trainer.max_epochs", "2"]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--format", "csv"]) == 0
    out = capsys.readouterr().out
    assert all(f",{name},rank1," in out for name in names)


def test_lists_of_names_and_options(folders, tmp_path, capsys):
    root, names = folders
    listed = f"[{', '.join(names)}, town]"
    config = write(tmp_path, root, names=f", names: {listed}", data=", unseen: [007, no, null], public: 1e3")
    for options in (
        [],
        ["--data.unseen=[0x1F, ~]", "--data.public=no"],
        ["--data.unseen", "[0x1F, ~]", "--data.source.names", listed, "--model.clients.2021.batch_size=2"],
        ["--data.unseen+=[12:30]", "--data.unseen+=true", "--model.clients={no: {batch_size: 2}, 2021: {}}"][:2],
        ["--model.clients={2021: {batch_size: 2}, 2021-01-01: {batch_size: 2}}"],
    ):
        assert main(["describe", "--config", str(config), *options]) == 0, options
        out = capsys.readouterr().out
        unseen = {line.split()[0] for line in out.splitlines() if line.endswith("unseen")}
        wanted = {"0x1F", "~"} if any("0x1F" in option for option in options) else {"007", "no", "null"}
        assert wanted <= unseen | {"no"}, options
    line = refuse(capsys, "describe", "--config", config, "--model.clients={7: {batch_size: 2}}")
    assert "there is no client 7; choose from 2021" in line


def test_a_sweep_keeps_names(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "program: fedsim\nmethod: grid\nmetric: {name: val/mAP}\ncommand: ['${program}', fit, '${args}']\nparameters:\n"
        "  data.public: {values: [null, no, 007, 2021-01-01]}\n  data.unseen: {values: [null, [1e3, null, 'a\\b']]}\n"
        "  model.client.batch_size: {value: 8}\n"
    )
    sweep = sweep_of(read_content(path), "s.yaml")
    lines = [command_of(sweep, sample) for sample in samples(sweep)]
    assert [line[2] for line in lines[::2]] == [f"--data.public={name}" for name in ("None", "no", "007", "2021-01-01")]
    assert lines[0][3] == "--data.unseen=None"
    assert yaml.safe_load(checked(lines[1])[3].partition("=")[2]) == ["1e3", "null", "a\\b"]


def test_emoji_travel_as_yaml(folders, tmp_path, capsys):
    root, _ = folders
    site(root / "😀 & 数", train=range(1, 4))
    assert yaml.safe_load(as_yaml({"😀": ["数", None]})) == {"😀": ["数", None]}
    for first in range(0, 0x20000, 0x100):  # every character but lone surrogates
        text = "".join(map(chr, range(first, first + 0x100))) if first not in range(0xD800, 0xE000) else ""
        assert yaml.safe_load(as_yaml(text)) == text == parse_yaml(as_yaml(text), "text")
    config = tmp_path / "mine😀.yaml"
    assert main(["init", str(root), "--output", str(config)]) == 0
    assert "😀 & 数" in read_config(str(config))["model"]["clients"]
    assert main(["describe", "--config", str(config), "--config", str(config)]) == 0


@pytest.mark.parametrize("name", [2021, False, None, 1e3, "", "..", "a\nb", "stra\udcdfe"])
def test_settings_in_python_take_names_only(name):
    with pytest.raises(ConfigError, match=r"^model\.clients: (expected dict\[str, |.*; use the name of a client$)"):
        Settings(method=FedAvg(), backbone=SmallCNN(), clients={name: ClientOverride()})
