"""The settings of a command line are read once, before the parser: in order, merged, with the texts of names."""

import pytest

from fedsim.core.errors import ConfigError, DataError
from fedsim.parsing.command_line import Given, given, merged, with_clients
from fedsim.parsing.options import kept_arguments


def test_settings_come_in_the_order_in_which_they_apply(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "run_dir: 007\nmodel:\n  method: {class_path: FedProx, init_args: {mu: 1}}\n  clients: {no: {batch_size: 8}}\n"
        "data: {unseen: [1, null]}\n"
    )
    words = ["--model.method=FedPav", "-c", str(config), "--model.method.init_args.mu", "2", "--print_config"]
    clients = {"no": {"batch_size": 8}}
    method = {"class_path": "FedProx", "init_args": {"mu": 1}}
    assert [entry for entry in given(words) if entry.setting not in ("", "data")] == [
        Given("model.method", "FedPav", True),
        Given("run_dir", "007", file=str(config)),
        Given("model", {"method": method, "clients": clients}, file=str(config)),
        Given("model.method", "FedProx", file=str(config)),
        Given("model.method.mu", 1, file=str(config)),
        Given("model.clients", clients, file=str(config)),
        Given("model.clients.no", clients["no"], file=str(config)),
        Given("model.clients.no.batch_size", 8, file=str(config)),
        Given("data.unseen", ["1", "null"], file=str(config)),
        Given("model.method.mu", 2, True),
        Given("print_config", None, True),
    ]
    settings = merged(given(words))
    assert (settings["model.method"], settings["model.method.mu"], settings["run_dir"]) == ("FedProx", 2, "007")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--run_dir=007"], "007"),
        (["--run_dir", "null"], None),
        (["--run_dir=[a"], "[a"),
        (["--run_dir="], None),
        (["--run_dir", "--overwrite"], None),
        (["--config", '{"run_dir": "a"}', "--run_dir=b"], "b"),
        (["--run_dir=b", '--config={"run_dir": "a"}'], "a"),
    ],
)
def test_the_last_value_applies_as_the_parser_reads_it(words, value):
    assert merged(given(words))["run_dir"] == value


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot read this config"),
        ("model: {client: }", "model.client: this section is empty"),
        ("trainer:", "trainer: this section is empty"),
        ("model: {evaluation: 3}", "model.evaluation: is a section with fields below it, but got 3"),
        ("model: {}\nmodel: {}", "model: is given twice"),
    ],
)
def test_faulty_files_are_refused_with_their_names(tmp_path, content, line):
    path = tmp_path / "c.yaml"
    if content:
        path.write_text(content)
    with pytest.raises(DataError, match=r"c\.yaml: ") as caught:
        merged(given(["--config", str(path)]))
    assert line in str(caught.value)


CLIENTS = '--config={"model": {"clients": %s}}'
A, B = '{"a": {"batch_size": 4, "local_epochs": 3}}', '{"a": {"batch_size": 8}, "b": {"batch_size": 5}}'


@pytest.mark.parametrize(
    ("words", "inserted"),
    [
        ([CLIENTS % A, "--run_dir=x"], {}),
        ([CLIENTS % A, CLIENTS % "null", CLIENTS % B], {}),
        (
            [CLIENTS % A, CLIENTS % B, "--model.clients.a.batch_size=6"],
            {2: '--model.clients={"a": {"batch_size": 8, "local_epochs": 3}, "b": {"batch_size": 5}}'},
        ),
        (["--model.clients.a.batch_size=6", "--model.clients.b.batch_size=6"], {0: "--model.clients={}"}),
    ],
)
def test_clients_of_several_configs_are_joined_field_by_field(words, inserted):
    expected = list(words)
    for place, word in inserted.items():
        expected.insert(place, word)
    assert with_clients(words) == expected


def test_an_option_of_a_client_before_a_config_with_clients_is_refused():
    with pytest.raises(ConfigError, match=r"^--model.clients.a.batch_size: a config after it has model.clients, too"):
        with_clients(["--model.clients.a.batch_size=6", CLIENTS % B])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--model.client.optimizer=SGD", "--model.client.optimizer.lr=0.1", "--model.client.optimizer=Adam"], 1),
        (["--model.client.optimizer=SGD", "--model.client.optimizer.momentum=0.1", "--model.client.optimizer=Adam"], 0),
        (["--model.client.optimizer=SGD", "--model.client.optimizer.lr=0.1", "--model.client.optimizer=SGD"], 0),
        (['--model.client.optimizer={"class_path": "SGD", "init_args": {"lr": 0.1}}', "--model.client.optimizer=Adam",
          "--model.client.optimizer.lr=0.1"], 0),
        (["--model.client.optimizer=SGD", "--model.client.optimizer.lr=0.1",
          '--config={"model": {"client": {"optimizer": "Adam"}}}'], 0),  # of a row of a paper
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=x",
          "--trainer.callbacks+=ModelCheckpoint"], 0),
    ],
)  # fmt: skip
def test_a_replaced_class_whose_arguments_are_kept_is_a_line(words, lines):
    line = "model.client.optimizer.lr: Adam keeps 0.1, which was given for SGD"
    assert kept_arguments(given(words)) == [line] * lines
