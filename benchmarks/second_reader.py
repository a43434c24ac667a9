"""Papers read a second time: forms that were filled in from the texts alone, beside the rows of the same papers.

A form has an entry for each printed row: its numbers as printed, and for each setting of ``SETTINGS`` a value, the
paper's own words and the place where they stand. A value is null where the paper gives none. Numbers must be those of
the paper's file, digit by digit. Settings are compared with all that the row resolves to: what the form says must be
a part of it. The reader writes words, so both sides become sets of facts first ("SGD, Nesterov" is ``sgd`` and
``nesterov``). Each disagreement is to be read in the text: this only finds them.

    python benchmarks/second_reader.py benchmarks/results/second_reader/*.yaml
    python benchmarks/second_reader.py FORMS/*.yaml --condense benchmarks/results/second_reader

A form whose setting has many equal entries is shorter with ``--condense``: an entry with the numbers of its rows.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tabulate import tabulate

from fedsim.papers import files
from fedsim.papers.files import Paper, read_paper
from fedsim.papers.published import Table, TableRow
from fedsim.papers.resolved_rows import resolved_row

Facts = frozenset[Any]
Form = Mapping[str, Any]
NAMES = {
    "000": {},
    "001": {
        "Baseline (Centralised joint)": "Centralised",
        "Centralised Baseline (Joint)": "Centralised",
        "FedAVG (S=1.0)": "FedAVG, S = 1",
        "FedATT (S=1.0)": "FedATT, S = 1",
        "FedReID (S=1.0)": "FedReID, S = 1",
        "Baseline(local sup.)": "Local supervised",
        "Baseline": "Local supervised",
        "FedReID(direct w/o fine-tuning)": "FedReID, direct",
        "FedReID(sup. w/ local data&dis.)": "FedReID, supervised",
        "DPR(unsup. multi-domain dis.)": "DPR",
        "DPR(semi-sup. multi-domain dis.)": "DPR, semi-supervised",
    },
    "003": {"Federated-by-identity": "By identity", "Federated-by-camera": "By camera"},
    "004": {
        "Baseline": "FedCAPR",
        "FedKLPR\u2217 (Ours)": "FedKLPR without pruning",
        "FedKLPR (Ours)": "FedKLPR",
        "no tick (baseline)": "FedCAPR",
        "KLL + KLAW + P": "and pruning",
        "five ticks, first such row (by the text: KLL + KLAW + P + PRAW + CRR)": "and PRAW, CRR",
        "five ticks, second such row (by the text: KLL + KLAW + P + SAS + CRR)": "and SAS, CRR",
        "KLL + KLAW + P + PRAW + SAS + CRR": "all",
    },
    "005": {
        "Single Model (1)": "Single (1)",
        "Single Model (2)": "Single (2)",
        "Single Model (3)": "Single (3)",
        "FedPav (BL)": "FedPav",
        "Ours": "DACS",
        "SNR+Ours": "SNR+DACS",
        "Ours (ViT)": "DACS (ViT)",
        "(a) JSD": "JSD",
        "(a) KL": "KL",
        "(a) WD (ours)": "DACS",
        "(b) Channel level": "channel level",
        "(b) Spatial level (Ours)": "DACS",
        "(c) H(fG(x)) < H(fG(x\u2032))": "H(G(x)) < H(G(x')) alone",
        "(c) H(fG(x\u2032)) < H(fL(x\u2032))": "H(G(x')) < H(L(x')) alone",
        "(c) Complete (Ours)": "DACS",
    },
    "007": {
        "SSCU": "SSCU (ViT)",
        "SSCU + PFTS (Ours)": "SSCU+PFTS (ViT)",
        "SSCU + BAPM (Ours)": "SSCU+BAPM (ViT)",
    },
}
"""paper -> name of a row in the form -> in the paper's file, where they differ in more than signs"""
TABLES = {f"table{roman}": f"table{number}" for number, roman in enumerate(("ii", "iii", "iv", "v", "vi", "vii"), 2)}
TABLES |= {"supplementtable1": "supp1", "supplementtable2": "supp2", "protocol1readme": "table1"}
ELSEWHERE = {("004/table3", "FedCAPR"): "table5", ("004/table4", "FedCAPR"): "table6"}
ELSEWHERE |= {("005/table3", name): "table2" for name in ("Baseline", "DACS")}
"""table and row that the form has -> the table of the file that has the same printed row"""
SETS = {"duke": "dukemtmc", "dukemtmcreid": "dukemtmc", "market": "market1501", "caviar": "caviar4reid"}
SETS |= {"prid": "prid2011", "prid2": "prid2011", "ilidsvid": "ilids", "cuhk03": "cuhk03np"}
SETS |= {"m": "market1501", "ms": "msmt17", "c3": "cuhk03np", "average": "mean", "savg": "mean"}
METRICS = {"r1": "rank1", "r5": "rank5", "r10": "rank10", "top1cifar10": "top1", "map": "mAP", "accuracymap": "mAP"}
METRICS |= {"rank1accuracy": "rank1", "notnamedrank1bycomparisonwithtable5": "rank1"}
METRICS |= {"pruningratio": "pruned", "pr": "pruned", "cc": "cost"}
COSTS = ("pruned", "cost")
"""names of a row's costs: percent of weights, GiB"""
CAMERAS = {"Market1501": 6, "CUHK03NP": 2}


