"""Settings of a federation: the section ``model`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from fedsim.core.arguments import Section
from fedsim.core.checks import Seed, Threads
from fedsim.core.errors import ConfigError
from fedsim.core.names import check_name
from fedsim.core.seeding import seed_of_process
from fedsim.core.store import StorePlace
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.adaptive_backbones import AdaptiveBackbones
from fedsim.federation.components.attacks import Attack
from fedsim.federation.components.collusion import Collusion
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.ledger import Accounting
from fedsim.federation.components.privacy import Privacy
from fedsim.federation.components.robust import Aggregation
from fedsim.federation.components.selection import AllClients, Availability, Selection
from fedsim.federation.components.timing import Synchronous, Timing
from fedsim.methods.base import Method
from fedsim.models.backbones import Backbone
from fedsim.models.reid import IdentityHead, Neck
from fedsim.settings.facts import NOTHING, ROUNDING, Facts
from fedsim.training.objective import Objective
from fedsim.training.own_module.blueprint import MakesModule, NetworkKind
from fedsim.training.own_module.inner_trainer import package_of
from fedsim.training.own_module.module_batch import BatchForm
from fedsim.training.own_module.module_client import CountsFrom
from fedsim.training.settings import ClientOverride, LocalTraining, try_optimizer
from fedsim.training.statistics import StatisticsPolicy

_LABELLED = "module is None and not client.cluster and not client.bottom_up"
_SPEEDS = "timing != 'Synchronous' or method.weighting == 'performance' or '.' in method or '.' in selection"
_SHARES = "method.shares"
_NOISE = "method.shares or '.' in privacy"
_STATISTICS = "'stat' in method.shares and (data.partition != 'union' or bn_stats not in ('mean', 'first'))"
_BY_NAME = "the fields of each client, such as {town0: {batch_size: 8}}"
_METHOD = Facts(group="method")


@dataclass(frozen=True)
class Settings(Section, option="model"):
    """The settings of a federation: the arguments of :class:`~fedsim.federation.federation.Federation`."""

    method: Annotated[Method, Facts(group="method", kind="methods", usage="FedPav")]
    """the federated method: FedAvg, FedPav, Local, or your own Method by its class_path"""
    backbone: Annotated[
        Backbone | nn.Module | None,
        NetworkKind(),
        Facts(group="network", kind="backbones", usage="ResNet", needs="module is None"),
    ] = None
    """ResNet, ConvNeXt, MobileNetV2, SmallCNN, or your own module with an int attribute out_channels"""
    neck: Annotated[Neck, Facts(group="network", usage="{kind: bnneck}", needs="module is None")] = Neck()
    """layers between pooled features and the identity head"""
    head: Annotated[IdentityHead, Facts(group="network", needs=_LABELLED)] = IdentityHead()
    """the identity head"""
    module: Annotated[MakesModule | None, Facts(group="network", base="lightning.LightningModule")] = None
    """your own LightningModule in place of backbone, neck, objective and optimizer (docs/own_module.md); null: fedsim's
    model. In Python also instead of ``backbone``"""
    private: Annotated[tuple[str, ...] | None, Facts(group="network", null=(), is_set=True)] = None
    """patterns of the names of tensors of ``module`` that stay with the clients, such as ``classifier.*``, beside those
    whose size depends on ``num_classes``; null: no further ones"""
    module_batch: Annotated[BatchForm | None, Facts(group="network", null="PairBatch", needs="module is not None")] = (
        None
    )
    """form of the batches of ``module``: PairBatch (images, labels), TripleBatch (images, labels, cameras), DictBatch,
    ViewsBatch (several versions of each image), or a BatchForm of your own by its class_path; null: PairBatch"""
    module_counts_from: Annotated[CountsFrom, Facts(group="network", needs="module is not None")] = "run"
    """where epochs, steps and schedules of ``module`` begin: ``run``: with the run, as though its client had trained in
    every round; ``round``: anew in each round"""
    client: Annotated[LocalTraining, Facts(usage="{local_epochs: 5}")] = LocalTraining()
    """local training of the clients in a round"""
    clients: Annotated[
        dict[str, ClientOverride] | None,
        Facts(null={}, usage="{NAME: FIELDS}", expected=_BY_NAME, synonyms=("clients",), overrides="model.client"),
    ] = None
    """client -> its settings that differ from the common ones"""
    objective: Annotated[Objective, Facts(group="loss", usage="{triplet: 1}", needs=_LABELLED)] = Objective()
    """the supervised loss"""
    selection: Annotated[Selection, Facts(group="method", kind="selections", usage="RandomFraction")] = AllClients()
    """choice of the clients that take part in a round"""
    availability: Annotated[Availability, _METHOD] = Availability()
    """drop-outs and stragglers"""
    timing: Annotated[Timing | None, Facts(group="method", kind="timings", null="Synchronous")] = None
    """Synchronous, Deadline, or Buffered (FedBuff, FedAsync): how long the server waits for answers, in the simulated
    time of model.hardware; null: as Synchronous, until all have answered"""
    adaptive_backbones: Annotated[AdaptiveBackbones | None, Facts(group="network")] = None
    """clients change their backbones by their rewards; null: they do not"""
    privacy: Annotated[Privacy | None, Facts(group="method", kind="privacy", null="Privacy", needs=_NOISE)] = None
    """WhiteNoise, or DifferentialPrivacy; null: downloads and uploads are not changed"""
    hardware: Annotated[Hardware | None, Facts(group="method", needs=_SPEEDS, otherwise="seconds")] = None
    """the clients' links and devices, for simulated seconds in the log; null: none are logged"""
    accounting: Annotated[Accounting, Facts(group="evaluation")] = Accounting()
    """rules for counting bytes, mainly of pruned models"""
    attack: Annotated[Attack | None, Facts(group="method", kind="attacks")] = None
    """of some clients, each alone: SignFlip, GaussianNoise, ModelReplacement, LabelFlip, Backdoor; together: ALIE,
    InnerProduct, MinMax, MinSum; null: all clients are honest"""
    aggregation: Annotated[Aggregation | None, Facts(group="method", kind="aggregations", needs=_SHARES)] = None
    """Median, TrimmedMean, Krum, Bulyan, GeometricMedian, NormClipping, CentredClipping or FLTrust instead of the mean;
    Bucketing or NearestNeighbourMixing before one of them; null: the aggregation of the method"""
    server_optimizer: Annotated[
        OptimizerCallable | None, Facts(group="method", kind="server-optimizers", usage="FedAdam", needs=_SHARES)
    ] = None
    """FedAvgM, FedAdam, FedYogi, FedAdagrad, or torch's; null: the global model becomes the weighted mean, exactly"""
    bn_stats: Annotated[StatisticsPolicy, Facts(group="method", needs=_STATISTICS)] = "mean"
    """treatment of running statistics; see fedsim.training.statistics.BatchNormStatistics"""
    reduction: Annotated[Literal["exact", "fp32"], Facts(group="method", effect="rounding")] = "exact"
    """exact: the same bits on any number of ranks; fp32: plain float32 sums"""
    on_bad_update: Annotated[Literal["stop", "skip_client"], _METHOD] = "stop"
    """after a loss or weights that are not finite, stop the run, or leave the client out of the round"""
    client_store: Annotated[StorePlace, NOTHING] = "device"
    """place of private states between rounds: device, host, or disk (for very many clients)"""
    evaluation: Annotated[Evaluation, Facts(group="evaluation", usage="{flip: true}")] = Evaluation()
    """settings of evaluations"""
    threads: Annotated[Threads, ROUNDING] = 1
    """CPU threads per rank. Results depend on it in the last bits, so the default does not depend on the machine"""
    tf32: Annotated[bool, Facts(effect="rounding", needs="trainer.accelerator != 'cpu'")] = True
    """let GPUs from NVIDIA's Ampere on compute convolutions in float32 with factors of 10 bits (TF32), torch's default;
    false: with all 23 bits, which is slower. bf16-mixed rounds more than either"""
    seed: Annotated[Seed | None, Facts(is_repeated=True)] = None
    """seed of all randomness of training; null: that of lightning.seed_everything, or 0. On the command line, set
    seed_everything"""

    def __post_init__(self) -> None:
        """Check the settings as far as possible without data."""
        if package_of(self.backbone) is not None or not isinstance(self.backbone, nn.Module | None):
            object.__setattr__(self, "module", self.backbone)
            object.__setattr__(self, "backbone", None)
        if self.backbone is None and self.module is None:
            raise ConfigError("model.backbone: name a backbone, or set model.module to your own LightningModule")
        if self.private and self.module is None:
            raise ConfigError("model.private: patterns are for model.module; methods say which groups are private")
        if self.seed is None:
            object.__setattr__(self, "seed", seed_of_process() or 0)
        self.client.check("model.client")
        for name in self.clients or ():
            check_name(name, "model.clients", "use the name of a client")
        for name in ("metric", "causality") if self.client.clusters else ():
            if getattr(self.objective, name) is not None:
                field = "model.client." + ("bottom_up" if self.client.cluster is None else "cluster")
                raise ConfigError(f"model.objective.{name}: {field} has another loss; set one of them to null")
        if self.server_optimizer is not None:
            try_optimizer("model.server_optimizer", self.server_optimizer)

    @property
    def training_seed(self) -> int:
        """:attr:`seed`; never None."""
        assert self.seed is not None
        return self.seed

    @property
    def overrides(self) -> Mapping[str, ClientOverride]:
        """:attr:`clients`; empty if there are none."""
        return self.clients or {}

    @property
    def needs_all_uploads(self) -> bool:
        """Whether uploads wait for those of the others: for a rule, or for attackers who know them."""
        has_rule = self.aggregation is not None or "uploads" in self.method.requires
        return has_rule or isinstance(self.attack, Collusion)

    @property
    def pace(self) -> Timing:
        """:attr:`timing`; without it, an object that waits for all clients."""
        return self.timing or Synchronous()

    @property
    def noise(self) -> Privacy:
        """:attr:`privacy`; without it, an object that adds no noise."""
        return self.privacy or Privacy()
