"""The metrics for torchmetrics: equal to ranking everything at once, whatever the batches, processes and order."""

import copy
import pickle
import queue
import socket
from datetime import timedelta

import matplotlib as mpl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MetricCollection

from failing import _server as processes  # forked from a server that has imported torch: they start in a second
from fedsim.evaluation.metrics import CMC, MeanAP, ReIDRetrieval
from fedsim.evaluation.ranker import Ranker, rank_features
from fedsim.evaluation.ranking import MAX_RANK, RetrievalLabels, average_scores, positive_ranks, score_ranks

mpl.use("Agg")

SCORES = ("rank1", "rank5", "rank10", "mAP", "mAP_trapezoid", "mINP")
Q, G, D = 21, 70, 6


def images(seed=0, ties=True, dtype=torch.float32):
    """Features, identities, cameras and who is a query: the columns of a data set, queries first."""
    rng = np.random.default_rng(seed)
    features = rng.integers(-1, 2, (Q + G, D)) if ties else rng.standard_normal((Q + G, D))
    features[:, 0] = 1  # no feature is zero
    pids = np.concatenate([rng.integers(1, 9, Q), rng.integers(-1, 8, G)])  # 8 is never found, -1 is junk
    camids = rng.integers(0, 3, Q + G)
    return (
        torch.from_numpy(features).to(dtype),
        torch.from_numpy(pids),
        torch.from_numpy(camids),
        torch.arange(Q + G) < Q,
    )


def places():
    """Each image's place in the list of queries or of gallery images."""
    return torch.cat([torch.arange(Q), torch.arange(G)])


def labels_of(columns, **rules):
    _, pids, camids, is_query = (column.numpy() for column in columns)
    return RetrievalLabels(pids[is_query], camids[is_query], pids[~is_query], camids[~is_query], **rules)


def expected_of(columns, **options):
    features, is_query = columns[0], columns[3]
    return rank_features(features[is_query], features[~is_query], labels_of(columns), **options)


def filled(metric, columns, batches=None, index=None):
    """The metric after it has seen the images in these batches."""
    for rows in [torch.arange(Q + G)] if batches is None else batches:
        metric.update(*(column[rows] for column in columns), None if index is None else index[rows])
    return metric


def same(scores, ranking):
    """Whether what compute() returns is a ranking, to the last bit of float32."""
    assert scores.keys() == {*ranking.metrics, "num_valid", "num_queries", "cmc"}
    counts = {name: getattr(ranking, name) for name in ("num_valid", "num_queries", "cmc")}
    for name, value in (ranking.metrics | counts).items():
        assert torch.equal(scores[name], torch.tensor(value)), name
    return True


def batches_of(how):
    rng = np.random.default_rng(3)
    everything = torch.arange(Q + G)
    # queries among gallery images, each in their own order
    mixed = torch.empty(Q + G, dtype=torch.int64)
    mixed[torch.from_numpy(np.argsort(rng.permutation(np.repeat([0, 1], [Q, G])), kind="stable"))] = everything
    return {
        "one": [everything],
        "single images": list(everything.split(1)),
        "tens": list(everything.split(10)),
        "uneven": list(everything.tensor_split([3, 4, 40, 85])),
        "an empty one": [everything[:30], everything[:0], everything[30:]],
        "gallery first": [everything[Q:], everything[:Q]],
        "mixed": list(mixed.split(9)),
    }[how]


# -- one process -------------------------------------------------------------------------------------------------------


def test_the_data_are_what_they_are_meant_to_be():
    columns = images()
    labels, features = labels_of(columns), columns[0]
    assert 0 < labels.num_valid < Q  # queries without a match
    assert len(labels.junk_columns) > 0
    assert any(len(labels.positives_and_junk(q)[1]) for q in range(Q))  # the same camera
    cosines = torch.nn.functional.normalize(features[:Q]) @ torch.nn.functional.normalize(features[Q:]).T
    assert (cosines.round(decimals=5).sort(dim=1).values.diff(dim=1) == 0).any(dim=1).all()  # ties in each list


