"""Two finished runs on three data sets as owners have them: distractors, junk, and queries without a match."""

from fedsim.__main__ import main
from sites import GALLERY, QUERY, put, site

CONFIG = """
seed_everything: 0
trainer: {max_epochs: 1, accelerator: cpu, devices: 1, enable_progress_bar: false}
model:
  method: FedPav
  backbone: {class_path: SmallCNN, init_args: {width: 8}}
  neck: {kind: linear, dim: 16}
  client: {batch_size: 8}
data: {source: {class_path: MarketFolders, init_args: {root: ROOT}}, val: none, size: [32, 16]}
"""
SETS = ("park", "station", "harbour")
"""of two clients, and an unseen one"""


def runs_of_sites(folder, unmatched=SETS):
    """Train FedPav in ``pav`` and Local in ``local``, with features; ``unmatched``: the sets with such queries."""
    for number, name in enumerate(SETS):
        root = site(folder / "data" / name, range(1, 5 * (name != "harbour")), range(11, 15 + number), (1, 2, 3))
        put(root / GALLERY / "0000_c1s1_7.png")
        put(root / GALLERY / "-1_c2s1_7.png")
        if name in unmatched:
            put(root / QUERY / "0099_c1s1_9.png")
            put(root / GALLERY / "0099_c1s1_8.png")  # of its own camera: no match
    (folder / "run.yaml").write_text(CONFIG.replace("ROOT", str(folder / "data")))
    for run, method in (("pav", "FedPav"), ("local", "Local")):
        words = ["--config", str(folder / "run.yaml"), "--model.method", method, "--run_dir", str(folder / run)]
        assert main(["fit", *words]) == 0
        assert main(["predict", "--ckpt_path", str(folder / run)]) == 0
    return folder