# -- facts of a form and of a row --------------------------------------------------------------------------------------


def numbers(value: object) -> Facts:
    """Return the numbers in a value."""
    return frozenset(float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", str(value).replace(",", "")))


def words(patterns: Mapping[str, str] | None = None, **names: str) -> Callable[[object], Facts]:
    """Return a function that yields the facts whose pattern a value has."""
    fact_of = {**(patterns or {}), **names}
    return lambda value: frozenset(fact for pattern, fact in fact_of.items() if re.search(pattern, str(value)))


def form_clients(value: object) -> Facts:
    """Return the number of clients, or that there is none."""
    return words({"none|together": "together"}, alone="alone")(value) or numbers(str(value).partition("(")[0])


def form_participation(value: object) -> Facts:
    """Return the fraction of clients that are averaged in a round."""
    fractions = [float(text) for text in re.findall(r"S=([\d.]+)", str(value))]
    return words({"not applicable|^none": "no average"})(value) or frozenset(fractions or [1.0] * ("all" in str(value)))


def form_backbones(value: object) -> Facts:
    """Return names such as ``resnet50`` and ``convnexttiny``."""
    names = {f"{name}{size}".lower() for name, size in re.findall(r"(ResNet|ConvNeXt)[- ](\w+)", str(value))}
    return frozenset(names) | words({"(?i)^vit": "vit", "SNR after each": "SNR in four stages"}, SNR="SNR")(value)


def form_neck(value: object) -> Facts:
    """Return the parts of the neck, and its width."""
    parts = words({"[Ff]ully-connected|FC": "linear", "BN,": "bn"}, ReLU="relu", Dropout="dropout")
    return parts(value) | numbers(str(value).partition("(")[0])


def form_splits(value: object) -> Facts:
    """Return numbers of people and images; smaller ones are of splits and cameras."""
    counts = str(list(value.values()) if isinstance(value, Mapping) else value)
    sizes = [number for number in numbers(counts) if number >= 30]
    return frozenset(f"{size:.0f} in all" if "(all)" in counts else size for size in sizes)


def at(config: Any, path: str) -> Any:
    """Return a setting by its dotted name; None: it has none."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def kind(config: Any, path: str) -> str:
    """Return the name of a class, without its modules."""
    return str(at(config, f"{path}.class_path")).rpartition(".")[2]


def number_at(path: str) -> Callable[[Any, Any], Facts]:
    """Return a function that yields the number of a setting."""
    return lambda config, _: frozenset([float(at(config, path))] if at(config, path) is not None else [])


def flags(*pairs: tuple[object, object]) -> Facts:
    """Return the facts that hold."""
    return frozenset(fact for holds, fact in pairs if holds)


def optimizer(config: Any, _: Any) -> Facts:
    """Return an optimizer's class, and whether its momentum is Nesterov's."""
    nesterov = at(config, "model.client.optimizer.init_args.nesterov")
    return flags((True, kind(config, "model.client.optimizer").lower()), (nesterov, "nesterov"))


def schedule(config: Any, _: Any) -> Facts:
    """Return factor and step of a stepwise schedule."""
    settings = at(config, "model.client.schedule")
    if settings["kind"] == "milestones":
        return frozenset([settings["gamma"], *map(float, settings["milestones"])])
    return frozenset([settings["gamma"], float(settings["step"])] if settings["kind"] == "step" else [])


def local_length(config: Any, _: Any) -> Facts:
    """Return the epochs of local training, and its steps if they are counted."""
    client = config["model"]["client"]
    return flags((True, float(client["local_epochs"])), (client["local_steps"], float(client["local_steps"] or 0)))


def head_rate(config: Any, _: Any) -> Facts:
    """Return the rate of the head, which is that of all without one of its own."""
    return frozenset([at(config, "model.client.head_lr") or at(config, "model.client.optimizer.init_args.lr")])


def image_size(config: Any, _: Any) -> Facts:
    """Return height and width of a training image."""
    return frozenset(map(float, at(config, "data.augmentation.crop") or at(config, "data.size")))


def networks(config: Any) -> Iterator[Any]:
    """Yield the backbones of a row."""
    net = config["model"]["backbone"]
    yield net["init_args"].get("backbone", net)
    overrides = (config["model"]["clients"] or {}).values()
    yield from (override["backbone"] for override in overrides if override["backbone"])


def backbones(config: Any, _: Any) -> Facts:
    """Return the names of all backbones."""
    pairs = ((kind({"b": net}, "b").replace("CifarResNet", "ResNet"), net["init_args"]) for net in networks(config))
    styles = [net["init_args"].get("style") or {} for net in networks(config)]
    with_snr = [style for style in styles if style.get("kind") == "snr"]
    return frozenset(
        "vit" if name == "TimmBackbone" else f"{name}{arguments.get('depth') or arguments.get('size')}".lower()
        for name, arguments in pairs
    ) | flags((with_snr, "SNR"), (any(len(style["after"]) == 4 for style in with_snr), "SNR in four stages"))


def pretrained(config: Any, _: Any) -> Facts:
    """Return whether a network starts from weights of ImageNet; files are of runs."""
    weights = [str(net["init_args"].get("weights")) for net in networks(config)]
    return flags(*((re.search("IMAGENET|in1k", name), "imagenet") for name in weights))


def losses(config: Any, _: Any) -> Facts:
    """Return the parts of the loss."""
    expert = at(config, "model.method.init_args.expert") or kind(config, "model.method") == "FedReIDFineTune"
    goal, regulariser = config["model"]["objective"], at(config, "model.method.init_args.regulariser")
    if kind(config, "model.method") == "FedCAPR":
        regulariser = "cosine"
    if parts := at(config, "model.client.cluster.loss"):
        return flags(*((parts[name], name) for name in ("intra", "inter", "camera")), (regulariser, regulariser))
    return flags((goal["cross_entropy"], "cross-entropy"), (goal["triplet"], "triplet"), (expert, "expert"))


def augmentation(config: Any, _: Any) -> Facts:
    """Return the kinds of augmentation."""
    settings = config["data"]["augmentation"]
    return flags(
        (settings["pad"] or settings["crop"], "crop"),
        (settings["flip"], "flip"),
        (settings["rotate"], "rotation"),
        (settings["brightness"], "colours"),
        (settings["erase"], "erasing"),
        (config["data"]["generated"], "generated"),
    )


def clients(config: Any, _: Any) -> Facts:
    """Return the number of clients, or that each data set is alone, or that all are together."""
    data = config["data"]
    sources = data["source"] if isinstance(data["source"], list) else [data["source"]]
    trains = [s["class_path"].rpartition(".")[2] for s in sources if at(s, "init_args.protocol") != "splits"]
    trains = [name for name in trains if name.lower() not in {*(data["unseen"] or ()), data["public"]}]
    if kind(config, "model.method") == "Local":
        return frozenset(["alone"])
    if data["partition"] == "union":
        return frozenset(["together"])
    by_camera = sum(CAMERAS.get(name, 0) for name in trains)
    return frozenset([float({"by_dataset": len(trains), "by_camera": by_camera}.get(data["partition"], data["parts"]))])


def participation(config: Any, _: Any) -> Facts:
    """Return the fraction of clients that are averaged in a round."""
    if kind(config, "model.method") == "Local" or config["data"]["partition"] == "union":
        return frozenset(["no average"])
    fraction = (
        at(config, "model.selection.init_args.fraction") or at(config, "model.method.init_args.aggregated") or 1.0
    )
    return frozenset([0.0 if kind(config, "model.selection") == "UCB" else fraction])


def aggregation(config: Any, _: Any) -> Facts:
    """Return the weights of the average."""
    if clients(config, _) & {"alone", "together"}:
        return frozenset(["no average"])
    default = {"FedCAPR": "cdw", "FedUReID": "size"}.get(kind(config, "model.method"), "uniform")
    weighting = str(at(config, "model.method.init_args.weighting") or default).replace("_param", "")
    return frozenset([weighting]) | flags((at(config, "model.method.init_args.sas"), "SAS"))


def shared(config: Any, _: Any) -> Facts:
    """Return what stays with the clients."""
    name = kind(config, "model.method")
    head = at(config, "model.method.init_args.share_head")
    norm = name in ("SKA", "FedBN")
    return flags((not head, "private head"), (head, "shared head"), (norm, "private normalisation"))


def neck(config: Any, _: Any) -> Facts:
    """Return the parts of the neck."""
    settings = config["model"]["neck"]
    linear = settings["kind"] == "linear"
    of_linear = flags((True, float(settings["dim"])), (True, settings["activation"]), (True, "linear"), (True, "bn"))
    return (of_linear if linear else frozenset()) | flags((settings["dropout"], "dropout"))


def dropout(config: Any, _: Any) -> Facts:
    """Return whether the neck has dropout."""
    return flags((at(config, "model.neck.dropout"), "used"))


def constants(config: Any, _: Any) -> Facts:
    """Return the parts of the method."""
    method, norm = at(config, "model.method.init_args") or {}, at(config, "model.backbone.init_args.norm")
    local_norm = kind(config, "model.method") in ("SKA", "FedBN")
    return flags(
        (local_norm, "LSN"),
        (method.get("dual"), "Dual"),
        (norm == "attentive", "AN"),
        (norm == "se", "SE"),
        (norm == "cbam", "CBAM"),
        (method.get("unseen") == "avg", "Avg"),
        (method.get("unseen") == "concat", "FeatConcat"),
        (method.get("unseen") == "imagenet", "RandImg"),
        (method.get("distillation"), "distillation"),
        (method.get("weighting") == "cdw", "cosine weights"),
        (method.get("temperature"), f"T {method.get('temperature'):g}" if method.get("temperature") else ""),
        (at(config, "model.privacy") is None, "no noise"),
        (at(config, "model.selection.init_args.reward") == "argmax", "largest is rewarded"),
        (at(config, "model.backbone.init_args.fam") == "none", "no attention"),
        *((name in method, f"{name} {method.get(name)}") for name in ("lam", "lam_div", "lam_au")),
        *((method.get("prune"), f"{name} {method.get(name)}") for name in ("step", "target", "trials")),
    )


def scored_model(_: Any, row: Any) -> Facts:
    """Return the scored models: columns of data sets without a client have the global one."""
    trained = set().union(*row.clients) if row.clients else set(row.scores)
    return frozenset([row.model]) | flags((set(row.scores) - trained, "global"))


def scored_round(_: Any, row: Any) -> Facts:
    """Return the paper's rule."""
    return frozenset([row.rule])


def distance(config: Any, _: Any) -> Facts:
    """Return the distance of queries to the gallery."""
    return frozenset([at(config, "model.evaluation.distance")])


def part(is_on: Callable[[Any, str], Any]) -> Callable[[Any, Any], Facts]:
    """Return a function that yields whether a part of the method is on, by the method's options and its name."""
    return lambda config, _: frozenset(
        ["on" if is_on(at(config, "model.method.init_args") or {}, kind(config, "model.method")) else "off"]
    )


def is_part(value: object) -> Facts:
    """Return whether a part of the method is on."""
    return frozenset(["off" if str(value) == "off" else "on"])


def supervision(config: Any, _: Any) -> Facts:
    """Return how images without labels get some."""
    client = config["model"]["client"]
    return flags((client["cluster"] or client["bottom_up"], "unsupervised"), (client["cluster"], "DBSCAN"))


def cameras(config: Any, _: Any) -> Facts:
    """Return whether images of the query's own camera are left out."""
    return flags((at(config, "model.evaluation.camera_aware"), "other cameras"))


class Setting(NamedTuple):
    """How a setting of the form is compared."""

    form: Callable[[object], Facts]
    ours: Callable[[Any, Any], Facts]
    in_notes: str
    """pattern of the words with which a note would name it"""
    exact: bool = False
    """whether the row may have no more than the form"""


# fmt: off
SETTINGS = {
    "n_clients": Setting(form_clients, clients, "clients?|alone|union"),
    "clients_per_round": Setting(form_participation, participation, "selection|selected|drawn|S =|K and|take part"),
    "rounds": Setting(numbers, number_at("trainer.max_epochs"), "rounds|max_epochs|how long|as many"),
    "local_epochs": Setting(numbers, local_length, "epochs?"),
    "batch_size": Setting(numbers, number_at("model.client.batch_size"), "batch"),
    "optimizer": Setting(words(SGD="sgd", Adam="adam", Nesterov="nesterov"), optimizer, "optimizer"),
    "lr_backbone": Setting(numbers, number_at("model.client.optimizer.init_args.lr"), "rate|lr:"),
    "lr_head": Setting(numbers, head_rate, "rate|head_lr|lr:"),
    "lr_schedule": Setting(numbers, schedule, "schedule|rate drops|drops|constant rate"),
    "momentum": Setting(numbers, number_at("model.client.optimizer.init_args.momentum"), "momentum|optimizer"),
    "weight_decay": Setting(numbers, number_at("model.client.optimizer.init_args.weight_decay"), "decay"),
    "image_size": Setting(numbers, image_size, r"size: \["),
    "backbone": Setting(form_backbones, backbones, "ResNet|ConvNeXt|network"),
    "pretrained": Setting(words({"ImageNet|jx_vit": "imagenet"}), pretrained, "weights|ImageNet|pretrained"),
    "embedding_neck": Setting(form_neck, neck, "neck"),
    "dropout": Setting(words(used="used"), dropout, "dropout"),
    "label_smoothing": Setting(numbers, number_at("model.objective.label_smoothing"), "smoothing"),
    "losses": Setting(
        words({"(?<!binary )cross-entropy|CEL": "cross-entropy", "[Tt]riplet": "triplet",
               r"(?<!model \()expert": "expert",
               "intra-camera|^CAP": "intra", "inter-camera|^CAP": "inter", r"\+ camera-aware": "camera",
               "cosine-similarity": "cosine", "KLL": "kl"}),
        losses, "loss|lambda|triplet|expert", exact=True),
    "augmentation": Setting(
        words(crop="crop", flip="flip", rotation="rotation", jitter="colours", GAN="generated", erasing="erasing"),
        augmentation, "crop|flip|augment|pad"),
    "aggregation": Setting(
        words({"unweighted|1/K": "uniform", "n_k|data size|data set size|by images": "size",
               "osine|weight adjustment": "cdw", "^none": "no average", "^KLAW": "klaw", "^KLPWA": "klpwa",
               r"\(SAS": "SAS", "^DWA": "gain", "averaged, once": "averaged once"}),
        aggregation, "weight|average"),
    "shared_parts": Setting(
        words({"private|not aggregated|embedding only|all but|network only|^feature extractor": "private head",
               "whole model|all model weights|all layers": "shared head",
               "BN layers|normalisation layers private|personalised BatchNorm": "private normalisation"}),
        shared, "share|private|classifier|stays? with"),
    "method_constants": Setting(
        words({r"(^|\+ ?)LSN": "LSN", r"\+ Dual": "Dual", r"(^|\+ ?)AN\b|AN placement": "AN", "^SE ": "SE",
               "^CBAM": "CBAM", "^Avg": "Avg", "m_k|weight adjustment": "cosine weights", "'T': 3": "T 3",
               "'beta': 0": "no noise", "1 best, 0 rest": "largest is rewarded", "attention removed": "no attention",
               "'KLL coefficient': 0.13": "lam 0.13", "'lambda_div': 1": "lam_div 1.0", "'lambda_au': 5": "lam_au 5.0",
               "'<= 9 %'": "step 0.09", "'70 %'": "target 0.7", "pruning': 10": "trials 10"},
              FeatConcat="FeatConcat", RandImg="RandImg", distillation="distillation"),
        constants, r"\bmu\b|tau|lambda|margin|rho|\bK\b|epsilon|attenti"),
    "eval_model": Setting(
        words({"before aggregation": "local", "(?<!from the )global|federated|joint|central|server": "global",
               "personalised|own model|specific normalisation|trained on|model distilled|source's": "personalised"},
              concat="ensemble"),
        scored_model, "global|personal|scored|model"),
    "eval_round": Setting(
        words({"three best": "best3", "^best$": "best", "^final$": "last"}), scored_round, "round|epoch|moment"),
    "eval_distance": Setting(words({"L2|Euclidean": "euclidean"}), distance, "distance"),
    "eval_cross_camera": Setting(words(), cameras, "camera"),
    "splits": Setting(form_splits, lambda _, row: row.counts, "split|Table [13]|owners"),
    # of papers 004 and 005
    "supervision": Setting(words({"^unsupervised": "unsupervised"}, DBSCAN="DBSCAN"), supervision, "cluster"),
    "kll_coefficient": Setting(is_part, part(lambda method, _: method.get("regulariser") == "kl"), "KLL"),
    "klaw_weight": Setting(is_part, part(lambda method, _: str(method.get("weighting"))[:2] == "kl"), "KLAW"),
    "praw_weight": Setting(is_part, part(lambda method, _: method.get("weighting") == "klpwa"), "PRAW|alpha"),
    "pruning_kind": Setting(is_part, part(lambda method, _: "target" in method and method.get("prune", True)), "prun"),
    "crr": Setting(is_part, part(lambda method, _: method.get("prune") and method.get("crr")), "CRR"),
    "stm": Setting(is_part, part(lambda _, name: name == "DACS"), "style"),
    "diversity_metric": Setting(is_part, part(lambda method, _: method.get("lam_div")), "diversity"),
    "authenticity": Setting(is_part, part(lambda method, _: method.get("lam_au")), "authenticity"),
    "expert": Setting(is_part, part(lambda method, _: method.get("lam_au")), "expert"),
}
# fmt: on
"""setting of the form -> how it is compared; the columns of the numbers are compared as numbers"""
NOT_THE_PAPERS = re.compile(
    r"\bours\b|\bcode\b|not (say|said|give|given|name|named|print|printed|state)|does not|neither|nor\b|silent|"
    r"cannot be read|guess|release"
)
"""words of notes about what a paper leaves open"""

NOTED, HEAD_ONLY = "silent, a note says whose", "silent, only the head of the file says whose"


# -- forms -------------------------------------------------------------------------------------------------------------


def read_form(path: Path) -> dict[str, Any]:
    """Return a form with the settings in each of its rows."""
    form = dict(yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    for setting, leaves in form.pop("settings", {}).items():  # condensed
        for leaf in leaves:
            for number in rows_in(leaf["rows"]):
                form["rows"][number].setdefault("settings", {})[setting] = leaf
    return form


def condensed(form: Form) -> str:
    """Return a form with one entry for all rows that have the same value and words of a compared setting."""
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    for number, row in enumerate(form["rows"]):
        for name, leaf in row["settings"].items():
            if name in SETTINGS or name == "eval_metric":
                entry = {field: leaf[field] for field in ("value", "words", "where")}
                of_rows = settings[name].setdefault(str(entry), entry | {"rows": ""})
                of_rows["rows"] = with_row(of_rows["rows"], number)
    kept = ("table", "row", "metrics", "datasets", "printed")
    content = {
        "paper": form["paper"],
        "title": form["title"],
        "rows": [{field: row[field] for field in (*kept, *["layout"][: by_columns(row)])} for row in form["rows"]],
        "settings": {name: list(entries.values()) for name, entries in settings.items()},
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=None)


def rows_in(spans: str) -> Iterator[int]:
    """Yield the numbers in a text such as ``0-3 7``."""
    for span in spans.split():
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


def with_row(spans: str, number: int) -> str:
    """Return such a text with one more number."""
    before, _, last = spans.rpartition(" ")
    first, _, end = last.partition("-")
    if (end or first) != str(number - 1):
        return f"{spans} {number}".lstrip()
    return f"{before} {first}-{number}".lstrip()


def plain(name: str) -> str:
    """Return a name in small letters and digits."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(heading.*", "", name).lower())


def data_set(name: str, paper: Paper) -> str:
    """Return fedsim's name of a data set, which may be a target behind an arrow; of several unnamed ones ``seen``."""
    name = name.rpartition("→")[2]
    own_name = SETS.get(plain(name), "seen" if re.search("not (named|said)|2 data sets", name) else plain(name))
    return own_name.removesuffix("np") if own_name not in paper.content["test_sets"] else own_name


def name_of(paper: Paper, entry: Form) -> str:
    """Return the name of an entry's row in the paper's file, as far as it is known."""
    name = re.sub(r" \[\d+\]$", "", entry["row"])
    return str(NAMES.get(paper.key, {}).get(name, name))


def by_columns(entry: Form) -> bool:
    """Return whether an entry has a column per printed row, because its own rows are data sets."""
    return str(entry.get("layout", "")).startswith("rows are")


def rows_of(table: Table, paper: Paper, entry: Form) -> list[TableRow]:
    """Return the printed rows of an entry: one, or one per column."""
    if by_columns(entry):
        return list(table.rows)
    name = name_of(paper, entry)
    if table.name == "supp1":  # a column per set of sources
        columns = [column.partition("→")[0] for column in entry["datasets"]]
        names = [f"{name}, {'three sources' if column.count('+') == 2 else column}" for column in columns]
        return [next(row for row in table.rows if row.name == name) for name in names]
    if equal := [row for row in table.rows if row.name == name]:
        return equal
    named = {plain(row.name): row for row in table.rows}
    starts = [row for key, row in named.items() if key.startswith(plain(name))]
    return [named.get(plain(name)) or starts[0]]


def cells_of(entry: Form, rows: Sequence[TableRow], paper: Paper) -> Iterator[tuple[TableRow, str, str, str]]:
    """Yield row, data set, metric and text of each number in an entry."""
    metrics = [METRICS.get(plain(name.partition(":")[2] or name), plain(name)) for name in entry["metrics"]]
    metrics = [name for name in metrics if name != "convergencespeed"]
    sets = [data_set(name, paper) for name in entry["datasets"]]
    if entry["datasets"] == ["(all)"]:  # one number for all
        sets = list(rows[0].costs)[:1]
    if len(rows) == len(sets) > 1:
        places = [(row, name, metric) for row, name in zip(rows, sets, strict=True) for metric in metrics]
    elif len(rows) > 1:  # a column per method
        metric = "mAP" if metrics == ["mAP"] else "rank1"
        places = [(row, sets[0], metric) for row in rows]
    elif len(metrics) == len(sets) > 1 and len(entry["printed"]) == len(sets):
        places = [(rows[0], *pair) for pair in zip(sets, metrics, strict=True)]
    else:
        places = [(rows[0], name, metric) for name in sets for metric in metrics]
    for (row, name, metric), text in zip(places, entry["printed"], strict=False):
        yield row, name, metric, re.sub(r"[^\d.+±?-]", "", str(text or "-"))


# -- comparison --------------------------------------------------------------------------------------------------------


def compare_numbers(paper: Paper, form: Form) -> Iterator[tuple[str, str]]:
    """Yield the verdict on each printed number, and a line about it."""
    seen = set()
    for entry in form["rows"]:
        table = table_named(paper, entry)
        for row, name, metric, text in cells_of(entry, rows_of(table, paper, entry), paper):
            place = f"{paper.key}/{table.name}, {row.name}, {name}, {metric}"
            seen.add(place)
            verdict, ours = verdict_on_number(paper, table, row, (name, metric), text)
            yield verdict, f"{place}: {text} in the form, {ours} ours"
    for table in paper.tables:
        for row in table.rows:
            cells = [(name, metric) for name in row.scores for metric in row.scores[name]]
            cells += [("mean", metric) for metric, _ in zip(("mAP", "rank1"), row.mean, strict=False)]
            cells += [(name, metric) for name in row.costs for metric in COSTS[: len(row.costs[name])]]
            places = [f"{paper.key}/{table.name}, {row.name}, {name}, {metric}" for name, metric in cells]
            yield from (("only ours", place) for place in places if place not in seen)


def verdict_on_number(
    paper: Paper, table: Table, row: TableRow, cell: tuple[str, str], text: str
) -> tuple[str, float | None]:
    """Return the verdict on a number, and ours."""
    (name, metric), (value, _, spread) = cell, text.partition("±")
    ours = row.scores.get(name, {}).get(metric)
    if metric in COSTS:
        ours = dict(zip(COSTS, row.costs.get(name, ()), strict=False)).get(metric)
    elif name == "mean":
        ours = dict(zip(next(iter(row.scores.values())), row.mean, strict=False)).get(metric)
    raw = paper.content["tables"][table.name]
    if ours is not None and "add" in raw:  # printed as differences
        ours = next(r for r in raw["rows"] if r["name"] == row.name)["scores"][name][0]
    if value == "-" or "?" in value:
        return ("both have none" if ours is None else "only ours"), ours
    if ours is None:
        return "only in the form", ours
    equal = float(value) == ours and (not spread or float(spread) == row.spread[name])
    return ("equal" if equal else "different"), ours


def table_named(paper: Paper, entry: Form) -> Table:
    """Return the table of an entry, by its printed name."""
    name = TABLES.get(plain(entry["table"]), plain(entry["table"]))
    name = ELSEWHERE.get((f"{paper.key}/{name}", name_of(paper, entry)), name)
    return next(table for table in paper.tables if table.name == name)


class Printed(NamedTuple):
    """A printed row with what its paper has for all rows."""

    model: str
    clients: Sequence[frozenset[str]]
    scores: Mapping[str, Any]
    rule: str
    counts: Facts


def counts_in(paper: Paper) -> Facts:
    """Return all numbers of people and images that a paper's file has, also in its notes."""
    result = set(numbers(paper.content["test_sets"]))
    for counts in paper.content["counts"].values():
        result |= numbers({role: value for role, value in counts.items() if role != "by"})
        result |= numbers(re.sub(r"Tables? \d", "", str(counts.get("by", ""))))
        if {"query", "gallery"} <= set(counts) and counts["gallery"]:
            result.add(float(counts["query"][1] + counts["gallery"]))
            (people, images), (tested, queries) = counts.get("train", (0, 0)), counts["query"]
            images = (images or 0) + counts["gallery"]
            result |= {f"{number} in all" for number in ((people or 0) + tested, images, images + queries)}
    return frozenset(result)


def printed_row(paper: Paper, row: TableRow, counts: Facts) -> Printed:
    """Return what is compared of a printed row."""
    return Printed(row.model, row.clients, row.scores, paper.content["rule"], counts)


class Finding(NamedTuple):
    """The verdict on an entry's setting."""

    verdict: str
    setting: str
    value: str = ""
    ours: str = ""
    runs: tuple[str, ...] = ()


def compare_settings(paper: Paper, form: Form, text: str) -> Iterator[Finding]:
    """Yield the verdict on each setting of each entry that is a run."""
    counts = counts_in(paper)
    comments = [line.partition("#")[2] if "#" in line else "" for line in text.splitlines()]
    beside = [line for line, comment in zip(text.splitlines(), comments, strict=True) if comment]
    for entry in form["rows"]:
        table = table_named(paper, entry)
        rows = rows_of(table, paper, entry)
        runs = [(row, run) for row in rows for run in row.runs if "/" not in run]
        if not runs:
            yield from (Finding("no run", name) for name in SETTINGS if name in entry["settings"])
            continue
        configs = [(row, run, resolved_row(paper, run)) for row, run in runs]
        notes = [*beside, *paper.content["notes"], *table.notes, *(row.note for row in rows)]
        notes += [sentence for _, run in runs for sentence in re.split(r"(?<=[.:;]) ", paper.rows[run]["notes"])]
        for name, setting in SETTINGS.items():
            if name not in entry["settings"]:
                continue
            leaf = entry["settings"][name]
            if leaf["value"] is None or leaf["value"] == {}:
                is_noted = any(re.search(setting.in_notes, note) and NOT_THE_PAPERS.search(note) for note in notes)
                ours = facts_text(setting.ours(configs[0][2], printed_row(paper, rows[0], counts)))
                yield Finding(
                    NOTED if is_noted else HEAD_ONLY, name, str(leaf["words"]), ours, tuple(run for _, run in runs)
                )
                continue
            compared: list[tuple[str, Facts, Facts]] = []
            for row, run, config in configs:
                form_facts = setting.form(of_run(leaf["value"], run))
                compared.append((run, form_facts, setting.ours(config, printed_row(paper, row, counts))))
            if len(rows) > 1:  # its settings are those of all columns
                every = frozenset[Any]().union(*(ours for *_, ours in compared))
                compared = [(run, facts, every) for run, facts, _ in compared]
            yield verdict_on(name, setting, leaf["value"], compared)


def of_run(value: object, run: str) -> object:
    """Return the part of a value such as ``Re-ID: 1; CIFAR-10: 5`` that is about a run."""
    if not isinstance(value, str) or not value.startswith("Re-ID:"):
        return value
    reid, _, cifar = value.removeprefix("Re-ID:").partition("; CIFAR-10:")
    return cifar if run.startswith("cifar10") else reid


def verdict_on(name: str, setting: Setting, value: object, compared: list[tuple[str, Facts, Facts]]) -> Finding:
    """Return the verdict on one entry's setting: the worst over its runs."""
    wrong = [(run, form, ours) for run, form, ours in compared if not fits(setting, form, ours)]
    has_value = any(form for _, form, _ in compared)
    chosen = wrong or compared
    _, form, ours = chosen[0]
    text = f"without {facts_text(form - ours)}" if wrong and name == "splits" else facts_text(ours)
    verdict = "disagree" if wrong else "agree" if has_value else "only in the form"
    return Finding(
        verdict, name, str(value), "" if name == "splits" and not wrong else text, tuple(run for run, *_ in chosen)
    )


def fits(setting: Setting, form: Facts, ours: Facts) -> bool:
    """Return whether a row has what the form says."""
    return form == ours if setting.exact and form else form <= ours


def facts_text(facts: Facts) -> str:
    """Return facts in order, as a text."""
    return ", ".join(sorted(f"{fact:g}" if isinstance(fact, float) else str(fact) for fact in facts))


def show_groups(findings: Sequence[Finding], verdict: str) -> None:
    """Print the findings of a verdict, equal ones in a line: number of entries, the row's facts and the runs."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.verdict == verdict:
            groups[finding.setting, finding.value[:110], finding.ours].append(finding)
    print(f"\n{verdict}:\n")
    for (name, value, ours), group in groups.items():
        runs = ", ".join(dict.fromkeys(run for finding in group for run in finding.runs))
        print(f"- {name}, {len(group)} x {value!r}; ours: {ours or 'none'} ({runs})")


def compare(form: Form) -> tuple[Counter[str], Counter[str]]:
    """Print what differs between a form and its paper's rows; return the counts of verdicts on numbers and settings."""
    paper = read_paper(form["paper"])
    print(f"\n## Paper {paper.key}\n")
    lines = list(compare_numbers(paper, form))
    print(*(f"- {verdict}: {line}" for verdict, line in lines if verdict not in ("equal", "both have none")), sep="\n")
    text = (Path(files.__file__).parent / f"{paper.key}.yaml").read_text(encoding="utf-8")
    findings = list(compare_settings(paper, form, text))
    for verdict in ("disagree", "only in the form", HEAD_ONLY):
        show_groups(findings, verdict)
    return Counter(verdict for verdict, _ in lines), Counter(finding.verdict for finding in findings)


def main() -> None:
    """Compare forms with rows, or condense them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("forms", nargs="+", type=Path)
    parser.add_argument("--condense", type=Path, metavar="FOLDER", help="write short forms instead")
    options = parser.parse_args()
    forms = {path.name: read_form(path) for path in options.forms}
    if options.condense:
        options.condense.mkdir(parents=True, exist_ok=True)
        for name, form in forms.items():
            (options.condense / name).write_text(condensed(form), encoding="utf-8")
        return
    counts = {form["paper"]: compare(form) for form in forms.values()}
    for column, title in enumerate(("numbers", "settings")):
        names = sorted({name for counters in counts.values() for name in counters[column]})
        table = [[key, *(counters[column][name] for name in names)] for key, counters in counts.items()]
        print(f"\n{tabulate(table, [title, *names], 'github')}")


if __name__ == "__main__":
    main()
