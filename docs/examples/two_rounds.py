"""Build a federation in Python, train two rounds, test it, and read the scores as a table."""

from tabulate import tabulate

from fedsim import Augmentation, FederatedDataModule, Federation, LocalTraining, SyntheticReID, Trainer
from fedsim.methods import FedPav
from fedsim.models import SmallCNN

source = SyntheticReID(clients=3, unseen=1, scale=0.25)  # or MarketFolders("data/reid"), your own folders
data = FederatedDataModule(source, size=(32, 16), augmentation=Augmentation(pad=2))
model = Federation(FedPav(), SmallCNN(width=8), client=LocalTraining(batch_size=8))

trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1)  # run_dir="runs/mine" writes config, checkpoints, metrics
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data)
print(tabulate(trainer.scores, headers="keys", floatfmt=".3f"))
