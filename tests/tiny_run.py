"""The config of a run that takes seconds: four clients, two unseen domains, a narrow network."""

TINY = """
seed_everything: 0
trainer: {max_epochs: 3, check_val_every_n_epoch: 3, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  neck: {kind: linear, dim: 16, dropout: 0.2}
  client:
    batch_size: 8
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9}}
data:
  source: {class_path: SyntheticReID, init_args: {clients: 4, unseen: 2, scale: 0.25}}
  val_fraction: 0.3
  size: [32, 16]
  augmentation: {pad: 2, flip: 0.5}
"""
