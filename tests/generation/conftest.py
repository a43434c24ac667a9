"""Fixtures for the tests of generators."""

import pytest
import yaml

from fedsim.generation.quality import discriminator_accuracy


@pytest.fixture(scope="module")
def quick_judge():
    """Let the discriminator that judges swaps learn in 8 steps: 200 take three times as long as a small generator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discriminator_accuracy, "__defaults__", (8,))
        yield


@pytest.fixture
def config(tmp_path, quick_judge):
    """Three clients of small people, whose generators are judged quickly."""
    path = tmp_path / "config.yaml"
    source = {"class_path": "SyntheticReID", "init_args": {"clients": 3, "unseen": 1, "scale": 0.2}}
    path.write_text(yaml.safe_dump({"data": {"source": source, "size": [32, 16], "val": "none"}}))
    return path
