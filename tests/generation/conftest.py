"""Fixtures for the tests of generators."""

import pytest
import yaml


@pytest.fixture
def config(tmp_path):
    """Three clients of small people."""
    path = tmp_path / "config.yaml"
    source = {"class_path": "SyntheticReID", "init_args": {"clients": 3, "unseen": 1, "scale": 0.2}}
    path.write_text(yaml.safe_dump({"data": {"source": source, "size": [32, 16], "val": "none"}}))
    return path