@pytest.mark.parametrize("how", ["one", "single images", "tens", "uneven", "an empty one", "gallery first", "mixed"])
def test_batches_do_not_matter(how):
    columns = images()
    assert same(filled(ReIDRetrieval(), columns, batches_of(how)).compute(), expected_of(columns))


def test_scores_equal_a_sort_of_the_whole_gallery():
    columns = images(ties=False)
    features = torch.nn.functional.normalize(columns[0])
    ranks = positive_ranks((features[:Q] @ features[Q:].T).numpy(), labels_of(columns))
    expected = average_scores(score_ranks(ranks))
    scores = filled(ReIDRetrieval(), columns, batches_of("tens")).compute()
    for name in SCORES:
        assert float(scores[name]) == pytest.approx(getattr(expected, name), abs=1e-7)
    assert scores["cmc"].tolist() == pytest.approx(expected.cmc, abs=1e-7)
    assert (int(scores["num_valid"]), int(scores["num_queries"])) == (expected.num_valid, Q)


def test_single_numbers_are_those_of_the_whole_table():
    columns = images()
    expected = expected_of(columns)
    assert torch.equal(filled(MeanAP(), columns).compute(), torch.tensor(expected.mAP))
    assert torch.equal(filled(MeanAP(trapezoid=True), columns).compute(), torch.tensor(expected.mAP_trapezoid))
    assert torch.equal(filled(CMC(), columns).compute(), torch.tensor(expected.cmc))
    assert torch.equal(filled(CMC(max_rank=7), columns).compute(), torch.tensor(expected.cmc[:7]))
    assert len(expected.cmc) == MAX_RANK
    assert expected.mAP != expected.mAP_trapezoid


def test_options_are_those_of_the_ranking():
    columns = images(ties=False)
    features, is_query = columns[0], columns[3]

    def score(*rules, **options):
        labels = labels_of(columns, **dict(rules))
        return Ranker(**options).score(features[is_query], features[~is_query], labels)

    plain = score()
    for option, expected in {
        "distance": ("euclidean", score(distance="euclidean")),
        "camera_aware": (False, score(("camera_aware", False))),
        "junk_pids": ((-1, 1, 2), score(("junk_pids", (-1, 1, 2)))),
        "invalid_as_zero": (True, score(invalid_as_zero=True)),
        "single_gallery_shot": (True, score(single_gallery_shot=True)),
    }.items():
        value, ranking = expected
        assert same(filled(ReIDRetrieval(**{option: value}), columns).compute(), ranking)
        assert ranking != plain, option
    # junk_pids may be any sequence, as a config gives it
    assert same(filled(ReIDRetrieval(junk_pids=[-1]), columns).compute(), plain)


def test_faiss_ranks_alike():
    pytest.importorskip("faiss")
    columns = images(ties=False)  # the two libraries' values may differ in their last bits
    assert same(filled(ReIDRetrieval(backend="faiss"), columns).compute(), expected_of(columns))


def test_is_query_may_be_one_answer_for_the_whole_batch():
    columns = images()
    features, pids, camids, _ = columns
    metric = ReIDRetrieval()
    metric.update(features[:Q], pids[:Q], camids[:Q], True)
    metric.update(features[Q:], pids[Q:], camids[Q:], False)
    assert same(metric.compute(), expected_of(columns))


def test_reset_forgets_everything():
    metric = filled(ReIDRetrieval(), images(seed=1))
    metric.compute()
    metric.reset()
    columns = images(seed=2)
    assert same(filled(metric, columns, batches_of("tens")).compute(), expected_of(columns))


def test_compute_may_come_in_between():
    columns = images()
    metric = filled(ReIDRetrieval(), columns, [torch.arange(60)])
    first = metric.compute()
    filled(metric, columns, [torch.arange(60, Q + G)])
    assert same(metric.compute(), expected_of(columns))
    assert not torch.equal(first["mAP"], metric.compute()["mAP"])


