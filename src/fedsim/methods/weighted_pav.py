"""Client selection by upper confidence bounds, and weighted partial aggregation.

Waref et al. Journal of Cloud Computing 14:24, 2025 (paper 002).

| hook          | the paper, Figs. 2 and 8                                                             |
|---------------|--------------------------------------------------------------------------------------|
| (selection)   | Fig. 8, Eq. (11): ``selection: UCB``, usable with every method                       |
| (backbone)    | ResNet, ConvNeXt: ``clients.NAME.backbone``; averaged within an architecture         |
| (objective)   | Eq. (9): ``objective``                                                               |
| (data)        | Table 7: ``data.generated``, images of each client's generator: ``fedsim augment``   |
| download      | the global model of the client's architecture, with its own embedding and classifier |
| upload        | Eqs. (10), (13): m_i = 1 - cos(w_i, w_g); or the performance p_i of Eq. (2)          |
| weights       | Eqs. (10), (13): w_i = m_i / sum over j in P_t of m_j; or Eq. (2)                    |
| upload        | Eq. (14), FedPav: the feature extractor                                              |

Deviations and silences:

- w_i and w_g are "model weights": here all trainable shared parameters, without running statistics. w_g is the received
  model. The distance is that of parameters; paper 003's Cosine Distance Weight (``FedPav``, ``weighting: cdw``)
  compares logits of a batch.
- Eqs. (6), (10) and (13) give more weight to a larger change, as paper 003 does; the prose says the opposite. This
  file follows the equations. ``invert`` follows the prose, with w_i proportional to 1 / m_i: the cosines themselves are
  all close to 1, and would weigh uniformly.
- Distances are 1e-5 and less: they are computed in float64, from differences. If all vanish, weights are uniform.
- Models of several architectures cannot be averaged with one another; the paper does not mention this. The sum of
  Eq. (10) is over the selected clients of an architecture. If there is none, its global model stays.
- "Client-specific parts remain unchanged": the classifier, and the embedding before it, whose input differs between
  architectures. ``share_neck`` averages the embedding within an architecture.
- The server "acting as the teacher model in the knowledge distillation process" is named once, without a loss: it is
  not implemented.
- Eq. (2), w_i = p_i h_i / sum of p_j h_j, is only in the problem statement; p_i is "based on local model performance
  metrics (e.g., loss, accuracy)", h_i "quantifies the client's hardware performance". ``weighting: performance`` is our
  reading: p_i is the accuracy on the round's training batches, h_i the ``images_per_second`` of ``model.hardware``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedsim.core.errors import ConfigError
from fedsim.functional.distances import cosine_distance_of_products, products_of_parameters
from fedsim.functional.weighting import normalise
from fedsim.methods.base import Method, Need, Signal, Weights
from fedsim.models.groups import Group, body_groups
from fedsim.training.client import Client
from fedsim.training.messages import Measured, Report, Upload


@dataclass(frozen=True, kw_only=True)
class WeightedPav(Method):
    """The backbone is averaged, with weights that clients measure."""

    weighting: Literal["cdw_param", "performance"] = "cdw_param"
    """``cdw_param`` is Eqs. (10) and (13), the cosine distance of parameters; ``performance`` is Eq. (2)"""
    invert: bool = False
    """weigh by $1 / m_i$, so that small changes count more; only with ``cdw_param``"""
    share_neck: bool = False
    """average the embedding, too"""

    def __post_init__(self) -> None:
        """Check that the settings are compatible."""
        if self.invert and self.weighting != "cdw_param":
            raise ConfigError("model.method.invert: belongs to weighting: cdw_param; leave it out")

    @property
    def measures(self) -> Mapping[str, Signal]:
        """m_i of Eq. (10), or the accuracy in p_i of Eq. (2)."""
        return {"cdw_param" if self.weighting == "cdw_param" else "accuracy": "client"}

    @property
    def requires(self) -> frozenset[Need]:
        """The speeds, and the guesses for the accuracy, in Eq. (2)."""
        return frozenset({"speeds", "built_in_model"} if self.weighting == "performance" else ())

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The backbone, and the neck if it is shared."""
        return body_groups(self.share_neck, share_head=False)

    def upload(self, client: Client) -> Upload:
        """Return the model, and m_i of Eq. (10) or the accuracy in Eq. (2)."""
        model, received = client.model, client.received.vector
        if self.weighting == "performance":
            accuracy = Measured(client.session.metrics.right(), lambda right: right[0] / max(right[1], 1))
            return Upload(model.shared, signals={"accuracy": accuracy})
        spans = [e.span for e in model.flat.shared_parameters if model.network.get_parameter(e.name).requires_grad]
        products = products_of_parameters((model.shared[span], received[span]) for span in spans)
        return Upload(model.shared, signals={"cdw_param": Measured(products, cosine_distance_of_products)})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the share of each client in the average."""
        if self.weighting == "performance":
            performance = {k: r.signals["accuracy"] * (r.speed or 0.0) for k, r in reports.items()}
            return Weights(normalise(performance))  # Eq. (2)
        distances = {client: report.signals["cdw_param"] for client, report in reports.items()}
        if self.invert:  # 1 / m_i times the smallest m_j; if that is 0, then 1 for those at 0, and 0 for the others
            smallest = min(distances.values(), default=0.0)
            distances = {client: 1.0 if m == smallest else smallest / m for client, m in distances.items()}
        return Weights(normalise(distances))  # Eq. (10)
