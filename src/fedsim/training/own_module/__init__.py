"""A LightningModule of the user as the client's model and training; see docs/own_module.md."""
