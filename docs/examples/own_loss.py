"""A loss of your own: images of one person from two cameras, in two views, should have equal features."""

from torch import Tensor
from torch.nn.functional import normalize

from fedsim.training.batch_loss import BatchLoss, SeenBatch


class AcrossCameras(BatchLoss):
    """Mean squared distance of unit features of one identity in two cameras; it starts after ``first`` rounds.

    Args:
        weight: of the loss in the sum.
        first: round, from 0, from which it counts.
    """

    views = 2  # each image is augmented twice, which costs a second forward pass

    def __init__(self, weight: float = 1.0, first: int = 0) -> None:
        super().__init__(weight)
        self.first = first

    def forward(self, seen: SeenBatch) -> Tensor:
        """Return the loss, a scalar; without such pairs it is 0, with a gradient of 0."""
        one, other = (normalize(view.neck) for view in seen.views)
        apart = (one[:, None] - other).square().sum(2)  # [B, B]
        same = seen.labels[:, None] == seen.labels
        pairs = same & (seen.cameras[:, None] != seen.cameras)
        counts = float(seen.round >= self.first)
        return counts * (apart * pairs).sum() / pairs.sum().clamp(min=1)
