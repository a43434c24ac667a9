"""The settings of a command line are read once, before the parser: in order, merged, with the texts of names."""

import pytest

from fedsim.core.errors import DataError
from fedsim.parsing.command_line import Given, given, merged


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
