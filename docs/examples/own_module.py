"""Metric learning as a plain Lightning module: it trains alone, and, unchanged, as the clients of a federation."""

import torch
from lightning import LightningModule, Trainer, seed_everything
from tabulate import tabulate
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import fedsim


class TripletNet(LightningModule):
    def __init__(self, num_classes: int, width: int = 16, margin: float = 0.3, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, 4 * width),
        )
        self.classifier = nn.Linear(4 * width, num_classes)

    def embed(self, images):
        return self.encoder(images)

    def forward(self, images):
        return self.classifier(self.embed(images))

    def triplet_loss(self, features, labels):
        distances = torch.cdist(normalize(features), normalize(features))
        same = labels[:, None] == labels[None, :]
        hardest_positive = distances.masked_fill(~same, 0.0).amax(dim=1)
        hardest_negative = distances.masked_fill(same, 4.0).amin(dim=1)
        return torch.relu(hardest_positive - hardest_negative + self.hparams.margin).mean()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        features = self.embed(images)
        logits = self.classifier(features)
        loss = cross_entropy(logits, labels) + self.triplet_loss(features, labels)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


def train_alone():
    """Train it under Lightning's own trainer."""
    labels = torch.arange(64) % 8
    images = labels.view(-1, 1, 1, 1) / 8 + 0.5 * torch.randn(64, 3, 32, 16)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    trainer = Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(TripletNet(num_classes=8), loader)
    print("alone:", {name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})


def train_federation():
    """Train it as three clients, whose classifiers are their own."""
    source = fedsim.SyntheticReID(clients=3, unseen=1, scale=0.25)
    data = fedsim.FederatedDataModule(source, size=(32, 16))
    client = fedsim.LocalTraining(batch_size=16, sampler="identity", local_epochs=2)
    model = fedsim.Federation(fedsim.methods.FedAvg(), TripletNet(num_classes=8), client=client)
    trainer = fedsim.Trainer(max_epochs=2, accelerator="cpu", devices=1)
    trainer.fit(model, datamodule=data)
    print({name: round(value, 3) for name, value in model.round_metrics.items() if name.startswith("train/town0")})
    trainer.test(model, datamodule=data)
    print(tabulate(trainer.scores, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    seed_everything(0)
    train_alone()
    train_federation()
