"""The federation: one communication round is one Lightning training step. Read this file first."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedsim.core.allocator import keep_freed_memory
from fedsim.core.errors import ConfigError
from fedsim.core.messages import Report
from fedsim.core.placement import Placement, place
from fedsim.core.store import ClientStore, Place, make_store
from fedsim.data.datamodule import FederatedDataModule
from fedsim.evaluation.classification import evaluator_for
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import MAX_NAMES, few_names
from fedsim.federation.adaptive_backbones import AdaptiveBackbones, BackboneLadder
from fedsim.federation.aggregation import Aggregator, Weights, aggregation_weights
from fedsim.federation.assembly import (
    Blueprint,
    build_clients,
    build_residents,
    check_equal_start,
    check_image_sizes,
    check_settings,
    settings_of,
)
from fedsim.federation.checkpoint import check_content, describe_content, load_states
from fedsim.federation.compatibility import check_trainer
from fedsim.federation.events import RoundCallback
from fedsim.federation.hardware import Hardware
from fedsim.federation.host import Host
from fedsim.federation.ledger import Accounting, Ledger
from fedsim.federation.privacy import Privacy
from fedsim.federation.round_table import RoundTable, as_oracle, publish
from fedsim.federation.selection import AllClients, Availability, Selection
from fedsim.federation.server_step import work_on_server
from fedsim.methods.base import Method
from fedsim.models.backbones import Backbone
from fedsim.models.reid import Neck
from fedsim.strategy.checkpoint_files import CONTENT_KEY, SERVER_KEY, STATES_KEY
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.server import Server
from fedsim.training.settings import ClientOverride, LocalTraining, Objective
from fedsim.training.statistics import BatchNormStatistics, StatisticsPolicy

__all__ = ["Federation"]

log = logging.getLogger(__name__)


class Federation(LightningModule):
    """Server, clients of this rank, and the round that joins them.

    Args:
        method: the federated method: FedAvg, FedPav, Local, or your own Method by its class_path.
        backbone: ResNet, ConvNeXt, MobileNetV2, SmallCNN, or your own module with an int attribute out_channels.
        neck: layers between pooled features and the identity head.
        client: what clients do in a round.
        clients: settings of single clients that differ, by client name.
        objective: the supervised loss.
        selection: who takes part in a round.
        availability: drop-outs and stragglers.
        adaptive_backbones: clients change their backbones by their rewards; null: they do not.
        privacy: WhiteNoise, or DifferentialPrivacy; null: what is sent is not changed.
        hardware: the clients' links and devices, from which simulated seconds are logged; null: they are not.
        accounting: how bytes are counted, of pruned models above all.
        server_optimizer: FedAdam, FedYogi, FedAdagrad, or torch.optim.SGD with momentum for FedAvgM; null: the global
            model becomes the weighted mean, exactly.
        bn_stats: what happens to running statistics; see fedsim.training.server.BatchNormStatistics.
        reduction: exact: the same bits on any number of ranks; fp32: plain float32 sums.
        on_bad_update: what to do with a client whose loss or weights are not finite: stop the run, or leave the client
            out of the round, as if it had not answered.
        client_store: where private states wait between rounds: device, host, or disk (for more clients than memory
            holds).
        evaluation: how models are scored.
        threads: CPU threads per rank. Results depend on it in the last bits, so it does not follow the machine.
        seed: of all training randomness; set by seed_everything on the command line.
    """

    def __init__(
        self,
        method: Method,
        backbone: Backbone | nn.Module,
        neck: Neck = Neck(),  # noqa: B008 - here and below: frozen dataclasses, shown as defaults in --help
        client: LocalTraining = LocalTraining(),  # noqa: B008
        clients: dict[str, ClientOverride] | None = None,
        objective: Objective = Objective(),  # noqa: B008
        selection: Selection = AllClients(),  # noqa: B008
        availability: Availability = Availability(),  # noqa: B008
        adaptive_backbones: AdaptiveBackbones | None = None,
        privacy: Privacy | None = None,
        hardware: Hardware | None = None,
        accounting: Accounting = Accounting(),  # noqa: B008
        server_optimizer: OptimizerCallable | None = None,
        bn_stats: StatisticsPolicy = "mean",
        reduction: Literal["exact", "fp32"] = "exact",
        on_bad_update: Literal["stop", "skip_client"] = "stop",
        client_store: Place = "device",
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        client.check("model.client")
        if threads < 1:
            raise ConfigError(f"model.threads: {threads} is less than 1")
        self.method = method
        self._backbone = (backbone,)  # in a tuple: the template is no part of the model
        self.neck_settings = neck
        self.client_settings = client
        self.overrides = clients or {}
        self.objective = objective
        self.selection = selection
        self.availability = availability
        self.adaptive_backbones = adaptive_backbones
        self.privacy = privacy or Privacy()
        self.hardware = hardware
        self.accounting = accounting
        self.server_optimizer = server_optimizer
        self.bn_stats: StatisticsPolicy = bn_stats
        self.reduction = reduction
        self.on_bad_update = on_bad_update
        self.client_store: Place = client_store
        self.evaluation = evaluation
        self.threads = threads
        self.seed = seed
        self.server: Server | None = None
        self.trained: list[str] = []
        """clients whose updates counted in the last round"""
        self.round_metrics: dict[str, float] = {}
        """what was logged about the last round's training"""
        self.scores: dict[str, float] = {}
        """of the last evaluation"""
        self.rankings: Path | None = None
        """where a test writes ranked lists; None: nowhere"""
        self.maps: Path | None = None
        """where a prediction draws maps; None: nowhere"""
        self._client_lr = client.trunk_lr

    # -- the round -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Run one communication round."""
        started = time.perf_counter()
        with torch.autocast(self.device.type, enabled=False):  # clients switch it on for their forward passes
            # 1. The server picks clients; some of them do not answer, or are slow.
            self._server.round = self.round
            self.ladder.adapt(self._server, self.method, self.clients)
            selected = self.selection.select(self.round, self._names, self.seed)
            work = self.availability.of(selected, self.round, self.seed)
            called = [name for name in work if work[name] > 0]
            # 2. If weights are known already, uploads are summed as they come; otherwise they wait.
            extras = {arch: self.method.extras_up(self._server, arch) for arch in self.residents}
            self.aggregator.begin(self.round, extras, self._early_weights(called))
            # 3. Each rank trains its clients, one after another.
            columns = (self.method.signal_names, self.strategy.world_size, self.aggregator.num_tensors(self.method))
            table = self.round_table = RoundTable(self._names, *columns, has_masks=self.method.has_masks)
            error = self.host.train(self.round, called, work, table, keep_snapshots=self._is_evaluation_round)
            # 4. All ranks meet: what each client reports, who is left out, whether somebody asked to stop.
            self.strategy.exchange(table.parts, error)
            trained = self.trained = table.returned(called)
            table.warn_of_skipped(self.round, called)
            # 5. Every rank computes the same weights, normalised before they meet any upload.
            reports = {name: table.report(name, self._data_of[name].num_images, self.hardware) for name in trained}
            weights = aggregation_weights(self.method, reports, self.archs)
            if self.selection.learns:
                overall = self.method.weights(reports) if reports else {}
                self.selection.observe(self.round, {name: overall.get(name) for name in work}, self.seed)
            # 6. Weighted sums over all clients, one collective per architecture; noise, if there is to be any.
            means = self.privacy.aggregated(self._server, self.aggregator.means(weights), weights)
            # 7. The server moves towards the means, and does what else the method asks of it.
            if means:  # nobody answered: no step, not even of the momentum
                self._server.received = self.aggregator.received(weights)
                self._step_server(means, weights)
        shares = {name: weights[self.archs[name]].clients[name] for name in trained}
        self.ledger.record(self.round, list(work), table.images(trained), table.masks(trained))
        self._log_round(table.metrics(shares, time.perf_counter() - started))
        if table.stop_signal is not None:  # agreed by all ranks: the run ends with this round's checkpoint
            self.strategy.request_stop(table.stop_signal, self.strategy.stop_deadline)
            self.trainer.should_stop = True

    def _early_weights(self, called: list[str]) -> dict[str, Weights] | None:
        """Return the round's weights if they depend neither on what clients measure nor on who is left out."""
        if self.method.measures or self.on_bad_update == "skip_client" or self.federated.has_unlabelled:
            return None
        reports = {name: Report(self._data_of[name].num_images, {}) for name in called}
        return aggregation_weights(self.method, reports, self.archs)

    def _step_server(self, means: Mapping[str, Tensor], weights: Mapping[str, Weights]) -> None:
        exact = {a: self.statistics[a].span if self.server_optimizer else slice(None) for a in self.residents}
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        # through LightningOptimizer.step(): it counts global_step, without which ModelCheckpoint saves nothing
        sizes = {arch: w.step_size for arch, w in weights.items()}
        self._server.step(optimizer.step, means, exact, sizes, self.aggregator.dead)
        recalibrates = self.bn_stats == "recalibrate"
        if recalibrates or self.method.has_server_step(self._server):
            size = self.evaluation.batch_size if recalibrates else None
            work_on_server(self.strategy, self._server, self.method, size)

    def configure_optimizers(self) -> Optimizer:
        """Return the server optimizer; SGD(lr=1) is plain averaging up to rounding, which the server then removes."""
        parameters = list(self._server.parameters())
        return self.server_optimizer(parameters) if self.server_optimizer else SGD(parameters, lr=1.0)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the validation sets, and during a fit the test sets, too."""
        fitting = self.trainer.state.fn == "fit"
        trained = self.trained if fitting and not self.trainer.sanity_checking else ()
        metrics = self.evaluator.score("val", trained)
        if fitting and self.evaluation.test_during_fit:
            metrics |= as_oracle(self.evaluator.score("test", trained))
        self.scores = metrics
        self._log(metrics)

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Score the test sets."""
        self._log(self.evaluator.score("test", rankings=self.rankings))

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:  # noqa: ARG002 - Lightning's
        """Write feature files of all test sets into the run directory; return their paths."""
        folder = Path(self.trainer.default_root_dir) / "features"
        return [str(path) for path in self.evaluator.write_features(folder, self.maps)]

    @property
    def _is_evaluation_round(self) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return bool(self.trainer.enable_validation) and every is not None and (self.round + 1) % every == 0

    # -- assembling ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Assemble server and clients, and read this rank's images; if a rank cannot, all stop."""
        check_trainer(self.trainer)
        torch.set_num_threads(self.threads)
        if self.strategy.root_device.type == "cpu":
            keep_freed_memory()
        with self.strategy.together():
            data = self.trainer.datamodule  # type: ignore[attr-defined] # Lightning sets it when there is one
            if not isinstance(data, FederatedDataModule):
                raise ConfigError(f"data: {type(data).__name__} is not a FederatedDataModule")
            limit = self.trainer.limit_train_batches
            strategy, device, is_new = self.strategy, self.strategy.root_device, self.server is None
            everybody = self.trainer.callbacks  # type: ignore[attr-defined] # Lightning's stub misses it
            callbacks = [callback for callback in everybody if isinstance(callback, RoundCallback)]
            if is_new:
                self.assemble(data, strategy.global_rank, strategy.world_size, device)
                for callback in callbacks:
                    callback.on_placed(self.placement)
            kinds = (self.statistics, self.archs, self.reduction)
            self.aggregator = Aggregator(strategy, *kinds, device, self.seed, self.method.has_masks)
            for client in self.clients.values():  # Lightning's option counts a client's batches; fast_dev_run sets it
                client.limit_batches = limit if isinstance(limit, int) else data.limit_client_batches
            how = (self.on_bad_update, str(self.trainer.precision), callbacks, self.privacy)
            self.host = Host(self.clients, self.method, self._server, self.aggregator, strategy, *how)
            self._read_images(data, stage)
        if is_new:
            check_equal_start(strategy, self.residents)

    def assemble(self, data: FederatedDataModule, rank: int, world_size: int, device: torch.device) -> None:
        """Build the server and the clients that ``rank`` hosts. No image is read.

        Args:
            data: the federation's data.
            rank: of this process.
            world_size: number of processes.
            device: where models live.

        Raises:
            ConfigError: if settings and data do not fit together.
        """
        settings = {c.name: settings_of(c, self.client_settings, self.overrides) for c in data.federated.clients}
        federated = self.federated = data.federated.without_identities({n for n, s in settings.items() if s.clusters})
        check_settings(federated, self.overrides, self.bn_stats, self.method, self.hardware)
        rungs = self.adaptive_backbones.ladder if self.adaptive_backbones else ()
        blueprint = Blueprint(self._backbone[0], self.neck_settings, self.method, self.bn_stats, self.seed, rungs)
        self.residents, self.archs = build_residents(blueprint, federated.clients, self.overrides, device)
        self.statistics = {a: BatchNormStatistics(self.bn_stats, r) for a, r in self.residents.items()}
        self.costs = {c.name: float(c.num_images * settings[c.name].passes) for c in federated.clients}
        """client -> predicted work of a round: images times local epochs"""
        self.placement: Placement = place(self.costs, world_size)
        check_image_sizes(self.residents, data)
        self.server = Server(self.residents, self.archs, data.augmentation, self.seed, len(federated.public or ()))
        self.server.load_kept({a: self.method.initial_server_kept(r) for a, r in self.residents.items()})
        self.ladder = BackboneLadder(self.adaptive_backbones, self.residents, self.archs, self.selection)
        self.privacy.prepare(self.method, self.server, self.selection)
        self.ledger = Ledger(self.method, self.server, self.archs, self.hardware, self.accounting)
        self.store: ClientStore = make_store(self.client_store, device)
        hosted = set(self.placement.hosted_by(rank))
        self.clients = build_clients(
            [c for c in federated.clients if c.name in hosted], settings, self.residents, self.archs, self.store,
            method=self.method, objective=self.objective, augmentation=data.augmentation, seed=self.seed,
        )  # fmt: skip
        self._data_of = {c.name: c for c in federated.clients}
        self._names = list(self._data_of)
        self._num_classes = {c.name: c.num_classes for c in federated.clients}

    def _read_images(self, data: FederatedDataModule, stage: str) -> None:
        """Decode what this rank needs in ``stage``, so that a damaged file stops the run before it starts."""
        self.evaluator = evaluator_for(self.evaluation)(
            settings=self.evaluation, method=self.method, server=self._server, clients=self.clients,
            residents=self.residents, archs=self.archs, federated=self.federated, placement=self.placement,
            strategy=self.strategy, open_images=data.open_test, progress=self._on_scoring,
        )  # fmt: skip
        if stage == "fit":
            for client in self.clients.values():
                client.open_images(data.open_train)
            if self.federated.public is not None:
                self._server.public_images = data.decode(self.federated.public.images, "public images")
        trained = self._names if stage == "fit" else ()
        if stage in ("fit", "validate"):
            self.evaluator.prepare("val", trained)
        if stage in ("test", "predict") or (stage == "fit" and self.evaluation.test_during_fit):
            self.evaluator.prepare("test", trained)

    @property
    def strategy(self) -> FederatedStrategy:
        """The trainer's strategy, which owns all collectives."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, FederatedStrategy)
        return strategy

    @property
    def round(self) -> int:
        """The current round, from 0: Lightning's epoch."""
        return self.current_epoch

    @property
    def was_stopped(self) -> bool:
        """Whether a signal ended the fit before its last round."""
        last = self.trainer.max_epochs
        return self.strategy.stop_signal is not None and not (last is not None and 0 <= last <= self.current_epoch)

    @property
    def _server(self) -> Server:
        assert self.server is not None, "assemble() comes first"
        return self.server

    # -- what people see -----------------------------------------------------------------------------------------------

    def _log_round(self, training: Mapping[str, float]) -> None:
        about = {"round": float(self.round + 1), "client/lr": self.client_lr(self.round)}
        few = self._names if len(self._names) <= MAX_NAMES else ()
        about |= self.ladder.metrics(few) | self.selection.metrics(self.round, few)
        self.round_metrics = {**about, **self.ledger.metrics(), **self.privacy.metrics(self.round + 1), **training}
        publish(self.trainer, self.round, self.round_metrics)

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Log scores, which are equal on all ranks already; of very many data sets loggers get the means."""
        self.log_dict(few_names(metrics), on_step=False, on_epoch=True, batch_size=1)
        self.trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})

    def client_lr(self, round_: int) -> float:
        """Return the trunk's learning rate in round ``round_``, in closed form."""
        return self._client_lr * self.client_settings.schedule.factor(round_)

    def _on_scoring(self, what: str) -> None:
        self.strategy.poll()
        self.strategy.describe_activity(f"scoring the {what}")
        for callback in self.host.callbacks:
            callback.on_scoring(what)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what fedsim must know; private states go to the strategy, which writes each rank's own."""
        what = (self.method, self.residents, self._num_classes, self.placement.ranks, self.threads)
        learnt = {"kept": dict(self.ledger.kept), "selection": self.selection.state_dict()}
        learnt |= {"traffic": dict(self.ledger.totals), "backbones": self.ladder.state_dict()}
        checkpoint[CONTENT_KEY] = describe_content(*what) | learnt
        checkpoint[SERVER_KEY] = self._server.kept
        checkpoint[STATES_KEY] = ((name, self.store.read(name)) for name in self.store.clients())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the private state of the clients that this rank hosts.

        Raises:
            ConfigError: if the checkpoint is of another method, federation or model.
        """
        content = checkpoint[CONTENT_KEY]
        with self.strategy.together():
            check_content(content, self.method, self.residents, self._num_classes)
            self.ladder.load_state_dict(content.get("backbones", {}), self._server, self.clients)
            load_states(Path(content["path"]), content, self.clients)
            self._server.load_kept(checkpoint.get(SERVER_KEY, {}))
            self.ledger.load_totals(content.get("traffic"), content.get("kept", {}))
            self.selection.load_state_dict(content.get("selection", {}))
            if content["threads"] != self.threads:
                log.warning("the checkpoint is of %d threads per rank: last bits may differ", content["threads"])
