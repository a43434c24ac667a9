"""Pruning as plain loops over the elements of named tensors: what masks and methods are compared with."""

import copy
import math

import torch
from torch import nn


def prunable(model):
    """Names of what may be pruned."""
    return [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def full(model):
    """name -> a flag for each element, all True."""
    return {name: [True] * model.state_dict()[name].numel() for name in prunable(model)}


def apply(model, mask):
    """Zero what is pruned, in place."""
    state = model.state_dict()
    for name, flags in mask.items():
        values = state[name].view(-1)
        for i, flag in enumerate(flags):
            if not flag:
                values[i] = 0.0


def fraction(mask):
    """Pruned share of all prunable elements."""
    flags = [flag for layer in mask.values() for flag in layer]
    return flags.count(False) / len(flags)


def prune_each_layer(model, mask, share):
    """Prune the smallest ``share`` of each layer's remaining weights, rounded up; one stays."""
    result = {}
    for name, flags in mask.items():
        values = model.state_dict()[name].flatten().tolist()
        alive = sorted((abs(values[i]), i) for i, flag in enumerate(flags) if flag)
        count = min(math.ceil(round(share * len(alive), 9)), len(alive) - 1)
        gone = {i for _, i in alive[:count]}
        result[name] = [flag and i not in gone for i, flag in enumerate(flags)]
    return result


def prune_all_layers(model, mask, share):
    """Prune the smallest weights of all layers together until ``share`` of all elements is gone."""
    state = model.state_dict()
    alive = sorted(
        (abs(value), position, name, i)
        for position, (name, flags) in enumerate(mask.items())
        for i, (value, flag) in enumerate(zip(state[name].flatten().tolist(), flags, strict=True))
        if flag
    )
    total = sum(len(flags) for flags in mask.values())
    missing = math.floor(round(share * total, 9)) - (total - len(alive))
    result = {name: list(flags) for name, flags in mask.items()}
    for _, _, name, i in alive[: max(missing, 0)]:
        result[name][i] = False
    return result


def halve(model, mask, step, parts, is_good, verdicts):
    """Prune the most parts of a step that are good: all of them first, then halves. Return the model and its mask."""
    start, passed, failed, best = fraction(mask), 0, parts + 1, (model, mask)
    while failed - passed > 1:
        k = parts if failed > parts else (passed + failed) // 2
        trial = copy.deepcopy(model)
        new = prune_all_layers(trial, mask, start + step * k / parts)
        apply(trial, new)
        if new == mask:
            verdicts.add("done")
            passed = k
        elif is_good(trial):
            verdicts.add("pruned")
            passed, best = k, (trial, new)
        else:
            verdicts.add("reverted")
            failed = k
    return best


def difference(a, b):
    """Share of the elements in which two masks differ."""
    pairs = [pair for name in a for pair in zip(a[name], b[name], strict=True)]
    return sum(x != y for x, y in pairs) / len(pairs)


def accuracy(model, head, x, y):
    """Share of images that are classified right."""
    model.eval()
    with torch.no_grad():
        guesses = head(model(x).neck).argmax(1).tolist()
    model.train()
    return sum(g == label for g, label in zip(guesses, y.tolist(), strict=True)) / len(guesses)


def masked_mean(old, states, masks, weights):
    """Per element the weighted mean over the clients that have it; the old value where nobody has."""
    result = {name: value.clone() for name, value in old.items()}
    for name, value in result.items():
        if not value.is_floating_point():
            continue
        flat = value.view(-1)
        for i in range(flat.numel()):
            having = [k for k, mask in enumerate(masks) if mask.get(name, [True] * flat.numel())[i]]
            if having:
                total = sum(weights[k] for k in having)
                flat[i] = sum(weights[k] * states[k][name].reshape(-1)[i] for k in having) / total
    return result


def flags_of(vector, model):
    """A client's mask, bool [num_shared_parameters], by name; what cannot be pruned is left out."""
    names = prunable(model.network)
    return {e.name: vector[e.span].tolist() for e in model.flat.shared_parameters if e.name in names}
