"""Lightning's import of torchmetrics brings two classes; the rest of the package comes with its first use."""

import subprocess
import sys

import pytest

FILES = {  # a package as torchmetrics is, for processes without torch
    "__init__": """
import heavy
from torchmetrics.__about__ import *
_logger = heavy.logger
from torchmetrics import functional
from torchmetrics.metric import Metric
from torchmetrics.collections import MetricCollection
from torchmetrics.functional import Accuracy
__all__ = ["Accuracy", "Metric", "MetricCollection"]
""",
    "__about__": "__version__ = '1.2.3'",
    "utilities": "from torchmetrics.metric import Metric",
    "metric": "from torchmetrics import _logger\nimport torchmetrics.utilities\nclass Metric: pass",
    "collections": "from torchmetrics.metric import Metric\nclass MetricCollection: pass",
    "functional": "import torchmetrics.utilities\nfrom torchmetrics.metric import Metric\nclass Accuracy(Metric): pass",
}


@pytest.fixture
def call(tmp_path):
    """Run a program beside the package; ``absent`` is a file that it does not have."""

    def run(program, absent=""):
        (tmp_path / "torchmetrics").mkdir()
        for name, text in FILES.items():
            lines = [line for line in text.splitlines(keepends=True) if not absent or absent not in line]
            if name != absent:
                (tmp_path / "torchmetrics" / f"{name}.py").write_text("".join(lines))
        (tmp_path / "heavy.py").write_text("import logging\nlogger = logging.getLogger('torchmetrics')\n")
        path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        done = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    "use",
    [
        "assert torchmetrics.Accuracy.__mro__[1] is Metric",
        "from torchmetrics import Accuracy; assert issubclass(Accuracy, Metric)",
        "from torchmetrics import *; assert issubclass(Accuracy, Metric)",
        "assert 'Accuracy' in dir(torchmetrics)",
    ],
)
def test_the_whole_package_comes_with_its_first_use_and_keeps_its_classes(call, use):
    program = (
        "import fedsim, torchmetrics\nfrom torchmetrics import Metric, MetricCollection\n"
        "print(torchmetrics.__version__, 'heavy' in sys.modules, hasattr(torchmetrics, '__wrapped__'))\n"
        f"{use}\nprint('heavy' in sys.modules, torchmetrics.Metric is Metric, type(torchmetrics).__name__)"
    )
    assert call(program) == ["1.2.3", "False", "False", "True", "True", "module"]


def test_a_name_that_the_package_lacks_is_an_attribute_error(call):
    program = "import fedsim, torchmetrics\nprint(hasattr(torchmetrics, 'Recall'), 'heavy' in sys.modules)"
    assert call(program) == ["False", "True"]


@pytest.mark.parametrize("absent", ["collections", "__about__", "utilities"])
def test_a_package_with_other_files_is_imported_whole(call, absent):
    program = (
        "import fedsim, torchmetrics\n"
        "print('heavy' in sys.modules, type(torchmetrics).__name__, torchmetrics.Accuracy.__mro__[1].__module__)\n"
        "print(torchmetrics.Accuracy.__mro__[1] is sys.modules['torchmetrics.metric'].Metric)"
    )
    assert call(program, absent) == ["True", "module", "torchmetrics.metric", "True"]


def test_a_package_that_was_imported_before_stays_as_it_is(call):
    program = (
        "import torchmetrics\nimport fedsim\nfrom fedsim.core.light_torchmetrics import LightFinder, lighten\n"
        "lighten()\nprint(type(torchmetrics).__name__, any(isinstance(f, LightFinder) for f in sys.meta_path))"
    )
    assert call(program) == ["module", "False"]


def test_the_source_of_the_package_can_be_read_and_one_finder_is_enough(call):
    program = (
        "import inspect, fedsim\nfrom fedsim.core.light_torchmetrics import LightFinder, lighten\nlighten()\n"
        "print(sum(isinstance(f, LightFinder) for f in sys.meta_path))\nimport torchmetrics\n"
        "print('heavy' in inspect.getsource(torchmetrics), sum(isinstance(f, LightFinder) for f in sys.meta_path))"
    )
    assert call(program) == ["1", "True", "0"]


def test_lightning_brings_neither_scipy_nor_torchvision_and_torchmetrics_still_works():
    program = """
import sys, fedsim, lightning, torch
print(*sorted({"scipy", "torchvision", "transformers", "torchmetrics.classification"} & set(sys.modules)), "light")
from lightning.pytorch.core.module import Metric as Known
from torchmetrics import Accuracy, Metric, MetricCollection
scores = MetricCollection([Accuracy("multiclass", num_classes=2)])
print(Metric is Known, scores(torch.tensor([0, 1]), torch.tensor([0, 0]))["MulticlassAccuracy"].item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["light", "True", "0.5"]


_PLOTTED = """
import sys, fedsim, lightning, torch, torchmetrics
print("matplotlib" in sys.modules)
class Sum(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0))
    def update(self, number):
        self.total += number
    def compute(self):
        return self.total
    def plot(self):
        return self._plot(None, None)
"""


@pytest.mark.parametrize(
    "use",
    [
        "metric = Sum()\nmetric.update(2.0)\nmetric.plot()",
        "metric = torchmetrics.MeanMetric()\nmetric.update(2.0)\nmetric.plot()",
        "from torchmetrics.utilities.plot import plot_curve",
        "import torchmetrics.utilities.plot as plots\nplots.plot_curve, hasattr(plots, '__wrapped__')",
    ],
)
def test_matplotlib_is_imported_by_the_first_picture(use):
    pytest.importorskip("matplotlib")
    end = '\nprint("matplotlib" in sys.modules, sys.modules["torchmetrics.utilities.plot"].__file__ is not None)'
    done = subprocess.run([sys.executable, "-c", _PLOTTED + use + end], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