def test_forward_scores_the_batch_and_keeps_it():
    first, second = images(seed=1), images(seed=2)
    metric = ReIDRetrieval()
    assert same(metric(*first), expected_of(first))
    assert same(metric(*second), expected_of(second))
    features, pids, camids, is_query = (torch.cat(pair) for pair in zip(first, second, strict=True))
    assert same(metric.compute(), expected_of((features, pids, camids, is_query)))


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("metric", [ReIDRetrieval(), CMC(), MeanAP()], ids=lambda m: type(m).__name__)
def test_a_copy_goes_its_own_way(metric):
    columns = images()
    filled(metric, columns, [torch.arange(40)])
    for duplicate in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()):
        filled(duplicate, columns, [torch.arange(40, Q + G)])
        assert torch.equal(torch.as_tensor(duplicate.ranking().mAP), torch.as_tensor(expected_of(columns).mAP))
    assert sum(map(len, metric.features)) == 40


def test_a_metric_with_faiss_can_be_copied_too():
    pytest.importorskip("faiss")
    metric = ReIDRetrieval(backend="faiss")
    columns = images(ties=False)
    for duplicate in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        assert same(filled(duplicate, columns).compute(), expected_of(columns))


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_states_are_saved_where_that_is_asked_for():
    columns = images()
    metric = filled(ReIDRetrieval(), columns, batches_of("tens"))
    assert not metric.state_dict()  # no evaluation in checkpoints by default
    metric.persistent(True)
    other = ReIDRetrieval()
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    assert same(other.compute(), expected_of(columns))


# -- index -------------------------------------------------------------------------------------------------------------


def test_index_restores_the_order_of_the_data_set():
    columns = images()
    order = torch.from_numpy(np.random.default_rng(5).permutation(Q + G))
    without = filled(ReIDRetrieval(), columns, order.split(8)).compute()
    assert not torch.equal(without["mAP"], torch.tensor(expected_of(columns).mAP))  # ties: the order does matter
    metric = filled(ReIDRetrieval(), columns, order.split(8), places())
    assert same(metric.compute(), expected_of(columns))


def test_index_drops_the_images_a_sampler_pads_with():
    columns = images()
    padded = torch.cat([torch.arange(Q + G), torch.tensor([0, 1, Q, Q + 1, Q + 2])])
    assert filled(ReIDRetrieval(), columns, padded.split(8)).ranking().num_queries == Q + 2
    assert same(filled(ReIDRetrieval(), columns, padded.split(8), places()).compute(), expected_of(columns))


def test_index_may_be_of_any_data_set_and_have_gaps():
    columns = images()
    index = 1000 - 3 * torch.arange(Q + G)  # one list for queries and gallery, backwards
    expected = expected_of(tuple(column.flip(0) for column in columns))
    assert expected != expected_of(columns)
    assert same(filled(ReIDRetrieval(), columns, batches_of("uneven"), index).compute(), expected)


# -- several processes -------------------------------------------------------------------------------------------------

CASES = ("split", "padded", "half", "one has nothing", "three")


def work(rank, world_size, port, case, answers):
    """One process: rank what the sampler gives it, and put what compute() returns into ``answers``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    columns = images(dtype=torch.float16 if case == "half" else torch.float32)
    metrics = MetricCollection({"all": ReIDRetrieval(), "cmc": CMC(max_rank=10), "map": MeanAP(trapezoid=True)})
    rows = torch.arange(rank, Q + G, world_size)
    if case in ("padded", "three"):
        sampler = DistributedSampler(range(Q + G), world_size, rank, shuffle=True, seed=1)
        rows = torch.tensor(list(sampler))
    if case == "one has nothing":
        rows = torch.arange(Q + G) if rank == 0 else rows[:0]
    for part in rows.split(7) if len(rows) else ():
        metrics.update(*(column[part] for column in columns), places()[part])
    scores = {name: value.tolist() for name, value in metrics.compute().items()}
    seen = sum(map(len, metrics["all"].features))  # its own again
    answers.put((rank, scores, seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_all_processes_get_the_scores_of_one(case):
    world_size = 3 if case == "three" else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = processes.Queue()
    workers = [processes.Process(target=work, args=(r, world_size, port, case, answers)) for r in range(world_size)]
    for worker in workers:
        worker.start()
    try:
        found = {}
        while len(found) < world_size and any(w.is_alive() for w in workers):
            try:
                rank, *answer = answers.get(timeout=1)
                found[rank] = answer
            except queue.Empty:
                continue
        for worker in workers:
            worker.join(300)
        assert [worker.exitcode for worker in workers] == [0] * world_size
    finally:
        for worker in workers:
            worker.kill()
    columns = images(dtype=torch.float16 if case == "half" else torch.float32)
    alone = MetricCollection({"all": ReIDRetrieval(), "cmc": CMC(max_rank=10), "map": MeanAP(trapezoid=True)})
    alone.update(*columns)
    expected = {name: value.tolist() for name, value in alone.compute().items()}
    assert expected["all_mAP"] == float(torch.tensor(expected_of(columns).mAP))
    share = -(-(Q + G) // world_size)
    for rank, (scores, seen) in found.items():
        assert scores == expected, rank
        if case in ("padded", "three"):  # so many that some images were seen twice
            assert seen == share
            assert share * world_size > Q + G


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision_are_ranked_in_float32(dtype):
    columns = images(ties=False, dtype=dtype)
    metric = filled(ReIDRetrieval(), columns, batches_of("tens"))
    assert {part.dtype for part in metric.features} == {torch.float32}
    as_single = (columns[0].float(), *columns[1:])
    assert same(metric.compute(), expected_of(as_single))


def test_autocast_and_gradients_do_not_matter():
    features, *rest = images(ties=False)
    features = features.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        metric = filled(ReIDRetrieval(), (features, *rest), batches_of("tens"))
        scores = metric.compute()
    assert same(scores, expected_of(images(ties=False)))
    assert not any(part.requires_grad for part in metric.features)


def test_half_does_not_round_identities():
    features, pids, camids, is_query = images(ties=False)
    metric = ReIDRetrieval().half()
    metric.update(features, pids + 4000 * (pids > 0), camids, is_query)  # 4001 is no float16
    assert same(metric.half().compute(), expected_of(images(ties=False)))


# -- with other parts of torchmetrics and Lightning --------------------------------------------------------------------


@pytest.mark.parametrize("groups", [True, False])
def test_a_collection(groups):
    columns = images(ties=False)
    members = {"a": ReIDRetrieval(), "b": MeanAP(), "c": CMC(max_rank=3), "d": ReIDRetrieval(distance="euclidean")}
    collection = MetricCollection(members, compute_groups=groups)
    for _ in range(2):  # the second time groups are known from the start
        collection.reset()
        for rows in batches_of("tens"):
            collection.update(*(column[rows] for column in columns))
        scores = collection.compute()
        expected, euclidean = expected_of(columns), expected_of(columns, distance="euclidean")
        for name in SCORES:
            assert torch.equal(scores[f"a_{name}"], torch.tensor(getattr(expected, name)))
            assert torch.equal(scores[f"d_{name}"], torch.tensor(getattr(euclidean, name)))
        assert torch.equal(scores["b"], torch.tensor(expected.mAP))
        assert torch.equal(scores["c"], torch.tensor(expected.cmc[:3]))
        assert expected.mAP != euclidean.mAP
    # features are kept once, not four times
    assert list(collection.compute_groups.values()) == ([["a", "b", "c", "d"]] if groups else [])


def test_a_collection_of_one():
    columns = images()
    collection = MetricCollection({"a": ReIDRetrieval()})
    collection.update(*columns)
    assert same(collection.compute(), expected_of(columns))


class Scored(LightningModule):
    """Scores its batches as they are: features, identities, cameras, who is a query."""

    def __init__(self):
        super().__init__()
        self.metric = MeanAP()

    def validation_step(self, batch, batch_idx):
        self.metric.update(*batch)
        self.log("mAP", self.metric, on_epoch=True)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*barrier")
def test_in_a_lightning_module():
    columns = images()
    loader = DataLoader(TensorDataset(*columns), batch_size=10)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    module = Scored()
    for _ in range(2):  # Lightning resets the metric in between
        (scores,) = trainer.validate(module, loader, verbose=False)
        assert scores["mAP"] == float(torch.tensor(expected_of(columns).mAP))


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_the_curve_is_drawn_in_percent():
    import matplotlib.pyplot as plt

    columns = images()
    expected = np.array(expected_of(columns).cmc)
    for metric, length in ((ReIDRetrieval(), MAX_RANK), (CMC(max_rank=12), 12)):
        filled(metric, columns)
        figure, axes = metric.plot()
        (line,) = axes.get_lines()
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, length + 1))
        np.testing.assert_allclose(line.get_ydata(), 100 * expected[:length], rtol=1e-6)
        assert axes.figure is figure
        plt.close(figure)
    assert "mAP" in filled(ReIDRetrieval(), columns).plot()[1].get_title()
    plt.close("all")


def test_values_and_axes_may_be_given():
    import matplotlib.pyplot as plt

    columns = images()
    given, axes = plt.subplots()
    for metric in (ReIDRetrieval(), CMC(), MeanAP()):
        value = filled(metric, columns).compute()
        assert type(metric)().plot(value, ax=axes)[1] is axes
    assert len(axes.get_lines()) == 3
    plt.close(given)


def test_mean_ap_draws_one_value_or_several():
    import matplotlib.pyplot as plt

    metric = filled(MeanAP(), images())
    for value in (None, [torch.tensor(0.2), torch.tensor(0.4)]):
        figure, axes = metric.plot(value)
        assert axes.figure is figure
        assert axes.get_lines()
        plt.close(figure)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("kind", [ReIDRetrieval, CMC, MeanAP])
def test_nothing_to_rank(kind):
    with pytest.raises(ValueError, match="never called"):
        kind().compute()
    features, pids, camids, _ = images()
    for is_query, missing in ((True, "gallery images"), (False, "queries")):
        metric = kind()
        metric.update(features, pids, camids, is_query)
        with pytest.raises(ValueError, match=f"there are no {missing}"):
            metric.compute()


@pytest.mark.parametrize("name", ["pids", "camids", "is_query", "index"])
@pytest.mark.parametrize("wrong", [3, Q + G + 1])
def test_lengths_must_fit(name, wrong):
    features, *columns = images()
    given = dict(zip(("pids", "camids", "is_query"), columns, strict=True)) | {"index": places()}
    given[name] = torch.zeros(wrong, dtype=given[name].dtype)
    metric = ReIDRetrieval()
    with pytest.raises(ValueError, match=name):
        metric.update(features, **given)
    assert not metric.features  # half a batch was not kept
    assert not metric.labels


@pytest.mark.parametrize("wrong", [0, -1, MAX_RANK + 1])
def test_max_rank_has_limits(wrong):
    with pytest.raises(ValueError, match="max_rank"):
        CMC(max_rank=wrong)


@pytest.mark.parametrize("option", ["distance", "backend"])
def test_a_misspelt_option_is_refused(option):
    with pytest.raises(ValueError, match=option):
        filled(ReIDRetrieval(**{option: "euklidean"}), images()).compute()


def test_options_nobody_knows():
    with pytest.raises(ValueError, match="max_rnk"):
        CMC(max_rnk=3)


def test_features_that_are_not_finite():
    features, *columns = images()
    features[Q + 4, 2] = torch.nan
    with pytest.raises(ValueError, match="gallery: the features of image 4 are not finite"):
        filled(ReIDRetrieval(), (features, *columns)).compute()


def test_without_a_match_scores_are_nan():
    features, pids, camids, is_query = images()
    scores = filled(ReIDRetrieval(), (features, pids + 100 * is_query, camids, is_query)).compute()
    assert scores["mAP"].isnan()
    assert scores["cmc"].isnan().all()
    assert (int(scores["num_valid"]), int(scores["num_queries"])) == (0, Q)
